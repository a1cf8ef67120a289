/*
 * DCP checkpoints without a `.metadata`: a save with use_collectives=False writes one `__<rank>.metadata` per rank.
 * Each lists the chunks of its rank and the global shapes. The chunks are merged; a box that several ranks hold is
 * taken from the lowest of them. Objects that differ between ranks are kept once per rank.
 *
 * The data files alone are not enough, because their items do not contain their names.
 */
#include "base/file_name.h"
#include "base/grow.h"
#include "base/name_table.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "dcp/dcp.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COMPARE = 64 << 10 };

/* A value, from the lists of the ranks that were read so far. */
typedef struct value {
    fc_tensor tensor; /* its chunks are not set yet */
    size_t rank;      /* the lowest rank that lists it */
    fc_chunk *chunks; /* malloc'ed; tensor.nchunks of them */
    size_t capacity;
    bool renamed; /* it has the name of one rank's object */
} value;

typedef struct builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    const char *directory;
    size_t ranks;
    fc_checkpoint *opened; /* malloc'ed, one per rank; they share the checkpoint's arena */
    uint32_t *first_file;  /* per rank: index into checkpoint->files */
    value *values;         /* malloc'ed */
    size_t count, capacity;
    fc_arena *tables;
    fc_name_table *names; /* in `tables`; from names to indexes of values */
    fc_name_table *boxes; /* in `tables`; the boxes of chunks, each with its value as the parent */
    fc_error *err;
} builder;

/* Parses "__<rank>.metadata". */
static bool parse_name(const char *name, size_t *rank) {
    const int64_t number = fc_take_text(&name, "__") ? fc_take_number(&name, FC_NO_RANK) : -1;
    *rank = (size_t)number;
    return number >= 0 && strcmp(name, ".metadata") == 0;
}

fc_code fc_dcp_count_ranks(const char *directory, size_t *ranks, fc_error *err) {
    fc_dir dir;
    size_t rank;
    *ranks = 0;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        if (parse_name(name, &rank) && rank >= *ranks) {
            *ranks = rank + 1;
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

static fc_code open_rank(builder *m, size_t rank) {
    fc_arena *arena = m->checkpoint->arena;
    fc_checkpoint *opened = &m->opened[rank];
    *opened = (fc_checkpoint){.format = m->checkpoint->format, .path = m->directory, .arena = arena};
    const char *path =
        fc_arena_printf(arena, "%s%s__%zu.metadata", m->directory, fc_ends_with(m->directory, "/") ? "" : "/", rank);
    FC_NEED(path, m->err, m->directory);
    if (fc_access(path, F_OK) != 0 && errno == ENOENT) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: the file is missing, but the directory has __%zu.metadata; each rank wrote one", path,
                       m->ranks - 1);
    }
    return fc_dcp_load(opened, m->options, m->directory, path, true, m->err);
}

static fc_code gather_files(builder *m) {
    size_t total = 0, at = 0;
    for (size_t r = 0; r < m->ranks; r++) {
        m->first_file[r] = (uint32_t)total;
        total += m->opened[r].nfiles;
    }
    fc_file *files = fc_arena_calloc(m->checkpoint->arena, total, sizeof *files);
    FC_NEED(files && total < UINT32_MAX, m->err, m->directory);
    for (size_t r = 0; r < m->ranks; r++) {
        for (size_t i = 0; i < m->opened[r].nfiles; i++) {
            files[at++] = m->opened[r].files[i];
        }
    }
    m->checkpoint->files = files;
    m->checkpoint->nfiles = total;
    return fc_identities_gather(m->checkpoint, m->opened, m->ranks, m->err);
}

/* Finds the value called t->name, or makes it without chunks and sets `*made`. */
static fc_code find_value(builder *m, const fc_tensor *t, size_t rank, value **out, bool *made) {
    const size_t at = fc_name_table_put(m->names, t->name, strlen(t->name), m->count);
    FC_NEED(at != FC_NO_NAME && fc_grow(&m->values, &m->capacity, m->count + 1, sizeof *m->values), m->err,
            m->directory);
    *made = at == m->count;
    *out = &m->values[at];
    if (*made) {
        **out = (value){.tensor = *t, .rank = rank};
        (*out)->tensor.nchunks = 0;
        m->count++;
    }
    return FC_OK;
}

/* Adds the chunks of one rank, each box once. */
static fc_code add_chunks(builder *m, value *v, const fc_tensor *t, size_t rank) {
    FC_NEED(fc_grow(&v->chunks, &v->capacity, v->tensor.nchunks + t->nchunks, sizeof *v->chunks), m->err, m->directory);
    for (size_t i = 0; i < t->nchunks; i++) {
        const size_t n = v->tensor.nchunks, box = 2 * (size_t)t->ndim * sizeof *t->chunks[i].dims;
        const size_t at = fc_name_table_put_child(m->boxes, (uint64_t)(v - m->values), t->chunks[i].dims, box, n);
        FC_NEED(at != FC_NO_NAME, m->err, m->directory);
        if (at == n) {
            v->chunks[n] = t->chunks[i];
            v->chunks[n].place.file += m->first_file[rank];
            v->tensor.nchunks++;
        }
    }
    return FC_OK;
}

static bool same_kind(const fc_tensor *a, const fc_tensor *b) {
    return !a->object == !b->object && a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->object || fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape));
}

static fc_code read_block(const builder *m, const fc_place *place, uint64_t at, unsigned char *buf, size_t size) {
    const char *path = m->checkpoint->files[place->file].path;
    int fd;
    uint64_t file_size;
    FC_TRY(fc_open_input(path, &fd, &file_size, m->err));
    fc_code rc = fc_pread_full(fd, buf, size, place->offset + at, path, m->err);
    close(fd);
    return rc;
}

/* Finds out whether an object of a rank has the bytes of `v`. If data files may be missing, compares only lengths. */
static fc_code compare_objects(const builder *m, const value *v, const fc_tensor *t, size_t rank, bool *same) {
    unsigned char x[COMPARE], y[COMPARE];
    const fc_place a = v->tensor.nchunks ? v->chunks[0].place : (fc_place){0};
    fc_place b = t->nchunks ? t->chunks[0].place : (fc_place){0};
    b.file += m->first_file[rank];
    *same = a.length == b.length;
    for (uint64_t at = 0; *same && at < a.length && !m->options->headers_only; at += COMPARE) {
        size_t size = a.length - at < COMPARE ? (size_t)(a.length - at) : COMPARE;
        FC_TRY(read_block(m, &a, at, x, size));
        FC_TRY(read_block(m, &b, at, y, size));
        *same = memcmp(x, y, size) == 0;
    }
    return FC_OK;
}

static fc_code fail_name_used(const builder *m, const char *name) {
    return fc_fail(m->err, FC_EUNSUPPORTED,
                   "%s: the ranks have different values, and the name %.256s for one of them is already in use",
                   m->directory, name);
}

/* Adds an object of a rank under a name with its rank, because the object of a lower rank differs. */
static fc_code add_rank_object(builder *m, const fc_tensor *t, size_t rank) {
    fc_tensor own = *t;
    char suffix[32];
    value *v;
    bool made;
    snprintf(suffix, sizeof suffix, ".rank_%zu", rank);
    FC_NEED(fc_path_add_suffix(m->checkpoint->arena, suffix, &own.name, &own.path), m->err, m->directory);
    FC_TRY(find_value(m, &own, rank, &v, &made));
    if (!made) {
        return fail_name_used(m, own.name);
    }
    v->renamed = true;
    return add_chunks(m, v, t, rank);
}

/* Adds what a rank lists of a value. */
static fc_code merge_value(builder *m, const fc_tensor *t, size_t rank) {
    value *v;
    bool made, same = false;
    FC_TRY(find_value(m, t, rank, &v, &made));
    if (v->renamed) {
        return fail_name_used(m, t->name);
    }
    if (made || (!v->tensor.object && same_kind(&v->tensor, t))) {
        return add_chunks(m, v, t, rank);
    }
    if (!v->tensor.object) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: %.256s: its dtype or shape in __%zu.metadata differs from that in __%zu.metadata",
                       m->directory, t->name, rank, v->rank);
    }
    if (!t->object) {
        return fc_fail(m->err, FC_ECORRUPT, "%s: %.256s is a tensor in __%zu.metadata, but not in __%zu.metadata",
                       m->directory, t->name, rank, v->rank);
    }
    FC_TRY(compare_objects(m, v, t, rank, &same));
    return same ? FC_OK : add_rank_object(m, t, rank);
}

/* Merges the lists of all ranks. Values are in the order in which the ranks list them, rank 0 first. */
static fc_code merge_ranks(builder *m) {
    m->tables = fc_arena_new();
    m->names = m->tables ? fc_name_table_new(m->tables, m->opened[0].ntensors) : NULL;
    m->boxes = m->tables ? fc_name_table_new(m->tables, m->opened[0].ntensors) : NULL;
    FC_NEED(m->names && m->boxes, m->err, m->directory);
    for (size_t r = 0; r < m->ranks; r++) {
        for (size_t i = 0; i < m->opened[r].ntensors; i++) {
            FC_TRY(merge_value(m, &m->opened[r].tensors[i], r));
        }
    }
    return FC_OK;
}

static fc_code list_tensors(const builder *m) {
    fc_tensor *tensors = fc_arena_calloc(m->checkpoint->arena, m->count, sizeof *tensors);
    for (size_t i = 0; tensors && i < m->count; i++) {
        const value *v = &m->values[i];
        fc_chunk *chunks = fc_arena_copy(m->checkpoint->arena, v->chunks, v->tensor.nchunks, sizeof *chunks);
        FC_NEED(chunks, m->err, m->directory);
        tensors[i] = v->tensor;
        tensors[i].chunks = chunks;
    }
    m->checkpoint->tensors = tensors;
    m->checkpoint->ntensors = tensors ? m->count : 0;
    m->checkpoint->producer = m->opened[0].producer;
    return tensors ? FC_OK : fc_no_memory(m->err, m->directory);
}

fc_code fc_dcp_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                          fc_error *err) {
    builder m = {.checkpoint = checkpoint, .options = options, .directory = directory, .err = err};
    FC_TRY(fc_dcp_count_ranks(directory, &m.ranks, err));
    m.opened = calloc(m.ranks + 1, sizeof *m.opened);
    m.first_file = calloc(m.ranks + 1, sizeof *m.first_file);
    fc_code rc;
    FC_TRY_GOTO(m.opened && m.first_file ? FC_OK : fc_no_memory(m.err, m.directory), rc, out);
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, m.ranks);
    for (size_t r = 0; r < m.ranks; r++) {
        FC_TRY_GOTO(open_rank(&m, r), rc, out);
        FC_TRY_GOTO(fc_progress_count(options->progress, 1, err), rc, out);
    }
    FC_TRY_GOTO(gather_files(&m), rc, out);
    FC_TRY_GOTO(merge_ranks(&m), rc, out);
    rc = list_tensors(&m);
out:
    free(m.opened);
    free(m.first_file);
    for (size_t i = 0; i < m.count; i++) {
        free(m.values[i].chunks);
    }
    free(m.values);
    fc_arena_free(m.tables);
    return rc;
}
