/*
 * Makes a delta: pairs the tensors of two versions by name, reads both sides of each pair that digests do not prove to
 * be equal, and writes what differs.
 */
#include "base/checked.h"
#include "checkpoint/identity.h"
#include "codec/zstd.h"
#include "delta/encode.h"
#include "delta/version.h"
#include "delta/write.h"
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
    const fc_checkpoint *old, *changed;
    const fc_delta_options *options;
    fc_delta_how how;
    fc_delta_report *report;
    fc_arena *arena;
    fc_target target; /* the new version: names, dtypes */
    fc_names names;   /* of the old one */
    pair *pairs;      /* to read, the largest first */
    size_t count;
    fc_scan scan;
    pthread_mutex_t lock; /* guards the list of encoders */
    fc_delta_encoder *encoders[FC_MOST_THREADS];
    int nencoders;
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
        !fc_add_u64(m->report->bytes, p.bytes, &m->report->bytes)) {
        return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", m->old->path);
    }
    m->report->tensors++;
    FC_TRY(same_digest(m, &p, &same, err));
    m->report->by_digest += same;
    if (!same && p.bytes > 0) {
        m->pairs[m->count++] = p;
    }
    return FC_OK;
}

/* Whether a tensor is tied to one that the old version has: then it has no bytes of its own there. */
static bool is_tied(const maker *m, const size_t *same_as, size_t i) {
    return same_as[i] != i && fc_names_find(&m->names, m->target.tensors[same_as[i]].name) != FC_NO_NAME;
}

static fc_code find_ties(const maker *m, const size_t **out, fc_error *err) {
    const fc_tensor **tensors = fc_arena_calloc(m->arena, m->target.ntensors + 1, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(m->arena, m->target.ntensors + 1, sizeof *same_as);
    FC_NEED(tensors && same_as, err, m->changed->path);
    for (size_t i = 0; i < m->target.ntensors; i++) {
        tensors[i] = m->target.tensors[i].source;
    }
    *out = same_as;
    return fc_find_ties(m->changed, tensors, m->target.ntensors, same_as, err);
}

static int order_pairs(const void *a, const void *b) {
    const pair *x = a, *y = b;
    FC_ORDER_BY(y->bytes, x->bytes);
    return strcmp(x->name, y->name);
}

static fc_code pair_tensors(maker *m, fc_error *err) {
    const fc_delta_options *o = m->options;
    const size_t *same_as = NULL;
    fc_selected counts;
    size_t met = 0;
    FC_TRY(fc_target_new(m->changed, &o->selection, m->arena, &m->target, &counts, err));
    FC_TRY(fc_names_make(m->old, NULL, NULL, m->arena, &m->names, err));
    FC_TRY(find_ties(m, &same_as, err));
    m->pairs = fc_arena_calloc(m->arena, m->target.ntensors + 1, sizeof *m->pairs);
    FC_NEED(m->pairs, err, m->changed->path);
    for (size_t i = 0; i < m->target.ntensors; i++) {
        const fc_target_tensor *t = &m->target.tensors[i];
        const size_t at = fc_names_find(&m->names, t->name);
        if (t->source->object) {
            m->report->objects++;
        } else if (at != FC_NO_NAME) {
            met++;
            FC_TRY(add_pair(m, t, m->names.items[at].tensor, err));
        } else if (!is_tied(m, same_as, i)) {
            return no_partner(m, t->name, err);
        }
    }
    for (size_t i = 0; i < m->old->ntensors; i++) {
        m->report->only_old += !m->old->tensors[i].object;
    }
    m->report->only_old -= met;
    qsort(m->pairs, m->count, sizeof *m->pairs, order_pairs);
    return FC_OK;
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

/* Gives a worker an encoder. */
static fc_code take_encoder(maker *m, delta_worker *w, fc_error *err) {
    pthread_mutex_lock(&m->lock);
    const int number = m->nencoders++;
    pthread_mutex_unlock(&m->lock);
    const fc_code rc = fc_delta_encoder_new(&m->how, number, &m->encoders[number], err);
    w->encoder = m->encoders[number];
    return rc;
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
    FC_TRY(w->encoder ? FC_OK : take_encoder(m, w, err));
    if (*done == 0) {
        fc_delta_encoder_begin(w->encoder, p->name, p->bytes);
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
                   .extra = fc_delta_encoder_memory(&m->how),
                   .context = m,
                   .begin = delta_begin_pair,
                   .look = delta_add_tile,
                   .add = delta_continue};
    for (size_t i = 0; i < m->count; i++) {
        fc_scan_add_bytes(&s->total, m->pairs[i].old);
        fc_scan_add_bytes(&s->total, m->pairs[i].changed);
    }
    for (int i = 0; i < 2; i++) {
        FC_TRY_GOTO(fc_source_crc_new(sides[i], sides[i]->tensors, sides[i]->ntensors, &s->crcs[i], err), rc, out);
    }
    FC_TRY_GOTO(fc_scan_run(s, &m->options->work, err), rc, out);
    for (int i = 0; i < 2; i++) {
        FC_TRY_GOTO(check_side(sides[i], s->crcs[i], err), rc, out);
    }
out:
    fc_source_crc_free(s->crcs[0]);
    fc_source_crc_free(s->crcs[1]);
    return rc;
}

/* ---- writing ---- */

/* Chooses the encoding with the smaller frames, of those that all changed tensors have. */
static fc_delta_encoding choose_encoding(const maker *m, uint64_t *stored) {
    uint64_t sizes[FC_DELTA_ENCODINGS] = {0};
    bool complete[FC_DELTA_ENCODINGS] = {true, true};
    for (size_t i = 0; i < m->count; i++) {
        const fc_delta_found *found = &m->pairs[i].found;
        for (int e = 0; e < FC_DELTA_ENCODINGS && found->changed_bytes > 0; e++) {
            sizes[e] += found->frames[e].size;
            complete[e] = complete[e] && found->frames[e].in;
        }
    }
    const bool smaller = sizes[FC_DELTA_OVERWRITE] < sizes[FC_DELTA_XOR];
    const fc_delta_encoding wanted = m->options->encoding != FC_DELTA_AUTO     ? m->options->encoding
                                     : complete[FC_DELTA_OVERWRITE] && smaller ? FC_DELTA_OVERWRITE
                                                                               : FC_DELTA_XOR;
    *stored = sizes[wanted];
    return wanted;
}

/* Lists what changed. */
static fc_code list_changed(maker *m, fc_delta_content *content, fc_error *err) {
    fc_delta_report *r = m->report;
    fc_delta_member *members = fc_arena_calloc(m->arena, m->count + 1, sizeof *members);
    FC_NEED(members, err, m->changed->path);
    for (size_t i = 0; i < m->count; i++) {
        const pair *p = &m->pairs[i];
        if (p->found.changed_bytes > 0) {
            members[r->changed++] = (fc_delta_member){p->name, &p->found};
            r->changed_bytes += p->found.changed_bytes;
        }
    }
    qsort(members, r->changed, sizeof *members, fc_order_texts);
    r->encoding = choose_encoding(m, &r->stored_bytes);
    *content = (fc_delta_content){.number = r->number,
                                  .base = r->base,
                                  .encoding = r->encoding,
                                  .checksum = m->options->checksum,
                                  .members = members,
                                  .count = r->changed};
    return FC_OK;
}

static fc_code make_content(void *context, const char *scratch, fc_delta_content *content, fc_error *err) {
    maker *m = context;
    m->how.directory = scratch;
    FC_TRY(read_pairs(m, err));
    return list_changed(m, content, err);
}

static void free_encoders(void *context) {
    const maker *m = context;
    for (int i = 0; i < m->nencoders; i++) {
        fc_delta_encoder_free(m->encoders[i]);
    }
}

static fc_code check_request(maker *m, const char *path, fc_error *err) {
    const fc_delta_options *o = m->options;
    const fc_checkpoint *sides[] = {m->old, m->changed};
    if (!fc_zstd_is_built_in()) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", path);
    }
    FC_TRY(fc_delta_checksum_check(o->checksum, path, err));
    FC_TRY(fc_delta_choose_numbers(path, &m->report->number, &m->report->base, err));
    for (int i = 0; i < 2; i++) {
        if (sides[i]->format->layout_only) {
            return fc_fail(err, FC_EUSAGE, "%s: a schema has no data to compare", sides[i]->path);
        }
        FC_TRY(fc_checkpoint_spare(sides[i], path, false, err));
    }
    return o->inputs ? fc_check_inputs(path, o->inputs, "a file", err) : FC_OK;
}

fc_code fc_delta_write(const fc_checkpoint *old, const fc_checkpoint *changed, const char *path,
                       const fc_delta_options *options, fc_delta_report *report, fc_error *err) {
    maker m = {.old = old,
               .changed = changed,
               .options = options,
               .how = {.encoding = options->encoding,
                       .checksum = options->checksum,
                       .level = options->level ? options->level : 1},
               .report = report,
               .arena = fc_arena_new()};
    fc_code rc;
    *report = (fc_delta_report){.number = options->number, .base = options->base};
    pthread_mutex_init(&m.lock, NULL);
    FC_TRY_GOTO(m.arena ? FC_OK : fc_no_memory(err, path), rc, out);
    FC_TRY_GOTO(check_request(&m, path, err), rc, out);
    FC_TRY_GOTO(pair_tensors(&m, err), rc, out);
    const fc_delta_publication publication = {.path = path,
                                              .force = options->force,
                                              .forbidden =
                                                  fc_checkpoint_forbidden(old) | fc_checkpoint_forbidden(changed),
                                              .reporter = options->reporter,
                                              .progress = options->work.progress,
                                              .context = &m,
                                              .make = make_content,
                                              .release = free_encoders};
    rc = fc_delta_publish(&publication, err);
out:
    pthread_mutex_destroy(&m.lock);
    fc_arena_free(m.arena);
    return rc;
}
