/*
 * Reads what Hugging Face's accelerate, and its Trainer, save of an FSDP run with SHARDED_STATE_DICT: a folder with one
 * DCP checkpoint for the model (model.*) and one for the optimizer (optimizer.*). The two are joined into one manifest
 * over the files of both, so that DCP's functions can read it.
 */
#include "fsdpckpt/format.h"

#include "base/file_name.h"
#include "base/try.h"
#include "checkpoint/other_files.h"
#include "checkpoint/same_name.h"
#include "dcp/dcp.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Versions of accelerate use two names for the model's folder. A number follows: that of the prepared model. */
static const char *const models[] = {"pytorch_model_fsdp", "pytorch_model"};
static const char optimizer[] = "optimizer";

enum { MODELS = sizeof models / sizeof *models, PARTS = 2 };

/* Whether the folder has a DCP checkpoint called `head`_`number`. */
static bool has_part(const char *directory, const char *head, int number) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "%s_%d/.metadata", head, number);
    return fc_find_in(directory, name, path);
}

static const char *model_of(const char *directory) {
    for (size_t i = 0; i < MODELS; i++) {
        if (has_part(directory, models[i], 0)) {
            return models[i];
        }
    }
    return NULL;
}

static bool accelerate_probe(const fc_probe *probe) {
    return probe->is_directory && model_of(probe->path);
}

/* Several models or optimizers would have the same names. */
static fc_code check_single(const fc_checkpoint *checkpoint, const char *head, fc_error *err) {
    if (has_part(checkpoint->path, head, 1)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s_1 exists as well as %s_0; open each of these folders on its own",
                       checkpoint->path, head, head);
    }
    return FC_OK;
}

/* Like a file, a folder must not be a link out of the checkpoint. */
static fc_code check_folder(const fc_checkpoint *checkpoint, const char *path, const char *name,
                            const fc_open_options *options, fc_error *err) {
    char root[PATH_MAX];
    if (options->follow_external) {
        return FC_OK;
    }
    return realpath(checkpoint->path, root) ? fc_check_link(path, name, root, err)
                                            : fc_fail_errno(err, errno, "%s: cannot be examined", checkpoint->path);
}

/* Reads the DCP checkpoint `head`_0 into `part`. The names of its files become relative to the joint folder. */
static fc_code read_part(const fc_checkpoint *checkpoint, const char *head, const fc_open_options *options,
                         fc_checkpoint *part, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *name = fc_arena_printf(arena, "%s_0", head);
    const char *path = fc_arena_printf(arena, "%s/%s", checkpoint->path, name ? name : "");
    const char *metadata = fc_arena_printf(arena, "%s/.metadata", path ? path : "");
    if (!name || !path || !metadata) {
        return fc_no_memory(err, checkpoint->path);
    }
    *part = (fc_checkpoint){.format = checkpoint->format, .path = path, .arena = arena};
    FC_TRY(check_folder(checkpoint, path, name, options, err));
    FC_TRY(fc_dcp_load(part, options, path, metadata, err));
    FC_TRY(fc_note_other_files(part, path, err));       /* needs names that are relative to the part's own folder */
    fc_file *files = (fc_file *)(uintptr_t)part->files; /* ours while the manifest is built */
    for (size_t i = 0; i < part->nfiles; i++) {
        files[i].name = fc_arena_printf(arena, "%s/%s", name, files[i].name);
        if (!files[i].name) {
            return fc_no_memory(err, checkpoint->path);
        }
    }
    return FC_OK;
}

/* Appends the tensors of a part. `base` is the index of the part's first file. */
static void add_tensors(fc_tensor *all, size_t *count, const fc_checkpoint *part, uint32_t base) {
    for (size_t i = 0; i < part->ntensors; i++) {
        const fc_tensor *t = &part->tensors[i];
        fc_chunk *chunks = (fc_chunk *)(uintptr_t)t->chunks;
        for (size_t k = 0; k < t->nchunks; k++) {
            chunks[k].file += base;
        }
        all[(*count)++] = *t;
    }
}

static fc_code join(fc_checkpoint *checkpoint, const fc_checkpoint *parts, size_t nparts, fc_error *err) {
    size_t nfiles = 0, ntensors = 0, count = 0;
    const char *twice;
    for (size_t i = 0; i < nparts; i++) {
        nfiles += parts[i].nfiles;
        ntensors += parts[i].ntensors;
    }
    fc_file *files = fc_arena_calloc(checkpoint->arena, nfiles + 1, sizeof *files);
    fc_tensor *tensors = fc_arena_calloc(checkpoint->arena, ntensors + 1, sizeof *tensors);
    if (!files || !tensors) {
        return fc_no_memory(err, checkpoint->path);
    }
    if (nfiles >= UINT32_MAX) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: more than 2^32 files", checkpoint->path);
    }
    nfiles = 0;
    for (size_t i = 0; i < nparts; i++) {
        add_tensors(tensors, &count, &parts[i], (uint32_t)nfiles);
        for (size_t f = 0; f < parts[i].nfiles; f++) {
            files[nfiles++] = parts[i].files[f];
        }
        checkpoint->note = checkpoint->note ? checkpoint->note : parts[i].note;
    }
    checkpoint->files = files;
    checkpoint->nfiles = nfiles;
    checkpoint->tensors = tensors;
    checkpoint->ntensors = ntensors;
    FC_TRY(fc_find_same_name(tensors, ntensors, &twice, err));
    if (twice) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: %.256s is in the folders of both the model and the optimizer; open each of these folders "
                       "on its own",
                       checkpoint->path, twice);
    }
    return FC_OK;
}

static fc_code accelerate_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_checkpoint parts[PARTS] = {0};
    size_t n = 0;
    const char *model = model_of(checkpoint->path);
    FC_TRY(check_single(checkpoint, model, err));
    FC_TRY(check_single(checkpoint, optimizer, err));
    FC_TRY(read_part(checkpoint, model, options, &parts[n++], err));
    if (has_part(checkpoint->path, optimizer, 0)) {
        FC_TRY(read_part(checkpoint, optimizer, options, &parts[n++], err));
    }
    FC_TRY(join(checkpoint, parts, n, err));
    checkpoint->producer = "accelerate";
    checkpoint->keeps_order = true;
    checkpoint->state = fc_dcp_state_new(checkpoint->nfiles);
    return checkpoint->state ? fc_note_other_files(checkpoint, checkpoint->path, err)
                             : fc_no_memory(err, checkpoint->path);
}

static void accelerate_close(fc_checkpoint *checkpoint) {
    fc_dcp_state_free(checkpoint->state);
    checkpoint->state = NULL;
}

static const char *const extensions[] = {NULL};

const fc_format fc_format_accelerate = {
    .name = "accelerate",
    .description = "Hugging Face accelerate FSDP checkpoint",
    .directory_sign = "pytorch_model_fsdp_0/.metadata (Hugging Face accelerate)",
    .extensions = extensions,
    .reader =
        {
            .probe = accelerate_probe,
            .open = accelerate_open,
            .close = accelerate_close,
            .extent = fc_dcp_extent,
            .object_json = fc_dcp_object_json,
            .digest = fc_dcp_digest,
            .check_object = fc_dcp_check_object,
        },
    .verifier =
        {
            .verify = fc_dcp_verify,
            .verify_chunk = fc_dcp_verify_chunk,
            .unverified = DCP_UNVERIFIED,
        },
};
