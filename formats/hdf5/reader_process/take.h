/*
 * Takes what a reader process says about one file, and finds out why it says nothing.
 */
#pragma once

#include "hdf5/reader_process/lend.h"

/**
 * Takes the records of one file.
 * @param size   the file's size: offsets and the number of records are checked against it.
 * @param loan   what the process was given for the file
 * @param broken whether the process sent something else, or died: fc_h5_end_taking knows which.
 * @param reason never NULL
 */
fc_code fc_h5_take_file(fc_h5_in *in, fc_arena *arena, const char *path, uint64_t size, const fc_h5_loan *loan,
                        fc_h5_file *file, bool *broken, fc_error *reason);

/**
 * Ends the process, after the file `path`, and frees `in`.
 * @param rc     what was returned for the file.
 * @param broken what fc_h5_take_file returned: then the error is made from how the process ended.
 */
fc_code fc_h5_end_taking(fc_h5_in *in, const char *path, fc_code rc, bool broken, fc_error *err);
