/*
 * Files of torch.save (`.pt`, `.pth`, `.bin`, `.ckpt`): the format's table, and what is recognised.
 */
#include "pt/pt.h"
#include "pt/writer.h"

#include "registry.h"

static bool pt_probe(const fc_probe *probe) {
    return !probe->is_directory &&
           (fc_pt_is_zip(probe->head, probe->head_size) || fc_pt_is_legacy(probe->head, probe->head_size) ||
            fc_pt_is_tar(probe->head, probe->head_size));
}

static fc_code pt_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    (void)options;
    return fc_pt_open_file(checkpoint, err);
}

static const char *const extensions[] = {".pt", ".pth", ".bin", ".ckpt", NULL};

const fc_format fc_format_pt = {
    .name = "pt",
    .description = "PyTorch (torch.save)",
    .extensions = extensions,
    .probe = pt_probe,
    .open = pt_open,
    .extent = fc_pt_extent,
    .read = fc_pt_read,
    .object_json = fc_pt_object_json,
    .digest = fc_pt_digest,
    .self_contained = true,
    .wants_crc32 = true,
    .is_directory = fc_pt_is_directory,
    .files = fc_pt_files,
    .create = fc_pt_create,
    .reserve = fc_pt_reserve,
    .seal = fc_pt_seal,
    .finish = fc_pt_finish,
    .destroy = fc_pt_destroy,
};
