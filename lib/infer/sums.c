/*
 * The sum of the hashes of the elements of each tensor. Sums of tensors add up to that of the tensor that they are
 * joined to, whatever the order of the elements. Zeros count nothing, so padding with zeros does not change a sum.
 * The first pass over the data of a side computes only the digest of a tensor that may be equal to one of the other
 * side, which is faster. If it is equal to one, and to no other, it needs no sum. The rest is read again.
 */
#include "base/crc.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"
#include "integrity/tile_digest.h"
#include "read/box.h"
#include "read/scan.h"
#include "read/stored_chunk.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 4096, SHORT = 1 << 16 };

/* fc_side.digested: what the first pass does with a tensor. */
enum { SUMMED = 0, DIGESTED = 1, RECORDED = 2 /* the checkpoint has the digest, with which the data is compared */ };

typedef struct job {
    const fc_search *search;
    fc_side *side;
    const uint64_t *table; /* the hashes of 16-bit elements */
    const size_t *items;   /* of the second pass: the tensors that still need sums; NULL: the first pass */
} job;

/* The tensors of both sides with the same digest, dtype and number of elements; the last of each side. */
typedef struct copies {
    size_t a, b, na, nb;
} copies;

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

static const fc_tensor *tensor_of(const job *j, size_t item) {
    return j->side->tensors[j->items ? j->items[item] : item];
}

static unsigned char digested(const job *j, const fc_tensor *t) {
    return j->items ? SUMMED : j->side->digested[t - j->side->checkpoint->tensors];
}

static fc_code sums_begin(void *context, fc_scan_item *item, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const job *j = context;
    const fc_tensor *t = tensor_of(j, item->index);
    (void)err;
    item->tensors[0] = t;
    item->box = (fc_box){t->ndim, origin, t->shape};
    item->large_tiles = fc_gains_from_large_tiles(j->side->checkpoint, t);
    return FC_OK;
}

static fc_code sums_look(void *context, const fc_scan_tile *tile, fc_error *err) {
    const job *j = context;
    const fc_search *s = j->search;
    const fc_tensor *t = tile->item->tensors[0];
    const fc_dtype dtype = t->dtype;
    found *f = tile->scratch;
    if (digested(j, t) == DIGESTED && tile->times > 1) {
        f->sums[0] = fc_repeat_digest(t, NULL, &tile->box, tile->bytes[0]).tensor;
        return FC_OK;
    }
    if (digested(j, t) != SUMMED) {
        return digested(j, t) == DIGESTED ? fc_box_digest_make(t, &tile->box, tile->bytes[0], &f->sums[0], err) : FC_OK;
    }
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
    const size_t index = tile->item->index;
    const fc_tensor *t = tile->item->tensors[0];
    if (digested(j, t) != SUMMED) {
        j->side->digests[t - j->side->checkpoint->tensors] ^= digested(j, t) == DIGESTED ? f->sums[0] : 0;
        return true;
    }
    for (int i = 0; i < j->search->ntypes; i++) {
        j->side->sums[j->items ? j->items[index] : index][i] += f->sums[i];
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

/* Reads tensors: all in the first pass, which compares them with what the files record, else `count` of `items`. */
static fc_code read_side(const fc_search *s, fc_side *side, const uint64_t *table, const size_t *items, size_t count,
                         fc_error *err) {
    const fc_checkpoint *c = side->checkpoint;
    job j = {.search = s, .side = side, .table = table, .items = items};
    fc_scan scan = {.count = count,
                    .sides = 1,
                    .checkpoints = {c},
                    .phase = FC_PHASE_READING,
                    .scratch = sizeof(found),
                    .context = &j,
                    .begin = sums_begin,
                    .look = sums_look,
                    .add = sums_add};
    fc_code rc;
    for (size_t i = 0; i < count; i++) {
        fc_scan_add_bytes(&scan.total, tensor_of(&j, i));
    }
    if (items) {
        return count > 0 ? fc_scan_run(&scan, &s->work, err) : FC_OK;
    }
    FC_TRY(fc_source_crc_new(c, c->tensors, c->ntensors, &scan.crcs[0], err));
    FC_TRY_GOTO(fc_scan_run(&scan, &s->work, err), rc, out);
    rc = fc_source_crc_check(scan.crcs[0], NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(scan.crcs[0]);
    return rc;
}

/* The first pass over a side. */
static fc_code digest_side(const fc_search *s, fc_side *side, const uint64_t *table, fc_error *err) {
    FC_TRY(read_side(s, side, table, NULL, side->count, err));
    for (size_t i = 0; i < side->count; i++) {
        const fc_tensor *t = side->tensors[i];
        const size_t at = (size_t)(t - side->checkpoint->tensors);
        uint64_t bytes = 0;
        fc_scan_add_bytes(&bytes, t);
        side->digests[at] =
            side->digested[at] == DIGESTED ? fc_crc64_finish(side->digests[at], bytes) : side->digests[at];
        side->known[i] = known_types(s, side, t->dtype);
    }
    return FC_OK;
}

/* The second pass over a side: those whose digest has not matched them. */
static fc_code sum_rest(const fc_search *s, fc_side *side, const bool *twins, const uint64_t *table, fc_error *err) {
    size_t *items = fc_arena_calloc(s->arena, side->count + 1, sizeof *items), count = 0;
    FC_NEED(items, err, side->checkpoint->path);
    for (size_t i = 0; i < side->count; i++) {
        const size_t at = (size_t)(side->tensors[i] - side->checkpoint->tensors);
        if (side->digested[at] != SUMMED && !twins[i]) {
            items[count++] = i;
        }
    }
    return read_side(s, side, table, items, count, err);
}

/* ---- tensors that are equal on both sides ---- */

/* The dtype and the shape, as a key. */
static fc_code make_shape_key(const fc_search *s, const fc_tensor *t, const char **key, size_t *len, fc_error *err) {
    int64_t *words = fc_arena_calloc(s->arena, (size_t)t->ndim + 1, sizeof *words);
    FC_NEED(words, err, NULL);
    words[0] = t->dtype;
    for (int d = 0; d < t->ndim; d++) {
        words[d + 1] = t->shape[d];
    }
    *key = (const char *)words;
    *len = ((size_t)t->ndim + 1) * sizeof *words;
    return FC_OK;
}

/* Chooses the tensors that may be equal to one of the other side. One-dimensional ones are equal too easily. */
static fc_code choose_digested(const fc_search *s, fc_side *side, const fc_side *other, fc_error *err) {
    fc_name_table *shapes = fc_name_table_new(s->arena, other->count + 1);
    const char *key = NULL;
    size_t len = 0;
    FC_NEED(shapes, err, NULL);
    for (size_t i = 0; i < other->count; i++) {
        FC_TRY(make_shape_key(s, other->tensors[i], &key, &len, err));
        FC_NEED(fc_name_table_put(shapes, key, len, i) != FC_NO_NAME, err, NULL);
    }
    for (size_t i = 0; i < side->count; i++) {
        const fc_tensor *t = side->tensors[i];
        const size_t at = (size_t)(t - side->checkpoint->tensors);
        fc_digest digest;
        FC_TRY(make_shape_key(s, t, &key, &len, err));
        if (t->ndim < 2 || fc_name_table_find(shapes, key, len) == FC_NO_NAME) {
            continue;
        }
        FC_TRY(fc_checkpoint_digest(side->checkpoint, t, FC_WHOLE_TENSOR, &digest, err));
        side->digested[at] = digest.kind == FC_DIGEST_CRC64 ? RECORDED : DIGESTED;
        side->digests[at] = digest.kind == FC_DIGEST_CRC64 ? digest.value : 0;
    }
    return FC_OK;
}

bool fc_search_same_digest(const fc_search *s, const fc_tensor *a, const fc_tensor *b) {
    const size_t i = (size_t)(a - s->a.checkpoint->tensors), k = (size_t)(b - s->b.checkpoint->tensors);
    return s->a.digested[i] && s->b.digested[k] && s->a.digests[i] == s->b.digests[k] && a->dtype == b->dtype &&
           fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape);
}

static fc_code count_copies(const fc_search *s, const fc_side *side, fc_name_table *table, copies *all, size_t *count,
                            fc_error *err) {
    for (size_t i = 0; i < side->count; i++) {
        const fc_tensor *t = side->tensors[i];
        const size_t at = (size_t)(t - side->checkpoint->tensors);
        uint64_t key[] = {side->digests[at], 0, t->dtype};
        fc_scan_add_bytes(&key[1], t);
        if (!side->digested[at]) {
            continue;
        }
        const uint64_t *copy = fc_arena_copy(s->arena, key, 3, sizeof *key);
        const size_t group = copy ? fc_name_table_put(table, (const char *)copy, sizeof key, *count) : FC_NO_NAME;
        FC_NEED(group != FC_NO_NAME, err, NULL);
        *count += group == *count;
        *(side == &s->a ? &all[group].a : &all[group].b) = i;
        *(side == &s->a ? &all[group].na : &all[group].nb) += 1;
    }
    return FC_OK;
}

/* The digest is the sum that only these two tensors have. */
static void set_twin(const fc_search *s, fc_side *side, size_t index) {
    const fc_tensor *t = side->tensors[index];
    side->known[index] = 0;
    for (int k = 0; k < s->ntypes; k++) {
        if (s->types[k] == t->dtype) {
            side->sums[index][k] = side->digests[t - side->checkpoint->tensors];
            side->known[index] = 1U << k;
        }
    }
}

/* Finds the tensors that are the only ones with their digest on both sides. */
static fc_code find_twins(fc_search *s, bool *twins_a, bool *twins_b, fc_error *err) {
    fc_name_table *table = fc_name_table_new(s->arena, s->a.count + s->b.count + 1);
    copies *all = fc_arena_calloc(s->arena, s->a.count + s->b.count + 1, sizeof *all);
    size_t count = 0;
    FC_NEED(table && all, err, NULL);
    FC_TRY(count_copies(s, &s->a, table, all, &count, err));
    FC_TRY(count_copies(s, &s->b, table, all, &count, err));
    for (size_t i = 0; i < count; i++) {
        const copies *c = &all[i];
        if (c->na == 1 && c->nb == 1 && fc_search_same_digest(s, s->a.tensors[c->a], s->b.tensors[c->b])) {
            set_twin(s, &s->a, c->a);
            set_twin(s, &s->b, c->b);
            twins_a[c->a] = twins_b[c->b] = true;
        }
    }
    return FC_OK;
}

static fc_code read_sides(fc_search *s, const uint64_t *table, fc_error *err) {
    bool *twins_a = fc_arena_calloc(s->arena, s->a.count + 1, sizeof *twins_a);
    bool *twins_b = fc_arena_calloc(s->arena, s->b.count + 1, sizeof *twins_b);
    FC_NEED(twins_a && twins_b, err, NULL);
    FC_TRY(choose_digested(s, &s->a, &s->b, err));
    FC_TRY(choose_digested(s, &s->b, &s->a, err));
    FC_TRY(digest_side(s, &s->a, table, err));
    FC_TRY(digest_side(s, &s->b, table, err));
    FC_TRY(find_twins(s, twins_a, twins_b, err));
    FC_TRY(sum_rest(s, &s->a, twins_a, table, err));
    return sum_rest(s, &s->b, twins_b, table, err);
}

/* Lists the tensors of a side. */
static fc_code list_tensors(const fc_search *s, fc_side *side, fc_error *err) {
    const fc_checkpoint *c = side->checkpoint;
    side->tensors = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->tensors);
    side->sums = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->sums);
    side->known = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->known);
    side->taken = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->taken);
    side->digests = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->digests);
    side->digested = fc_arena_calloc(s->arena, c->ntensors + 1, sizeof *side->digested);
    FC_NEED(side->tensors && side->sums && side->known && side->taken && side->digests && side->digested, err, c->path);
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
    rc = read_sides(s, table, err);
out:
    free(table);
    return rc;
}
