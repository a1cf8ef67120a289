/*
 * Lines for people about what an earlier run left behind.
 */
#pragma once

#include "fsdpckpt/io.h"

/** Reports one printable line, if the caller wants any. @param reporter may be NULL */
void fc_report(const fc_reporter *reporter, const char *format, ...) __attribute__((format(printf, 2, 3)));
