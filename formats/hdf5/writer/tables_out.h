/*
 * Writes the tables of index.h5.
 */
#pragma once

#include "hdf5/writer/image.h"

struct fc_h5_writer;

/** Adds the tables to the image of index.h5, whose heap is closed. @param group receives the address of their group.
 *  @param at receives their offset in image->objects. */
fc_code fc_h5_tables_add(struct fc_h5_writer *w, const uint64_t *digests, fc_h5_image *image, uint64_t *group,
                         size_t *at, fc_error *err);

/** Sets the size of index.h5, which must be known by now, and the digest of the tables. */
void fc_h5_tables_seal(fc_h5_image *image, size_t at);
