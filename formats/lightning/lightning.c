/*
 * Reads checkpoints of PyTorch Lightning's FSDP and model-parallel strategies: a DCP directory that also has `meta.pt`,
 * which contains everything except the state of the model and the optimizer (epoch, global_step, loops,
 * hyper_parameters).
 */
#include "fsdpckpt/format.h"

#include "checkpoint/folder.h"
#include "dcp/files.h"
#include "dcp/with_torch_file.h"
#include "torch/file/file.h"

#include "fsdpckpt/try.h"

static const char meta[] = "meta.pt";

static fc_code lightning_list(const char *directory, fc_listing *out, fc_error *err) {
    const bool found = fc_dcp_has_file(directory, meta, err);
    FC_TRY(err->code);
    return found ? fc_listing_add(out, ".metadata", ".metadata", FC_LISTED_TRAINING, err) : FC_OK;
}

static fc_code lightning_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_code rc = fc_dcp_open_with_file(checkpoint, meta, true, options, err);
    checkpoint->producer = "PyTorch Lightning";
    return rc;
}

const fc_format fc_format_lightning = {
    .name = "lightning",
    .description = "PyTorch Lightning checkpoint",
    .header_name = ".metadata",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .list = lightning_list,
            .open = lightning_open,
            .close = fc_dcp_close_with_file,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent_with_file,
            .read = fc_dcp_read_with_file,
            .read_part = fc_dcp_read_part_with_file,
            .object_json = fc_dcp_object_json_with_file,
            .digest = fc_dcp_digest_with_file,
            .check_object = fc_dcp_check_object_with_file,
        },
    .verifier =
        {
            .verify = fc_dcp_verify_with_file,
            .verify_chunk = fc_dcp_verify_chunk_with_file,
            .unverified = ".metadata, objects in torch.save files, and the gaps between the records of archives",
        },
};
