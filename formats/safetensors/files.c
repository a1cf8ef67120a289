/*
 * Turns the path of a checkpoint into the list of its files. See files.h.
 */
#include "safetensors/files.h"

#include "base/grow.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/io.h"
#include "safetensors/header.h"

#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- names ---- */

/* Consumes decimal digits at `*s`. */
static bool take_number(const char **s, uint32_t *out) {
    uint64_t value = 0;
    const char *start = *s;
    for (; **s >= '0' && **s <= '9'; ++*s) {
        value = value * 10 + (uint64_t)(**s - '0');
        if (value >= FC_NO_RANK) {
            return false;
        }
    }
    *out = (uint32_t)value;
    return *s > start;
}

static bool take_text(const char **s, const char *text) {
    size_t n = strlen(text);
    if (strncmp(*s, text, n) != 0) {
        return false;
    }
    *s += n;
    return true;
}

/* "shard-00001-model-00001-of-00001.safetensors". The numbers are valid if the name is a shard file's. */
static bool parse_shard_name(const char *name, uint32_t *shard, uint32_t *model, uint32_t *models) {
    const char *s = name;
    return take_text(&s, "shard-") && take_number(&s, shard) && take_text(&s, "-model-") && take_number(&s, model) &&
           take_text(&s, "-of-") && take_number(&s, models) && strcmp(s, ST_EXTENSION) == 0 && *shard > 0 &&
           *model > 0 && *model <= *models;
}

/* "<stem>-00002-of-00005.safetensors"; `*stem` is the stem's length. */
static bool parse_numbered_name(const char *name, size_t *stem, uint32_t *number, uint32_t *count) {
    for (const char *at = strchr(name, '-'); at; at = strchr(at + 1, '-')) {
        const char *s = at + 1;
        if (take_number(&s, number) && take_text(&s, "-of-") && take_number(&s, count) &&
            strcmp(s, ST_EXTENSION) == 0) {
            *stem = (size_t)(at - name);
            return *number > 0 && *number <= *count;
        }
    }
    return false;
}

/* ---- the directory ---- */

typedef struct listing {
    const char **names; /* malloc'ed: *.safetensors, sorted */
    size_t count, capacity;
    const char *index; /* the index to use; NULL if there is none */
    size_t indexes;    /* number of index files */
} listing;

static int by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool add_name(listing *l, fc_arena *arena, const char *name) {
    if (!fc_grow(&l->names, &l->capacity, l->count + 1, sizeof *l->names)) {
        return false;
    }
    l->names[l->count] = fc_arena_strndup(arena, name, strlen(name));
    return l->names[l->count++] != NULL;
}

static fc_code add_listed(fc_arena *arena, const char *directory, const char *name, listing *out, fc_error *err) {
    if (fc_ends_with(name, ST_EXTENSION) && name[0] != '.') {
        return add_name(out, arena, name) ? FC_OK : fc_no_memory(err, directory);
    }
    if (fc_ends_with(name, ST_INDEX_EXTENSION)) {
        bool usual = strcmp(name, ST_INDEX_NAME) == 0;
        out->indexes++;
        if (usual || !out->index) {
            out->index = usual ? ST_INDEX_NAME : fc_arena_strndup(arena, name, strlen(name));
            return out->index ? FC_OK : fc_no_memory(err, directory);
        }
    }
    return FC_OK;
}

/* @param out the caller frees out->names, also after a failure. */
static fc_code list(fc_arena *arena, const char *directory, listing *out, fc_error *err) {
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        FC_TRY_GOTO(add_listed(arena, directory, name, out, err), rc, out);
    }
    if (out->count > 1) {
        qsort(out->names, out->count, sizeof *out->names, by_name);
    }
out:
    return fc_dir_close(&dir, rc, err);
}

static bool is_data_or_index(const char *name) {
    return name[0] != '.' && (fc_ends_with(name, ST_EXTENSION) || fc_ends_with(name, ST_INDEX_EXTENSION));
}

/* Whether a file starts with a valid header length and a JSON object. */
static bool is_header_start(const unsigned char *head, size_t size) {
    uint64_t length = 0;
    if (size < ST_LENGTH_BYTES + 2) {
        return false;
    }
    for (int i = ST_LENGTH_BYTES - 1; i >= 0; i--) {
        length = length << 8 | head[i];
    }
    size_t at = ST_LENGTH_BYTES;
    while (at < size && head[at] && strchr(" \t\r\n", head[at])) {
        at++;
    }
    return length >= 2 && length <= ST_MAX_HEADER && at < size && head[at] == '{';
}

bool fc_st_files_probe(const fc_probe *probe) {
    if (probe->is_directory) {
        return fc_dir_find(probe->path, is_data_or_index, probe->err);
    }
    return fc_ends_with(probe->path, ST_EXTENSION) || fc_ends_with(probe->path, ST_INDEX_EXTENSION) ||
           is_header_start(probe->head, probe->head_size);
}

bool fc_st_make_file(fc_arena *arena, const char *directory, const char *name, fc_file *out) {
    size_t n = strlen(directory);
    out->name = fc_arena_strndup(arena, name, strlen(name));
    out->path = fc_arena_printf(arena, "%s%s%s", directory, n > 0 && directory[n - 1] == '/' ? "" : "/", name);
    return out->name && out->path;
}

static fc_code take_names(fc_arena *arena, const listing *l, st_files *out, fc_error *err) {
    fc_file *files = fc_arena_calloc(arena, l->count, sizeof *files);
    for (size_t i = 0; files && i < l->count; i++) {
        if (!fc_st_make_file(arena, out->directory, l->names[i], &files[i])) {
            files = NULL;
        }
    }
    out->files = files;
    out->nfiles = l->count;
    return files ? FC_OK : fc_no_memory(err, out->directory);
}

/* ---- shards ---- */

/*
 * Ranks count from 1. torch writes no file for a rank that holds nothing, nor for the ranks after it, so a gap in the
 * numbers is a missing file. torch does not record the number of ranks. If the last file is missing, the global shapes
 * that fsdpckpt records, or the coverage of tensors with more shards, reveal it.
 */
static int by_number(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static fc_code check_shards(fc_arena *arena, const st_files *f, const unsigned char *models, uint32_t count,
                            fc_error *err) {
    for (uint32_t m = 1; m <= count; m++) {
        if (!models[m]) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: a file is missing: the file names count from 1 to %u, but there is no "
                           "shard-*-model-%05u-of-%05u.safetensors",
                           f->directory, count, m, count);
        }
    }
    uint32_t *sorted = fc_arena_alloc(arena, f->nfiles * sizeof *sorted), next = 0;
    if (!sorted) {
        return fc_no_memory(err, f->directory);
    }
    memcpy(sorted, f->ranks, f->nfiles * sizeof *sorted);
    qsort(sorted, f->nfiles, sizeof *sorted, by_number);
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

static fc_code read_shards(fc_arena *arena, const listing *l, st_files *out, fc_error *err) {
    uint32_t shard = 0, model = 0, models = 0, count = 0;
    unsigned char *seen = NULL;
    fc_code rc = FC_OK;
    out->ranks = fc_arena_calloc(arena, l->count, sizeof *out->ranks);
    if (!out->ranks) {
        return fc_no_memory(err, out->directory);
    }
    for (size_t i = 0; i < l->count; i++) {
        if (!parse_shard_name(l->names[i], &shard, &model, &models)) {
            rc = fc_fail(err, FC_EUSAGE,
                         "%s: the directory holds shard files (%s) and other files (%s): give the path of one file, or "
                         "move the others away",
                         out->directory, l->names[l->count - 1], l->names[i]);
            goto out;
        } else if (count && models != count) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: files of two checkpoints are mixed here: %s and %s", out->directory,
                         l->names[0], l->names[i]);
            goto out;
        } else if (!seen && !(seen = calloc((size_t)models + 1, 1))) {
            rc = fc_no_memory(err, out->directory);
            goto out;
        } else {
            count = models;
            seen[model] = 1;
            out->ranks[i] = shard - 1;
        }
    }
    FC_TRY_GOTO(check_shards(arena, out, seen, count, err), rc, out);
out:
    free(seen);
    return rc;
}

/* ---- several files ---- */

/* Files with numbered names, such as "model-00001-of-00003", must all exist. Other names do not tell their number. */
static fc_code check_numbers(const listing *l, st_files *f, fc_error *err) {
    for (size_t i = 0; i < l->count; i++) {
        size_t stem, other;
        uint32_t number, count, n, c;
        if (!parse_numbered_name(l->names[i], &stem, &number, &count)) {
            f->assumed = l->count > 1;
            continue;
        }
        /* The names are sorted, so files with the same stem and count are adjacent and in the order of their numbers.
         */
        bool first = i == 0 || !parse_numbered_name(l->names[i - 1], &other, &n, &c) || other != stem || c != count ||
                     strncmp(l->names[i - 1], l->names[i], stem) != 0;
        bool end = i + 1 == l->count || !parse_numbered_name(l->names[i + 1], &other, &n, &c) || other != stem ||
                   c != count || strncmp(l->names[i + 1], l->names[i], stem) != 0;
        uint32_t missing = 0;
        if (first && number != 1) {
            missing = 1;
        } else if (end ? number < count : n != number + 1) {
            missing = number + 1;
        }
        if (missing) {
            return fc_fail(err, FC_ECORRUPT, "%s: the file %.*s-%05u-of-%05u%s is missing; by the name %s there are %u",
                           f->directory, (int)stem, l->names[i], missing, count, ST_EXTENSION, l->names[i], count);
        }
    }
    return FC_OK;
}

static bool has_shards(const listing *l) {
    uint32_t shard, model, models;
    for (size_t i = 0; i < l->count; i++) {
        if (parse_shard_name(l->names[i], &shard, &model, &models)) {
            return true;
        }
    }
    return false;
}

/* Reads the index, which describes the other files. */
static fc_code read_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, st_files *out,
                          fc_error *err) {
    FC_TRY(fc_identities_add_header(checkpoint, path, options, err));
    return fc_st_index_read(checkpoint->arena, path, out, err);
}

static fc_code find_in_directory(fc_checkpoint *checkpoint, const listing *l, const fc_open_options *options,
                                 st_files *out, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    if (l->index) {
        fc_file index;
        if (l->indexes > 1 && strcmp(l->index, ST_INDEX_NAME) != 0) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: there are %zu index files, and none is called %s: give the path of one of them",
                           out->directory, l->indexes, ST_INDEX_NAME);
        }
        if (!fc_st_make_file(arena, out->directory, l->index, &index)) {
            return fc_no_memory(err, out->directory);
        }
        return read_index(checkpoint, index.path, options, out, err);
    }
    if (l->count == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: the directory holds no safetensors files", out->directory);
    }
    FC_TRY(take_names(arena, l, out, err));
    if (has_shards(l)) {
        out->kind = ST_SHARDS;
        return read_shards(arena, l, out, err);
    }
    out->kind = l->count == 1 ? ST_ONE : ST_MANY;
    return check_numbers(l, out, err);
}

/* ---- links ---- */

fc_code fc_st_check_links(const st_files *f, fc_error *err) {
    char root[PATH_MAX];
    if (!realpath(f->directory, root)) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", f->directory);
    }
    for (size_t i = 0; i < f->nfiles; i++) {
        FC_TRY(fc_check_link(f->files[i].path, f->files[i].name, root, err));
    }
    return FC_OK;
}

void fc_st_files_free(st_files *files) {
    free(files->map);
    files->map = NULL;
}

static fc_code open_directory(fc_checkpoint *checkpoint, const fc_open_options *options, st_files *out, fc_error *err) {
    listing l = {0};
    fc_code rc;
    FC_TRY_GOTO(list(checkpoint->arena, out->directory, &l, err), rc, out);
    FC_TRY_GOTO(find_in_directory(checkpoint, &l, options, out, err), rc, out);
out:
    free(l.names);
    return rc;
}

fc_code fc_st_files_find(fc_checkpoint *checkpoint, const fc_open_options *options, st_files *out, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *path = checkpoint->path;
    uint32_t shard, model, models;
    const char *name = fc_base_name(path);
    *out = (st_files){.kind = ST_ONE};
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    if (is_directory) {
        out->directory = path;
        FC_TRY(open_directory(checkpoint, options, out, err));
        return options->follow_external ? FC_OK : fc_st_check_links(out, err);
    }
    if (parse_shard_name(name, &shard, &model, &models)) {
        return fc_fail(err, FC_EUSAGE, "%s: this is one rank's shard file; give the path of its directory", path);
    }
    out->directory = name == path ? "." : fc_arena_strndup(arena, path, (size_t)(name - path));
    if (!out->directory) {
        return fc_no_memory(err, path);
    }
    if (fc_ends_with(name, ST_INDEX_EXTENSION)) {
        FC_TRY(read_index(checkpoint, path, options, out, err));
        return options->follow_external ? FC_OK : fc_st_check_links(out, err);
    }
    fc_file *file = fc_arena_calloc(arena, 1, sizeof *file);
    if (!file) {
        return fc_no_memory(err, path);
    }
    *file = (fc_file){path, name};
    out->files = file;
    out->nfiles = 1;
    return FC_OK;
}
