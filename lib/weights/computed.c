/*
 * Computed checkpoints: see computed.h. To the engine a block is a chunk that only the format can decode.
 */
#include "weights/computed.h"

#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/list_budget.h"
#include "checkpoint/same_name.h"
#include "derived/derived.h"
#include "fsdpckpt/try.h"
#include "read/box.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 1 << 22, MOST_SOURCES = 64 };

/* A tensor that several blocks read. */
typedef struct shared {
    size_t source;
    const fc_tensor *tensor;
} shared;

/* fc_checkpoint.state. */
typedef struct state {
    fc_derived base;
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
    fc_origin from;
    fc_compute *compute;
    const void *what;
} origin;

/* ---- the values ---- */

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

static fc_code compute_block(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                             void *buf, fc_error *err) {
    state *s = (state *)derived;
    const origin *o = tensor->detail;
    fc_work *work = take_work(s);
    FC_NEED(work, err, derived->sources[0]->path);
    const fc_computed_block block = {.tensor = tensor,
                                     .what = o->what,
                                     .box = fc_chunk_box(tensor, &tensor->chunks[index]),
                                     .sources = derived->sources,
                                     .crcs = crcs,
                                     .work = work,
                                     .out = buf};
    const fc_code rc = o->compute(&block, err);
    give_work(s, work);
    return rc == FC_OK ? FC_OK : fc_context(err, rc, "tensor %.256s", tensor->name);
}

/* Reads what several blocks have read once more, as a whole, which compares it. The ranks divide this work. */
static fc_code check_shared(const fc_checkpoint *checkpoint, const fc_comm *comm, fc_error *err) {
    const state *s = checkpoint->state;
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    for (size_t i = share; i < s->nshared; i += shares) {
        FC_TRY(fc_compare_tensor(s->base.sources[s->shared[i].source], s->shared[i].tensor, err));
    }
    return FC_OK;
}

static void free_state(fc_derived *derived) {
    state *s = (state *)derived;
    free_work(s);
    free(s->shared);
}

static const fc_derived_kind computed_kind = {
    .size = sizeof(state),
    .compute = compute_block,
    .check_inputs = check_shared,
    .free = free_state,
};

/* ---- the manifest ---- */

fc_code fc_computed_new(fc_checkpoint *const *sources, size_t count, size_t most, fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    if (count > MOST_SOURCES) {
        return fc_fail(err, FC_EUSAGE, "%zu checkpoints at once; at most %d can be read", count, MOST_SOURCES);
    }
    fc_checkpoint *made;
    FC_TRY(fc_derived_new(&computed_kind, sources, count, &made, err));
    state *s = made->state;
    pthread_mutex_init(&s->lock, NULL);
    s->tensors = fc_arena_calloc(made->arena, most + 1, sizeof *s->tensors);
    s->most = most;
    fc_list_budget_begin(&s->lists, s->base.sources, count);
    made->tensors = s->tensors;
    const fc_code rc = s->tensors ? fc_derived_collect_crcs(made, err) : fc_no_memory(err, made->path);
    if (rc != FC_OK) {
        fc_checkpoint_close(made);
        return rc;
    }
    *out = made;
    return FC_OK;
}

/* @return the next value, with room for its origin, or NULL when out of memory. */
static fc_tensor *add_value(fc_checkpoint *computed, const fc_tensor *like, origin **o) {
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
    FC_NEED(element && t->name, err, computed->path);
    element->key = t->name;
    t->path = (fc_path){element, 1};
    return FC_OK;
}

fc_code fc_computed_keep_as(fc_checkpoint *computed, const fc_tensor *tensor, const char *name, fc_error *err) {
    origin *o;
    fc_tensor *t = add_value(computed, tensor, &o);
    FC_NEED(t, err, computed->path);
    o->from = (fc_origin){.tensor = tensor};
    return name ? set_name(computed, t, name, err) : FC_OK;
}

fc_code fc_computed_keep(fc_checkpoint *computed, const fc_tensor *tensor, fc_error *err) {
    return fc_computed_keep_as(computed, tensor, NULL, err);
}

fc_code fc_computed_text(fc_checkpoint *computed, const fc_tensor *object, const char *text, fc_error *err) {
    const int64_t size = (int64_t)strlen(text);
    origin *o;
    fc_tensor *t = add_value(computed, object, &o);
    int64_t *shape = fc_arena_copy(computed->arena, &size, 1, sizeof *shape);
    FC_NEED(t && shape, err, computed->path);
    t->shape = shape;
    o->from = (fc_origin){.kind = FC_ORIGIN_TEXT, .text = text};
    return fc_derived_cut(t, &size, 1, computed->arena) ? FC_OK : fc_no_memory(err, computed->path);
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
    int64_t count = 0;
    t->chunks = NULL;
    t->nchunks = 0;
    FC_TRY(count_blocks(t, block, &count, err));
    if (count == 0 || s->base.format.layout_only) {
        return FC_OK;
    }
    const size_t chunk_size = sizeof(fc_chunk) + sizeof *o->from.read + 2 * ((size_t)t->ndim + 1) * sizeof(int64_t);
    FC_TRY(fc_list_budget_take(&s->lists, (uint64_t)count, chunk_size, err));
    FC_NEED(fc_derived_cut(t, block, (size_t)count, computed->arena), err, computed->path);
    return fc_derived_record_reads(computed, t, &o->from, err);
}

fc_code fc_computed_add(fc_checkpoint *computed, const fc_tensor *like, const char *name, const int64_t *block,
                        fc_compute *compute, const void *what, fc_error *err) {
    fc_arena *arena = computed->arena;
    origin *o;
    fc_tensor *t = add_value(computed, like, &o);
    int64_t *shape = fc_arena_copy(arena, like->shape, (size_t)like->ndim, sizeof *shape);
    FC_NEED(t && shape, err, computed->path);
    t->shape = shape;
    o->from.kind = FC_ORIGIN_COMPUTED;
    o->compute = compute;
    o->what = what;
    if (name) {
        FC_TRY(set_name(computed, t, name, err));
    }
    return cut(computed, t, block, o, err);
}

void fc_computed_reads(fc_checkpoint *computed, uint32_t reads) {
    const state *s = computed->state;
    ((origin *)s->tensors[computed->ntensors - 1].detail)->from.reads = reads;
}

fc_code fc_computed_shares(fc_checkpoint *computed, size_t source, const fc_tensor *tensor, fc_error *err) {
    state *s = computed->state;
    FC_NEED(fc_grow(&s->shared, &s->capacity, s->nshared + 1, sizeof *s->shared), err, computed->path);
    s->shared[s->nshared++] = (shared){source, tensor};
    return FC_OK;
}

fc_code fc_computed_own(fc_checkpoint *computed, fc_error *err) {
    const char *name = NULL;
    FC_TRY(fc_find_same_name(computed->tensors, computed->ntensors, &name, err));
    if (name) {
        return fc_fail(err, FC_EUSAGE, "%s: there would be two tensors called '%.256s'", computed->path, name);
    }
    fc_derived_own(computed);
    return FC_OK;
}
