/*
 * Checkpoints of PyTorch Lightning's FSDP and model-parallel strategies, read: a DCP directory, and beside it
 * `meta.pt`, where they put what is no state of model or optimizer (epoch, global_step, loops, hyper_parameters).
 */
#include "fsdpckpt/format.h"

#include "dcp/with_torch_file.h"
#include "pt/pt.h"

static const char meta[] = "meta.pt";

static bool lightning_probe(const fc_probe *probe) {
    return probe->is_directory && fc_pt_is_beside_dcp(probe->path, meta);
}

static fc_code lightning_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_code rc = fc_pt_open_beside_dcp(checkpoint, meta, true, options, err);
    checkpoint->producer = "PyTorch Lightning";
    return rc;
}

static const char *const extensions[] = {NULL};

const fc_format fc_format_lightning = {
    .name = "lightning",
    .description = "PyTorch Lightning checkpoint",
    .header_name = ".metadata",
    .extensions = extensions,
    .probe = lightning_probe,
    .open = lightning_open,
    .close = fc_pt_close_beside_dcp,
    .extent = fc_pt_extent_beside_dcp,
    .read = fc_pt_read,
    .object_json = fc_pt_object_json_beside_dcp,
    .digest = fc_pt_digest_beside_dcp,
    .check_object = fc_pt_check_object_beside_dcp,
    .verify = fc_pt_verify_beside_dcp,
    .verify_chunk = fc_pt_verify_chunk_beside_dcp,
    .unverified = ".metadata, objects in torch.save files, and the gaps between the records of archives",
};
