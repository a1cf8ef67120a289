/*
 * Writes the tables of index.h5 and of full files.
 */
#pragma once

#include "hdf5/writer/image.h"

struct fc_h5_writer;

/**
 * Adds the tables to `image`, whose heap is closed, for the boxes in w->written. Only their numbers must be known by
 * now, and those of their HDF5 chunks: fc_h5_tables_fill sets what the data decides. @param group receives the address
 * of the group of the tables.
 */
fc_code fc_h5_tables_add(struct fc_h5_writer *w, fc_h5_image *image, uint64_t *group, fc_error *err);

/**
 * Sets the rows of boxes and HDF5 chunks to those in w->written, and the digests of tensors. @param digests those of
 * target->tensors.
 */
fc_code fc_h5_tables_fill(const struct fc_h5_writer *w, const uint64_t *digests, fc_h5_image *image, fc_error *err);
