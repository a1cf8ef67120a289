/*
 * The torch.save format (`.pt`, `.pth`, `.bin`, `.ckpt`): its table, and how it is recognised.
 */
#include "pt/pt.h"
#include "pt/as_torch.h"
#include "pt/parts.h"
#include "pt/ranks.h"
#include "pt/sharding.h"
#include "pt/writer.h"

#include "registry.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "checkpoint/other_files.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* What save_pretrained of transformers, diffusers and PEFT writes with torch.save, and accelerate's save_model. */
static const struct {
    const char *name;
    fc_listed_role role;
} models[] = {{"pytorch_model.bin.index.json", FC_LISTED_MODEL_PT},
              {"pytorch_model.bin", FC_LISTED_MODEL_PT},
              {"pytorch_model_fsdp.bin", FC_LISTED_MODEL_PT}, /* of accelerate, with a full state dict */
              {"diffusion_pytorch_model.bin.index.json", FC_LISTED_MODEL_PT},
              {"diffusion_pytorch_model.bin", FC_LISTED_MODEL_PT},
              {"adapter_model.bin", FC_LISTED_OTHER}};

/* Lists the indexes of variants, such as pytorch_model.bin.index.fp16.json. */
static fc_code list_variants(const char *directory, fc_listing *out, fc_error *err) {
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, directory, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        const bool is = fc_pt_is_index(name) && !fc_ends_with(name, ".bin.index.json");
        rc = is ? fc_listing_add(out, name, name, FC_LISTED_COPY, err) : FC_OK;
    }
    return fc_dir_close(&dir, rc, err);
}

static fc_code pt_list(const char *directory, fc_listing *out, fc_error *err) {
    char path[PATH_MAX];
    FC_TRY(fc_pt_list_sets(directory, out, err));
    const bool described = fc_pt_sharding_is_in(directory, err);
    FC_TRY(err->code);
    FC_TRY(described ? fc_listing_add(out, FC_PT_SHARDING, FC_PT_SHARDING, FC_LISTED_TRAINING, err)
                     : fc_pt_list_numbered(directory, out, err));
    FC_TRY(fc_pt_list_parts(directory, out, err));
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct stat st;
        const char *name = models[i].name;
        const bool found = snprintf(path, sizeof path, "%s/%s", directory, name) < PATH_MAX &&
                           fc_path_exists(path, &st, err) && S_ISREG(st.st_mode);
        FC_TRY(err->code);
        FC_TRY(found ? fc_listing_add(out, name, name, models[i].role, err) : FC_OK);
    }
    return list_variants(directory, out, err);
}

static bool is_sharding(const char *path) {
    return strcmp(fc_base_name(path), FC_PT_SHARDING) == 0;
}

static bool pt_probe(const fc_probe *probe) {
    return fc_pt_is_index(probe->path) || is_sharding(probe->path) || fc_torch_is_zip(probe->head, probe->head_size) ||
           fc_torch_is_legacy(probe->head, probe->head_size) || fc_torch_is_tar(probe->head, probe->head_size);
}

static const char *directory_of(const fc_checkpoint *checkpoint, const char *base) {
    const size_t n = (size_t)(base - checkpoint->path);
    return n == 0 ? "." : fc_arena_strndup(checkpoint->arena, checkpoint->path, n == 1 ? 1 : n - 1);
}

/*
 * Opens the whole set if `path` is one rank's file whose name contains the number of ranks, because one file alone is
 * not a checkpoint.
 */
static fc_code open_set_of(fc_checkpoint *checkpoint, const fc_open_options *options, const char *base,
                           const fc_pt_rank_name *name, fc_error *err) {
    char group[NAME_MAX + 1];
    fc_arena *arena = checkpoint->arena;
    fc_pt_group_of(base, name, group);
    checkpoint->group = fc_arena_strndup(arena, group, strlen(group));
    const char *directory = directory_of(checkpoint, base);
    const char *only = fc_arena_strndup(arena, base, name->name);
    return directory && only && checkpoint->group ? fc_pt_open_ranks(checkpoint, directory, only, options, err)
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

static fc_code open_directory(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *group = checkpoint->group;
    if (!group) {
        return fc_fail(err, FC_ECORRUPT, "%s: the directory holds no torch.save files of ranks, and no index",
                       checkpoint->path);
    }
    if (is_sharding(group)) {
        return fc_pt_open_sharding(checkpoint, checkpoint->path, options, err);
    }
    if (fc_pt_is_parts(group)) {
        return fc_pt_open_parts(checkpoint, options, err);
    }
    if (strchr(group, '*')) {
        return fc_pt_open_ranks(checkpoint, checkpoint->path, NULL, options, err);
    }
    const char *path = fc_arena_printf(checkpoint->arena, "%s/%s", checkpoint->path, group);
    return path ? open_model(checkpoint, path, options, err) : fc_no_memory(err, checkpoint->path);
}

static fc_code pt_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *path = checkpoint->path, *base = fc_base_name(path);
    fc_pt_rank_name name;
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    if (is_directory) {
        FC_TRY(open_directory(checkpoint, options, err));
        return fc_note_other_files(checkpoint, path, err);
    }
    if (is_sharding(path)) {
        const char *directory = directory_of(checkpoint, base);
        return directory ? fc_pt_open_sharding(checkpoint, directory, options, err) : fc_no_memory(err, path);
    }
    if (fc_pt_parse_rank_name(base, &name) && name.ranks > 0) {
        return open_set_of(checkpoint, options, base, &name, err);
    }
    return open_model(checkpoint, path, options, err);
}

static const fc_own_file own_files[] = {{"model_world_size_*_rank_*.pt", fc_torch_is_file}, {NULL}};

static const fc_format_notes notes = {NULL, NULL}; /* no file of a target lists the others */

const fc_format fc_format_pt = {
    .name = "pt",
    .description = "PyTorch (torch.save)",
    .file_sign = "torch.save",
    .directory_sign =
        "*_rank_*.pt, *_<rank>.pt with DTensors, pytorch_model.bin or its .index.json (torch.save), metadata.pkl "
        "(torch_checkpointing)",
    .extensions = (const char *const[]){".pt", ".pth", ".bin", ".ckpt", NULL},
    .reader =
        {
            .probe = pt_probe,
            .list = pt_list,
            .open = pt_open,
            .check_header = fc_pt_check_header,
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
    .target =
        {
            .own_files = own_files,
            .is_checkpoint = fc_torch_is_file,
            .self_contained = true,
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = fc_pt_is_directory,
            .files = fc_pt_files,
        },
    .writer =
        {
            .create = fc_pt_create,
            .reserve = fc_pt_reserve,
            .finish_item = fc_pt_finish_item,
            .finish_file = fc_pt_finish_file,
            .finish = fc_pt_finish,
            .destroy = fc_pt_destroy,
            .notes = &notes,
        },
};
