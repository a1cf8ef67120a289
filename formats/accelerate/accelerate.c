/*
 * Reads what Hugging Face's accelerate, and its Trainer, save of an FSDP run with SHARDED_STATE_DICT: a folder with one
 * DCP checkpoint for each model (model.*) and one for each optimizer (optimizer.*). They are joined into one manifest
 * over the files of all, so that DCP's functions can read it.
 */
#include "accelerate/accelerate.h"

#include "checkpoint/folder.h"
#include "checkpoint/identity.h"
#include "checkpoint/other_files.h"
#include "checkpoint/same_name.h"
#include "dcp/dcp.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "dcp/packed.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Before 0.27 the folder of a model was called like this. */
static const char old_model[] = "pytorch_model";

/* Whether the checkpoint has this folder, and a DCP checkpoint in it. */
static fc_code look_for(const char *directory, const char *folder, bool *found, fc_error *err) {
    struct stat st;
    char path[PATH_MAX];
    bool fits = snprintf(path, sizeof path, "%s/%s/.metadata", directory, folder) < PATH_MAX;
    *found = fits && fc_stat(path, &st) == 0;
    return !fits || *found || errno == ENOENT || errno == ENOTDIR
               ? FC_OK
               : fc_fail_errno(err, errno, "%s: cannot be examined", path);
}

/* Finds the folder of a section. */
static fc_code find_folder(const char *directory, uint32_t section, char folder[ACCELERATE_NAME], bool *found,
                           fc_error *err) {
    fc_accelerate_folder(section, folder);
    FC_TRY(look_for(directory, folder, found, err));
    if (*found || section % ACCELERATE_KINDS == ACCELERATE_OPTIMIZER) {
        return FC_OK;
    }
    snprintf(folder, ACCELERATE_NAME, "%s_%u", old_model, (unsigned)(section / ACCELERATE_KINDS));
    return look_for(directory, folder, found, err);
}

static fc_code accelerate_list(const char *directory, fc_listing *out, fc_error *err) {
    char folder[ACCELERATE_NAME], glob[ACCELERATE_NAME + 2];
    bool found = false;
    FC_TRY(find_folder(directory, 0, folder, &found, err));
    snprintf(glob, sizeof glob, "%.*s*", (int)strcspn(folder, "0123456789"), folder);
    return found ? fc_listing_add(out, glob, folder, FC_LISTED_TRAINING, err) : FC_OK;
}

/* Like a file, a folder must not be a link out of the checkpoint. */
static fc_code check_folder(const fc_checkpoint *checkpoint, const char *path, const char *name,
                            const fc_open_options *options, fc_error *err) {
    char root[PATH_MAX];
    if (options->follow_external) {
        return FC_OK;
    }
    return fc_realpath(checkpoint->path, root) ? fc_check_link(path, name, root, err)
                                               : fc_fail_errno(err, errno, "%s: cannot be examined", checkpoint->path);
}

/* Makes the names of a section's files relative to the joint folder. */
static fc_code name_files(fc_checkpoint *section, const char *folder, fc_error *err) {
    fc_file *files = (fc_file *)(uintptr_t)section->files; /* ours while the manifest is built */
    for (size_t i = 0; i < section->nfiles; i++) {
        files[i].name = fc_arena_printf(section->arena, "%s/%s", folder, files[i].name);
        FC_NEED(files[i].name, err, section->path);
    }
    return FC_OK;
}

/* Gives the values of a model after the first, and of its optimizer, names of their own. */
static fc_code name_values(fc_checkpoint *section, uint32_t number, fc_error *err) {
    const char *head = fc_accelerate_head(number);
    const char *own = fc_accelerate_own_head(section->arena, number);
    fc_tensor *tensors = (fc_tensor *)(uintptr_t)section->tensors;
    size_t length = strlen(head);
    for (size_t i = 0; own && number >= ACCELERATE_KINDS && i < section->ntensors; i++) {
        fc_tensor *t = &tensors[i];
        bool headed = strncmp(t->name, head, length) == 0 && t->name[length] == '.';
        if (headed && !fc_accelerate_rename(section->arena, length, own, &t->name, &t->path)) {
            own = NULL;
        }
    }
    return own ? FC_OK : fc_no_memory(err, section->path);
}

/* Reads the DCP checkpoint of a section. */
static fc_code read_section(const fc_checkpoint *checkpoint, uint32_t number, const char *folder,
                            const fc_open_options *options, fc_checkpoint *section, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *path = fc_arena_printf(arena, "%s/%s", checkpoint->path, folder);
    const char *metadata = fc_arena_printf(arena, "%s/.metadata", path ? path : "");
    FC_NEED(path && metadata, err, checkpoint->path);
    *section = (fc_checkpoint){.format = checkpoint->format, .path = path, .arena = arena};
    FC_TRY(check_folder(checkpoint, path, folder, options, err));
    FC_TRY(fc_dcp_load(section, options, path, metadata, false, err));
    FC_TRY(fc_note_other_files(section, path, err)); /* needs names that are relative to the section's own folder */
    FC_TRY(name_files(section, folder, err));
    return name_values(section, number, err);
}

/* Appends the tensors of a section. `base` is the index of the section's first file. */
static void add_tensors(fc_tensor *all, size_t *count, const fc_checkpoint *section, uint32_t base) {
    for (size_t i = 0; i < section->ntensors; i++) {
        const fc_tensor *t = &section->tensors[i];
        fc_chunk *chunks = (fc_chunk *)(uintptr_t)t->chunks;
        for (size_t k = 0; k < t->nchunks; k++) {
            chunks[k].place.file += base;
        }
        all[(*count)++] = *t;
    }
}

static fc_code join_sections(fc_checkpoint *checkpoint, const fc_checkpoint *sections, size_t nsections,
                             fc_error *err) {
    size_t nfiles = 0, ntensors = 0, count = 0;
    const char *twice;
    for (size_t i = 0; i < nsections; i++) {
        nfiles += sections[i].nfiles;
        ntensors += sections[i].ntensors;
    }
    fc_file *files = fc_arena_calloc(checkpoint->arena, nfiles + 1, sizeof *files);
    fc_tensor *tensors = fc_arena_calloc(checkpoint->arena, ntensors + 1, sizeof *tensors);
    FC_NEED(files && tensors, err, checkpoint->path);
    if (nfiles >= UINT32_MAX) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: more than 2^32 files", checkpoint->path);
    }
    nfiles = 0;
    for (size_t i = 0; i < nsections; i++) {
        add_tensors(tensors, &count, &sections[i], (uint32_t)nfiles);
        for (size_t f = 0; f < sections[i].nfiles; f++) {
            files[nfiles++] = sections[i].files[f];
        }
        checkpoint->note = checkpoint->note ? checkpoint->note : sections[i].note;
    }
    checkpoint->files = files;
    checkpoint->nfiles = nfiles;
    FC_TRY(fc_identities_gather(checkpoint, sections, nsections, err));
    checkpoint->tensors = tensors;
    checkpoint->ntensors = ntensors;
    FC_TRY(fc_find_same_name(tensors, ntensors, &twice, err));
    if (twice) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %.256s is in two of its folders; open each of these on its own",
                       checkpoint->path, twice);
    }
    return FC_OK;
}

/* Reads the sections of all models, up to the first number that has none. */
static fc_code read_sections(const fc_checkpoint *checkpoint, const fc_open_options *options, fc_checkpoint *sections,
                             size_t *nsections, fc_error *err) {
    char folder[ACCELERATE_NAME];
    size_t before = 1;
    for (uint32_t number = 0; number < ACCELERATE_SECTIONS && before > 0; number += ACCELERATE_KINDS) {
        before = *nsections;
        for (uint32_t section = number; section < number + ACCELERATE_KINDS; section++) {
            bool found;
            FC_TRY(find_folder(checkpoint->path, section, folder, &found, err));
            if (found) {
                FC_TRY(read_section(checkpoint, section, folder, options, &sections[(*nsections)++], err));
            }
        }
        before = *nsections - before;
    }
    return FC_OK;
}

static fc_code accelerate_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    size_t n = 0;
    fc_checkpoint *sections = fc_arena_calloc(checkpoint->arena, ACCELERATE_SECTIONS, sizeof *sections);
    FC_NEED(sections, err, checkpoint->path);
    FC_TRY(read_sections(checkpoint, options, sections, &n, err));
    FC_TRY(join_sections(checkpoint, sections, n, err));
    checkpoint->producer = "accelerate";
    checkpoint->whole = true;
    checkpoint->keeps_order = true;
    checkpoint->state = fc_dcp_state_new(checkpoint->nfiles);
    return checkpoint->state ? fc_note_other_files(checkpoint, checkpoint->path, err)
                             : fc_no_memory(err, checkpoint->path);
}

static void accelerate_close(fc_checkpoint *checkpoint) {
    fc_dcp_state_free(checkpoint->state);
    checkpoint->state = NULL;
}

static const fc_own_file own_files[] = {{"pytorch_model_fsdp_*/.metadata", fc_dcp_is_metadata},
                                        {"pytorch_model_fsdp_*/__*_*.distcp", fc_dcp_is_data},
                                        {"optimizer_*/.metadata", fc_dcp_is_metadata},
                                        {"optimizer_*/__*_*.distcp", fc_dcp_is_data},
                                        {NULL}};

const fc_format fc_format_accelerate = {
    .name = "accelerate",
    .description = "Hugging Face accelerate FSDP checkpoint",
    .directory_sign = "pytorch_model_fsdp_0/.metadata (Hugging Face accelerate)",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .list = accelerate_list,
            .open = accelerate_open,
            .close = accelerate_close,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent,
            .read = fc_dcp_read,
            .read_part = fc_dcp_read_part,
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
    .target =
        {
            .own_files = own_files,
            .also_needed =
                "Accelerator.load_state also reads files of the run that are not part of a checkpoint, such as "
                "scheduler.bin and random_states_0.pkl: copy them there",
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = fc_accelerate_is_directory,
            .set_sections = fc_accelerate_set_sections,
            .name_as_read = fc_accelerate_name_as_read,
            .files = fc_accelerate_files,
            .index = fc_accelerate_index,
        },
    .writer =
        {
            .create = fc_accelerate_create,
            .reserve = fc_accelerate_reserve,
            .finish_item = fc_accelerate_finish_item,
            .finish = fc_accelerate_finish,
            .destroy = fc_accelerate_destroy,
        },
};
