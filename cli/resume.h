/*
 * --resume: what a command tells the library of its options.
 */
#pragma once

#include "options/command.h"

/** With --resume: prepares `how`, with the options that decide on the values. @return FC_EUNSUPPORTED for several
 *  processes. */
fc_code resume_prepare(const cli_call *call, fc_convert_options *how, fc_error *err);
