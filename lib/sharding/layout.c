/*
 * Layouts: from `--replicas --dp --tp` to a mesh, from a tensor's TP dimension to its placements, and from those to the
 * rank that stores a replicated box. Called by the plan of a conversion; pure arithmetic.
 */
#include "fsdpckpt/layout.h"

#include "core/checked.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 1 << 20 };

fc_code fc_layout_mesh(const fc_layout_spec *spec, fc_mesh *mesh, fc_error *err) {
    const struct {
        const char *name, *option;
        int64_t size;
    } wanted[] = {{"replicate", "--replicas", spec->replicas}, {"dp", "--dp", spec->dp}, {"tp", "--tp", spec->tp}};
    memset(mesh, 0, sizeof *mesh);
    int64_t ranks = 1;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        int64_t size = wanted[i].size;
        if (size == 0) {
            continue;
        }
        if (size < 0) {
            return fc_fail(err, FC_EUSAGE, "%s %lld: must be at least 1", wanted[i].option, (long long)size);
        }
        if (!fc_mul_i64(ranks, size, &ranks) || ranks > MAX_RANKS) {
            return fc_fail(err, FC_EUSAGE, "%s %lld: more than %d ranks in all", wanted[i].option, (long long)size,
                           MAX_RANKS);
        }
        mesh->sizes[mesh->ndim] = size;
        snprintf(mesh->names[mesh->ndim], sizeof mesh->names[0], "%s", wanted[i].name);
        mesh->ndim++;
    }
    if (mesh->ndim == 0) {
        return fc_fail(err, FC_EUSAGE, "no layout given: say --dp N, --tp N, --replicas N or several of them");
    }
    return FC_OK;
}

static int64_t size_of(const fc_mesh *mesh, const char *name) {
    for (int m = 0; m < mesh->ndim; m++) {
        if (strcmp(mesh->names[m], name) == 0) {
            return mesh->sizes[m];
        }
    }
    return 1;
}

void fc_layout_placements(const fc_mesh *mesh, int ndim, int tp_dim, fc_placement *placements) {
    int64_t tp = size_of(mesh, "tp");
    for (int m = 0; m < mesh->ndim; m++) {
        fc_placement p = {FC_REPLICATE, 0, 0};
        if (ndim > 0 && strcmp(mesh->names[m], "dp") == 0) {
            /* fully_shard makes a _StridedShard only when TP really splits, so tp 1 gives Shard(0) there and here. */
            p.kind = tp_dim == 0 && tp > 1 ? FC_STRIDED_SHARD : FC_SHARD;
            p.split_factor = p.kind == FC_STRIDED_SHARD ? tp : 0;
        } else if (tp_dim >= 0 && tp_dim < ndim && strcmp(mesh->names[m], "tp") == 0) {
            p.kind = FC_SHARD;
            p.dim = tp_dim;
        }
        placements[m] = p;
    }
}

/* How many ranks hold each box: the product of the mesh dimensions that replicate. */
static int64_t holders(const fc_mesh *mesh, const fc_placement *placements) {
    int64_t count = 1;
    for (int m = 0; m < mesh->ndim; m++) {
        count *= placements[m].kind == FC_REPLICATE ? mesh->sizes[m] : 1;
    }
    return count;
}

/* The number of the rank at `coordinate` among those that hold its box, in rank order. */
static int64_t holder_index(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate) {
    int64_t index = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        if (placements[m].kind == FC_REPLICATE) {
            index = index * mesh->sizes[m] + coordinate[m];
        }
    }
    return index;
}

int64_t fc_layout_owner(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
                        uint32_t owner_offset) {
    int64_t owner[FC_MAX_MESH_DIMS];
    int64_t index = (int64_t)owner_offset % holders(mesh, placements);
    for (int m = mesh->ndim - 1; m >= 0; m--) {
        owner[m] = coordinate[m];
        if (placements[m].kind == FC_REPLICATE) {
            owner[m] = index % mesh->sizes[m];
            index /= mesh->sizes[m];
        }
    }
    return fc_mesh_rank(mesh, owner);
}

/*
 * The mesh with the dimensions that no tensor replicates set to 1: all ranks along such a dimension get the same load,
 * so one of them speaks for all. Keeps the spreading cheap on large meshes.
 */
static fc_mesh choices_of(const fc_mesh *mesh, size_t count, const fc_placement *placements) {
    fc_mesh choices = *mesh;
    for (int m = 0; m < mesh->ndim; m++) {
        bool replicated = false;
        for (size_t i = 0; i < count && !replicated; i++) {
            replicated = placements[i * (size_t)mesh->ndim + (size_t)m].kind == FC_REPLICATE;
        }
        choices.sizes[m] = replicated ? mesh->sizes[m] : 1;
    }
    return choices;
}

static uint64_t saturating_add(uint64_t a, uint64_t b) {
    uint64_t sum;
    return fc_add_u64(a, b, &sum) ? sum : UINT64_MAX;
}

/* The state of one spreading over the ranks of `mesh`. */
typedef struct spread {
    fc_mesh mesh;
    int64_t ranks;
    uint64_t *loads;     /* of each rank */
    uint64_t *peaks;     /* of each holder of the tensor at hand: the load of its busiest rank */
    uint32_t *holder;    /* which holder each rank is, for the dimensions in `replicated` */
    uint32_t replicated; /* bit m: mesh dimension m replicates; ~0 before the first tensor */
} spread;

/* Numbers the holders for `placements`, unless the tensor before had the same. */
static void number_holders(spread *s, const fc_placement *placements) {
    uint32_t replicated = 0;
    for (int m = 0; m < s->mesh.ndim; m++) {
        replicated |= placements[m].kind == FC_REPLICATE ? 1u << m : 0;
    }
    if (replicated == s->replicated) {
        return;
    }
    s->replicated = replicated;
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        int64_t coordinate[FC_MAX_MESH_DIMS];
        fc_mesh_coordinate(&s->mesh, rank, coordinate);
        s->holder[rank] = (uint32_t)holder_index(&s->mesh, placements, coordinate);
    }
}

/* Gives one tensor to the holder whose busiest rank is least busy; a tie goes to the lowest. */
static uint32_t place(spread *s, const fc_placement *placements, uint64_t box_bytes) {
    uint32_t count = (uint32_t)holders(&s->mesh, placements), best = 0;
    number_holders(s, placements);
    memset(s->peaks, 0, count * sizeof *s->peaks);
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        uint64_t *peak = &s->peaks[s->holder[rank]];
        *peak = s->loads[rank] > *peak ? s->loads[rank] : *peak;
    }
    for (uint32_t i = 1; i < count; i++) {
        best = s->peaks[i] < s->peaks[best] ? i : best;
    }
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        if (s->holder[rank] == best) {
            s->loads[rank] = saturating_add(s->loads[rank], box_bytes);
        }
    }
    return best;
}

fc_code fc_layout_spread(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                         uint32_t *offsets, fc_error *err) {
    spread s = {.mesh = choices_of(mesh, count, placements), .replicated = ~0u};
    fc_code code = FC_OK;
    s.ranks = fc_mesh_ranks(&s.mesh);
    s.loads = calloc((size_t)s.ranks, sizeof *s.loads);
    s.peaks = calloc((size_t)s.ranks, sizeof *s.peaks);
    s.holder = calloc((size_t)s.ranks, sizeof *s.holder);
    if (!s.loads || !s.peaks || !s.holder) {
        code = fc_fail(err, FC_ENOMEM, "out of memory for the loads of %lld ranks", (long long)s.ranks);
        goto out;
    }
    int64_t all = fc_mesh_ranks(mesh);
    for (size_t i = 0; i < count; i++) {
        const fc_placement *p = placements + i * (size_t)mesh->ndim;
        uint64_t boxes = (uint64_t)(all / holders(mesh, p));
        offsets[i] = place(&s, p, bytes[i] / boxes + (bytes[i] % boxes != 0));
    }
out:
    free(s.loads);
    free(s.peaks);
    free(s.holder);
    return code;
}
