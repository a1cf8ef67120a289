/*
 * Computed checkpoints: see computed.h. To the engine a block is a chunk that only the format can decode.
 */
#include "weights/computed.h"

#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/identity.h"
#include "checkpoint/list_budget.h"
#include "checkpoint/same_name.h"
#include "engine/read_box.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/try.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 1 << 22, MOST_SOURCES = 64 };

/* A tensor that several blocks read. */
typedef struct shared {
    size_t source;
    const fc_tensor *tensor;
} shared;

/* fc_checkpoint.state. The format is a copy of the first source's, with some functions replaced. */
typedef struct state {
    fc_checkpoint **sources;
    fc_source_crc **crcs; /* one per source: CRCs of what was read of it */
    size_t count;
    bool owned;
    fc_format format;
    fc_tensor *tensors;
    size_t most;
    shared *shared; /* from malloc */
    size_t nshared, capacity;
    fc_list_budget lists;
    pthread_mutex_t lock; /* guards `idle` */
    fc_work *idle;        /* from malloc */
} state;

/* fc_tensor.detail of a value. */
typedef struct origin {
    const fc_tensor *kept; /* of the first source; NULL: it is computed */
    fc_compute *compute;
    const void *what;
    atomic_bool *read; /* one per chunk: whether it was read before, so that its CRCs are already added */
} origin;

static fc_checkpoint *first_of(const fc_checkpoint *checkpoint) {
    return ((const state *)checkpoint->state)->sources[0];
}

/* ---- the format ---- */

static fc_code computed_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                               fc_error *err) {
    const origin *o = tensor->detail;
    if (o->kept) {
        return fc_checkpoint_extent(first_of(checkpoint), o->kept, index, out, err);
    }
    *out = fc_computed_extent(tensor, index);
    return FC_OK;
}

void *fc_work_buffer(fc_work *work, int which, size_t size) {
    if (work->sizes[which] < size || !work->bytes[which]) {
        free(work->bytes[which]);
        work->bytes[which] = malloc(size + 1);
        work->sizes[which] = work->bytes[which] ? size : 0;
    }
    return work->bytes[which];
}

/* @return buffers that no worker uses, or NULL when out of memory. */
static fc_work *take_work(state *s) {
    pthread_mutex_lock(&s->lock);
    fc_work *work = s->idle;
    s->idle = work ? work->next : NULL;
    pthread_mutex_unlock(&s->lock);
    return work ? work : calloc(1, sizeof *work);
}

static void give_work(state *s, fc_work *work) {
    pthread_mutex_lock(&s->lock);
    work->next = s->idle;
    s->idle = work;
    pthread_mutex_unlock(&s->lock);
}

static void free_work(state *s) {
    for (fc_work *work = s->idle, *next; work; work = next) {
        next = work->next;
        for (int i = 0; i < FC_WORK_BUFFERS; i++) {
            free(work->bytes[i]);
        }
        free(work);
    }
    pthread_mutex_destroy(&s->lock);
}

static fc_code computed_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                             fc_error *err) {
    static fc_source_crc *const none[MOST_SOURCES];
    const state *s = checkpoint->state;
    const origin *o = tensor->detail;
    if (o->kept) {
        return s->sources[0]->format->reader.read(s->sources[0], o->kept, index, buf, err);
    }
    fc_work *work = take_work(checkpoint->state);
    if (!work) {
        return fc_no_memory(err, checkpoint->path);
    }
    const bool again = atomic_exchange(&o->read[index], true); /* the cache may have evicted it */
    const fc_computed_block block = {.tensor = tensor,
                                     .what = o->what,
                                     .box = fc_chunk_box(tensor, &tensor->chunks[index]),
                                     .sources = s->sources,
                                     .crcs = again ? none : s->crcs,
                                     .work = work,
                                     .out = buf};
    const fc_code rc = o->compute(&block, err);
    give_work(checkpoint->state, work);
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "tensor %.256s", tensor->name);
}

static fc_code computed_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                    const char **json, fc_error *err) {
    const origin *o = object->detail;
    return fc_checkpoint_object_json(first_of(checkpoint), o->kept, arena, json, err);
}

static fc_code computed_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                               fc_error *err) {
    const origin *o = tensor->detail;
    *out = (fc_digest){.kind = FC_DIGEST_NONE};
    return o->kept ? fc_checkpoint_digest(first_of(checkpoint), o->kept, index, out, err) : FC_OK;
}

static fc_code computed_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    const origin *o = object->detail;
    const fc_checkpoint *source = first_of(checkpoint);
    return source->format->reader.check_object(source, o->kept, err);
}

/* The files of the sources follow each other. */
static fc_code computed_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    const state *s = checkpoint->state;
    size_t i = 0;
    for (; index >= s->sources[i]->nfiles; i++) {
        index -= s->sources[i]->nfiles;
    }
    const fc_format_reader *reader = &s->sources[i]->format->reader;
    return reader->check_file ? reader->check_file(s->sources[i], index, err) : FC_OK;
}

/* Reads what several blocks have read once more, as a whole, which compares it. The ranks divide this work. */
static fc_code check_shared(const state *s, const fc_comm *comm, fc_error *err) {
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    for (size_t i = share; i < s->nshared; i += shares) {
        FC_TRY(fc_compare_tensor(s->sources[s->shared[i].source], s->shared[i].tensor, err));
    }
    return FC_OK;
}

static fc_code computed_check_inputs(const fc_checkpoint *checkpoint, fc_comm *comm, fc_error *err) {
    const state *s = checkpoint->state;
    for (size_t i = 0; i < s->count; i++) {
        FC_TRY(fc_source_crc_join(s->crcs[i], comm, err));
    }
    for (size_t i = 0; i < s->count; i++) {
        FC_TRY(fc_source_crc_check(s->crcs[i], comm, err));
    }
    FC_TRY(check_shared(s, comm, err));
    for (size_t i = 0; i < s->count; i++) {
        FC_TRY(fc_checkpoint_check_inputs(s->sources[i], comm, err));
    }
    return FC_OK;
}

static void computed_close(fc_checkpoint *checkpoint) {
    state *s = checkpoint->state;
    free_work(s);
    free(s->shared);
    for (size_t i = 0; i < s->count; i++) {
        fc_source_crc_free(s->crcs[i]);
        if (s->owned) {
            fc_checkpoint_close(s->sources[i]);
        }
    }
}

static void make_format(state *s) {
    const fc_format *of = s->sources[0]->format;
    s->format = *of;
    s->format.reader.open = NULL;
    s->format.reader.close = computed_close;
    s->format.reader.extent = computed_extent;
    s->format.reader.read = computed_read;
    s->format.reader.object_json = of->reader.object_json ? computed_object_json : NULL;
    s->format.reader.records_json = false; /* the source decodes it */
    s->format.reader.digest = computed_digest;
    s->format.reader.check_object = of->reader.check_object ? computed_check_object : NULL;
    s->format.reader.check_file = computed_check_file;
    s->format.reader.check_inputs = computed_check_inputs;
    s->format.verifier.verify = NULL; /* it can only check the source */
    s->format.verifier.verify_chunk = NULL;
}

/* ---- the manifest ---- */

static fc_code fill(fc_checkpoint *made, fc_checkpoint *const *sources, size_t count, size_t most, fc_error *err) {
    fc_arena *arena = made->arena;
    state *s = fc_arena_calloc(arena, 1, sizeof *s);
    if (!s) {
        return fc_no_memory(err, sources[0]->path);
    }
    s->sources = fc_arena_calloc(arena, count, sizeof *s->sources);
    s->crcs = fc_arena_calloc(arena, count, sizeof *s->crcs);
    s->tensors = fc_arena_calloc(arena, most + 1, sizeof *s->tensors);
    if (!s->sources || !s->crcs || !s->tensors) {
        return fc_no_memory(err, sources[0]->path);
    }
    pthread_mutex_init(&s->lock, NULL);
    memcpy(s->sources, sources, count * sizeof *sources);
    s->count = count;
    s->most = most;
    fc_list_budget_begin(&s->lists, s->sources, count);
    make_format(s);
    *made = *sources[0];
    made->arena = arena;
    made->state = s;
    made->format = &s->format;
    made->tensors = s->tensors;
    made->ntensors = 0;
    made->seal = NULL; /* its digests belong to the source's tensors */
    made->mesh = (fc_mesh){0};
    for (size_t i = 0; i < count; i++) {
        FC_TRY(fc_source_crc_new(sources[i], sources[i]->tensors, sources[i]->ntensors, &s->crcs[i], err));
    }
    return fc_files_gather(made, NULL, s->sources, count, err); /* chunks refer to the files of the first source */
}

fc_code fc_computed_new(fc_checkpoint *const *sources, size_t count, size_t most, fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    if (count > MOST_SOURCES) {
        return fc_fail(err, FC_EUSAGE, "%zu checkpoints at once; at most %d can be read", count, MOST_SOURCES);
    }
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *made = arena ? fc_arena_calloc(arena, 1, sizeof *made) : NULL;
    if (!made) {
        fc_arena_free(arena);
        return fc_no_memory(err, sources[0]->path);
    }
    made->arena = arena;
    fc_code rc = fill(made, sources, count, most, err);
    if (rc == FC_OK) {
        *out = made;
    } else if (made->state) {
        fc_checkpoint_close(made);
    } else {
        fc_arena_free(arena);
    }
    return rc;
}

/* @return the next value, with room for its origin, or NULL when out of memory. */
static fc_tensor *add(fc_checkpoint *computed, const fc_tensor *like, origin **o) {
    state *s = computed->state;
    *o = fc_arena_calloc(computed->arena, 1, sizeof **o);
    if (!*o || computed->ntensors == s->most) {
        return NULL;
    }
    fc_tensor *t = &s->tensors[computed->ntensors++];
    *t = *like;
    t->detail = *o;
    t->placements = NULL; /* they refer to a mesh that other tensors do not have */
    return t;
}

/* Gives a value a name without nesting, which is copied. */
static fc_code set_name(const fc_checkpoint *computed, fc_tensor *t, const char *name, fc_error *err) {
    fc_path_element *element = fc_arena_calloc(computed->arena, 1, sizeof *element);
    t->name = fc_arena_strndup(computed->arena, name, strlen(name));
    if (!element || !t->name) {
        return fc_no_memory(err, computed->path);
    }
    element->key = t->name;
    t->path = (fc_path){element, 1};
    return FC_OK;
}

fc_code fc_computed_keep_as(fc_checkpoint *computed, const fc_tensor *tensor, const char *name, fc_error *err) {
    origin *o;
    fc_tensor *t = add(computed, tensor, &o);
    if (!t) {
        return fc_no_memory(err, computed->path);
    }
    o->kept = tensor;
    return name ? set_name(computed, t, name, err) : FC_OK;
}

fc_code fc_computed_keep(fc_checkpoint *computed, const fc_tensor *tensor, fc_error *err) {
    return fc_computed_keep_as(computed, tensor, NULL, err);
}

void fc_computed_run(const fc_tensor *like, int64_t *block) {
    int64_t room = FC_COMPUTED_BLOCK / (int64_t)fc_dtype_size(like->dtype);
    for (int d = like->ndim - 1; d >= 0; d--) {
        block[d] = like->shape[d] < room ? like->shape[d] : room;
        room = block[d] > 0 ? room / block[d] : room;
    }
}

/* Sets the number of blocks of a tensor; 0 if it is empty. */
static fc_code count_blocks(const fc_tensor *t, const int64_t *block, int64_t *count, fc_error *err) {
    *count = 1;
    for (int d = 0; d < t->ndim; d++) {
        if (t->shape[d] == 0) {
            *count = 0;
            return FC_OK;
        }
    }
    for (int d = 0; d < t->ndim; d++) {
        if (!fc_mul_i64(*count, (t->shape[d] - 1) / block[d] + 1, count) || *count > MOST_BLOCKS) {
            return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s: it would be computed in more than %d blocks", t->name,
                           MOST_BLOCKS);
        }
    }
    return FC_OK;
}

/* Cuts a tensor into blocks, which become its chunks. */
static fc_code cut(fc_checkpoint *computed, fc_tensor *t, const int64_t *block, origin *o, fc_error *err) {
    state *s = computed->state;
    int64_t at[FC_MAX_DIMS] = {0}, count = 0;
    t->chunks = NULL;
    t->nchunks = 0;
    FC_TRY(count_blocks(t, block, &count, err));
    if (count == 0 || s->format.layout_only) {
        return FC_OK;
    }
    const size_t chunk_size = sizeof(fc_chunk) + sizeof *o->read + 2 * ((size_t)t->ndim + 1) * sizeof *at;
    FC_TRY(fc_list_budget_take(&s->lists, (uint64_t)count, chunk_size, err));
    fc_chunk *chunks = fc_arena_calloc(computed->arena, (size_t)count, sizeof *chunks);
    int64_t *dims = fc_arena_calloc(computed->arena, (size_t)count, 2 * ((size_t)t->ndim + 1) * sizeof *dims);
    o->read = fc_arena_calloc(computed->arena, (size_t)count, sizeof *o->read);
    if (!chunks || !dims || !o->read) {
        return fc_no_memory(err, computed->path);
    }
    for (int64_t i = 0; i < count; i++, dims += 2 * t->ndim) {
        for (int d = 0; d < t->ndim; d++) {
            dims[d] = at[d];
            dims[t->ndim + d] = t->shape[d] - at[d] < block[d] ? t->shape[d] - at[d] : block[d];
        }
        chunks[i] = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
        for (int d = t->ndim - 1; d >= 0 && (at[d] += block[d]) >= t->shape[d]; d--) {
            at[d] = 0;
        }
    }
    t->chunks = chunks;
    t->nchunks = (size_t)count;
    return FC_OK;
}

fc_code fc_computed_add(fc_checkpoint *computed, const fc_tensor *like, const char *name, const int64_t *block,
                        fc_compute *compute, const void *what, fc_error *err) {
    fc_arena *arena = computed->arena;
    origin *o;
    fc_tensor *t = add(computed, like, &o);
    int64_t *shape = fc_arena_calloc(arena, (size_t)like->ndim + 1, sizeof *shape);
    if (!t || !shape) {
        return fc_no_memory(err, computed->path);
    }
    memcpy(shape, like->shape, (size_t)like->ndim * sizeof *shape);
    t->shape = shape;
    o->compute = compute;
    o->what = what;
    if (name) {
        FC_TRY(set_name(computed, t, name, err));
    }
    return cut(computed, t, block, o, err);
}

fc_code fc_computed_shares(fc_checkpoint *computed, size_t source, const fc_tensor *tensor, fc_error *err) {
    state *s = computed->state;
    if (!fc_grow(&s->shared, &s->capacity, s->nshared + 1, sizeof *s->shared)) {
        return fc_no_memory(err, computed->path);
    }
    s->shared[s->nshared++] = (shared){source, tensor};
    return FC_OK;
}

fc_code fc_computed_own(fc_checkpoint *computed, fc_error *err) {
    state *s = computed->state;
    const char *name = NULL;
    FC_TRY(fc_find_same_name(computed->tensors, computed->ntensors, &name, err));
    if (name) {
        return fc_fail(err, FC_EUSAGE, "%s: there would be two tensors called '%.256s'", computed->path, name);
    }
    s->owned = true;
    return FC_OK;
}
