/*
 * DCP checkpoints without a `.metadata`: a save with use_collectives=False writes one `__<rank>.metadata` per rank.
 * Each lists the chunks of its rank and the global shapes. The chunks are merged; a box that several ranks hold is
 * taken from the lowest of them. Objects that differ between ranks are kept once per rank.
 *
 * The data files alone are not enough, because their items do not contain their names.
 */
#include "checkpoint/identity.h"
#include "dcp/dcp.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COMPARE = 64 << 10 };

/* A value in the list of one rank. */
typedef struct listed {
    const fc_tensor *tensor;
    size_t rank, order; /* order: position in the lists of all ranks */
} listed;

typedef struct builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    const char *directory;
    size_t ranks;
    fc_checkpoint *opened; /* malloc'ed, one per rank; they share the checkpoint's arena */
    uint32_t *first_file;  /* per rank: index into checkpoint->files */
    listed *all;
    size_t count;
    fc_tensor *tensors;
    size_t *orders; /* listed.order of each tensor */
    size_t ntensors;
    fc_error *err;
} builder;

/* Parses "__<rank>.metadata". */
static bool parse_name(const char *name, size_t *rank) {
    char *end;
    if (strncmp(name, "__", 2) != 0 || name[2] < '0' || name[2] > '9') {
        return false;
    }
    errno = 0;
    unsigned long long value = strtoull(name + 2, &end, 10);
    *rank = (size_t)value;
    return errno == 0 && value < FC_NO_RANK && strcmp(end, ".metadata") == 0;
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
    size_t n = strlen(m->directory);
    const char *slash = n > 0 && m->directory[n - 1] == '/' ? "" : "/";
    *opened = (fc_checkpoint){.format = m->checkpoint->format, .path = m->directory, .arena = arena};
    const char *path = fc_arena_printf(arena, "%s%s__%zu.metadata", m->directory, slash, rank);
    if (!path) {
        return fc_no_memory(m->err, m->directory);
    }
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: the file is missing, but the directory has __%zu.metadata; each rank wrote one", path,
                       m->ranks - 1);
    }
    return fc_dcp_load(opened, m->options, m->directory, path, m->err);
}

static fc_code gather_files(builder *m) {
    size_t total = 0, at = 0;
    for (size_t r = 0; r < m->ranks; r++) {
        m->first_file[r] = (uint32_t)total;
        total += m->opened[r].nfiles;
    }
    fc_file *files = fc_arena_calloc(m->checkpoint->arena, total, sizeof *files);
    if (!files || total >= UINT32_MAX) {
        return fc_no_memory(m->err, m->directory);
    }
    for (size_t r = 0; r < m->ranks; r++) {
        for (size_t i = 0; i < m->opened[r].nfiles; i++) {
            files[at++] = m->opened[r].files[i];
        }
    }
    m->checkpoint->files = files;
    m->checkpoint->nfiles = total;
    return fc_identities_gather(m->checkpoint, m->opened, m->ranks, m->err);
}

static int compare_listed_names(const void *a, const void *b) {
    const listed *x = a, *y = b;
    int order = strcmp(x->tensor->name, y->tensor->name);
    return order ? order : x->order < y->order ? -1 : 1;
}

static fc_code gather_values(builder *m) {
    for (size_t r = 0; r < m->ranks; r++) {
        m->count += m->opened[r].ntensors;
    }
    m->all = malloc((m->count + 1) * sizeof *m->all);
    m->orders = malloc((m->count + 1) * sizeof *m->orders);
    m->tensors = malloc((m->count + 1) * sizeof *m->tensors); /* objects may be kept once per rank */
    if (!m->all || !m->orders || !m->tensors) {
        return fc_no_memory(m->err, m->directory);
    }
    size_t at = 0;
    for (size_t r = 0; r < m->ranks; r++) {
        for (size_t i = 0; i < m->opened[r].ntensors; i++, at++) {
            m->all[at] = (listed){&m->opened[r].tensors[i], r, at};
        }
    }
    qsort(m->all, m->count, sizeof *m->all, compare_listed_names);
    return FC_OK;
}

static void add_tensor(builder *m, const fc_tensor *tensor, size_t order) {
    m->tensors[m->ntensors] = *tensor;
    m->orders[m->ntensors++] = order;
}

static bool same_kind(const fc_tensor *a, const fc_tensor *b) {
    bool same = !a->object == !b->object && a->dtype == b->dtype && a->ndim == b->ndim;
    for (int i = 0; same && !a->object && i < a->ndim; i++) {
        same = a->shape[i] == b->shape[i];
    }
    return same;
}

static bool has_box(const fc_tensor *t, const fc_chunk *chunks, size_t n, const int64_t *dims) {
    for (size_t i = 0; i < n; i++) {
        if (memcmp(chunks[i].dims, dims, 2 * (size_t)t->ndim * sizeof *dims) == 0) {
            return true;
        }
    }
    return false;
}

/* Merges a tensor that several ranks list, each box once. */
static fc_code merge_tensor(builder *m, const listed *same, size_t n) {
    size_t total = 0, kept = 0;
    for (size_t i = 0; i < n; i++) {
        total += same[i].tensor->nchunks;
        if (!same_kind(same[0].tensor, same[i].tensor)) {
            return fc_fail(m->err, FC_ECORRUPT,
                           "%s: %.256s: its dtype or shape in __%zu.metadata differs from that in __%zu.metadata",
                           m->directory, same[0].tensor->name, same[i].rank, same[0].rank);
        }
    }
    fc_chunk *chunks = fc_arena_calloc(m->checkpoint->arena, total, sizeof *chunks);
    if (!chunks) {
        return fc_no_memory(m->err, m->directory);
    }
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = same[i].tensor;
        for (size_t c = 0; c < t->nchunks; c++) {
            if (!has_box(t, chunks, kept, t->chunks[c].dims)) {
                chunks[kept] = t->chunks[c];
                chunks[kept++].place.file += m->first_file[same[i].rank];
            }
        }
    }
    fc_tensor merged = *same[0].tensor;
    merged.chunks = chunks;
    merged.nchunks = kept;
    add_tensor(m, &merged, same[0].order);
    return FC_OK;
}

static fc_code read_block(const builder *m, const listed *l, uint64_t at, unsigned char *buf, size_t size) {
    const fc_chunk *chunk = &l->tensor->chunks[0];
    const char *path = m->opened[l->rank].files[chunk->place.file].path;
    int fd;
    uint64_t file_size;
    FC_TRY(fc_open_input(path, &fd, &file_size, m->err));
    fc_code rc = fc_pread_full(fd, buf, size, chunk->place.offset + at, path, m->err);
    close(fd);
    return rc;
}

/* Finds out whether two objects have the same bytes. If data files may be missing, compares only their lengths. */
static fc_code compare_objects(const builder *m, const listed *a, const listed *b, bool *same) {
    unsigned char x[COMPARE], y[COMPARE];
    uint64_t length = a->tensor->nchunks ? a->tensor->chunks[0].place.length : 0;
    *same = length == (b->tensor->nchunks ? b->tensor->chunks[0].place.length : 0);
    for (uint64_t at = 0; *same && at < length && !m->options->headers_only; at += COMPARE) {
        size_t size = length - at < COMPARE ? (size_t)(length - at) : COMPARE;
        FC_TRY(read_block(m, a, at, x, size));
        FC_TRY(read_block(m, b, at, y, size));
        *same = memcmp(x, y, size) == 0;
    }
    return FC_OK;
}

/* Adds an object of one rank, under its common name or, if the ranks' objects differ, under a name with its rank. */
static fc_code add_object(builder *m, const listed *l, bool rename) {
    fc_arena *arena = m->checkpoint->arena;
    fc_tensor t = *l->tensor;
    fc_chunk *chunks = fc_arena_calloc(arena, t.nchunks, sizeof *chunks);
    if (!chunks) {
        return fc_no_memory(m->err, m->directory);
    }
    for (size_t c = 0; c < t.nchunks; c++) {
        chunks[c] = t.chunks[c];
        chunks[c].place.file += m->first_file[l->rank];
    }
    t.chunks = chunks;
    if (rename) {
        fc_path_element *elements = fc_arena_calloc(arena, t.path.count, sizeof *elements);
        if (!elements) {
            return fc_no_memory(m->err, m->directory);
        }
        memcpy(elements, t.path.elements, t.path.count * sizeof *elements);
        fc_path_element *last = &elements[t.path.count - 1];
        *last = (fc_path_element){.key = fc_arena_printf(arena, "%s.rank_%zu", last->key, l->rank)};
        t.name = fc_arena_printf(arena, "%s.rank_%zu", t.name, l->rank);
        t.path.elements = elements;
        if (!last->key || !t.name) {
            return fc_no_memory(m->err, m->directory);
        }
    }
    add_tensor(m, &t, l->order);
    return FC_OK;
}

static fc_code merge_objects(builder *m, const listed *same, size_t n) {
    FC_TRY(add_object(m, &same[0], false));
    for (size_t i = 1; i < n; i++) {
        bool equal = false;
        if (!same[i].tensor->object) {
            return fc_fail(m->err, FC_ECORRUPT, "%s: %.256s is a tensor in __%zu.metadata, but not in __%zu.metadata",
                           m->directory, same[0].tensor->name, same[i].rank, same[0].rank);
        }
        FC_TRY(compare_objects(m, &same[0], &same[i], &equal));
        if (!equal) {
            FC_TRY(add_object(m, &same[i], true));
        }
    }
    return FC_OK;
}

static fc_code merge(builder *m) {
    fc_code rc = FC_OK;
    for (size_t i = 0; i < m->count && rc == FC_OK;) {
        size_t end = i + 1;
        while (end < m->count && strcmp(m->all[i].tensor->name, m->all[end].tensor->name) == 0) {
            end++;
        }
        rc = m->all[i].tensor->object ? merge_objects(m, &m->all[i], end - i) : merge_tensor(m, &m->all[i], end - i);
        i = end;
    }
    return rc;
}

static int compare_tensor_orders(const void *a, const void *b, void *orders) {
    const size_t *order = orders, *x = a, *y = b;
    return order[*x] < order[*y] ? -1 : 1;
}

static int compare_tensor_names(const void *a, const void *b, void *tensors) {
    const fc_tensor *of = tensors;
    const size_t *x = a, *y = b;
    return strcmp(of[*x].name, of[*y].name);
}

/* Only a name that was made for one rank's object can clash with another. */
static fc_code check_names(const builder *m, size_t *sorted) {
    qsort_r(sorted, m->ntensors, sizeof *sorted, compare_tensor_names, m->tensors);
    for (size_t i = 1; i < m->ntensors; i++) {
        if (strcmp(m->tensors[sorted[i - 1]].name, m->tensors[sorted[i]].name) == 0) {
            return fc_fail(m->err, FC_EUNSUPPORTED,
                           "%s: the ranks have different values, and the name %.256s for one of them is already in use",
                           m->directory, m->tensors[sorted[i]].name);
        }
    }
    return FC_OK;
}

/* Puts the values in the order in which the ranks list them, rank 0 first. */
static fc_code finish(builder *m) {
    size_t *sorted = malloc((m->ntensors + 1) * sizeof *sorted);
    fc_tensor *tensors = fc_arena_calloc(m->checkpoint->arena, m->ntensors, sizeof *tensors);
    if (!sorted || !tensors) {
        free(sorted);
        return fc_no_memory(m->err, m->directory);
    }
    for (size_t i = 0; i < m->ntensors; i++) {
        sorted[i] = i;
    }
    fc_code rc = check_names(m, sorted);
    qsort_r(sorted, m->ntensors, sizeof *sorted, compare_tensor_orders, m->orders);
    for (size_t i = 0; i < m->ntensors; i++) {
        tensors[i] = m->tensors[sorted[i]];
    }
    free(sorted);
    m->checkpoint->tensors = tensors;
    m->checkpoint->ntensors = m->ntensors;
    m->checkpoint->producer = m->opened[0].producer;
    return rc;
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
    FC_TRY_GOTO(gather_values(&m), rc, out);
    FC_TRY_GOTO(merge(&m), rc, out);
    rc = finish(&m);
out:
    free(m.opened);
    free(m.first_file);
    free(m.all);
    free(m.orders);
    free(m.tensors);
    return rc;
}
