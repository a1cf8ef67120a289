/*
 * What the verifiers of formats report.
 */
#pragma once

#include "fsdpckpt/verify.h"

/** Reports a defect. Thread-safe. `place` contains all members except the message. */
void fc_report_defect(fc_findings *findings, const fc_defect *place, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/**
 * Counts `object` as covered. A format calls it when it has compared every byte of the object with a CRC, because
 * fc_verify itself would count it as only read, unless the checkpoint or a seal records its digest.
 */
void fc_verify_covered(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_verify_report *report);
