/*
 * Finds what changed between two checkpoints: pairs their tensors by name, and reads both sides of each pair that
 * digests do not prove to be equal. See part.h.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/identity.h"
#include "delta/part.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "plan/names.h"
#include "read/box.h"
#include "read/scan.h"
#include "read/stored_chunk.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { CAST_BLOCK = 8 << 10 /* elements */, CAST_ELEMENT = 8 /* bytes of the largest that is cast */ };

/* A tensor of both versions. */
typedef struct pair {
    const char *name;
    const fc_tensor *old, *changed;
    fc_dtype dtype; /* of both, after the cast of the new one */
    uint64_t bytes;
    fc_delta_found found;
} pair;

typedef struct maker {
    fc_delta_part *part;
    const fc_checkpoint *old, *changed;
    fc_arena *arena;
    fc_target target; /* the new version: names, dtypes */
    fc_names names;   /* of the old one */
    pair *pairs;      /* to read, the largest first, or by name for a sender */
    size_t count;
    fc_scan scan;
} maker;

/* What a worker keeps between two tiles. */
typedef struct delta_worker {
    fc_delta_encoder *encoder;                     /* NULL: it has had no tile yet */
    unsigned char cast[CAST_BLOCK * CAST_ELEMENT]; /* a block of the new tensor in the dtype of the old one */
} delta_worker;

/* ---- pairs ---- */

static fc_code no_partner(const maker *m, const char *name, fc_error *err) {
    return fc_advise(
        err,
        fc_fail(err, FC_EUSAGE,
                "%s: it has no tensor %.256s, which %s has; a delta changes tensors and adds none: publish "
                "the whole model, or leave the tensor out",
                m->old->path, name, m->changed->path),
        FC_HINT_EXCLUDE, name);
}

static fc_code check_alike(const maker *m, const pair *p, fc_error *err) {
    if (p->old->object) {
        return fc_fail(err, FC_EUSAGE, "%s: %.256s is an object, but a tensor in %s", m->old->path, p->name,
                       m->changed->path);
    }
    if (p->old->dtype != p->dtype) {
        return fc_fail(err, FC_EUSAGE,
                       "tensor %.256s: it is %s in %s and %s in %s; give the new version the dtype of the "
                       "old one",
                       p->name, fc_dtype_get(p->old->dtype)->torch_name, m->old->path,
                       fc_dtype_get(p->dtype)->torch_name, m->changed->path);
    }
    if (!fc_same_sizes(p->old->ndim, p->old->shape, p->changed->ndim, p->changed->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %.256s: it has another shape in %s than in %s", p->name, m->old->path,
                       m->changed->path);
    }
    return FC_OK;
}

/* Whether recorded digests prove that nothing changed. */
static fc_code same_digest(const maker *m, const pair *p, bool *same, fc_error *err) {
    fc_digest a, b;
    *same = false;
    if (p->changed->dtype != p->dtype) {
        return FC_OK;
    }
    FC_TRY(fc_checkpoint_digest(m->old, p->old, FC_WHOLE_TENSOR, &a, err));
    FC_TRY(fc_checkpoint_digest(m->changed, p->changed, FC_WHOLE_TENSOR, &b, err));
    *same = a.kind == FC_DIGEST_CRC64 && b.kind == FC_DIGEST_CRC64 && a.value == b.value;
    return FC_OK;
}

static fc_code add_pair(maker *m, const fc_target_tensor *t, const fc_tensor *old, fc_error *err) {
    pair p = {.name = t->name, .old = old, .changed = t->source, .dtype = t->dtype};
    int64_t elements;
    bool same;
    FC_TRY(check_alike(m, &p, err));
    if (!fc_numel(old->ndim, old->shape, &elements) ||
        !fc_mul_u64((uint64_t)elements, fc_dtype_size(p.dtype), &p.bytes) ||
        !fc_add_u64(m->part->report.bytes, p.bytes, &m->part->report.bytes)) {
        return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", m->old->path);
    }
    m->part->report.tensors++;
    FC_TRY(same_digest(m, &p, &same, err));
    m->part->report.by_digest += same;
    if (!same && p.bytes > 0) {
        m->pairs[m->count++] = p;
    }
    return FC_OK;
}

/*
 * Finds which tensors are tied to one that the old version has: they need no bytes of their own there.
 * @param out one flag for each tensor of the target
 */
static fc_code find_ties(const maker *m, const bool **out, fc_error *err) {
    const size_t count = m->target.ntensors;
    const fc_tensor **tensors = fc_arena_calloc(m->arena, count + 1, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(m->arena, count + 1, sizeof *same_as);
    bool *held = fc_arena_calloc(m->arena, count + 1, sizeof *held);
    FC_NEED(tensors && same_as && held, err, m->changed->path);
    for (size_t i = 0; i < count; i++) {
        tensors[i] = m->target.tensors[i].source;
    }
    FC_TRY(fc_find_ties(m->changed, tensors, count, same_as, err));
    for (size_t i = 0; i < count; i++) {
        held[same_as[i]] = held[same_as[i]] || fc_names_find(&m->names, m->target.tensors[i].name) != FC_NO_NAME;
    }
    for (size_t i = 0; i < count; i++) {
        held[i] = held[same_as[i]]; /* the first of each group says it for all */
    }
    *out = held;
    return FC_OK;
}

static int order_pairs(const void *a, const void *b) {
    const pair *x = a, *y = b;
    FC_ORDER_BY(y->bytes, x->bytes);
    return strcmp(x->name, y->name);
}

/* A sender gets the frames in the order of the file. */
static int order_pairs_by_name(const void *a, const void *b) {
    return strcmp(((const pair *)a)->name, ((const pair *)b)->name);
}

static fc_code pair_tensors(maker *m, const fc_selection *selection, fc_error *err) {
    const bool *tied = NULL;
    fc_selected counts;
    size_t met = 0;
    FC_TRY(fc_target_new(m->changed, selection, m->arena, &m->target, &counts, err));
    FC_TRY(fc_names_make(m->old, NULL, NULL, m->arena, &m->names, err));
    FC_TRY(find_ties(m, &tied, err));
    m->pairs = fc_arena_calloc(m->arena, m->target.ntensors + 1, sizeof *m->pairs);
    FC_NEED(m->pairs, err, m->changed->path);
    for (size_t i = 0; i < m->target.ntensors; i++) {
        const fc_target_tensor *t = &m->target.tensors[i];
        const size_t at = fc_names_find(&m->names, t->name);
        if (t->source->object) {
            m->part->report.objects++;
        } else if (at != FC_NO_NAME) {
            met++;
            FC_TRY(add_pair(m, t, m->names.items[at].tensor, err));
        } else if (!tied[i]) {
            return no_partner(m, t->name, err);
        }
    }
    for (size_t i = 0; i < m->old->ntensors; i++) {
        m->part->report.only_old += !m->old->tensors[i].object;
    }
    m->part->report.only_old -= met;
    fc_delta_sender *sender = m->part->how.sender;
    fc_sort_items(m->pairs, m->count, sizeof *m->pairs, sender ? order_pairs_by_name : order_pairs);
    return sender ? fc_delta_sender_begin(sender, m->count, err) : FC_OK;
}

/* ---- reading ---- */

static fc_code delta_begin_pair(void *context, fc_scan_item *item, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const maker *m = context;
    const pair *p = &m->pairs[item->index];
    (void)err;
    item->tensors[0] = p->old;
    item->tensors[1] = p->changed;
    item->box = (fc_box){p->old->ndim, origin, p->old->shape};
    item->large_tiles = fc_gains_from_large_tiles(m->old, p->old) || fc_gains_from_large_tiles(m->changed, p->changed);
    return FC_OK;
}

/* Casts the new bytes of a tile block by block, and adds them. */
static fc_code add_cast(delta_worker *w, const pair *p, const fc_scan_tile *tile, fc_error *err) {
    const size_t from = fc_dtype_size(p->changed->dtype), to = fc_dtype_size(p->dtype);
    for (size_t i = 0; i < tile->count;) {
        const size_t some = tile->count - i < CAST_BLOCK ? tile->count - i : CAST_BLOCK;
        fc_cast(p->changed->dtype, tile->bytes[1] + i * from, p->dtype, w->cast, some);
        FC_TRY(fc_delta_encoder_add(w->encoder, tile->bytes[0] + i * to, w->cast, some * to, err));
        i += some;
    }
    return FC_OK;
}

/* The tiles of a pair come in order, to one worker. */
static fc_code delta_add_tile(void *context, const fc_scan_tile *tile, fc_error *err) {
    maker *m = context;
    pair *p = &m->pairs[tile->item->index];
    uint64_t *done = tile->item->state; /* bytes */
    delta_worker *w = tile->scratch;
    const size_t bytes = tile->count * fc_dtype_size(p->dtype);
    FC_TRY(w->encoder ? FC_OK : fc_delta_take_encoder(m->part, &w->encoder, err));
    if (*done == 0) {
        FC_TRY(fc_delta_encoder_begin(w->encoder, tile->item->index, p->name, p->bytes, err));
    }
    FC_TRY(p->changed->dtype == p->dtype ? fc_delta_encoder_add(w->encoder, tile->bytes[0], tile->bytes[1], bytes, err)
                                         : add_cast(w, p, tile, err));
    *done += bytes;
    return *done == p->bytes ? fc_delta_encoder_end(w->encoder, &p->found, err) : FC_OK;
}

static bool delta_continue(void *context, const fc_scan_tile *tile) {
    (void)context, (void)tile;
    return true;
}

static void delta_end_pair(void *context, const fc_scan_item *item, bool complete) {
    const maker *m = context;
    (void)item;
    if (!complete) {
        fc_delta_sender_stop(m->part->how.sender);
    }
}

/* Compares what was read with the recorded CRCs, and asks whether a file changed meanwhile. */
static fc_code check_side(const fc_checkpoint *side, const fc_source_crc *crc, fc_error *err) {
    FC_TRY(fc_source_crc_check(crc, NULL, fc_read_crc64, err));
    FC_TRY(fc_checkpoint_check_inputs(side, NULL, err));
    return fc_checkpoint_unchanged(side, err);
}

static fc_code read_pairs(maker *m, fc_error *err) {
    fc_scan *s = &m->scan;
    const fc_checkpoint *sides[] = {m->old, m->changed};
    fc_code rc = FC_OK;
    *s = (fc_scan){.count = m->count,
                   .sides = 2,
                   .checkpoints = {m->old, m->changed},
                   .in_order = true,
                   .phase = FC_PHASE_COMPARING,
                   .state = sizeof(uint64_t),
                   .scratch = sizeof(delta_worker),
                   .extra = fc_delta_encoder_memory(&m->part->how),
                   .context = m,
                   .begin = delta_begin_pair,
                   .look = delta_add_tile,
                   .add = delta_continue,
                   .end = delta_end_pair};
    for (size_t i = 0; i < m->count; i++) {
        fc_scan_add_bytes(&s->total, m->pairs[i].old);
        fc_scan_add_bytes(&s->total, m->pairs[i].changed);
    }
    for (int i = 0; i < 2; i++) {
        FC_TRY_GOTO(fc_source_crc_new(sides[i], sides[i]->tensors, sides[i]->ntensors, &s->crcs[i], err), rc, out);
    }
    FC_TRY_GOTO(fc_scan_run(s, &m->part->options.work, err), rc, out);
    for (int i = 0; i < 2; i++) {
        FC_TRY_GOTO(check_side(sides[i], s->crcs[i], err), rc, out);
    }
out:
    fc_source_crc_free(s->crcs[0]);
    fc_source_crc_free(s->crcs[1]);
    return rc;
}

/* ---- the whole ---- */

/* Keeps what changed. */
static fc_code keep_changed(const maker *m, fc_error *err) {
    fc_delta_part *part = m->part;
    for (size_t i = 0; i < m->count; i++) {
        const pair *p = &m->pairs[i];
        if (p->found.changed_bytes > 0) {
            const char *name = fc_arena_strndup(part->arena, p->name, strlen(p->name));
            fc_delta_found *found = fc_arena_copy(part->arena, &p->found, 1, sizeof *found);
            FC_NEED(name && found &&
                        fc_arena_grow(part->arena, &part->members, &part->capacity, part->report.changed,
                                      part->report.changed + 1, sizeof *part->members),
                    err, m->changed->path);
            part->members[part->report.changed++] = (fc_delta_member){name, found};
            part->report.changed_bytes += found->changed_bytes;
        }
    }
    return FC_OK;
}

fc_code fc_delta_part_add(fc_delta_part *part, const fc_checkpoint *old, const fc_checkpoint *changed,
                          const fc_selection *selection, fc_error *err) {
    maker m = {.part = part, .old = old, .changed = changed, .arena = fc_arena_new()};
    fc_code rc;
    part->taken = 0;
    FC_TRY_GOTO(m.arena ? FC_OK : fc_no_memory(err, changed->path), rc, out);
    FC_TRY_GOTO(pair_tensors(&m, selection, err), rc, out);
    FC_TRY_GOTO(read_pairs(&m, err), rc, out);
    rc = keep_changed(&m, err);
out:
    fc_arena_free(m.arena);
    return rc;
}
