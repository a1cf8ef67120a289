/*
 * Searches for the layout of a flat parameter's members. Exactly one layout must fit the evidence.
 *
 * Without use_orig_params there is no choice: every member that is not stored on its own is in the flat parameter,
 * without gaps. With use_orig_params, members are padded for a dtype that no file records, and DCP stores some rank's
 * one-dimensional view of each member, a shard of it, next to the flat parameter, which could also be a buffer. The
 * evidence is the number of elements and the size of each stored view. If several layouts fit, the bytes decide: first
 * those of the views, then those of the padding, which is FC_FLAT_PADDING_VALUE and which no optimizer changes.
 */
#include "base/checked.h"
#include "checkpoint/parameters.h"
#include "derived/flat_units.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_STEPS = 1 << 20, COMPARED = 4096 };

/* A member, and the evidence about it. */
typedef struct candidate {
    size_t member;
    bool may;              /* it may be a buffer, which is stored on its own */
    const fc_tensor *view; /* what some rank stored of it; NULL: nothing */
    int64_t numel;         /* of the whole member */
    int64_t first, last;   /* that rank's shard, in elements of the flat parameter; first is -1 when unknown */
    size_t primary;        /* the candidate with which it is tied; its own index when it is not tied */
    unsigned char *bytes;  /* the view's first elements, once they were read */
} candidate;

/* One level of the search: which choices were tried for the candidate, and where it would be. */
typedef struct decision {
    int64_t at;     /* end of the candidates before it */
    int64_t offset; /* of the candidate, if it is taken */
    int tried;
    bool taken;
} decision;

/* The evidence to use. Each level includes those before it. */
typedef enum evidence { BY_NUMBERS, BY_VIEWS, BY_PADDING } evidence;

typedef struct search {
    const fc_flat_fit *f;
    const fc_flat_unit *unit;
    fc_arena *arena;
    candidate *all;
    size_t count;
    decision *decisions;
    int64_t *rest;     /* padded elements of all candidates from each one on */
    int64_t alignment; /* 0: no padding */
    int64_t ranks, shard;
    evidence by;
    size_t steps;
    /* The result. */
    size_t found;      /* number of different layouts, counted up to 2 */
    decision *way;     /* the first layout */
    fc_dtype computed; /* its dtype */
} search;

/* ---- evidence ---- */

bool fc_flat_is_view(const fc_flat_fit *f, const fc_flat_member *m, bool *whole) {
    const fc_tensor *t = m->stored != SIZE_MAX ? &f->source->tensors[m->stored] : NULL;
    *whole = t && t->ndim == m->tensor->ndim;
    for (int d = 0; *whole && d < t->ndim; d++) {
        *whole = t->shape[d] == m->tensor->shape[d];
    }
    return t && t->ndim == 1 && fc_dtype_get(m->tensor->dtype)->cls == FC_CLASS_FLOAT;
}

/* Finds the shard of the rank that stored a view. With replicated ranks another rank may have stored the shard. */
static void find_shard(const search *s, candidate *c) {
    uint32_t rank = c->view && c->view->nchunks == 1 ? c->view->chunks[0].rank : FC_NO_RANK;
    c->first = -1;
    for (size_t i = 0; i < s->unit->tensor->nchunks && rank != FC_NO_RANK; i++) {
        const fc_chunk *chunk = &s->unit->tensor->chunks[i];
        if (chunk->rank == rank) {
            c->first = chunk->dims[0];
            c->last = chunk->dims[0] + chunk->dims[1];
        }
    }
}

/* Returns whether a member may be in the flat parameter. All other members are stored on their own. */
static bool is_candidate(const search *s, const fc_flat_member *m, candidate *c) {
    bool whole, view = fc_flat_is_view(s->f, m, &whole);
    if (fc_dtype_get(m->tensor->dtype)->cls != FC_CLASS_FLOAT || (m->stored != SIZE_MAX && (!view || !s->f->views)) ||
        (whole && fc_is_buffer(m->fqn, m->tensor->dtype))) {
        return false;
    }
    c->view = view ? &s->f->source->tensors[m->stored] : NULL;
    c->may = whole;
    return !view || c->view->dtype == s->unit->tensor->dtype;
}

static fc_code list_candidates(search *s) {
    const fc_flat_model *model = s->f->out;
    size_t *of = fc_arena_calloc(s->arena, model->nmembers + 1, sizeof *of); /* index + 1 of each member's candidate */
    FC_NEED(of, s->f->err, s->f->source->path);
    for (size_t k = 0; k < s->unit->nbelow; k++) {
        const fc_flat_member *m = &model->members[s->unit->below[k]];
        candidate *c = &s->all[s->count];
        *c = (candidate){.member = s->unit->below[k], .primary = s->count};
        if (!is_candidate(s, m, c)) {
            continue;
        }
        if (!fc_numel(m->tensor->ndim, m->tensor->shape, &c->numel)) {
            return fc_fail(s->f->err, FC_EUSAGE, "%s: tensor '%.256s': its size overflows", s->f->model->path,
                           m->tensor->name);
        }
        c->primary = of[m->same_as] ? of[m->same_as] - 1 : s->count;
        of[c->member] = ++s->count;
        find_shard(s, c);
    }
    return FC_OK;
}

/* ---- does an offset fit? ---- */

static int64_t overlap_size(int64_t a, int64_t b, int64_t c, int64_t d) {
    int64_t first = a > c ? a : c, last = b < d ? b : d;
    return first < last ? last - first : 0;
}

/* Returns whether the rank that stored the view would hold as many elements of a member at `offset`. */
static bool fits_shard(const search *s, const candidate *c, int64_t offset) {
    int64_t has = c->view ? c->view->shape[0] : 0, end = offset + c->numel;
    if (!c->view || has == 0) {
        return true;
    }
    if (c->first >= 0) {
        return overlap_size(offset, end, c->first, c->last) == has;
    }
    int64_t before = offset % s->shard,
            after = end % s->shard; /* elements of other members in the first and last shard */
    int64_t first = s->shard - before < c->numel ? s->shard - before : c->numel;
    return has == first || (end / s->shard > offset / s->shard && has == after) ||
           (c->numel - first > s->shard && has == s->shard);
}

static fc_code read_run(const search *s, const fc_tensor *t, int64_t first, int64_t count, void *out) {
    const int64_t dims[2] = {first, count};
    const fc_box box = {1, dims, dims + 1};
    return fc_read_box(s->f->source, t, &box, t->dtype, out, s->f->err);
}

/* Compares what was stored of a member with the elements at `offset`, up to COMPARED bytes. */
static fc_code same_bytes(search *s, candidate *c, int64_t offset, bool *same) {
    unsigned char there[COMPARED];
    size_t element = fc_dtype_size(s->unit->tensor->dtype);
    int64_t has = c->view ? c->view->shape[0] : 0, most = COMPARED / (int64_t)element;
    int64_t count = has < most ? has : most, first = offset > c->first ? offset : c->first;
    *same = true;
    if (s->by < BY_VIEWS || has == 0 || c->first < 0) {
        return FC_OK;
    }
    *same = false;
    if (!c->bytes) {
        c->bytes = fc_arena_alloc(s->arena, (size_t)count * element);
        FC_NEED(c->bytes, s->f->err, s->f->source->path);
        FC_TRY(read_run(s, c->view, 0, count, c->bytes));
    }
    FC_TRY(read_run(s, s->unit->tensor, first, count, there));
    *same = memcmp(there, c->bytes, (size_t)count * element) == 0;
    return FC_OK;
}

/* Clears `*is` unless the elements between members have the value that FSDP pads with. */
static fc_code is_padding(search *s, int64_t first, int64_t last, bool *is) {
    unsigned char there[COMPARED], padding[16];
    const float value = FC_FLAT_PADDING_VALUE;
    const fc_tensor *flat = s->unit->tensor;
    size_t element = fc_dtype_size(flat->dtype);
    int64_t most = COMPARED / (int64_t)element;
    fc_cast(FC_F32, &value, flat->dtype, padding, 1);
    for (int64_t at = first, n; *is && s->by == BY_PADDING && at < last; at += n) {
        n = last - at < most ? last - at : most;
        FC_TRY(read_run(s, flat, at, n, there));
        for (int64_t i = 0; i < n; i++) {
            *is = *is && memcmp(there + (size_t)i * element, padding, element) == 0;
        }
    }
    return FC_OK;
}

/* ---- the search ---- */

static int64_t up(int64_t n, int64_t unit) {
    int64_t sum = n;
    return unit > 1 && n % unit && !fc_add_i64(n - n % unit, unit, &sum) ? INT64_MAX : sum;
}

static bool is_tied(const search *s, size_t i) {
    return s->all[i].primary != i && s->decisions[s->all[i].primary].taken;
}

/* Takes candidate `i` if it fits at the next possible offset. */
static fc_code take_candidate(search *s, size_t i, bool *fits) {
    candidate *c = &s->all[i];
    decision *p = &s->decisions[i];
    int64_t numel = s->unit->tensor->shape[0];
    bool tied = is_tied(s, i);
    p->offset = tied ? s->decisions[c->primary].offset : up(p->at, s->alignment);
    p->taken = *fits = c->numel <= numel && p->offset <= numel - c->numel && fits_shard(s, c, p->offset);
    if (!*fits) {
        return FC_OK;
    }
    p[1] = (decision){.at = tied ? p->at : p->offset + c->numel};
    fc_code rc;
    FC_TRY_GOTO(same_bytes(s, c, p->offset, fits), rc, out);
    if (!tied) {
        FC_TRY_GOTO(is_padding(s, p->at, p->offset, fits), rc, out);
    }
out:
    p->taken = *fits;
    return rc;
}

static bool same_way(const search *s, const decision *a, const decision *b) {
    bool same = true;
    for (size_t i = 0; i < s->count && same; i++) {
        same = a[i].taken == b[i].taken && (!a[i].taken || s->all[i].numel == 0 || a[i].offset == b[i].offset);
    }
    return same;
}

/* Records a layout once all candidates are decided. */
static fc_code note_way(search *s, fc_dtype computed) {
    int64_t end = s->decisions[s->count].at, numel = s->unit->tensor->shape[0];
    bool fits = end > 0 && up(end, s->alignment ? s->ranks : 1) == numel;
    if (fits) {
        FC_TRY(is_padding(s, end, numel, &fits));
    }
    if (!fits) {
        return FC_OK;
    }
    if (s->found == 0) {
        memcpy(s->way, s->decisions, s->count * sizeof *s->way);
        s->computed = computed;
        s->found = 1;
    } else if (!same_way(s, s->way, s->decisions)) {
        s->found = 2;
    }
    return FC_OK;
}

/* Returns whether the remaining candidates can still fill the flat parameter. */
static bool is_enough(const search *s, size_t i) {
    int64_t numel = s->unit->tensor->shape[0];
    return s->rest[i] >= numel - s->decisions[i].at - s->alignment - s->ranks;
}

/*
 * Tries the next choice for candidate `i`: it is in the flat parameter, or it is not. @param goes_on receives whether
 * that is possible
 */
static fc_code try_next(search *s, size_t i, bool *goes_on) {
    decision *p = &s->decisions[i];
    *goes_on = false;
    if (!is_enough(s, i)) {
        p->tried = 2;
        return FC_OK;
    }
    if (p->tried++ == 0) {
        return take_candidate(s, i, goes_on);
    }
    p->taken = false;
    p[1] = (decision){.at = p->at};
    *goes_on = s->all[i].may;
    return FC_OK;
}

static fc_code try_all(search *s, fc_dtype computed) {
    size_t i = 0;
    fc_code rc = FC_OK;
    s->decisions[0] = (decision){0};
    while (rc == FC_OK && s->found < 2 && s->steps++ < MOST_STEPS) {
        bool goes_on = false;
        rc = i == s->count ? note_way(s, computed) : try_next(s, i, &goes_on);
        if (goes_on) {
            i++;
            continue;
        }
        while (i == s->count || s->decisions[i].tried == 2) { /* backtrack to a candidate with an untried choice */
            if (i-- == 0) {
                return rc;
            }
        }
    }
    return rc;
}

/* Computes, from each candidate on, an upper bound of the elements; saturates. */
static void sum_rest(search *s) {
    s->rest[s->count] = 0;
    for (size_t i = s->count; i-- > 0;) {
        int64_t sum = s->rest[i + 1];
        if (!fc_add_i64(sum, s->all[i].numel, &sum) || !fc_add_i64(sum, s->alignment, &sum)) {
            sum = INT64_MAX;
        }
        s->rest[i] = sum;
    }
}

/* Searches with each dtype that a padded flat parameter may be computed in. */
static fc_code try_dtypes(search *s, bool padded, evidence by) {
    static const fc_dtype computed[] = {FC_F32, FC_BF16, FC_F64, FC_F8_E4M3FN}; /* of 4, 2, 8 and 1 bytes */
    s->found = s->steps = 0;
    s->by = by;
    for (size_t i = 0; i < (padded ? sizeof computed / sizeof *computed : 1); i++) {
        s->alignment = padded ? 16 / (int64_t)fc_dtype_size(computed[i]) : 0;
        sum_rest(s);
        FC_TRY(try_all(s, computed[i]));
    }
    return FC_OK;
}

/* ---- the result ---- */

static fc_code ambiguous(const search *s) {
    return fc_fail(s->f->err, FC_EUNSUPPORTED,
                   "its parameters are padded (use_orig_params) in a way that no file records, and several layouts fit "
                   "even by their bytes; save with StateDictType.SHARDED_STATE_DICT");
}

static fc_code misfit(const search *s, bool padded) {
    const fc_flat_member *members = s->f->out->members;
    int64_t numel = 0;
    for (size_t i = 0; i < s->count; i++) {
        if (s->all[i].primary == i && !fc_add_i64(numel, s->all[i].numel, &numel)) {
            return fc_fail(s->f->err, FC_EUSAGE, "the size of the %zu parameters of %s that belong in it overflows",
                           s->count, s->f->model->path);
        }
    }
    return fc_fail(s->f->err, FC_EUSAGE,
                   "has %" PRId64 " elements, but its %zu parameters in %s ('%.128s' to '%.128s') have %" PRId64
                   "%s; give the schema of the right model, and mark tied parameters in it with \"same_as\": \"NAME\"",
                   s->unit->tensor->shape[0], s->count, s->f->model->path,
                   s->count > 0 ? members[s->all[0].member].key : "none",
                   s->count > 0 ? members[s->all[s->count - 1].member].key : "none", numel,
                   padded ? " before padding, and match no layout" : "");
}

static fc_code make_layout(const search *s, fc_flat_unit *u, bool padded) {
    const fc_flat_fit *f = s->f;
    fc_flat_desc *descs = fc_arena_calloc(f->arena, s->count, sizeof *descs);
    size_t *index_of = fc_arena_calloc(s->arena, s->count, sizeof *index_of);
    u->members = fc_arena_calloc(f->arena, s->count, sizeof *u->members);
    u->nmembers = 0;
    FC_NEED(descs && index_of && u->members, f->err, f->source->path);
    for (size_t i = 0; i < s->count; i++) {
        const candidate *c = &s->all[i];
        fc_flat_member *m = &f->out->members[c->member];
        m->flat = s->way[i].taken;
        if (!m->flat) {
            continue;
        }
        bool tied = c->primary != i && s->way[c->primary].taken;
        descs[u->nmembers] = (fc_flat_desc){.fqn = m->fqn,
                                            .ndim = m->tensor->ndim,
                                            .shape = m->tensor->shape,
                                            .dtype = u->tensor->dtype,
                                            .requires_grad = true,
                                            .shared_with = tied ? (int64_t)index_of[c->primary] : -1};
        index_of[i] = u->nmembers;
        u->members[u->nmembers++] = c->member;
    }
    return fc_flat_layout_new(descs, u->nmembers, s->ranks, padded, s->computed, f->arena, &u->layout, f->err);
}

/*
 * Finds the number of ranks that the flat parameter is divided into: all shards but the last ones are as large as the
 * first.
 */
static void find_ranks(search *s) {
    const fc_tensor *flat = s->unit->tensor;
    s->ranks = 1;
    s->shard = flat->shape[0] > 0 ? flat->shape[0] : 1;
    for (size_t i = 0; i < flat->nchunks; i++) {
        int64_t size = flat->chunks[i].dims[1];
        if (flat->chunks[i].dims[0] == 0 && size > 0) {
            s->shard = size;
            s->ranks = flat->shape[0] / size + (flat->shape[0] % size != 0);
            return;
        }
    }
}

static bool is_open(const search *s) {
    return s->found > 1 || s->steps >= MOST_STEPS;
}

/* Without padding, its bytes are no evidence for the layout that was found. */
static bool has_padding(const search *s) {
    int64_t end = 0;
    for (size_t i = 0; i < s->count && s->found == 1; i++) {
        const candidate *c = &s->all[i];
        if (!s->way[i].taken || s->way[i].offset < end) { /* or tied */
            continue;
        }
        if (s->way[i].offset > end) {
            return true;
        }
        end = s->way[i].offset + c->numel;
    }
    return s->found == 1 && end < s->unit->tensor->shape[0];
}

static fc_code fit(search *s, fc_flat_unit *u) {
    bool padded = s->f->views || s->f->source->omits_views;
    s->all = fc_arena_calloc(s->arena, u->nbelow, sizeof *s->all);
    s->decisions = fc_arena_calloc(s->arena, u->nbelow + 1, sizeof *s->decisions);
    s->way = fc_arena_calloc(s->arena, u->nbelow + 1, sizeof *s->way);
    s->rest = fc_arena_calloc(s->arena, u->nbelow + 1, sizeof *s->rest);
    FC_NEED(s->all && s->decisions && s->way && s->rest, s->f->err, s->f->source->path);
    if (fc_dtype_get(u->tensor->dtype)->cls != FC_CLASS_FLOAT) {
        return fc_fail(s->f->err, FC_EUSAGE, "has dtype %s, which a flat parameter cannot have",
                       fc_dtype_get(u->tensor->dtype)->torch_name);
    }
    find_ranks(s);
    FC_TRY(list_candidates(s));
    FC_TRY(try_dtypes(s, padded, BY_NUMBERS));
    for (int by = BY_VIEWS; by <= BY_PADDING && padded && is_open(s); by++) {
        FC_TRY(try_dtypes(s, padded, (evidence)by));
    }
    if (is_open(s) || (s->by == BY_PADDING && !has_padding(s))) {
        return ambiguous(s);
    }
    return s->found == 1 ? make_layout(s, u, padded) : misfit(s, padded);
}

fc_code fc_flat_lay_out(const fc_flat_fit *f, fc_flat_unit *unit) {
    search s = {.f = f, .unit = unit, .arena = fc_arena_new()};
    fc_code rc = s.arena ? fit(&s, unit) : fc_no_memory(f->err, f->source->path);
    fc_arena_free(s.arena);
    return rc == FC_OK ? rc : fc_context(f->err, rc, "%s: '%.256s'", f->source->path, unit->tensor->name);
}
