/*
 * From the directory of an iteration to the files of its model-parallel ranks:
 * mp_rank_<tensor>[_<pipeline>[_<expert>]], each with model_optim_rng.pt (or model_rng.pt), as
 * training/checkpointing.py of Megatron-LM names them.
 */
#include "megatron/megatron.h"

#include "fsdpckpt/io.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_RANKS = 1 << 16 };

static const char distributed[] = "distrib_optim.pt";

typedef struct found_rank {
    char name[48];
    int64_t numbers[3]; /* tensor, pipeline, expert */
    int parts;
    const char *file;
    bool optimizer;
} found_rank;

static bool exists(const char *directory, const char *rank, const char *name) {
    char path[PATH_MAX];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s/%s", directory, rank, name) < (int)sizeof path && stat(path, &st) == 0;
}

/* Parses the name of a rank's directory and looks for its file. */
static bool parse(const char *directory, const char *name, found_rank *out) {
    static const char prefix[] = "mp_rank_";
    static const char *const files[] = {"model_optim_rng.pt", "model_rng.pt"};
    const char *p = name + sizeof prefix - 1;
    *out = (found_rank){0};
    if (strncmp(name, prefix, sizeof prefix - 1) != 0 || strlen(name) >= sizeof out->name) {
        return false;
    }
    for (; out->parts < 3; p++) {
        const char *start = p;
        int64_t value = 0;
        for (; *p >= '0' && *p <= '9' && value < MAX_RANKS; p++) {
            value = value * 10 + (*p - '0');
        }
        if (p == start || value >= MAX_RANKS) {
            return false;
        }
        out->numbers[out->parts++] = value;
        if (*p != '_') {
            break;
        }
    }
    if (*p != '\0') {
        return false;
    }
    for (size_t i = 0; i < 2 && !out->file; i++) {
        out->file = exists(directory, name, files[i]) ? files[i] : NULL;
    }
    out->optimizer = exists(directory, name, distributed);
    memcpy(out->name, name, strlen(name) + 1);
    return out->file != NULL;
}

size_t fc_mg_count_ranks(const char *directory) {
    found_rank rank;
    size_t count = 0;
    DIR *dir = opendir(directory);
    for (const struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        count += parse(directory, e->d_name, &rank);
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

static fc_code list(const char *directory, found_rank **out, size_t *count, fc_error *err) {
    size_t capacity = 0;
    fc_code rc = FC_OK;
    DIR *dir = opendir(directory);
    if (!dir) {
        return fc_fail_errno(err, errno, "%s: cannot be listed", directory);
    }
    for (const struct dirent *e; rc == FC_OK && (e = readdir(dir)) != NULL;) {
        found_rank rank;
        if (!parse(directory, e->d_name, &rank)) {
            continue;
        }
        if (*count == capacity) {
            capacity = capacity ? capacity * 2 : 16;
            found_rank *grown = realloc(*out, capacity * sizeof *grown);
            *out = grown ? grown : *out;
            rc = grown ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", directory);
        }
        if (rc == FC_OK) {
            (*out)[(*count)++] = rank;
        }
    }
    closedir(dir);
    return rc;
}

/* By stage, then by tensor-parallel rank. */
static int by_place(const void *a, const void *b) {
    const found_rank *x = a, *y = b;
    int64_t way = x->numbers[1] != y->numbers[1] ? x->numbers[1] - y->numbers[1] : x->numbers[0] - y->numbers[0];
    return way < 0 ? -1 : way > 0;
}

static fc_code check_rank(const char *directory, const found_rank *first, const found_rank *rank, fc_error *err) {
    if (rank->numbers[2] > 0) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s/%s: a checkpoint with expert parallelism, whose ranks hold different experts under equal "
                       "names; save it with --ckpt-format torch_dist, or name the file of one rank",
                       directory, rank->name);
    }
    return rank->parts == first->parts
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: %s and %s are ranks of two checkpoints: move one of them away",
                         directory, first->name, rank->name);
}

/* The ranks, sorted, are all there are of a grid: stages × tensor-parallel ranks. */
static fc_code check(const char *directory, const found_rank *ranks, size_t count, mg_grid *grid, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < count; i++) {
        grid->tp = ranks[i].numbers[0] >= grid->tp ? ranks[i].numbers[0] + 1 : grid->tp;
        grid->stages = ranks[i].numbers[1] >= grid->stages ? ranks[i].numbers[1] + 1 : grid->stages;
        rc = check_rank(directory, &ranks[0], &ranks[i], err);
    }
    for (int64_t i = 0; rc == FC_OK && i < grid->tp * grid->stages; i++) {
        char stage[24] = "";
        bool there = (size_t)i < count && ranks[i].numbers[0] == i % grid->tp && ranks[i].numbers[1] == i / grid->tp;
        if (!there && ranks[0].parts > 1) {
            snprintf(stage, sizeof stage, "_%03" PRId64, i / grid->tp);
        }
        rc = there ? FC_OK
                   : fc_fail(err, FC_ECORRUPT,
                             "%s: mp_rank_%02" PRId64 "%s and its file are missing, or a rank is there twice; the "
                             "others are of %" PRId64 " tensor-parallel ranks and %" PRId64
                             " pipeline stages: copy the whole directory",
                             directory, i % grid->tp, stage, grid->tp, grid->stages);
    }
    if (rc == FC_OK && count != (size_t)(grid->tp * grid->stages)) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: a rank is there twice, under names of different lengths", directory);
    }
    return rc;
}

static bool name_file(const fc_checkpoint *checkpoint, const found_rank *rank, const char *name, fc_file *out) {
    out->name = fc_arena_printf(checkpoint->arena, "%s/%s", rank->name, name);
    out->path = out->name ? fc_arena_printf(checkpoint->arena, "%s/%s", checkpoint->path, out->name) : NULL;
    return out->path != NULL;
}

static fc_code take(fc_checkpoint *checkpoint, const found_rank *ranks, size_t count, mg_grid *grid, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    fc_file *files = fc_arena_calloc(arena, 2 * count, sizeof *files);
    grid->names = fc_arena_calloc(arena, 2 * count, sizeof *grid->names);
    bool good = files && grid->names;
    for (size_t i = 0; good && i < count; i++) {
        grid->optimizers += ranks[i].optimizer;
        grid->names[i] = grid->names[count + i] = fc_arena_strndup(arena, ranks[i].name, strlen(ranks[i].name));
        good = grid->names[i] && name_file(checkpoint, &ranks[i], ranks[i].file, &files[i]) &&
               name_file(checkpoint, &ranks[i], distributed, &files[count + i]);
    }
    checkpoint->files = files;
    checkpoint->nfiles = !good ? 0 : grid->optimizers == count ? 2 * count : count;
    return good ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
}

static fc_code check_links(const fc_checkpoint *checkpoint, fc_error *err) {
    char root[PATH_MAX];
    fc_code rc = FC_OK;
    if (!realpath(checkpoint->path, root)) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", checkpoint->path);
    }
    for (size_t i = 0; rc == FC_OK && i < checkpoint->nfiles; i++) {
        rc = fc_check_link(checkpoint->files[i].path, checkpoint->files[i].name, root, err);
    }
    return rc;
}

fc_code fc_mg_find_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, mg_grid *out, fc_error *err) {
    found_rank *ranks = NULL;
    size_t count = 0;
    *out = (mg_grid){0};
    fc_code rc = list(checkpoint->path, &ranks, &count, err);
    if (rc == FC_OK && count == 0) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: the files of its ranks are gone", checkpoint->path);
    } else if (rc == FC_OK) {
        qsort(ranks, count, sizeof *ranks, by_place);
        rc = check(checkpoint->path, ranks, count, out, err);
    }
    rc = rc == FC_OK ? take(checkpoint, ranks, count, out, err) : rc;
    free(ranks);
    return rc == FC_OK && !options->follow_external ? check_links(checkpoint, err) : rc;
}
