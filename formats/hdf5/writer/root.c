/*
 * Makes the root group of a file, which ends its object headers: the attributes, the tables, and all groups.
 */
#include "hdf5/writer/writer.h"

#include "fsdpckpt/try.h"
#include "hdf5/writer/groups.h"

#include <stdlib.h>

/* For users of h5dump: what a part reads as if its shard file is missing. */
static const char absent_values[] =
    "floating-point and complex: NaN; signed integers: the smallest; unsigned integers, float4_e2m1fn_x2 and objects: "
    "all bits set; bool: -1";

fc_code fc_h5_make_root(fc_h5_writer *w, fc_h5_image *image, fc_h5_groups *groups, int64_t rank, fc_error *err) {
    fc_h5_buffer messages = {NULL, 0, 0, false};
    fc_h5_holder holder = {.image = image, .messages = &messages};
    size_t tables = 0, tables_at = 0;
    uint64_t group = 0;
    fc_h5_root_attributes(w, &holder, rank);
    const size_t crc64 = holder.last;
    if (rank < 0) {
        if (w->target->mesh->ndim > 0) {
            fc_h5_set_text(&holder, FC_H5_A_MISSING, absent_values);
        }
        fc_h5_set_number(&holder, FC_H5_A_TABLES, 0);
        tables = holder.last;
        fc_h5_set_number(&holder, FC_H5_A_TABLES_AT, 0);
        tables_at = holder.last;
    }
    fc_code rc;
    FC_TRY_GOTO(messages.failed ? fc_no_memory(err, image->path) : FC_OK, rc, out);
    FC_TRY_GOTO(fc_h5_groups_find(groups, image, err), rc, out);
    fc_h5_image_close_heap(image);
    if (rank < 0) {
        FC_TRY_GOTO(fc_h5_tables_add(w, image, &group, err), rc, out);
        fc_store_little(messages.data + tables, group, 8);
        fc_store_little(messages.data + tables_at, image->objects_at + image->tables_at, 8);
    }
    rc = fc_h5_groups_make(groups, image, &messages, crc64, err);
out:
    free(messages.data);
    return rc;
}
