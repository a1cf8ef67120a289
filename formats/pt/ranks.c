/*
 * One file a rank, put together: each rank's leaves say which box of the whole they are (a DTensor's placements, a
 * ShardedTensor's metadata, our own layout record), and equal boxes of several ranks are one chunk, the lowest rank's.
 *
 * A plain tensor is a copy that every rank has, which is not taken on trust: the copies' CRCs (or bytes) must agree.
 * A value that is no tensor and differs from rank to rank is kept for each of them.
 */
#include "pt/ranks.h"

#include "core/checked.h"
#include "torch/pickle_private.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { COMPARE_BYTES = 16 << 20 /* of plain tensors whose CRCs do not say whether they are equal */ };

/* A value of the whole. */
typedef struct value {
    const char *name;
    fc_path path;
    const pt_object *object; /* NULL: a tensor */
    bool plain;              /* every rank has all of it */
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    fc_chunk *chunks; /* malloc'ed; each a box of its own */
    size_t nchunks, capacity;
    uint32_t file; /* of an object */
    fc_mesh mesh;
    fc_placement *placements;
} value;

typedef struct merger {
    fc_checkpoint *checkpoint;
    const char *directory;
    fc_arena *scratch; /* of one file */
    value *values;
    size_t count, capacity;
    uint32_t *slots; /* hash table: name → index + 1 */
    size_t nslots;
    pt_file f; /* the current one */
    int64_t rank;
    pt_layout layout;
    fc_error *err;
} merger;

static fc_code no_memory(const merger *m) {
    return fc_fail(m->err, FC_ENOMEM, "%s: out of memory", m->checkpoint->path);
}

static uint32_t *find_slot(const merger *m, uint32_t *slots, size_t nslots, const char *name) {
    size_t i = (size_t)XXH3_64bits(name, strlen(name)) & (nslots - 1);
    while (slots[i] && strcmp(m->values[slots[i] - 1].name, name) != 0) {
        i = (i + 1) & (nslots - 1);
    }
    return &slots[i];
}

static bool grow_slots(merger *m) {
    size_t nslots = m->nslots ? m->nslots * 2 : 1024;
    uint32_t *slots = calloc(nslots, sizeof *slots);
    if (!slots) {
        return false;
    }
    for (size_t i = 0; i < m->count; i++) {
        *find_slot(m, slots, nslots, m->values[i].name) = (uint32_t)i + 1;
    }
    free(m->slots);
    m->slots = slots;
    m->nslots = nslots;
    return true;
}

/* The names of later ranks' leaves live as long as their file is read. */
static bool keep_name(const merger *m, value *v) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, v->path.count, sizeof *elements);
    v->name = fc_arena_strndup(arena, v->name, strlen(v->name));
    for (size_t i = 0; elements && i < v->path.count; i++) {
        elements[i] = v->path.elements[i];
        elements[i].key = fc_arena_strndup(arena, elements[i].key, strlen(elements[i].key));
        elements = elements[i].key ? elements : NULL;
    }
    v->path.elements = elements;
    return elements && v->name;
}

/* The value called `name`, made if it is not there (`*made`). */
static value *value_of(merger *m, const char *name, const fc_path *path, bool *made) {
    if ((m->count + 1) * 2 >= m->nslots && !grow_slots(m)) {
        return NULL;
    }
    uint32_t *slot = find_slot(m, m->slots, m->nslots, name);
    *made = *slot == 0;
    if (*slot) {
        return &m->values[*slot - 1];
    }
    if (!fc_pickle_grow(&m->values, &m->capacity, m->count + 1, sizeof *m->values)) {
        return NULL;
    }
    value *v = &m->values[m->count];
    *v = (value){.name = name, .path = *path};
    if (m->rank > 0 && !keep_name(m, v)) {
        return NULL;
    }
    *slot = (uint32_t)++m->count;
    return v;
}

/* ---- objects ---- */

static bool same_object(const pt_object *a, const pt_object *b) {
    bool same = a->size == b->size && a->nstorages == b->nstorages && memcmp(a->pickle, b->pickle, a->size) == 0;
    for (size_t i = 0; same && i < a->nstorages; i++) {
        same = a->storages[i].size == b->storages[i].size && a->storages[i].crc == b->storages[i].crc &&
               a->storages[i].crc != 0;
    }
    return same;
}

/* The name and path of what another rank has under a name that is taken: "lr.rank_3". */
static fc_code rank_path(merger *m, const pt_leaf *leaf, const char **name, fc_path *path) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, leaf->path.count, sizeof *elements);
    *name = fc_arena_printf(arena, "%s.rank_%" PRId64, leaf->name, m->rank);
    if (!elements || !*name) {
        return no_memory(m);
    }
    memcpy(elements, leaf->path.elements, leaf->path.count * sizeof *elements);
    fc_path_element *last = &elements[leaf->path.count - 1];
    *last = (fc_path_element){.key = fc_arena_printf(arena, "%s.rank_%" PRId64, last->key, m->rank)};
    *path = (fc_path){elements, leaf->path.count};
    return last->key ? FC_OK : no_memory(m);
}

static fc_code add_object(merger *m, const pt_leaf *leaf) {
    pt_object *object = NULL;
    bool made;
    value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return no_memory(m);
    }
    fc_code rc = fc_pt_object_new(&m->f, leaf->v, made ? m->checkpoint->arena : m->scratch, &object, m->err);
    if (rc != FC_OK) {
        return rc;
    }
    if (!made && v->object && same_object(v->object, object)) {
        return FC_OK;
    }
    if (!made) {
        const char *name;
        fc_path path;
        rc = rank_path(m, leaf, &name, &path);
        v = rc == FC_OK ? value_of(m, name, &path, &made) : NULL;
        if (!v || !made) {
            return rc != FC_OK ? rc
                   : v ? fc_fail(m->err, FC_EUNSUPPORTED, "the ranks' values differ, and %.256s is another", name)
                       : no_memory(m);
        }
        rc = fc_pt_object_new(&m->f, leaf->v, m->checkpoint->arena, &object, m->err);
    }
    v->object = object;
    v->file = m->f.index;
    return rc;
}

/* ---- tensors ---- */

static bool same_shape(const value *v, const pt_share *share) {
    return v->ndim == share->ndim && memcmp(v->shape, share->shape, (size_t)v->ndim * sizeof *v->shape) == 0;
}

static fc_code describe(merger *m, value *v, const pt_share *share, fc_dtype dtype) {
    size_t bytes = (size_t)share->ndim * sizeof *v->shape;
    int64_t *shape = fc_arena_alloc(m->checkpoint->arena, bytes);
    v->placements = fc_arena_calloc(m->checkpoint->arena, (size_t)share->mesh.ndim, sizeof *v->placements);
    if (!shape || !v->placements) {
        return no_memory(m);
    }
    memcpy(shape, share->shape, bytes);
    memcpy(v->placements, share->placements, (size_t)share->mesh.ndim * sizeof *v->placements);
    v->dtype = dtype;
    v->ndim = share->ndim;
    v->shape = shape;
    v->mesh = share->mesh;
    return FC_OK;
}

static bool is_empty(const pt_share *share) {
    for (int i = 0; i < share->ndim; i++) {
        if (share->sizes[i] == 0) {
            return true;
        }
    }
    return false;
}

static bool has_box(const value *v, const pt_share *share) {
    size_t bytes = (size_t)v->ndim * sizeof(int64_t);
    for (size_t i = 0; i < v->nchunks; i++) {
        const int64_t *dims = v->chunks[i].dims;
        if (memcmp(dims, share->offsets, bytes) == 0 && memcmp(dims + v->ndim, share->sizes, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static fc_code add_chunk(merger *m, value *v, const pt_share *share, const pt_piece *piece) {
    int64_t *dims = fc_arena_calloc(m->checkpoint->arena, 2 * (size_t)v->ndim, sizeof *dims);
    if (!dims || !fc_pickle_grow(&v->chunks, &v->capacity, v->nchunks + 1, sizeof *v->chunks)) {
        return no_memory(m);
    }
    memcpy(dims, share->offsets, (size_t)v->ndim * sizeof *dims);
    memcpy(dims + v->ndim, share->sizes, (size_t)v->ndim * sizeof *dims);
    v->chunks[v->nchunks++] = (fc_chunk){.dims = dims,
                                         .offset = piece->record.offset,
                                         .length = piece->record.stored,
                                         .file = piece->record.file,
                                         .rank = (uint32_t)m->rank,
                                         .detail = (uint64_t)(uintptr_t)piece};
    return FC_OK;
}

static fc_code check_local(const merger *m, const pt_share *share, const fc_torch_tensor *t) {
    bool same = t->ndim == share->ndim;
    for (int i = 0; same && i < t->ndim; i++) {
        same = t->sizes[i] == share->sizes[i];
    }
    return same ? FC_OK
                : fc_fail(m->err, FC_ECORRUPT, "%s: its local part has another shape than its placements give the rank",
                          m->f.path);
}

/* A rank's piece of the value called leaf->name. */
static fc_code add_share(merger *m, const pt_leaf *leaf, const pt_share *share) {
    fc_torch_tensor t = {0};
    pt_piece *piece = NULL;
    bool made;
    value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return no_memory(m);
    }
    if (!share->local) { /* the rank holds none of it; another will say more */
        m->count -= made;
        if (made) {
            *find_slot(m, m->slots, m->nslots, leaf->name) = 0;
        }
        return FC_OK;
    }
    /* Pieces that another rank's file has, too, need no place in the manifest. */
    bool wanted = made || (!v->object && same_shape(v, share) && !is_empty(share) && !has_box(v, share));
    fc_code rc = fc_pt_piece(&m->f, share->local, &t, wanted ? m->checkpoint->arena : m->scratch, &piece, m->err);
    rc = rc == FC_OK ? check_local(m, share, &t) : rc;
    rc = rc == FC_OK && made ? describe(m, v, share, t.dtype) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    if (v->object || v->plain || v->dtype != t.dtype || !same_shape(v, share)) {
        return fc_fail(m->err, FC_ECORRUPT, "%s: its type or shape is not that of the ranks before", m->f.path);
    }
    return wanted && !is_empty(share) ? add_chunk(m, v, share, piece) : FC_OK;
}

/* Whether two plain tensors hold the same bytes; their records' CRCs tell without reading, mostly. */
static fc_code compare_plain(const merger *m, const value *v, const pt_piece *b, bool *same) {
    const pt_piece *a = (const pt_piece *)(uintptr_t)v->chunks[0].detail;
    int64_t bytes = fc_dtype_size(v->dtype), expected = 1;
    bool dense = a->first == b->first && a->swap == b->swap && a->negate == b->negate && a->conjugate == b->conjugate;
    *same = false;
    for (int i = v->ndim - 1; i >= 0; i--) {
        dense = dense && a->strides[i] == b->strides[i];
        expected *= v->shape[i];
        bytes *= v->shape[i];
    }
    *same = dense && a->record.crc == b->record.crc && a->record.crc != 0 && a->record.size == b->record.size;
    bool readable = dense && a->record.size == b->record.size && a->record.method == FC_ZIP_STORED &&
                    b->record.method == FC_ZIP_STORED && b->record.size <= COMPARE_BYTES;
    if (*same || !readable) {
        return FC_OK;
    }
    unsigned char *x = malloc((size_t)a->record.size + 1), *y = malloc((size_t)b->record.size + 1);
    const char *path = m->checkpoint->files[a->record.file].path;
    int fd = -1;
    uint64_t size;
    fc_code rc = x && y ? fc_open_input(path, &fd, &size, m->err) : no_memory(m);
    rc = rc == FC_OK ? fc_pread_full(fd, x, (size_t)a->record.size, a->record.offset, path, m->err) : rc;
    rc = rc == FC_OK ? fc_pread_full(m->f.fd, y, (size_t)b->record.size, b->record.offset, m->f.path, m->err) : rc;
    *same = rc == FC_OK && memcmp(x, y, (size_t)a->record.size) == 0;
    if (fd >= 0) {
        close(fd);
    }
    free(x);
    free(y);
    return rc;
}

/* A plain tensor without a word about how it lies: the same on every rank, or it cannot be put together. */
static fc_code add_plain(merger *m, const pt_leaf *leaf) {
    fc_torch_tensor t = {0};
    pt_piece *piece = NULL;
    pt_share share = {0};
    bool made, same = false;
    value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return no_memory(m);
    }
    fc_code rc = fc_pt_piece(&m->f, leaf->v, &t, made ? m->checkpoint->arena : m->scratch, &piece, m->err);
    if (rc != FC_OK) {
        return rc;
    }
    share.ndim = t.ndim;
    memcpy(share.shape, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    memcpy(share.sizes, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    if (made) {
        v->plain = true;
        rc = describe(m, v, &share, t.dtype);
        return rc == FC_OK && !is_empty(&share) ? add_chunk(m, v, &share, piece) : rc;
    }
    if (v->object || !v->plain || v->dtype != t.dtype || !same_shape(v, &share)) {
        return fc_fail(m->err, FC_EUNSUPPORTED,
                       "%s: a plain tensor whose type or shape is another on another rank: nothing says how the "
                       "ranks' parts fit together",
                       m->f.path);
    }
    if (v->nchunks == 0) {
        return FC_OK;
    }
    rc = compare_plain(m, v, piece, &same);
    return rc != FC_OK || same ? rc
                               : fc_fail(m->err, FC_EUNSUPPORTED,
                                         "%s: a plain tensor that differs from that of rank 0: neither a copy, nor "
                                         "does anything say how the ranks' parts fit together",
                                         m->f.path);
}

static fc_code add_sharded(merger *m, const pt_leaf *leaf) {
    pt_share share;
    size_t n = fc_pt_sharded_count(&m->f, leaf->v);
    fc_code rc = FC_OK;
    for (size_t i = 0; i < n && rc == FC_OK; i++) {
        rc = fc_pt_sharded_share(&m->f, leaf->v, i, &share, m->err);
        rc = rc == FC_OK ? add_share(m, leaf, &share) : rc;
    }
    return rc;
}

static fc_code add_leaf(merger *m, const pt_leaf *leaf) {
    pt_share share;
    fc_code rc;
    switch (leaf->kind) {
    case PT_OBJECT:
        return add_object(m, leaf);
    case PT_DTENSOR:
        rc = fc_pt_dtensor_share(&m->f, leaf->v, &share, m->err);
        return rc == FC_OK ? add_share(m, leaf, &share) : rc;
    case PT_SHARDED_TENSOR:
        return add_sharded(m, leaf);
    default:
        break;
    }
    if (m->layout.root) {
        rc = fc_pt_layout_share(&m->layout, &m->f, m->rank, leaf->name, leaf->v, &share, m->err);
        if (rc != FC_OK || share.ndim >= 0) {
            return rc == FC_OK ? add_share(m, leaf, &share) : rc;
        }
    }
    return add_plain(m, leaf);
}

/* ---- files ---- */

static fc_code add_file(merger *m, const pt_set *set, int64_t rank, const fc_path *prefix) {
    pt_leaves leaves = {.arena = m->checkpoint->arena};
    uint32_t index = (uint32_t)m->checkpoint->nfiles;
    const fc_file *file = &m->checkpoint->files[index];
    m->rank = rank;
    m->scratch = fc_arena_new();
    fc_code rc = m->scratch ? fc_pt_file_open(file->path, index, &m->f, m->err) : no_memory(m);
    if (rc == FC_OK) {
        m->checkpoint->nfiles++;
        leaves.arena = rank == 0 ? m->checkpoint->arena : m->scratch;
        rc = fc_pt_layout_load(&m->f, rank, set->ranks, &m->layout, m->err);
        rc = rc == FC_OK ? fc_pt_flatten(&m->f, prefix, &leaves, m->err) : rc;
        rc = rc == FC_OK ? fc_pt_check_names(file->path, &leaves, m->err) : rc;
        for (size_t i = 0; i < leaves.count && rc == FC_OK; i++) {
            rc = add_leaf(m, &leaves.items[i]);
            rc = rc == FC_OK ? rc : fc_context(m->err, rc, "%s: %.256s", m->directory, leaves.items[i].name);
        }
        fc_pt_layout_free(&m->layout);
        fc_pt_file_close(&m->f);
    }
    free(leaves.items);
    fc_arena_free(m->scratch);
    m->scratch = NULL;
    return rc;
}

static fc_code check_missing(const merger *m, const pt_set *set, size_t first) {
    size_t missing = 0, at = 0;
    for (int64_t r = 0; r < set->ranks; r++) {
        if (access(m->checkpoint->files[first + (size_t)r].path, F_OK) != 0) {
            at = missing++ ? at : first + (size_t)r;
        }
    }
    return missing == 0
               ? FC_OK
               : fc_fail(m->err, FC_ECORRUPT,
                         "%s: the file is missing, %zu of the %" PRId64 " ranks' files are: copy the whole directory",
                         m->checkpoint->files[at].path, missing, set->ranks);
}

static fc_code check_links(const merger *m, const fc_open_options *options, size_t first, size_t count) {
    char root[PATH_MAX];
    fc_code rc = FC_OK;
    if (options->follow_external) {
        return rc;
    }
    if (!realpath(m->directory, root)) {
        return fc_fail_errno(m->err, errno, "%s: cannot be examined", m->directory);
    }
    for (size_t i = first; i < first + count && rc == FC_OK; i++) {
        rc = fc_check_link(m->checkpoint->files[i].path, m->checkpoint->files[i].name, root, m->err);
    }
    return rc;
}

/* Names the files of a set from checkpoint->files[first] on. */
static fc_code name_files(merger *m, const pt_set *set, fc_file *files) {
    fc_arena *arena = m->checkpoint->arena;
    size_t n = strlen(m->directory);
    const char *slash = n > 0 && m->directory[n - 1] == '/' ? "" : "/";
    for (int64_t r = 0; r < set->ranks; r++) {
        files[r].name =
            fc_arena_printf(arena, "%s_world_size_%" PRId64 "_rank_%" PRId64 ".pt", set->name, set->ranks, r);
        files[r].path = files[r].name ? fc_arena_printf(arena, "%s%s%s", m->directory, slash, files[r].name) : NULL;
        if (!files[r].path) {
            return no_memory(m);
        }
    }
    return FC_OK;
}

static bool is_merged(const pt_set *set) {
    return strncmp(set->name, "model", 5) == 0 || strncmp(set->name, "optim", 5) == 0;
}

/* What precedes the names of a file of a set: the set's, if there are several; and the rank, for a set of which nothing
 * is known (verl's extra_state: random number generators and schedulers, each rank's own). */
static fc_code make_prefix(const merger *m, const pt_set *set, bool several, int64_t rank, fc_path *out) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, 2, sizeof *elements);
    size_t n = 0;
    if (!elements) {
        return no_memory(m);
    }
    if (several) {
        elements[n++].key = set->name;
    }
    if (!is_merged(set)) {
        elements[n].key = fc_arena_printf(arena, "rank_%" PRId64, rank);
        if (!elements[n++].key) {
            return no_memory(m);
        }
    }
    *out = (fc_path){elements, n};
    return FC_OK;
}

static fc_code add_set(merger *m, const pt_set *set, bool several, const fc_open_options *options, fc_file *files) {
    size_t first = m->checkpoint->nfiles;
    fc_code rc = name_files(m, set, files + first);
    rc = rc == FC_OK ? check_missing(m, set, first) : rc;
    rc = rc == FC_OK ? check_links(m, options, first, (size_t)set->ranks) : rc;
    for (int64_t r = 0; r < set->ranks && rc == FC_OK; r++) {
        fc_path prefix;
        rc = make_prefix(m, set, several, r, &prefix);
        rc = rc == FC_OK ? add_file(m, set, r, &prefix) : rc;
    }
    return rc;
}

/* ---- the manifest ---- */

static bool same_mesh(const fc_mesh *a, const fc_mesh *b) {
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++) {
        same = a->sizes[i] == b->sizes[i] && strcmp(a->names[i], b->names[i]) == 0;
    }
    return same;
}

static fc_code finish_value(const merger *m, const value *v, fc_tensor *t) {
    fc_arena *arena = m->checkpoint->arena;
    t->name = v->name;
    t->path = v->path;
    if (v->object) {
        return fc_pt_object_tensor(v->object, v->file, arena, t, m->err);
    }
    fc_chunk *chunks = fc_arena_alloc(arena, v->nchunks * sizeof *chunks);
    if (!chunks) {
        return no_memory(m);
    }
    if (v->nchunks > 0) {
        memcpy(chunks, v->chunks, v->nchunks * sizeof *chunks);
    }
    t->dtype = v->dtype;
    t->ndim = v->ndim;
    t->shape = v->shape;
    t->chunks = chunks;
    t->nchunks = v->nchunks;
    if (v->mesh.ndim > 0 && same_mesh(&v->mesh, &m->checkpoint->mesh)) {
        t->placements = v->placements;
    }
    return FC_OK;
}

/* Copies of every rank are, on the mesh of the others, replicated. */
static fc_code place_plain(const merger *m, const value *v, fc_tensor *t) {
    if (v->object || !v->plain || m->checkpoint->mesh.ndim == 0) {
        return FC_OK;
    }
    fc_placement *placements =
        fc_arena_calloc(m->checkpoint->arena, (size_t)m->checkpoint->mesh.ndim, sizeof *placements);
    t->placements = placements;
    return placements ? FC_OK : no_memory(m);
}

static fc_code finish(merger *m) {
    fc_tensor *tensors = fc_arena_calloc(m->checkpoint->arena, m->count, sizeof *tensors);
    if (!tensors) {
        return no_memory(m);
    }
    for (size_t i = 0; i < m->count; i++) { /* the mesh with the most dimensions: others are parts of it */
        if (m->values[i].mesh.ndim > m->checkpoint->mesh.ndim) {
            m->checkpoint->mesh = m->values[i].mesh;
        }
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; i < m->count && rc == FC_OK; i++) {
        rc = finish_value(m, &m->values[i], &tensors[i]);
        rc = rc == FC_OK ? place_plain(m, &m->values[i], &tensors[i]) : rc;
    }
    m->checkpoint->tensors = tensors;
    m->checkpoint->ntensors = m->count;
    m->checkpoint->producer = "torch.save, one file a rank";
    return rc;
}

fc_code fc_pt_open_ranks(fc_checkpoint *checkpoint, const char *directory, const pt_set *only,
                         const fc_open_options *options, fc_error *err) {
    merger m = {.checkpoint = checkpoint, .directory = directory, .f = {.fd = -1}, .err = err};
    pt_set *sets = NULL;
    size_t nsets = 0, total = 0;
    fc_code rc = fc_pt_find_sets(directory, checkpoint->arena, &sets, &nsets, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (size_t i = 0; i < nsets; i++) {
        total += (size_t)sets[i].ranks;
    }
    fc_file *files = fc_arena_calloc(checkpoint->arena, total, sizeof *files);
    if (!files) {
        return no_memory(&m);
    }
    checkpoint->files = files;
    for (size_t i = 0; i < nsets && rc == FC_OK; i++) {
        if (!only || strcmp(only->name, sets[i].name) == 0) {
            rc = add_set(&m, &sets[i], !only && nsets > 1, options, files);
        }
    }
    rc = rc == FC_OK ? finish(&m) : rc;
    for (size_t i = 0; i < m.count; i++) {
        free(m.values[i].chunks);
    }
    free(m.values);
    free(m.slots);
    return rc;
}
