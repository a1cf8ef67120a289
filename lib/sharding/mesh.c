/*
 * Meshes and local boxes: computes which box of a tensor the rank at a coordinate holds.
 */
#include "fsdpckpt/mesh.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"

#include "base/checked.h"
#include "sharding/recorded.h"

#include <string.h>

bool fc_mesh_equal(const fc_mesh *a, const fc_mesh *b) {
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++) {
        same = a->sizes[i] == b->sizes[i] && strcmp(a->names[i], b->names[i]) == 0;
    }
    return same;
}

int64_t fc_mesh_ranks(const fc_mesh *mesh) {
    int64_t ranks = 1;
    for (int m = 0; m < mesh->ndim; m++) {
        ranks *= mesh->sizes[m];
    }
    return ranks;
}

void fc_mesh_coordinate(const fc_mesh *mesh, int64_t rank, int64_t *coordinate) {
    for (int m = mesh->ndim - 1; m >= 0; m--) {
        coordinate[m] = rank % mesh->sizes[m];
        rank /= mesh->sizes[m];
    }
}

int64_t fc_mesh_rank(const fc_mesh *mesh, const int64_t *coordinate) {
    int64_t rank = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        rank = rank * mesh->sizes[m] + coordinate[m];
    }
    return rank;
}

void fc_shard_range(int64_t size, int64_t count, int64_t index, int64_t *offset, int64_t *length) {
    int64_t full = size / count + (size % count != 0);
    /* Compares by division, because full × index may overflow when the size is near 2^63. */
    if (full == 0 || index > size / full) {
        *offset = size;
        *length = 0;
        return;
    }
    *offset = full * index;
    *length = size - *offset < full ? size - *offset : full;
}

/*
 * The elements that a rank holds after a division: `share` elements of each of `full` blocks, and `rest` elements of
 * one shorter block. Later blocks are empty.
 */
typedef struct held {
    int64_t block;             /* elements of a full block */
    int64_t full;              /* number of full blocks */
    int64_t offset, share;     /* the rank's elements in a full block */
    int64_t rest_offset, rest; /* the rank's elements in the shorter block */
} held;

/*
 * The division of a tensor dimension by a mesh dimension of `count` ranks. `index` is the rank's coordinate. A split of
 * 1 is Shard. A larger one is _StridedShard: the dimension is divided into `split` blocks and each block into `count`
 * shards; the rank holds shard `index` of every block, in order.
 */
typedef struct division {
    int64_t count, index, split;
    held held; /* the elements that the rank holds after it */
} division;

/* Computes what the rank holds of a dimension of `size`. @return the size after the division. */
static int64_t divide(division *d, int64_t size) {
    held p = {0};
    p.block = size / d->split + (size % d->split != 0);
    if (p.block > 0) {
        p.full = size / p.block;
        fc_shard_range(p.block, d->count, d->index, &p.offset, &p.share);
        if (p.full * p.block < size) {
            fc_shard_range(size - p.full * p.block, d->count, d->index, &p.rest_offset, &p.rest);
        }
    }
    d->held = p;
    return p.full * p.share + p.rest;
}

/* @return the index that element `i` of the rank has in the whole dimension. */
static int64_t index_before(const division *d, int64_t i) {
    const held *p = &d->held;
    if (i < p->full * p->share) {
        return i / p->share * p->block + p->offset + i % p->share;
    }
    return p->full * p->block + p->rest_offset + (i - p->full * p->share);
}

/*
 * Applies the divisions in their order to a dimension of `size`, with the same result as torch's explicit index lists.
 * The indices of the local elements ascend, so they are contiguous exactly when the last minus the first is their
 * number minus one.
 * @return whether the local shard is one interval. An empty one starts at `size`.
 */
static bool divide_all(int64_t size, division *all, int count, int64_t *offset, int64_t *length) {
    int64_t n = size;
    for (int i = 0; i < count; i++) {
        n = divide(&all[i], n);
    }
    *length = n;
    *offset = size;
    if (n == 0) {
        return true;
    }
    int64_t first = 0, last = n - 1;
    for (int i = count - 1; i >= 0; i--) {
        first = index_before(&all[i], first);
        last = index_before(&all[i], last);
    }
    *offset = first;
    return last - first == n - 1;
}

/* @return whether the _StridedShard at `at` is FSDP's, because the later divisions make exactly split_factor shards. */
static bool fsdp_over_tp(const division *all, int count, int at) {
    int64_t later = 1;
    for (int i = at + 1; i < count; i++) {
        if (!fc_mul_i64(later, all[i].count, &later)) {
            return false;
        }
    }
    return all[at].split > 1 && all[at].split == later;
}

/*
 * Puts the divisions into the order in which the ranks made them. FSDP divides what TP left each rank, so its division
 * comes last and is a plain one.
 */
static void order_divisions(division *all, int count) {
    division fsdp[FC_MAX_MESH_DIMS];
    int nfsdp = 0, n = 0;
    for (int i = 0; i < count; i++) {
        if (fsdp_over_tp(all, count, i)) {
            fsdp[nfsdp] = all[i];
            fsdp[nfsdp++].split = 1;
        } else {
            all[n++] = all[i];
        }
    }
    while (nfsdp > 0) {
        all[n++] = fsdp[--nfsdp];
    }
}

static fc_code check_placement(int ndim, const fc_mesh *mesh, int m, const fc_placement *p, const int64_t *coordinate,
                               fc_error *err) {
    if (mesh->sizes[m] < 1 || coordinate[m] < 0 || coordinate[m] >= mesh->sizes[m]) {
        return fc_fail(err, FC_EUSAGE, "mesh dimension %d: coordinate %lld is outside its size %lld", m,
                       (long long)coordinate[m], (long long)mesh->sizes[m]);
    }
    if (p->kind == FC_PARTIAL) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "mesh dimension %d: the placement is Partial, a sum that is not reduced yet and has no box; "
                       "reduce the tensor before saving it",
                       m);
    }
    if (p->kind == FC_REPLICATE) {
        return FC_OK;
    }
    if (p->dim < 0 || p->dim >= ndim) {
        return fc_fail(err, FC_EUSAGE, "mesh dimension %d: Shard(%d) does not fit a tensor of %d dimensions", m, p->dim,
                       ndim);
    }
    if (p->kind == FC_STRIDED_SHARD && p->split_factor < 1) {
        return fc_fail(err, FC_EUSAGE,
                       "mesh dimension %d: _StridedShard(%d, %lld): the split factor must be at least 1", m, p->dim,
                       (long long)p->split_factor);
    }
    return FC_OK;
}

/* Lists the divisions of dimension `d` in the order of the placements. @return their number. */
static int divisions_of(int d, const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
                        division *all) {
    int count = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        const fc_placement *p = &placements[m];
        if (p->kind != FC_REPLICATE && p->dim == d) {
            int64_t split = p->kind == FC_STRIDED_SHARD ? p->split_factor : 1;
            all[count++] = (division){.count = mesh->sizes[m], .index = coordinate[m], .split = split};
        }
    }
    return count;
}

static fc_code check_call(int ndim, const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
                          fc_error *err) {
    if (mesh->ndim < 0 || mesh->ndim > FC_MAX_MESH_DIMS || ndim < 0 || ndim > FC_MAX_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "the tensor has %d dimensions and the mesh %d; at most %d and %d are supported", ndim,
                       mesh->ndim, FC_MAX_DIMS, FC_MAX_MESH_DIMS);
    }
    for (int m = 0; m < mesh->ndim; m++) {
        FC_TRY(check_placement(ndim, mesh, m, &placements[m], coordinate, err));
    }
    return FC_OK;
}

fc_code fc_local_box(int ndim, const int64_t *shape, const fc_mesh *mesh, const fc_placement *placements,
                     const int64_t *coordinate, int64_t *offsets, int64_t *sizes, fc_error *err) {
    FC_TRY(check_call(ndim, mesh, placements, coordinate, err));
    for (int d = 0; d < ndim; d++) {
        division all[FC_MAX_MESH_DIMS];
        const int count = divisions_of(d, mesh, placements, coordinate, all);
        order_divisions(all, count);
        if (!divide_all(shape[d], all, count, &offsets[d], &sizes[d])) {
            char text[256];
            fc_placements_format(mesh->ndim, placements, text, (int)sizeof text);
            return fc_fail(err, FC_EUNSUPPORTED,
                           "placements %s give a rank rows of dimension %d (size %lld) that are not contiguous, so it "
                           "would not hold one box",
                           text, d, (long long)shape[d]);
        }
    }
    return FC_OK;
}

fc_code fc_recorded_box(int ndim, const int64_t *shape, const fc_mesh *mesh, const fc_placement *placements,
                        const int64_t *coordinate, int64_t *offsets, int64_t *sizes, fc_error *err) {
    FC_TRY(check_call(ndim, mesh, placements, coordinate, err));
    for (int d = 0; d < ndim; d++) {
        division all[FC_MAX_MESH_DIMS];
        const int count = divisions_of(d, mesh, placements, coordinate, all);
        divide_all(shape[d], all, count, &offsets[d], &sizes[d]); /* torch ignores that it may be no interval */
    }
    return FC_OK;
}
