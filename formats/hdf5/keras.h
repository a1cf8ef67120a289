/*
 * Keras' containers of HDF5 files: `.weights.json`, an index of several, and `.keras`, a zip archive around one.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Whether the file is an index of `.weights.h5` files, by its name and its first bytes. */
bool fc_keras_is_index(const fc_probe *probe);

/** Whether the file is a `.keras` archive, by its first bytes. */
bool fc_keras_is_archive(const fc_probe *probe);

/** Opens the files of an index as one checkpoint. */
fc_code fc_keras_open_index(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Opens the HDF5 file in an archive, where it must be stored, and keeps the other members as objects. */
fc_code fc_keras_open_archive(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Compares the HDF5 file in an archive with its CRC-32, for fc_format_verifier.verify. Nothing to do without an
 * archive.
 */
fc_code fc_keras_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                        fc_error *err);
