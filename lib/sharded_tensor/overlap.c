/*
 * Checks whether enumerated shards overlap and whether they cover a tensor. Shards come from a checkpoint's metadata,
 * so their numbers are checked before they are added.
 * The messages begin with PyTorch's own words, so that people find them.
 */
#include "fsdpckpt/sharded_tensor/sharding_spec.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARD_TEXT = 256 };

/* Appends like snprintf: *used also counts the bytes that do not fit. */
__attribute__((format(printf, 4, 5))) static void append(char *buf, size_t size, int *used, const char *fmt, ...) {
    va_list args;
    size_t at = (size_t)*used < size ? (size_t)*used : size;
    va_start(args, fmt);
    int n = vsnprintf(size > at ? buf + at : NULL, size - at, fmt, args);
    va_end(args);
    *used += n > 0 ? n : 0;
}

static void append_numbers(char *buf, size_t size, int *used, int n, const int64_t *numbers) {
    append(buf, size, used, "[");
    for (int i = 0; i < n; i++) {
        append(buf, size, used, "%s%" PRId64, i > 0 ? ", " : "", numbers[i]);
    }
    append(buf, size, used, "]");
}

int fc_shard_metadata_format(const fc_shard_metadata *shard, char *buf, size_t size) {
    char placement[128] = "None";
    int used = 0;
    if (shard->has_placement) {
        fc_remote_device_format(&shard->placement, placement, sizeof placement);
    }
    append(buf, size, &used, "ShardMetadata(shard_offsets=");
    append_numbers(buf, size, &used, shard->box.ndim, shard->box.offsets);
    append(buf, size, &used, ", shard_sizes=");
    append_numbers(buf, size, &used, shard->box.ndim, shard->box.sizes);
    append(buf, size, &used, ", placement=%s)", placement);
    return used;
}

static int64_t start_of(const fc_shard_metadata *s, int d) {
    return s->box.offsets[d];
}

static int64_t end_of(const fc_shard_metadata *s, int d) {
    return s->box.offsets[d] + s->box.sizes[d];
}

/* An empty shard inside another shard overlaps it, as in torch. */
static bool pair_overlaps(const fc_shard_metadata *a, const fc_shard_metadata *b) {
    for (int d = 0; d < a->box.ndim; d++) {
        if (start_of(a, d) >= end_of(b, d) || start_of(b, d) >= end_of(a, d)) {
            return false;
        }
    }
    return true;
}

/* Finds the dimensions in which the shards differ in offset or size. @return their number. */
static int sharded_dims(const fc_shard_metadata *shards, size_t count, int *dims) {
    int n = 0;
    for (int d = 0; d < shards[0].box.ndim; d++) {
        for (size_t i = 1; i < count; i++) {
            if (start_of(&shards[i], d) != start_of(&shards[0], d) ||
                shards[i].box.sizes[d] != shards[0].box.sizes[d]) {
                dims[n++] = d;
                break;
            }
        }
    }
    return n;
}

static bool empty_at_origin(const fc_shard_metadata *s) {
    bool empty = false;
    for (int d = 0; d < s->box.ndim; d++) {
        if (s->box.offsets[d] != 0) {
            return false;
        }
        empty = empty || s->box.sizes[d] == 0;
    }
    return empty;
}

/* The criteria by which a sweep sorts shards. */
typedef struct order {
    const fc_shard_metadata *shards;
    const int *dims; /* the dimension of the sweep comes first */
    int ndims;
} order;

static int compare_starts(const void *pa, const void *pb, void *context) {
    const order *o = context;
    size_t a = *(const size_t *)pa, b = *(const size_t *)pb;
    for (int i = 0; i < o->ndims; i++) {
        FC_ORDER_BY(start_of(&o->shards[a], o->dims[i]), start_of(&o->shards[b], o->dims[i]));
    }
    /* In one dimension the shorter comes first: an empty shard does not overlap the shard that starts where it is. */
    if (o->ndims == 1) {
        FC_ORDER_BY(end_of(&o->shards[a], o->dims[0]), end_of(&o->shards[b], o->dims[0]));
    }
    return FC_ORDER(a, b);
}

typedef struct pair {
    bool found;
    size_t a, b;
} pair;

/* Sorted intervals overlap only if neighbours do. */
static pair find_1d(const fc_shard_metadata *shards, const size_t *sorted, size_t count, int dim) {
    for (size_t i = 0; i + 1 < count; i++) {
        if (end_of(&shards[sorted[i]], dim) > start_of(&shards[sorted[i + 1]], dim)) {
            return (pair){true, sorted[i], sorted[i + 1]};
        }
    }
    return (pair){false, 0, 0};
}

/*
 * Sweeps along dims[0]. `active` holds the shards that have not ended yet; each new shard is compared with them. If it
 * overlaps several, the one that ends first is reported, as in torch.
 */
static pair find_nd(const fc_shard_metadata *shards, const size_t *sorted, size_t count, int dim, size_t *active) {
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const fc_shard_metadata *current = &shards[sorted[i]];
        pair found = {false, 0, sorted[i]};
        size_t kept = 0;
        for (size_t k = 0; k < n; k++) {
            const fc_shard_metadata *other = &shards[active[k]];
            if (end_of(other, dim) <= start_of(current, dim)) {
                continue;
            }
            active[kept++] = active[k];
            if (!pair_overlaps(current, other)) {
                continue;
            }
            int64_t best = found.found ? end_of(&shards[found.a], dim) : INT64_MAX;
            if (!found.found || end_of(other, dim) < best || (end_of(other, dim) == best && active[k] < found.a)) {
                found.found = true;
                found.a = active[k];
            }
        }
        if (found.found) {
            return found;
        }
        n = kept;
        active[n++] = sorted[i];
    }
    return (pair){false, 0, 0};
}

/* Moves the dimension in which the first shard reaches farthest to the front. */
static void choose_sweep(const fc_shard_metadata *first, int *dims, int ndims) {
    int best = 0;
    for (int i = 1; i < ndims; i++) {
        best = end_of(first, dims[i]) > end_of(first, dims[best]) ? i : best;
    }
    int sweep = dims[best];
    memmove(dims + 1, dims, (size_t)best * sizeof *dims);
    dims[0] = sweep;
}

static fc_code find_overlap(const fc_shard_metadata *shards, size_t count, int *dims, int ndims, pair *out,
                            fc_error *err) {
    fc_code code = FC_OK;
    size_t *sorted = calloc(count, sizeof *sorted);
    size_t *active = calloc(count, sizeof *active);
    if (!sorted || !active) {
        code = fc_no_memory(err, NULL);
        goto out;
    }
    choose_sweep(&shards[0], dims, ndims);
    for (size_t i = 0; i < count; i++) {
        sorted[i] = i;
    }
    order o = {shards, dims, ndims};
    fc_sort_items_by(sorted, count, sizeof *sorted, compare_starts, &o);
    *out = ndims == 1 ? find_1d(shards, sorted, count, dims[0]) : find_nd(shards, sorted, count, dims[0], active);
out:
    free(sorted);
    free(active);
    return code;
}

fc_code fc_validate_non_overlapping_shards_metadata(const fc_shard_metadata *shards, size_t count, fc_error *err) {
    int dims[FC_MAX_DIMS];
    pair found = {false, 0, 1};
    if (count < 2) {
        return FC_OK;
    }
    int ndims = sharded_dims(shards, count, dims);
    if (ndims > 0) {
        FC_TRY(find_overlap(shards, count, dims, ndims, &found, err));
    } else {
        found.found = !empty_at_origin(&shards[0]);
    }
    if (!found.found) {
        return FC_OK;
    }
    char a[SHARD_TEXT], b[SHARD_TEXT];
    fc_shard_metadata_format(&shards[found.a], a, sizeof a);
    fc_shard_metadata_format(&shards[found.b], b, sizeof b);
    return fc_fail(err, FC_ECORRUPT, "shards %zu %s and %zu %s overlap", found.a, a, found.b, b);
}

fc_code fc_enumerable_sharding_spec_check(const fc_enumerable_sharding_spec *spec, fc_error *err) {
    if (spec->count == 0) {
        return fc_fail(err, FC_ECORRUPT, "empty shard list provided; a tensor has at least one shard");
    }
    for (size_t i = 0; i < spec->count; i++) {
        const fc_box *box = &spec->shards[i].box;
        char text[SHARD_TEXT];
        if (box->ndim < 0 || box->ndim > FC_MAX_DIMS) {
            return fc_fail(err, FC_EUNSUPPORTED, "shard %zu has %d dimensions; at most %d are supported", i, box->ndim,
                           FC_MAX_DIMS);
        }
        fc_shard_metadata_format(&spec->shards[i], text, sizeof text);
        for (int d = 0; d < box->ndim; d++) {
            int64_t end;
            if (box->offsets[d] < 0 || box->sizes[d] < 0 || !fc_add_i64(box->offsets[d], box->sizes[d], &end)) {
                return fc_fail(err, FC_ECORRUPT, "shard %zu %s: an offset or size is negative or exceeds 64 bits", i,
                               text);
            }
        }
        if (box->ndim != spec->shards[0].box.ndim) {
            return fc_fail(err, FC_ECORRUPT, "found inconsistent ranks for shards: %d and %d: shard %zu is %s",
                           spec->shards[0].box.ndim, box->ndim, i, text);
        }
    }
    return fc_validate_non_overlapping_shards_metadata(spec->shards, spec->count, err);
}

fc_code fc_check_tensor(const fc_shard_metadata *shards, size_t count, int ndim, const int64_t *shape, fc_error *err) {
    int64_t total = 0, volume;
    if (!fc_numel(ndim, shape, &volume)) {
        return fc_fail(err, FC_ECORRUPT, "the number of elements of the tensor exceeds 64 bits");
    }
    for (size_t i = 0; i < count; i++) {
        const fc_box *box = &shards[i].box;
        char text[SHARD_TEXT];
        int64_t n;
        if (box->ndim != ndim) {
            return fc_fail(err, FC_ECORRUPT, "rank of tensor is %d, but shards rank is %d", ndim, box->ndim);
        }
        fc_shard_metadata_format(&shards[i], text, sizeof text);
        for (int d = 0; d < ndim; d++) {
            int64_t end;
            if (box->offsets[d] < 0 || box->sizes[d] < 0 || !fc_add_i64(box->offsets[d], box->sizes[d], &end) ||
                end > shape[d]) {
                return fc_fail(err, FC_ECORRUPT,
                               "shard offset %" PRId64 " and length %" PRId64 " exceeds tensor dim: %" PRId64
                               " for shard %zu %s",
                               box->offsets[d], box->sizes[d], shape[d], i, text);
            }
        }
        if (!fc_numel(ndim, box->sizes, &n) || !fc_add_i64(total, n, &total)) {
            return fc_fail(err, FC_ECORRUPT, "the total volume of the shards exceeds 64 bits at shard %zu %s", i, text);
        }
    }
    if (total != volume) {
        return fc_fail(err, FC_ECORRUPT,
                       "total volume of shards: %" PRId64 " does not match tensor volume: %" PRId64
                       ": the %zu shards do not cover the entire tensor",
                       total, volume, count);
    }
    return FC_OK;
}
