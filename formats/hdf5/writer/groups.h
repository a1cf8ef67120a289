/*
 * The groups of an image, which lead from the root to the datasets of the file.
 */
#pragma once

#include "hdf5/writer/image.h"
#include "hdf5/writer/tree.h"

/** Groups under construction. */
typedef struct fc_h5_groups {
    const fc_h5_tree *tree;
    size_t *made;           /**< one per node: offset of its object header in the image, plus 1; 0: not in this file */
    size_t *kind_at;        /**< one per node: offset of the group's attribute in `kinds` */
    uint32_t *first, *next; /**< one per node: its first member, and the next member of the same group; 0: none */
    fc_h5_buffer kinds;
    size_t kind_size;
} fc_h5_groups;

/** Prepares the groups. Call fc_h5_groups_free even after a failure. The caller sets `made` of the datasets. */
fc_code fc_h5_groups_new(const fc_h5_tree *tree, const char *path, fc_h5_groups *out, fc_error *err);
void fc_h5_groups_free(fc_h5_groups *groups);

/** Finds the groups that the file needs. Their attributes go into the heap, which is still open. */
fc_code fc_h5_groups_find(fc_h5_groups *groups, fc_h5_image *image, fc_error *err);

/** Makes the groups, the root last. @param root the attributes of the root, as messages.
 *  @param crc64_at offset of the value of header_crc64 in `root`. */
fc_code fc_h5_groups_make(fc_h5_groups *groups, fc_h5_image *image, const fc_h5_buffer *root, size_t crc64_at,
                          fc_error *err);
