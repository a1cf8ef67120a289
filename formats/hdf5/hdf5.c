/*
 * The table of the HDF5 format.
 */
#include "hdf5/h5.h"
#include "hdf5/reader.h"
#include "registry.h"

static const fc_own_file own_files[] = {{"index.h5", fc_h5_is_ours}, {"shard-*-of-*.h5", fc_h5_is_ours}, {NULL}};

static const fc_format_notes notes = {fc_h5_take_notes, fc_h5_add_notes};

const fc_format fc_format_hdf5 = {
    .name = "h5",
    .description = "HDF5",
    .file_sign = "HDF5",
    .directory_sign = "index.h5 or shard-*.h5 (HDF5)",
    .extensions = (const char *const[]){".h5", ".hdf5", NULL},
    .reader =
        {
            .probe = fc_h5_probe,
            .list = fc_h5_list_checkpoints,
            .open = fc_h5_open,
            .check_header = fc_h5_check_header,
            .close = fc_h5_close,
            .extent = fc_h5_extent,
            .read = fc_h5_read,
            .object_json = fc_h5_object_json,
            .records_json = true,
            .digest = fc_h5_digest,
            .check_file = fc_h5_check_file,
        },
    .verifier = {.verify = fc_h5_verify},
    .target =
        {
            .own_files = own_files,
            .is_checkpoint = fc_h5_is_ours,
            .index = fc_h5_index,
        },
    .writer =
        {
            .create = fc_h5_create,
            .reserve = fc_h5_reserve,
            .place = fc_h5_place,
            .finish_file = fc_h5_finish_file,
            .finish = fc_h5_finish,
            .destroy = fc_h5_destroy,
            .notes = &notes,
        },
};
