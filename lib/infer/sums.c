/*
 * One pass over the data of a side: the sum of the hashes of the elements of each tensor. Sums of tensors add up to
 * that of the tensor that they are joined to, whatever the order of the elements. Zeros count nothing, so padding with
 * zeros does not change a sum.
 */
#include "fsdpckpt/box.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"
#include "read/box.h"
#include "read/scan.h"
#include "read/stored_chunk.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 4096, SHORT = 1 << 16 };

typedef struct job {
    const fc_search *search;
    fc_side *side;
    const uint64_t *table; /* the hashes of 16-bit elements */
} job;

typedef struct found {
    uint64_t sums[FC_SEARCH_TYPES];
} found;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

static uint64_t sum_elements(const uint64_t *table, uint32_t size, const unsigned char *bytes, size_t count) {
    uint64_t sum = 0;
    if (size == 2) {
        uint64_t second = 0;
        size_t i = 0;
        for (; i + 4 <= count; i += 4) { /* four at a time, in two sums that do not wait for each other */
            uint64_t bits;
            memcpy(&bits, bytes + 2 * i, sizeof bits);
            sum += table[bits & 0xffff] + table[bits >> 16 & 0xffff];
            second += table[bits >> 32 & 0xffff] + table[bits >> 48];
        }
        for (sum += second; i < count; i++) {
            uint16_t bits;
            memcpy(&bits, bytes + 2 * i, sizeof bits);
            sum += table[bits];
        }
    } else if (size == 1) {
        for (size_t i = 0; i < count; i++) {
            sum += table[bytes[i]];
        }
    } else if (size == 4) {
        for (size_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, bytes + 4 * i, sizeof bits);
            sum += mix(bits);
        }
    } else {
        for (size_t i = 0; i < count; i++) {
            uint64_t bits[2] = {0, 0};
            memcpy(bits, bytes + size * i, size);
            sum += bits[1] ? mix(bits[0] ^ mix(bits[1])) : mix(bits[0]);
        }
    }
    return sum;
}

static bool is_float(fc_dtype dtype) {
    return fc_dtype_get(dtype)->cls == FC_CLASS_FLOAT;
}

/* Adds the elements as another floating-point type. */
static uint64_t sum_cast(const uint64_t *table, fc_dtype from, fc_dtype to, const unsigned char *bytes, size_t count) {
    unsigned char block[BLOCK];
    const uint32_t size = fc_dtype_size(to);
    const size_t most = BLOCK / size;
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i += most) {
        const size_t some = count - i < most ? count - i : most;
        fc_cast(from, bytes + i * fc_dtype_size(from), to, block, some);
        sum += sum_elements(table, size, block, some);
    }
    return sum;
}

static fc_code sums_begin(void *context, fc_scan_item *item, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const job *j = context;
    const fc_tensor *t = j->side->tensors[item->index];
    (void)err;
    item->tensors[0] = t;
    item->box = (fc_box){t->ndim, origin, t->shape};
    item->large_tiles = fc_gains_from_large_tiles(j->side->checkpoint, t);
    return FC_OK;
}

static fc_code sums_look(void *context, const fc_scan_tile *tile, fc_error *err) {
    const job *j = context;
    const fc_search *s = j->search;
    const fc_dtype dtype = tile->item->tensors[0]->dtype;
    found *f = tile->scratch;
    (void)err;
    for (int i = 0; i < s->ntypes; i++) {
        f->sums[i] = 0;
        if (s->types[i] == dtype) {
            f->sums[i] = sum_elements(j->table, fc_dtype_size(dtype), tile->bytes[0], tile->count) * tile->times;
        } else if (j->side == &s->a && is_float(dtype) && is_float(s->types[i])) {
            f->sums[i] = sum_cast(j->table, dtype, s->types[i], tile->bytes[0], tile->count) * tile->times;
        }
    }
    return FC_OK;
}

static bool sums_add(void *context, const fc_scan_tile *tile) {
    const job *j = context;
    const found *f = tile->scratch;
    for (int i = 0; i < j->search->ntypes; i++) {
        j->side->sums[tile->item->index][i] += f->sums[i];
    }
    return true;
}

/* Which sums of a tensor exist. */
static unsigned known_types(const fc_search *s, const fc_side *side, fc_dtype dtype) {
    unsigned known = 0;
    for (int i = 0; i < s->ntypes; i++) {
        const bool cast = side == &s->a && is_float(dtype) && is_float(s->types[i]);
        known |= s->types[i] == dtype || cast ? 1U << i : 0;
    }
    return known;
}

static fc_code sum_side(const fc_search *s, fc_side *side, const uint64_t *table, fc_error *err) {
    const fc_checkpoint *c = side->checkpoint;
    job j = {.search = s, .side = side, .table = table};
    fc_scan scan = {.count = side->count,
                    .sides = 1,
                    .checkpoints = {c},
                    .phase = FC_PHASE_READING,
                    .scratch = sizeof(found),
                    .context = &j,
                    .begin = sums_begin,
                    .look = sums_look,
                    .add = sums_add};
    fc_code rc;
    for (size_t i = 0; i < side->count; i++) {
        side->known[i] = known_types(s, side, side->tensors[i]->dtype);
        fc_scan_add_bytes(&scan.total, side->tensors[i]);
    }
    FC_TRY(fc_source_crc_new(c, c->tensors, c->ntensors, &scan.crcs[0], err));
    FC_TRY_GOTO(fc_scan_run(&scan, &s->work, err), rc, out);
    rc = fc_source_crc_check(scan.crcs[0], NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(scan.crcs[0]);
    return rc;
}

/* Lists the tensors of a side. */
static fc_code list_tensors(const fc_search *s, fc_side *side, fc_error *err) {
    const fc_checkpoint *c = side->checkpoint;
    side->tensors = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->tensors);
    side->sums = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->sums);
    side->known = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->known);
    side->taken = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->taken);
    FC_NEED(side->tensors && side->sums && side->known && side->taken, err, c->path);
    for (size_t i = 0; i < c->ntensors; i++) {
        int64_t elements;
        const fc_tensor *t = &c->tensors[i];
        if (!fc_numel(t->ndim, t->shape, &elements)) {
            return fc_fail(err, FC_ECORRUPT, "%s: tensor %s: the shape has more than 2^63 elements", c->path, t->name);
        }
        if (!t->object && elements > 0) {
            side->tensors[side->count++] = t;
        }
    }
    return FC_OK;
}

static void add_type(fc_search *s, fc_dtype dtype) {
    for (int i = 0; i < s->ntypes; i++) {
        if (s->types[i] == dtype) {
            return;
        }
    }
    if (s->ntypes < FC_SEARCH_TYPES) {
        s->types[s->ntypes++] = dtype;
    }
}

fc_code fc_search_sums(fc_search *s, fc_error *err) {
    uint64_t *table = malloc(SHORT * sizeof *table);
    fc_code rc = table ? FC_OK : fc_no_memory(err, s->a.checkpoint->path);
    FC_TRY_GOTO(rc, rc, out);
    for (size_t i = 0; i < SHORT; i++) {
        table[i] = mix(i);
    }
    FC_TRY_GOTO(list_tensors(s, &s->a, err), rc, out);
    FC_TRY_GOTO(list_tensors(s, &s->b, err), rc, out);
    for (size_t i = 0; i < s->b.count; i++) {
        add_type(s, s->b.tensors[i]->dtype);
    }
    FC_TRY_GOTO(sum_side(s, &s->a, table, err), rc, out);
    rc = sum_side(s, &s->b, table, err);
out:
    free(table);
    return rc;
}
