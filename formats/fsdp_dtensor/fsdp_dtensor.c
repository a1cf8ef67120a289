/*
 * Writes fsdp_dtensor, the checkpoints of Megatron-FSDP: DCP with Megatron's own names. DCP's reader opens them, and
 * the shards of any layout load, because Megatron-FSDP asks torch's DCP for the boxes of its own ranks.
 */
#include "fsdp_dtensor/fsdp_dtensor.h"

#include "checkpoint/folder.h"
#include "dcp/dcp.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "dcp/packed.h"
#include "dcp/writer.h"
#include "fsdpckpt/try.h"

static fc_code create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    if (!fc_fsdp_dtensor_is_adapted(target->source)) { /* fc_shards_write does not call fc_format_target.adapt */
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: cannot be written as fsdp_dtensor directly: save it as dcp, and convert that",
                       target->source->path);
    }
    return fc_dcp_create(target, staging, writer, err);
}

const fc_format fc_format_fsdp_dtensor = {
    .name = "fsdp_dtensor",
    .description = "Megatron-FSDP fsdp_dtensor checkpoint",
    .header_name = ".metadata",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .open = fc_dcp_open_whole,
            .close = fc_dcp_close,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent,
            .read = fc_dcp_read,
            .read_part = fc_dcp_read_part,
            .object_json = fc_dcp_object_json,
            .digest = fc_dcp_digest,
            .check_object = fc_dcp_check_object,
        },
    .target =
        {
            .own_files = fc_dcp_own_files,
            .also_needed = "Megatron's --load takes its parent, with a file latest_checkpointed_iteration.txt that has "
                           "the number of iter_NNNNNNN",
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = fc_dcp_is_directory,
            .adapt = fc_fsdp_dtensor_adapt,
            .files = fc_dcp_files,
            .index = fc_dcp_index,
        },
    .writer =
        {
            .create = create,
            .reserve = fc_dcp_reserve,
            .finish_item = fc_dcp_finish_item,
            .finish = fc_dcp_finish,
            .destroy = fc_dcp_destroy,
            .notes = &fc_dcp_notes,
        },
};
