/*
 * Checks whether checkpoints can be averaged: they must have equal names and shapes, and equal values where there is no
 * average.
 */
#include "derived/average.h"

#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "plan/quantized_values.h"
#include "plan/tiles.h"
#include "read/box.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILE_BYTES = 1 << 20, MOST_NAMED = 5 };

/* The first few names that differ. */
typedef struct differences {
    size_t count;
    char text[512];
} differences;

static void add_name(differences *d, const char *name) {
    size_t used = strlen(d->text);
    if (d->count++ < MOST_NAMED) {
        snprintf(d->text + used, sizeof d->text - used, "%s%s", d->count > 1 ? ", " : "", name);
    }
}

static const char *more(const differences *d, char buf[40]) {
    buf[0] = '\0';
    if (d->count > MOST_NAMED) {
        snprintf(buf, 40, " and %zu more", d->count - MOST_NAMED);
    }
    return buf;
}

/* Fails if `here` has names that `there` lacks. */
static fc_code compare_names(const fc_checkpoint *here, const fc_names *has, const fc_checkpoint *there,
                             const fc_names *lacks, fc_error *err) {
    differences d = {0};
    char buf[40];
    for (size_t i = 0; i < has->count; i++) {
        if (fc_names_find(lacks, has->items[i].name) == FC_NO_NAME) {
            add_name(&d, has->items[i].name);
        }
    }
    if (d.count == 0) {
        return FC_OK;
    }
    fc_code rc =
        fc_fail(err, FC_EUSAGE, "%s lacks names that %s has: %s%s", there->path, here->path, d.text, more(&d, buf));
    return fc_advise(err, rc, FC_HINT_EXCLUDE, NULL);
}

/* Floating-point dtypes may differ: values are cast. */
static bool same_kind(const fc_tensor *a, const fc_tensor *b) {
    bool floats = fc_dtype_get(a->dtype)->cls == FC_CLASS_FLOAT && fc_dtype_get(b->dtype)->cls == FC_CLASS_FLOAT;
    return !a->object == !b->object && (a->dtype == b->dtype || floats);
}

static fc_code compare_types(const fc_average *a, size_t i, const fc_tensor *x, const fc_tensor *y, fc_error *err) {
    if (!same_kind(x, y)) {
        return fc_fail(err, FC_EUSAGE, "%s: '%s' is %s, but in %s it is %s", a->base.sources[i]->path, y->name,
                       fc_dtype_get(y->dtype)->torch_name, a->base.sources[0]->path,
                       fc_dtype_get(x->dtype)->torch_name);
    }
    if (!x->object && !fc_same_sizes(x->ndim, x->shape, y->ndim, y->shape)) {
        static const int64_t origin[FC_MAX_DIMS];
        fc_box p = {x->ndim, origin, x->shape}, q = {y->ndim, origin, y->shape};
        return fc_fail(err, FC_EUSAGE, "%s: tensor %s is %s, but in %s it is %s", a->base.sources[i]->path, y->name,
                       fc_box_to_text(&q).s, a->base.sources[0]->path, fc_box_to_text(&p).s);
    }
    return FC_OK;
}

/*
 * Compares the bytes of two values of the same dtype and shape, tile by tile. Also compares them with their recorded
 * CRCs, so that damage is not reported as a difference.
 */
static fc_code compare_bytes(const fc_checkpoint *a, const fc_tensor *x, const fc_checkpoint *b, const fc_tensor *y,
                             bool *equal, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box whole = {x->ndim, origin, x->shape};
    size_t element = fc_dtype_size(x->dtype);
    unsigned char *buf = malloc((size_t)2 * TILE_BYTES);
    fc_tiles tiles;
    fc_tile tile;
    fc_source_crc *sum_x = NULL, *sum_y = NULL;
    FC_NEED(buf, err, NULL);
    fc_code rc;
    FC_TRY_GOTO(fc_source_crc_new(a, x, 1, &sum_x, err), rc, out);
    FC_TRY_GOTO(fc_source_crc_new(b, y, 1, &sum_y, err), rc, out);
    fc_tiles_begin(&tiles, &whole, (int64_t)(TILE_BYTES / element), 1);
    *equal = true;
    while (*equal && fc_tiles_next(&tiles, &tile)) {
        fc_box box = {x->ndim, tile.offsets, tile.sizes};
        FC_TRY_GOTO(fc_read_box_crc(a, x, &box, x->dtype, buf, sum_x, err), rc, out);
        FC_TRY_GOTO(fc_read_box_crc(b, y, &box, y->dtype, buf + TILE_BYTES, sum_y, err), rc, out);
        *equal = memcmp(buf, buf + TILE_BYTES, (size_t)tile.count * element) == 0;
    }
    FC_TRY_GOTO(fc_source_crc_check(sum_x, NULL, fc_read_crc64, err), rc, out);
    rc = fc_source_crc_check(sum_y, NULL, fc_read_crc64, err);
out:
    fc_source_crc_free(sum_x);
    fc_source_crc_free(sum_y);
    free(buf);
    return rc;
}

/* Objects that decode to the same value are equal too: a zip may hold more than its object. */
static bool same_decoding(const fc_checkpoint *a, const fc_tensor *x, const fc_checkpoint *b, const fc_tensor *y) {
    fc_arena *arena = fc_arena_new();
    const char *p = NULL, *q = NULL;
    bool same = arena && fc_checkpoint_object_json(a, x, arena, &p, NULL) == FC_OK &&
                fc_checkpoint_object_json(b, y, arena, &q, NULL) == FC_OK && strcmp(p, q) == 0;
    fc_arena_free(arena);
    return same;
}

static fc_code compare_values(const fc_average *a, size_t i, const fc_tensor *x, const fc_tensor *y, differences *d,
                              fc_error *err) {
    bool equal = false;
    if (fc_same_sizes(x->ndim, x->shape, y->ndim, y->shape)) {
        FC_TRY(compare_bytes(a->base.sources[0], x, a->base.sources[i], y, &equal, err));
    }
    if (!equal && !(x->object && same_decoding(a->base.sources[0], x, a->base.sources[i], y))) {
        add_name(d, x->name);
    }
    return FC_OK;
}

static fc_code compare_source(const fc_average *a, const fc_names *names, size_t i, bool take_first, fc_error *err) {
    differences d = {0};
    char buf[40];
    FC_TRY(compare_names(a->base.sources[0], &names[0], a->base.sources[i], &names[i], err));
    FC_TRY(compare_names(a->base.sources[i], &names[i], a->base.sources[0], &names[0], err));
    for (size_t t = 0; t < names[0].count; t++) {
        const fc_tensor *x = names[0].items[t].tensor;
        const fc_tensor *y = names[i].items[fc_names_find(&names[i], names[0].items[t].name)].tensor;
        FC_TRY(compare_types(a, i, x, y, err));
        if (!take_first && !fc_is_averaged(x)) {
            FC_TRY(compare_values(a, i, x, y, &d, err));
        }
    }
    if (d.count == 0) {
        return FC_OK;
    }
    fc_code rc = fc_fail(err, FC_EUSAGE,
                         "%s and %s differ in values that cannot be averaged (integers, booleans, objects): %s%s",
                         a->base.sources[0]->path, a->base.sources[i]->path, d.text, more(&d, buf));
    return fc_advise(err, rc, FC_HINT_TAKE_FIRST, NULL);
}

/* Codes and scales of quantized weights cannot be averaged apart from each other. */
static fc_code refuse_codes(const fc_checkpoint *source, const fc_names *selected, fc_arena *arena, fc_error *err) {
    fc_quantized_values values;
    FC_TRY(fc_quantized_values_find(source, arena, &values, err));
    for (size_t i = 0; i < selected->count; i++) {
        const size_t index = (size_t)(selected->items[i].tensor - source->tensors);
        if (values.of[index].codes != FC_NO_NAME) {
            return fc_quantized_refuse_undequantized(source, &values, index,
                                                     "an average of each would not be that of the weights", arena, err);
        }
    }
    return FC_OK;
}

fc_code fc_average_compare(const fc_average *a, const fc_names *names, bool take_first, fc_arena *arena,
                           fc_error *err) {
    for (size_t i = 0; i < a->base.count; i++) {
        FC_TRY(refuse_codes(a->base.sources[i], &names[i], arena, err));
    }
    for (size_t i = 1; i < a->base.count; i++) {
        FC_TRY(compare_source(a, names, i, take_first, err));
    }
    return FC_OK;
}
