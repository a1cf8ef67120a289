/*
 * A model with deltas applied: a derived checkpoint whose changed tensors are computed block by block, in the order of
 * their bytes. A reader is one pass over the frames of a tensor. It is kept for the block that follows, and begins
 * again only for one that precedes it. patched_sum.c compares the checksums.
 */
#include "delta/patched.h"

#include "base/checked.h"
#include "checkpoint/list_budget.h"
#include "checkpoint/same_name.h"
#include "codec/zstd.h"
#include "delta/heads.h"
#include "delta/model.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "weights/computed.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    SKIP = 64 << 10,
    NEAR = 8 << 20,           /* bytes between two blocks of which the later one waits */
    READER_MEMORY = 24 << 20, /* of all readers, if one is smaller */
    MOST_READER = 64 << 20
};

/* One pass over the frames of a tensor. One worker uses it at a time. */
struct fc_patch_reader {
    const fc_patched_tensor *of; /* NULL: none */
    uint64_t at;
    fc_delta_decoder **decoders; /* one per delta, NULL until it is needed */
    struct fc_patch_reader *next;
    unsigned char skipped[SKIP];
};

/* ---- readers ---- */

static void free_reader(fc_patch_reader *r, size_t count) {
    for (size_t i = 0; r && r->decoders && i < count; i++) {
        fc_delta_decoder_free(r->decoders[i]);
    }
    if (r) {
        free(r->decoders);
    }
    free(r);
}

static fc_patch_reader *new_reader(size_t count) {
    fc_patch_reader *r = calloc(1, sizeof *r);
    if (r && !(r->decoders = calloc(count + 1, sizeof(fc_delta_decoder *)))) {
        free(r);
        return NULL;
    }
    return r;
}

/* Takes an idle reader out of the list: the one that is nearest before `at` of the tensor, else the one that was idle
 * for longest. @return NULL: there is none, or none that fits if there may be more. */
static fc_patch_reader *pick_idle(fc_patched *p, const fc_patched_tensor *of, uint64_t at) {
    fc_patch_reader **best = NULL, **last = NULL;
    for (fc_patch_reader **r = &p->idle; *r; r = &(*r)->next) {
        if ((*r)->of == of && (*r)->at <= at && (!best || (*r)->at > (*best)->at)) {
            best = r;
        }
        last = r;
    }
    best = best ? best : p->readers < p->most_readers ? NULL : last;
    fc_patch_reader *found = best ? *best : NULL;
    if (found) {
        *best = found->next;
    }
    return found;
}

/* Whether a worker computes an earlier block that is near: the reader that it leaves serves this one. */
static bool is_turn(const fc_patched *p, const fc_patch_turn *turn) {
    for (const fc_patch_turn *t = p->turns; t; t = t->next) {
        if (t->of == turn->of && t->at < turn->at && turn->at - t->at <= NEAR) {
            return false;
        }
    }
    return true;
}

static void begin_turn(fc_patched *p, fc_patch_turn *turn) {
    pthread_mutex_lock(&p->lock);
    turn->next = p->turns;
    p->turns = turn;
    pthread_mutex_unlock(&p->lock);
}

/* @param r NULL: none was taken */
static void end_turn(fc_patched *p, const fc_patch_turn *turn, fc_patch_reader *r) {
    pthread_mutex_lock(&p->lock);
    fc_patch_turn **at = &p->turns;
    while (*at != turn) {
        at = &(*at)->next;
    }
    *at = turn->next;
    if (r) {
        r->next = p->idle;
        p->idle = r;
    }
    pthread_cond_broadcast(&p->given);
    pthread_mutex_unlock(&p->lock);
}

/* Waits for its turn, and for a reader while all are in use. @return NULL: out of memory. */
static fc_patch_reader *take_reader(fc_patched *p, const fc_patch_turn *turn) {
    fc_patch_reader *r = NULL;
    pthread_mutex_lock(&p->lock);
    while (!is_turn(p, turn) || (!(r = pick_idle(p, turn->of, turn->at)) && p->readers == p->most_readers)) {
        pthread_cond_wait(&p->given, &p->lock);
    }
    if (!r && (r = new_reader(p->links.count)) != NULL) {
        p->readers++;
    }
    pthread_mutex_unlock(&p->lock);
    return r;
}

static fc_code begin_reader(fc_patch_reader *r, const fc_patched_tensor *t, fc_error *err) {
    r->of = NULL;
    r->at = 0;
    for (size_t i = 0; i < t->link->count; i++) {
        if (!r->decoders[i]) {
            FC_TRY(fc_delta_decoder_new(&r->decoders[i], err));
        }
        FC_TRY(fc_delta_decoder_begin(r->decoders[i], t->link->versions[i], t->link->tensors[i], t->bytes, err));
        fc_delta_decoder_skip_checksum(r->decoders[i]);
    }
    return FC_OK;
}

static fc_code patch_bytes(fc_patch_reader *r, const fc_patched_tensor *t, unsigned char *bytes, size_t size,
                           fc_error *err) {
    for (size_t i = 0; i < t->link->count; i++) {
        FC_TRY(fc_delta_decode(r->decoders[i], bytes, bytes, NULL, size, err));
    }
    r->at += size;
    for (size_t i = 0; r->at == t->bytes && i < t->link->count; i++) {
        FC_TRY(fc_delta_decoder_end(r->decoders[i], false, err));
    }
    return FC_OK;
}

/* Applies the frames of a tensor to `size` of its bytes. */
static fc_code patch_at(fc_patch_reader *r, const fc_patched_tensor *t, uint64_t at, unsigned char *bytes, size_t size,
                        fc_error *err) {
    FC_TRY(r->of == t && r->at <= at ? FC_OK : begin_reader(r, t, err));
    r->of = NULL; /* until it is known to be good */
    while (r->at < at) {
        FC_TRY(patch_bytes(r, t, r->skipped, at - r->at < SKIP ? (size_t)(at - r->at) : SKIP, err));
    }
    FC_TRY(patch_bytes(r, t, bytes, size, err));
    r->of = t;
    return FC_OK;
}

/* ---- blocks ---- */

uint64_t fc_patched_offset(const fc_tensor *tensor, size_t index) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[index]);
    uint64_t at = 0;
    for (int d = 0; d < tensor->ndim; d++) {
        at = at * (uint64_t)tensor->shape[d] + (uint64_t)box.offsets[d];
    }
    return at * fc_dtype_size(tensor->dtype);
}

fc_code fc_patched_block(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                         void *buf, fc_error *err) {
    fc_patched *p = (fc_patched *)derived;
    const fc_patched_tensor *t = tensor->detail;
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[index]);
    fc_patch_turn turn = {.of = t, .at = fc_patched_offset(tensor, index)};
    const size_t size = (size_t)fc_box_volume(&box) * fc_dtype_size(tensor->dtype);
    fc_patch_reader *r = NULL;
    begin_turn(p, &turn);
    fc_code rc = fc_read_box_crc(derived->sources[0], t->from.tensor, &box, tensor->dtype, buf, crcs[0], err);
    if (rc == FC_OK) {
        r = take_reader(p, &turn);
        rc = r ? patch_at(r, t, turn.at, buf, size, err) : fc_no_memory(err, tensor->name);
    }
    end_turn(p, &turn, r);
    return rc == FC_OK ? fc_patched_sum(p, t->state, turn.at, buf, size, err) : rc;
}

static void free_patched(fc_derived *derived) {
    fc_patched *p = (fc_patched *)derived;
    for (fc_patch_reader *r = p->idle, *next; r; r = next) {
        next = r->next;
        free_reader(r, p->links.count);
    }
    fc_patched_sums_free(p);
    pthread_cond_destroy(&p->given);
    pthread_mutex_destroy(&p->lock);
    fc_arena_free(p->headers);
}

static const fc_derived_kind patched_kind = {
    .size = sizeof(fc_patched),
    .compute = fc_patched_block,
    .checks_computed = true,
    .check_inputs = fc_patched_check,
    .free = free_patched,
};

/* ---- the manifest ---- */

/* What is made of a model and deltas. */
typedef struct patcher {
    fc_checkpoint *source, *made;
    fc_patched *p;
    fc_delta_link *list;
    size_t count;
    const fc_delta_link **by_tensor; /* of the source: NULL: it does not change */
    fc_list_budget lists;
    size_t most; /* bytes of a reader */
    fc_arena *scratch;
} patcher;

static fc_code no_tensor(const patcher *m, const fc_delta_link *link, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: it changes tensor %.256s, which %s does not have: it is for another model",
                   link->tensors[0]->path, link->name, m->source->path);
}

static fc_code match_tensors(patcher *m, fc_error *err) {
    const fc_name_table *names = fc_names_of(m->source, m->scratch);
    m->by_tensor = fc_arena_calloc(m->scratch, m->source->ntensors + 1, sizeof *m->by_tensor);
    FC_NEED(names && m->by_tensor, err, m->source->path);
    for (size_t i = 0; i < m->count; i++) {
        const fc_delta_link *link = &m->list[i];
        const size_t at = fc_name_table_find(names, link->name, strlen(link->name));
        if (at == FC_NO_NAME || m->source->tensors[at].object) {
            return no_tensor(m, link, err);
        }
        m->by_tensor[at] = link;
    }
    return FC_OK;
}

/* A tied tensor is stored once under two names; a delta of one would part them. */
static fc_code check_ties(const patcher *m, fc_error *err) {
    const size_t count = m->source->ntensors;
    const fc_tensor **all = fc_arena_calloc(m->scratch, count + 1, sizeof *all);
    size_t *same_as = fc_arena_calloc(m->scratch, count + 1, sizeof *same_as);
    FC_NEED(all && same_as, err, m->source->path);
    for (size_t i = 0; i < count; i++) {
        all[i] = &m->source->tensors[i];
    }
    FC_TRY(fc_find_ties(m->source, all, count, same_as, err));
    for (size_t i = 0; i < count; i++) {
        if (!m->by_tensor[i] != !m->by_tensor[same_as[i]]) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: %.256s and %.256s are tied, and the deltas change only one of them; write the model "
                           "with one of the two names first",
                           m->source->path, all[same_as[i]]->name, all[i]->name);
        }
    }
    return FC_OK;
}

/* Compares what the frames say with the size of the tensor. */
static fc_code measure_frames(patcher *m, const fc_patched_tensor *t, fc_error *err) {
    size_t memory = 0;
    for (size_t i = 0; i < t->link->count; i++) {
        const fc_delta_tensor *frame = t->link->tensors[i];
        const fc_delta_encoding encoding = t->link->versions[i]->encoding;
        size_t window;
        uint64_t content;
        FC_TRY(fc_delta_window(frame, &window, &content, err));
        if (encoding == FC_DELTA_XOR && content != UINT64_MAX && content != t->bytes) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: tensor %.256s: the frame has %" PRIu64 " bytes, but the tensor has %" PRIu64 " in %s",
                           frame->path, frame->name, content, t->bytes, m->source->path);
        }
        memory += fc_delta_decoder_memory(encoding, window);
    }
    m->most = memory > m->most ? memory : m->most;
    return FC_OK;
}

/* Cuts a tensor into blocks that are contiguous in it. */
static fc_code cut_tensor(patcher *m, fc_tensor *tensor, fc_patched_tensor *t, fc_error *err) {
    int64_t block[FC_MAX_DIMS], count = 1;
    tensor->chunks = NULL;
    tensor->nchunks = 0;
    if (t->bytes == 0 || m->source->format->layout_only) {
        return FC_OK;
    }
    fc_computed_run(tensor, block);
    for (int d = 0; d < tensor->ndim; d++) {
        if (!fc_mul_i64(count, (tensor->shape[d] - 1) / block[d] + 1, &count)) {
            return fc_fail(err, FC_ECORRUPT, "tensor %.256s: its size overflows", tensor->name);
        }
    }
    FC_TRY(fc_list_budget_take(
        &m->lists, (uint64_t)count,
        sizeof(fc_chunk) + sizeof *t->from.read + 2 * ((size_t)tensor->ndim + 1) * sizeof(int64_t), err));
    FC_NEED(fc_derived_cut(tensor, block, (size_t)count, m->made->arena), err, m->source->path);
    return fc_derived_record_reads(m->made, tensor, &t->from, err);
}

static fc_code patch_tensor(patcher *m, fc_tensor *tensor, const fc_delta_link *link, fc_patched_tensor *t,
                            fc_error *err) {
    int64_t elements;
    *t = (fc_patched_tensor){.from = {.kind = FC_ORIGIN_COMPUTED, .tensor = t->from.tensor},
                             .link = link,
                             .state = fc_arena_calloc(m->made->arena, 1, sizeof *t->state)};
    FC_NEED(t->state, err, m->source->path);
    t->from.progress = t->state->progress;
    t->from.nprogress = sizeof t->state->progress / sizeof *t->state->progress;
    t->state->of = t;
    t->state->tensor = tensor;
    if (!fc_numel(tensor->ndim, tensor->shape, &elements) ||
        !fc_mul_u64((uint64_t)elements, fc_dtype_size(tensor->dtype), &t->bytes)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %.256s: its size overflows", tensor->name);
    }
    FC_TRY(measure_frames(m, t, err));
    return cut_tensor(m, tensor, t, err);
}

static fc_code patch_tensors(patcher *m, fc_error *err) {
    const size_t count = m->source->ntensors;
    fc_tensor *tensors = fc_arena_copy(m->made->arena, m->source->tensors, count, sizeof *tensors);
    fc_patched_tensor *origins = fc_arena_calloc(m->made->arena, count + 1, sizeof *origins);
    FC_NEED((tensors || count == 0) && origins, err, m->source->path);
    m->made->tensors = tensors;
    m->made->ntensors = count;
    for (size_t i = 0; i < count; i++) {
        origins[i].from.tensor = &m->source->tensors[i];
        tensors[i].detail = &origins[i];
        tensors[i].placements = NULL; /* they refer to a mesh that the result does not have */
        if (m->by_tensor[i]) {
            FC_TRY(patch_tensor(m, &tensors[i], m->by_tensor[i], &origins[i], err));
        }
    }
    return FC_OK;
}

static fc_code choose_readers(const patcher *m, fc_error *err) {
    if (m->most > MOST_READER) {
        return fc_fail(err, FC_EUSAGE,
                       "%zu deltas at once need %zu MiB of memory; fold them in groups first, which makes one of many",
                       m->p->links.count, m->most >> 20);
    }
    const size_t fit = READER_MEMORY / (m->most + sizeof(fc_patch_reader));
    m->p->most_readers = fit > 0 ? fit : 1;
    return FC_OK;
}

/* Opens the deltas as checkpoints: then their files count as inputs. Those without tensors have no files to read.
 * @param opened receives the source and them. */
static fc_code open_deltas(const fc_delta_links *links, fc_checkpoint **opened, size_t *count, fc_error *err) {
    for (size_t i = 0; i < links->count; i++) {
        if (links->versions[i]->ntensors > 0) {
            FC_TRY(fc_checkpoint_open(links->versions[i]->path, NULL, &opened[*count], err));
            ++*count;
        }
    }
    return FC_OK;
}

/* Gives the new checkpoint a state that can be freed. */
static void begin_patched(patcher *m, fc_arena *headers, const fc_delta_links *links) {
    m->p = m->made->state;
    m->p->headers = headers;
    m->p->links = *links;
    pthread_mutex_init(&m->p->lock, NULL);
    pthread_cond_init(&m->p->given, NULL);
}

static fc_code patch_opened(patcher *m, fc_checkpoint **opened, size_t count, fc_error *err) {
    fc_list_budget_begin(&m->lists, opened, count);
    FC_TRY(match_tensors(m, err));
    FC_TRY(check_ties(m, err));
    FC_TRY(patch_tensors(m, err));
    FC_TRY(choose_readers(m, err));
    return fc_derived_collect_crcs(m->made, err);
}

/* @param headers belongs to `*out` after success. */
static fc_code patch_source(patcher *m, fc_arena *headers, const char *const *paths, size_t count, int64_t up_to,
                            fc_checkpoint **out, fc_error *err) {
    fc_delta_links links;
    int64_t have;
    FC_TRY(fc_sync_known_version(m->source->path, &have, err));
    FC_TRY(fc_delta_links_find(headers, paths, count, up_to, have, &links, err));
    for (size_t i = 0; i < links.count; i++) {
        FC_TRY(fc_delta_checksum_check(links.versions[i]->checksum, links.versions[i]->path, err));
    }
    fc_delta_heads_read(links.versions, links.count);
    FC_TRY(fc_delta_links_tensors(headers, &links, &m->list, &m->count, err));
    fc_checkpoint **opened = fc_arena_calloc(m->scratch, links.count + 1, sizeof(fc_checkpoint *));
    FC_NEED(opened, err, m->source->path);
    opened[0] = m->source;
    size_t nopened = 1;
    fc_code rc;
    FC_TRY_GOTO(open_deltas(&links, opened, &nopened, err), rc, out);
    FC_TRY_GOTO(fc_derived_new(&patched_kind, opened, nopened, &m->made, err), rc, out);
    begin_patched(m, NULL, &links);
    rc = patch_opened(m, opened, nopened, err);
    if (rc == FC_OK) {
        m->p->headers = headers;
        return fc_derived_finish(m->made, FC_OK, out);
    }
    fc_checkpoint_close(m->made); /* the sources stay open */
out:
    for (size_t i = 1; i < nopened; i++) {
        fc_checkpoint_close(opened[i]);
    }
    return rc;
}

fc_code fc_delta_patch(fc_checkpoint *source, const char *const *paths, size_t count, int64_t up_to,
                       fc_checkpoint **out, fc_error *err) {
    patcher m = {.source = source, .scratch = fc_arena_new()};
    fc_arena *headers = fc_arena_new();
    fc_code rc;
    *out = NULL;
    FC_TRY_GOTO(m.scratch && headers ? FC_OK : fc_no_memory(err, source->path), rc, out);
    if (!fc_zstd_is_built_in()) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", paths[0]);
        goto out;
    }
    rc = patch_source(&m, headers, paths, count, up_to, out, err);
out:
    if (rc != FC_OK) {
        fc_arena_free(headers);
    }
    fc_arena_free(m.scratch);
    return rc;
}
