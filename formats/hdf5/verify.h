/*
 * Internals of fc_h5_verify.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

struct fc_findings;

/** Compares the tables of index.h5, if there are any, with the headers of the files. */
fc_code fc_h5_verify_tables(const fc_checkpoint *checkpoint, struct fc_findings *findings, fc_error *err);
