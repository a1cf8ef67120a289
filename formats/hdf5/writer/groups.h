/*
 * The groups of an image: what leads from the root to the datasets that the file has.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_GROUPS_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_GROUPS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/writer/image.h"
#include "hdf5/writer/tree.h"

/** Groups being made. */
typedef struct fc_h5_groups {
    const fc_h5_tree *tree;
    size_t *made;           /**< one per node: 1 + where its object header is in the image; 0: not in this file */
    size_t *kind_at;        /**< one per node: where the attribute of the group is in `kinds` */
    uint32_t *first, *next; /**< one per node: the first member, the next one in the same group; 0: none */
    fc_h5_buffer kinds;
    size_t kind_size;
} fc_h5_groups;

/** @return FC_ENOMEM, else FC_OK; fc_h5_groups_free in both cases. The caller sets `made` of the datasets. */
fc_code fc_h5_groups_new(const fc_h5_tree *tree, const char *path, fc_h5_groups *out, fc_error *err);
void fc_h5_groups_free(fc_h5_groups *groups);

/** Finds the groups that the file needs. Their attributes go into the heap, which is still open. */
fc_code fc_h5_groups_find(fc_h5_groups *groups, fc_h5_image *image, fc_error *err);

/** Makes them, the root last. @param root its attributes, as messages.
 *  @param crc64_at where the value of header_crc64 is in `root`. */
fc_code fc_h5_groups_make(fc_h5_groups *groups, fc_h5_image *image, const fc_h5_buffer *root, size_t crc64_at,
                          fc_error *err);

#endif
