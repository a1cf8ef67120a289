/*
 * Megatron checkpoints, read. `torch_dist` is a DCP checkpoint and beside it `common.pt`, a torch.save file of what is
 * not sharded: so this is the readers of both, one behind the other. The older `torch` format is a torch.save file for
 * each model-parallel rank, `mp_rank_00/model_optim_rng.pt`: ranks.c puts those of several together. The path is the
 * directory of an iteration, or the one above, whose `latest_checkpointed_iteration.txt` says which.
 */
#include "fsdpckpt/format.h"

#include "megatron/megatron.h"
#include "registry.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char tracker[] = "latest_checkpointed_iteration.txt";
static const char common[] = "common.pt";

enum { TRACKED = 32 };

static bool exists(const char *directory, const char *name, char path[PATH_MAX]) {
    struct stat st;
    return snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX && stat(path, &st) == 0;
}

static bool is_distributed(const char *directory) {
    char path[PATH_MAX];
    return exists(directory, ".metadata", path) && exists(directory, common, path);
}

static bool is_iteration(const char *directory) {
    return is_distributed(directory) || fc_mg_count_ranks(directory) > 0;
}

/* What the tracker names: "iter_0000010" for 10, or "release". */
static bool read_tracker(const char *directory, char name[TRACKED]) {
    char path[PATH_MAX], text[TRACKED] = "", *end;
    int fd;
    uint64_t size;
    if (!exists(directory, tracker, path) || fc_open_input(path, &fd, &size, NULL) != FC_OK) {
        return false;
    }
    bool good = size > 0 && size < TRACKED - 8 && fc_pread_full(fd, text, (size_t)size, 0, path, NULL) == FC_OK;
    close(fd);
    text[strcspn(text, " \r\n")] = '\0';
    unsigned long long number = strtoull(text, &end, 10);
    if (good && strcmp(text, "release") == 0) {
        strcpy(name, text);
        return true;
    }
    return good && end != text && *end == '\0' && snprintf(name, TRACKED, "iter_%07llu", number) < TRACKED;
}

static bool megatron_probe(const fc_probe *probe) {
    char name[TRACKED], path[PATH_MAX];
    if (!probe->is_directory) {
        return false;
    }
    return is_iteration(probe->path) ||
           (read_tracker(probe->path, name) && exists(probe->path, name, path) && is_iteration(path));
}

/* ---- torch_dist ---- */

static fc_code no_memory(const fc_checkpoint *checkpoint, fc_error *err) {
    return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static fc_code check_unique(const fc_checkpoint *checkpoint, fc_error *err) {
    const char **names = calloc(checkpoint->ntensors + 1, sizeof *names);
    fc_code rc = names ? FC_OK : no_memory(checkpoint, err);
    for (size_t i = 0; names && i < checkpoint->ntensors; i++) {
        names[i] = checkpoint->tensors[i].name;
    }
    if (names) {
        qsort(names, checkpoint->ntensors, sizeof *names, by_name);
    }
    for (size_t i = 1; rc == FC_OK && i < checkpoint->ntensors; i++) {
        if (strcmp(names[i - 1], names[i]) == 0) {
            rc = fc_fail(err, FC_EUNSUPPORTED, "%s: %.256s is both in %s and in .metadata", checkpoint->path, names[i],
                         common);
        }
    }
    free(names);
    return rc;
}

/* Puts the values of common.pt behind those of DCP, and the file behind its files. */
static fc_code add_common(fc_checkpoint *checkpoint, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    size_t nfiles = checkpoint->nfiles, ntensors = checkpoint->ntensors, more = 0;
    fc_tensor *added = NULL;
    fc_file *files = fc_arena_calloc(arena, nfiles + 1, sizeof *files);
    const char *path = fc_arena_printf(arena, "%s/%s", checkpoint->path, common);
    if (!files || !path) {
        return no_memory(checkpoint, err);
    }
    fc_code rc = fc_pt_read_file(checkpoint, path, (uint32_t)nfiles, &added, &more, err);
    fc_tensor *all = rc == FC_OK ? fc_arena_calloc(arena, ntensors + more, sizeof *all) : NULL;
    if (!all) {
        return rc == FC_OK ? no_memory(checkpoint, err) : rc;
    }
    if (nfiles > 0) {
        memcpy(files, checkpoint->files, nfiles * sizeof *files);
    }
    if (ntensors > 0) {
        memcpy(all, checkpoint->tensors, ntensors * sizeof *all);
    }
    if (more > 0) {
        memcpy(all + ntensors, added, more * sizeof *all);
    }
    files[nfiles] = (fc_file){path, common};
    checkpoint->files = files;
    checkpoint->nfiles = nfiles + 1;
    checkpoint->tensors = all;
    checkpoint->ntensors = ntensors + more;
    return check_unique(checkpoint, err);
}

/* ---- one file a rank ---- */

/* One rank has the whole model: its file is read as any other, under the names that are in it. */
static fc_code open_one(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    mg_reader r = {.checkpoint = checkpoint, .err = err};
    fc_code rc = fc_mg_find_ranks(checkpoint, options, &r.grid, err);
    const char *path = rc == FC_OK ? checkpoint->files[0].path : NULL;
    rc = rc == FC_OK ? fc_pt_file_open(path, 0, &r.f, err) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    fc_mg_read_args(&r.f, &r.args);
    fc_pt_file_close(&r.f);
    rc = fc_mg_check_args(&r);
    if (rc != FC_OK) {
        return rc;
    }
    checkpoint->note = r.grid.optimizer ? fc_mg_optimizer_note : NULL;
    checkpoint->path = path;
    return fc_pt_open_file(checkpoint, err);
}

static fc_code megatron_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    char name[TRACKED], path[PATH_MAX];
    if (!is_iteration(checkpoint->path) && read_tracker(checkpoint->path, name) &&
        exists(checkpoint->path, name, path)) {
        checkpoint->path = fc_arena_strndup(checkpoint->arena, path, strlen(path));
        if (!checkpoint->path) {
            return fc_fail(err, FC_ENOMEM, "out of memory");
        }
    }
    bool distributed = is_distributed(checkpoint->path);
    fc_code rc = distributed                                ? fc_format_dcp.open(checkpoint, options, err)
                 : fc_mg_count_ranks(checkpoint->path) == 1 ? open_one(checkpoint, options, err)
                                                            : fc_mg_open_ranks(checkpoint, options, err);
    rc = rc == FC_OK && distributed ? add_common(checkpoint, err) : rc;
    checkpoint->producer = "Megatron";
    return rc;
}

static void megatron_close(fc_checkpoint *checkpoint) {
    fc_format_dcp.close(checkpoint);
}

/* ---- values ---- */

/* Whether a value is one of DCP's: only that has a state, and common.pt is the last file. */
static bool is_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    return checkpoint->state && (tensor->nchunks == 0 || tensor->chunks[0].file + 1 < checkpoint->nfiles);
}

static fc_code megatron_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                               fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.extent(checkpoint, tensor, index, out, err)
                                      : fc_pt_extent(checkpoint, tensor, index, out, err);
}

static fc_code megatron_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                    const char **json, fc_error *err) {
    return is_dcp(checkpoint, object) ? fc_format_dcp.object_json(checkpoint, object, arena, json, err)
                                      : fc_pt_object_json(checkpoint, object, arena, json, err);
}

static fc_code megatron_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                               fc_error *err) {
    if (is_dcp(checkpoint, tensor)) {
        return fc_format_dcp.digest(checkpoint, tensor, index, out, err);
    }
    /* Of the record that a chunk lies in; only for the one at its start, so that each record is read once. */
    if (!tensor->object && index != FC_WHOLE_TENSOR &&
        ((const pt_piece *)(uintptr_t)tensor->chunks[index].detail)->first != 0) {
        return FC_OK;
    }
    return fc_pt_digest(checkpoint, tensor, index, out, err);
}

static const char *const extensions[] = {NULL};

const fc_format fc_format_megatron = {
    .name = "megatron",
    .description = "Megatron checkpoint",
    .directory_sign = "mp_rank_*/model_optim_rng.pt (Megatron)",
    .header_name = ".metadata",
    .extensions = extensions,
    .probe = megatron_probe,
    .open = megatron_open,
    .close = megatron_close,
    .extent = megatron_extent,
    .read = fc_pt_read,
    .object_json = megatron_object_json,
    .digest = megatron_digest,
    .unverified = ".metadata, objects, and the gaps between the records of archives",
};
