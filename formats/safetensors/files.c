/*
 * Turns the path of a checkpoint into the list of its files. See files.h.
 */
#include "safetensors/files.h"
#include "safetensors/groups.h"

#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "safetensors/header.h"

#include "base/file_name.h"
#include "base/little.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Whether a file starts with a valid header length and a JSON object. */
static bool is_header_start(const unsigned char *head, size_t size) {
    if (size < ST_LENGTH_BYTES + 2) {
        return false;
    }
    const uint64_t length = fc_load_little(head, ST_LENGTH_BYTES);
    size_t at = ST_LENGTH_BYTES;
    while (at < size && head[at] && strchr(" \t\r\n", head[at])) {
        at++;
    }
    return length >= 2 && length <= ST_MAX_HEADER && at < size && head[at] == '{';
}

bool fc_st_files_probe(const fc_probe *probe) {
    return fc_ends_with(probe->path, ST_EXTENSION) || fc_is_index_of(probe->path, ST_EXTENSION) ||
           is_header_start(probe->head, probe->head_size);
}

/* Takes the names of one group. */
static fc_code take_names(fc_arena *arena, const fc_st_names *l, const char *group, fc_st_files *out, fc_error *err) {
    fc_file *files = fc_arena_calloc(arena, l->count + 1, sizeof *files);
    out->files = files;
    for (size_t i = 0; files && i < l->count; i++) {
        if (strcmp(l->groups[i], group) == 0 &&
            !fc_file_in(arena, out->directory, l->names[i], &files[out->nfiles++])) {
            files = NULL;
        }
    }
    return files ? FC_OK : fc_no_memory(err, out->directory);
}

/* ---- shards ---- */

/*
 * Ranks count from 1. torch writes no file for a rank that holds nothing, nor for the ranks after it, so a gap in the
 * numbers is a missing file. torch does not record the number of ranks. If the last file is missing, the global shapes
 * that fsdpckpt records, or the coverage of tensors with more shards, reveal it.
 */
static int compare_file_numbers(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static fc_code check_shards(fc_arena *arena, const fc_st_files *f, const unsigned char *models, uint32_t count,
                            fc_error *err) {
    for (uint32_t m = 1; m <= count; m++) {
        if (!models[m]) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: a file is missing: the file names count from 1 to %u, but there is no "
                           "shard-*-model-%05u-of-%05u.safetensors",
                           f->directory, count, m, count);
        }
    }
    uint32_t *sorted = fc_arena_copy(arena, f->ranks, f->nfiles, sizeof *sorted), next = 0;
    FC_NEED(sorted, err, f->directory);
    fc_sort_items(sorted, f->nfiles, sizeof *sorted, compare_file_numbers);
    for (size_t i = 0; i < f->nfiles; i++) {
        if (sorted[i] > next) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: a file is missing: there are shards up to number %u, but there is no "
                           "shard-%05u-model-*-of-%05u.safetensors",
                           f->directory, sorted[f->nfiles - 1] + 1, next + 1, count);
        }
        next = sorted[i] + 1;
    }
    return FC_OK;
}

static bool is_shard(const fc_file *file, uint32_t *shard, uint32_t *model, uint32_t *models) {
    return fc_st_parse_shard_name(file->name, shard, model, models);
}

static fc_code read_shards(fc_arena *arena, fc_st_files *out, fc_error *err) {
    uint32_t shard = 0, model = 0, count = 0;
    is_shard(&out->files[0], &shard, &model, &count); /* the same number in all names of the group */
    unsigned char *seen = calloc((size_t)count + 1, 1);
    out->ranks = fc_arena_calloc(arena, out->nfiles, sizeof *out->ranks);
    fc_code rc = seen && out->ranks ? FC_OK : fc_no_memory(err, out->directory);
    for (size_t i = 0; rc == FC_OK && i < out->nfiles; i++) {
        is_shard(&out->files[i], &shard, &model, &count);
        seen[model] = 1;
        out->ranks[i] = shard - 1;
    }
    rc = rc == FC_OK ? check_shards(arena, out, seen, count, err) : rc;
    free(seen);
    return rc;
}

/* ---- files of ranks without a record of their layout ---- */

/* A file that is missing among ranks from 0, and among the parts of a rank from 0. */
static fc_code check_ranks(const fc_st_files *f, fc_error *err) {
    uint32_t rank = 0, part = 0, ranks = 0;
    size_t first = 0;
    for (size_t i = 0; i < f->nfiles; i++) {
        fc_st_parse_rank_name(f->files[i].name, &rank, &part);
        ranks = rank >= ranks ? rank + 1 : ranks;
        first += part == 0;
    }
    return first == ranks
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: a file is missing: there are ranks up to %u, but files of %zu ranks",
                         f->directory, ranks - 1, first);
}

/* ---- several files ---- */

/* Files with names such as "model-00001-of-00003" must all exist. Other names do not tell their number. */
static fc_code check_numbers(fc_st_files *f, fc_error *err) {
    for (size_t i = 0; i < f->nfiles; i++) {
        size_t stem;
        uint32_t number, count;
        const char *name = f->files[i].name;
        if (!fc_st_parse_numbered_name(name, &stem, &number, &count)) {
            f->assumed = f->nfiles > 1;
            continue;
        }
        const uint32_t next = (uint32_t)i + 1; /* the names are sorted */
        if (number != next || (i + 1 == f->nfiles && next < count)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the file %.*s-%05u-of-%05u%s is missing; by the name %s there are %u",
                           f->directory, (int)stem, name, number != next ? next : next + 1, count, ST_EXTENSION, name,
                           count);
        }
    }
    return FC_OK;
}

/* Reads the index, which describes the other files. */
static fc_code read_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_st_files *out,
                          fc_error *err) {
    FC_TRY(fc_identities_add_header(checkpoint, path, options, err));
    return fc_st_index_read(checkpoint->arena, path, out, err);
}

static fc_code find_in_directory(fc_checkpoint *checkpoint, const fc_st_names *l, const fc_open_options *options,
                                 fc_st_files *out, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *group = checkpoint->group ? checkpoint->group : "";
    fc_file index;
    uint32_t shard, model, models;
    if (fc_is_index_of(group, ST_EXTENSION)) {
        return fc_file_in(arena, out->directory, group, &index) ? read_index(checkpoint, index.path, options, out, err)
                                                                : fc_no_memory(err, out->directory);
    }
    FC_TRY(take_names(arena, l, group, out, err));
    if (out->nfiles == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: the directory holds no safetensors files", out->directory);
    }
    if (is_shard(&out->files[0], &shard, &model, &models)) {
        out->kind = ST_SHARDS;
        return read_shards(arena, out, err);
    }
    if (fc_st_parse_rank_name(out->files[0].name, &shard, &model) &&
        (out->nfiles > 1 || out->files[0].name[0] == 'm')) {
        out->kind = ST_RANKS;
        out->assumed = true;
        return check_ranks(out, err);
    }
    out->kind = out->nfiles == 1 ? ST_ONE : ST_MANY;
    return check_numbers(out, err);
}

static fc_code open_directory(fc_checkpoint *checkpoint, const fc_open_options *options, fc_st_files *out,
                              fc_error *err) {
    fc_st_names l;
    FC_TRY(fc_st_list_names(checkpoint->arena, out->directory, &l, err));
    return find_in_directory(checkpoint, &l, options, out, err);
}

fc_code fc_st_files_find(fc_checkpoint *checkpoint, const fc_open_options *options, fc_st_files *out, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *path = checkpoint->path;
    uint32_t shard, model, models;
    const char *name = fc_base_name(path);
    *out = (fc_st_files){.kind = ST_ONE};
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    if (is_directory) {
        out->directory = path;
        FC_TRY(open_directory(checkpoint, options, out, err));
        return options->follow_external ? FC_OK : fc_check_links(out->directory, out->files, out->nfiles, err);
    }
    if (fc_st_parse_shard_name(name, &shard, &model, &models)) {
        return fc_fail(err, FC_EUSAGE, "%s: this is one rank's shard file; give the path of its directory", path);
    }
    out->directory = name == path ? "." : fc_arena_strndup(arena, path, (size_t)(name - path));
    FC_NEED(out->directory, err, path);
    if (fc_is_index_of(name, ST_EXTENSION)) {
        FC_TRY(read_index(checkpoint, path, options, out, err));
        return options->follow_external ? FC_OK : fc_check_links(out->directory, out->files, out->nfiles, err);
    }
    fc_file *file = fc_arena_calloc(arena, 1, sizeof *file);
    FC_NEED(file, err, path);
    *file = (fc_file){path, name};
    out->files = file;
    out->nfiles = 1;
    return FC_OK;
}
