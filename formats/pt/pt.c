/*
 * The torch.save format (`.pt`, `.pth`, `.bin`, `.ckpt`): its table, and how it is recognised.
 */
#include "pt/pt.h"
#include "pt/ranks.h"
#include "pt/writer.h"

#include "registry.h"

#include "base/file_name.h"
#include "checkpoint/other_files.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <string.h>
#include <sys/stat.h>

static bool pt_probe(const fc_probe *probe) {
    char path[PATH_MAX];
    if (probe->is_directory) {
        return fc_pt_has_sets(probe->path, probe->err) ||
               (probe->err->code == FC_OK && fc_pt_find_index(probe->path, path, probe->err));
    }
    return fc_pt_is_index(probe->path) || fc_torch_is_zip(probe->head, probe->head_size) ||
           fc_torch_is_legacy(probe->head, probe->head_size) || fc_torch_is_tar(probe->head, probe->head_size);
}

/*
 * Opens the whole set if `path` is one rank's file whose name contains the number of ranks, because one file alone is
 * not a checkpoint.
 */
static fc_code open_set_of(fc_checkpoint *checkpoint, const fc_open_options *options, const char *base, size_t name,
                           fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    size_t n = (size_t)(base - checkpoint->path);
    const char *directory = n == 0 ? "." : fc_arena_strndup(arena, checkpoint->path, n == 1 ? 1 : n - 1);
    const char *only = fc_arena_strndup(arena, base, name);
    return directory && only ? fc_pt_open_ranks(checkpoint, directory, only, options, err)
                             : fc_no_memory(err, checkpoint->path);
}

/* Opens Hugging Face's directory of a model: an index, or a single file. */
static fc_code open_model(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err) {
    if (fc_pt_is_index(path)) {
        return fc_pt_open_index(checkpoint, path, options, err);
    }
    checkpoint->path = fc_arena_strndup(checkpoint->arena, path, strlen(path));
    bool sharded = false;
    FC_TRY(checkpoint->path ? fc_torch_open_file(checkpoint, options, &sharded, err) : fc_no_memory(err, path));
    return sharded ? fc_pt_open_alone(checkpoint, options, err) : FC_OK;
}

static fc_code pt_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *path = checkpoint->path, *base = fc_base_name(path);
    char model[PATH_MAX];
    pt_rank_name name;
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    if (is_directory) {
        fc_error failed = {FC_OK, ""};
        bool indexed = fc_pt_find_index(path, model, &failed);
        fc_code rc = failed.code != FC_OK ? fc_fail(err, failed.code, "%s", failed.message)
                     : indexed            ? open_model(checkpoint, model, options, err)
                                          : fc_pt_open_ranks(checkpoint, path, NULL, options, err);
        return rc == FC_OK ? fc_note_other_files(checkpoint, path, err) : rc;
    }
    if (fc_pt_parse_rank_name(base, &name) && name.ranks > 0) {
        return open_set_of(checkpoint, options, base, name.name, err);
    }
    return open_model(checkpoint, path, options, err);
}

static const char *const extensions[] = {".pt", ".pth", ".bin", ".ckpt", NULL};
static const fc_own_file own_files[] = {{"model_world_size_*_rank_*.pt", fc_torch_is_file}, {NULL}};

const fc_format fc_format_pt = {
    .name = "pt",
    .description = "PyTorch (torch.save)",
    .file_sign = "torch.save",
    .directory_sign = "*_rank_*.pt, pytorch_model.bin or its .index.json (torch.save)",
    .extensions = extensions,
    .reader =
        {
            .probe = pt_probe,
            .open = pt_open,
            .check_header = fc_torch_check_header,
            .extent = fc_torch_extent,
            .read = fc_torch_read,
            .object_json = fc_torch_object_json,
            .digest = fc_torch_digest,
        },
    .verifier =
        {
            .verify = fc_pt_verify,
            .unverified = "the gaps between the records of zip files, and whole files of torch before 1.6",
        },
    .writer =
        {
            .own_files = own_files,
            .is_checkpoint = fc_torch_is_file,
            .self_contained = true,
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = fc_pt_is_directory,
            .files = fc_pt_files,
            .create = fc_pt_create,
            .reserve = fc_pt_reserve,
            .finish_file = fc_pt_finish_file,
            .finish = fc_pt_finish,
            .destroy = fc_pt_destroy,
            .separable = true,
        },
};
