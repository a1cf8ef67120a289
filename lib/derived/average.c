/*
 * An average as a checkpoint: the manifest of the first source, with chunks that are computed when they are read. To
 * the engine it is another format.
 */
#include "fsdpckpt/average.h"

#include "checkpoint/list_budget.h"
#include "derived/average.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "plan/names.h"
#include "plan/tiles.h"
#include "read/box.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/*
 * Bytes of a computed chunk. A worker holds two of them. Even 1 MiB of memory can hold the smallest; larger ones keep
 * the list of a very large model short.
 */
enum { LEAST_CHUNK = 256 << 10, MOST_CHUNK = 4 << 20, MOST_CHUNKS = 1 << 20 };

/* Elements are computed as doubles. A complex number counts as two real ones. */
typedef struct arithmetic {
    fc_dtype stored; /* of a component */
    size_t components;
} arithmetic;

static arithmetic arithmetic_of(fc_dtype dtype) {
    const fc_dtype_info *info = fc_dtype_get(dtype);
    return (arithmetic){info->component, info->cls == FC_CLASS_COMPLEX ? 2 : 1};
}

bool fc_is_averaged(const fc_tensor *tensor) {
    fc_dtype_class cls = fc_dtype_get(tensor->dtype)->cls;
    return cls == FC_CLASS_FLOAT || cls == FC_CLASS_COMPLEX;
}

/* ---- computing a chunk ---- */

/*
 * Adds the values of source `i` to the sums; the first source starts them. `errors` receives the rounding errors of
 * sums and products (Ogita, Rump, Oishi: Accurate sum and dot product). It is NULL for types with less precision than
 * double, whose sums are exact enough.
 */
static void accumulate(const fc_average *a, size_t i, double *sums, double *errors, const double *x, size_t count) {
    const double weight = a->weights ? a->weights[i] : 1;
    for (size_t k = 0; k < count; k++) {
        const double value = weight * x[k], before = sums[k], total = i == 0 ? value : before + value;
        sums[k] = total;
        if (errors) {
            const double added = total - before;
            const double lost = i == 0 ? 0 : errors[k] + ((before - (total - added)) + (value - added));
            errors[k] = a->weights ? lost + fma(weight, x[k], -value) : lost;
        }
    }
}

/* @return the sum, or its quotient by `n`, with the rounding errors added. Zeros keep their sign, infinities stay. */
static double corrected(double sum, double error, double n) {
    const double value = sum / n, rest = fma(-value, n, sum) + error;
    return isfinite(rest) && rest != 0 ? value + rest / n : value;
}

/* Rounds to a float so that rounding this to a type of less precision gives what rounding `x` gives: if the result is
 * not exact, its last bit is 1. */
static float round_to_odd(double x) {
    float y = (float)x;
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    if (isfinite(y) && (double)y != x && (bits & 1) == 0) {
        bits += fabs((double)y) < fabs(x) ? 1U : -1U; /* the neighbour on the other side of x */
        memcpy(&y, &bits, sizeof y);
    }
    return y;
}

/* Turns sums into averages and stores them, rounded once. */
static void store(const fc_average *a, double *sums, const double *errors, fc_dtype stored, void *out, size_t count) {
    const double n = a->weights ? 1 : (double)a->base.count;
    float *floats = (float *)sums; /* in place: element k is written after it was read */
    for (size_t k = 0; k < count; k++) {
        const double value = errors ? corrected(sums[k], errors[k], n) : sums[k] / n;
        if (stored == FC_F64) {
            sums[k] = value;
        } else {
            const float rounded = stored == FC_F32 ? (float)value : round_to_odd(value);
            memcpy(floats + k, &rounded, sizeof rounded);
        }
    }
    fc_cast(stored == FC_F64 ? FC_F64 : FC_F32, sums, stored, out, count);
}

/* Reads one source's values of a box as doubles. Real numbers are cast while they are read. */
static fc_code read_values(const fc_checkpoint *source, const fc_tensor *tensor, const fc_box *box, const arithmetic *w,
                           double *x, void *raw, fc_source_crc *crc, fc_error *err) {
    if (w->components == 1) {
        return fc_read_box_crc(source, tensor, box, FC_F64, x, crc, err);
    }
    FC_TRY(fc_read_box_crc(source, tensor, box, tensor->dtype, raw, crc, err));
    fc_cast(w->stored, raw, FC_F64, x, (size_t)fc_box_volume(box) * w->components);
    return FC_OK;
}

/* Adds up the box of every input. */
static fc_code sum_inputs(const fc_average *a, const fc_average_inputs *of, const fc_box *box, const arithmetic *w,
                          double *sums, double *errors, double *x, void *raw, fc_source_crc *const *crcs,
                          fc_error *err) {
    const size_t count = (size_t)fc_box_volume(box) * w->components;
    for (size_t i = 0; i < a->base.count; i++) {
        FC_TRY_CONTEXT(read_values(a->base.sources[i], of->inputs[i], box, w, x, raw, crcs[i], err), err, "%s",
                       a->base.sources[i]->path);
        accumulate(a, i, sums, errors, x, count);
    }
    return FC_OK;
}

static fc_code average_chunk(const fc_average *a, const fc_tensor *tensor, const fc_box *box,
                             fc_source_crc *const *crcs, void *out, fc_error *err) {
    const arithmetic w = arithmetic_of(tensor->dtype);
    const bool precise = w.stored == FC_F64;
    const size_t count = (size_t)fc_box_volume(box) * w.components;
    double *sums = calloc(count, sizeof *sums), *x = malloc(count * sizeof *x);
    double *errors = precise ? calloc(count, sizeof *errors) : NULL;
    fc_code rc = FC_OK;
    if (!sums || !x || (precise && !errors)) {
        rc = fc_no_memory(err, tensor->name);
        goto out;
    }
    FC_TRY_GOTO(sum_inputs(a, tensor->detail, box, &w, sums, errors, x, out, crcs, err), rc, out);
    store(a, sums, errors, w.stored, out, count);
out:
    free(sums);
    free(x);
    free(errors);
    return rc;
}

static fc_code compute_average(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                               void *buf, fc_error *err) {
    const fc_average_inputs *of = tensor->detail;
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[index]);
    return fc_is_averaged(tensor)
               ? average_chunk((const fc_average *)derived, tensor, &box, crcs, buf, err)
               : fc_read_box_crc(derived->sources[0], of->inputs[0], &box, tensor->dtype, buf, crcs[0], err);
}

static const fc_derived_kind average_kind = {
    .name = "average", .lists_path = true, .size = sizeof(fc_average), .compute = compute_average};

/* ---- the manifest ---- */

/* Divides a tensor into contiguous chunks. */
static fc_code make_chunks(fc_tensor *tensor, size_t chunk_size, fc_list_budget *lists, fc_arena *arena,
                           fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    arithmetic w = arithmetic_of(tensor->dtype);
    const fc_box whole = {tensor->ndim, origin, tensor->shape};
    size_t element = fc_is_averaged(tensor) ? w.components * sizeof(double) : fc_dtype_size(tensor->dtype);
    fc_tiles tiles;
    fc_tile tile;
    size_t n = 0;
    fc_tiles_begin(&tiles, &whole, (int64_t)(chunk_size / element), 1);
    while (fc_tiles_next(&tiles, &tile)) {
        n++;
        FC_TRY(fc_list_budget_take(lists, 1, sizeof(fc_chunk) + 1 + 2 * (size_t)tensor->ndim * sizeof(int64_t), err));
    }
    fc_chunk *chunks = fc_arena_calloc(arena, n, sizeof *chunks);
    int64_t *dims = fc_arena_calloc(arena, n, 2 * (size_t)tensor->ndim * sizeof *dims);
    FC_NEED(chunks && dims, err, tensor->name);
    fc_tiles_begin(&tiles, &whole, (int64_t)(chunk_size / element), 1);
    for (size_t i = 0; i < n && fc_tiles_next(&tiles, &tile); i++, dims += 2 * tensor->ndim) {
        memcpy(dims, tile.offsets, (size_t)tensor->ndim * sizeof *dims);
        memcpy(dims + tensor->ndim, tile.sizes, (size_t)tensor->ndim * sizeof *dims);
        chunks[i] = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
    }
    tensor->chunks = chunks;
    tensor->nchunks = n;
    return FC_OK;
}

/* Returns the bytes of a computed chunk. */
static size_t chunk_bytes(const fc_names *names) {
    uint64_t total = 0;
    for (size_t i = 0; i < names->count; i++) {
        const fc_tensor *t = names->items[i].tensor;
        const fc_box whole = {t->ndim, NULL, t->shape};
        total += (uint64_t)fc_box_volume(&whole) *
                 4; /* an overflow, possible only in a hostile file, merely gives another chunk size */
    }
    uint64_t chunk_size = total / MOST_CHUNKS;
    return chunk_size < LEAST_CHUNK ? LEAST_CHUNK : chunk_size > MOST_CHUNK ? MOST_CHUNK : (size_t)chunk_size;
}

static fc_code make_tensors(fc_checkpoint *average, const fc_names *names, fc_error *err) {
    const fc_average *a = average->state;
    fc_tensor *tensors = fc_arena_calloc(average->arena, names[0].count, sizeof *tensors);
    FC_NEED(tensors, err, average->path);
    fc_list_budget lists;
    fc_list_budget_begin(&lists, a->base.sources, a->base.count);
    size_t chunk_size = chunk_bytes(&names[0]);
    for (size_t t = 0; t < names[0].count; t++) {
        fc_average_inputs *of = fc_arena_calloc(average->arena, 1, sizeof *of);
        const fc_tensor **inputs = fc_arena_calloc(average->arena, a->base.count, sizeof *inputs);
        FC_NEED(of && inputs, err, average->path);
        for (size_t i = 0; i < a->base.count; i++) {
            inputs[i] = names[i].items[fc_names_find(&names[i], names[0].items[t].name)].tensor;
        }
        tensors[t] = *inputs[0];
        tensors[t].detail = of;
        FC_TRY(make_chunks(&tensors[t], chunk_size, &lists, average->arena, err));
        of->inputs = inputs;
        of->from = (fc_origin){.kind = FC_ORIGIN_COMPUTED, .tensor = inputs[0]};
        of->from.reads = fc_is_averaged(inputs[0]) ? (uint32_t)a->base.count : 1;
        FC_TRY(fc_derived_record_reads(average, &tensors[t], &of->from, err));
    }
    average->tensors = tensors;
    average->ntensors = names[0].count;
    return FC_OK;
}

/* Copies the weights, divided by their sum. */
static fc_code make_weights(fc_average *a, const double *weights, fc_arena *arena, fc_error *err) {
    double sum = 0;
    if (!weights) {
        return FC_OK;
    }
    double *own = fc_arena_calloc(arena, a->base.count, sizeof *own);
    FC_NEED(own, err, a->base.sources[0]->path);
    for (size_t i = 0; i < a->base.count; i++) {
        sum += weights[i];
    }
    if (!isfinite(sum) || sum == 0) {
        return fc_fail(err, FC_EUSAGE, "the sum of the weights is %g and cannot be divided by", sum);
    }
    for (size_t i = 0; i < a->base.count; i++) {
        own[i] = weights[i] / sum;
    }
    a->weights = own;
    return FC_OK;
}

static fc_code fill_average(fc_checkpoint *average, fc_checkpoint *const *sources, size_t count,
                            const fc_average_options *options, fc_error *err) {
    fc_arena *arena = average->arena;
    fc_average *a = average->state;
    fc_names *names = fc_arena_calloc(arena, count, sizeof *names);
    FC_NEED(names, err, average->path);
    average->mesh = sources[0]->mesh;
    average->producer = NULL;
    FC_TRY(make_weights(a, options->weights, arena, err));
    for (size_t i = 0; i < count; i++) {
        if (sources[i]->format->layout_only) {
            return fc_fail(err, FC_EUSAGE, "%s: a schema has no data to average", sources[i]->path);
        }
        FC_TRY(fc_names_make(sources[i], options->selection, NULL, arena, &names[i], err));
    }
    FC_TRY(fc_derived_collect_crcs(average, err));
    FC_TRY(fc_average_compare(a, names, options->take_first, arena, err));
    return make_tensors(average, names, err);
}

fc_code fc_average_open(fc_checkpoint *const *sources, size_t count, const fc_average_options *options,
                        fc_checkpoint **out, fc_error *err) {
    static const fc_average_options defaults = {0};
    *out = NULL;
    if (count == 0) {
        return fc_fail(err, FC_EUSAGE, "nothing to average: no checkpoint is given");
    }
    fc_checkpoint *average;
    FC_TRY(fc_derived_new(&average_kind, sources, count, &average, err));
    const fc_code rc = fill_average(average, sources, count, options ? options : &defaults, err);
    return fc_derived_finish(average, rc, out);
}
