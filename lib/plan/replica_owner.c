/*
 * Chooses which of the ranks that hold a replicated box stores it, so that all store about as much.
 */
#include "fsdpckpt/replica_owner.h"

#include "base/checked.h"

#include <stdlib.h>

/* @return how many ranks hold each box: the product of the mesh dimensions that replicate. */
static int64_t holders(const fc_mesh *mesh, const fc_placement *placements) {
    int64_t count = 1;
    for (int m = 0; m < mesh->ndim; m++) {
        count *= placements[m].kind == FC_REPLICATE ? mesh->sizes[m] : 1;
    }
    return count;
}

/* @return the index of the rank at `coordinate` among the ranks that hold the same box. */
static int64_t holder_index(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate) {
    int64_t index = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        if (placements[m].kind == FC_REPLICATE) {
            index = index * mesh->sizes[m] + coordinate[m];
        }
    }
    return index;
}

int64_t fc_replica_owner(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
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
 * @return the mesh with every dimension that no tensor replicates set to 1. All ranks along such a dimension get the
 * same load, so one of them represents all. This keeps spreading cheap on large meshes.
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

/* A group of ranks that could store a tensor: the load of its busiest rank in bytes, and its index. */
typedef struct holder {
    uint64_t peak;
    uint32_t index;
} holder;

/* The state of fc_spread_owners. `mesh` is the result of choices_of. */
typedef struct spread {
    fc_mesh mesh;
    int64_t ranks;
    uint64_t *loads;  /* bytes that each rank stores so far */
    uint32_t *number; /* the index of the holder to which each rank belongs */
    holder *heap;     /* the holders, the least busy one first */
    uint64_t *gained; /* bytes that each holder got in the current round */
} spread;

static uint32_t replicated_by(const fc_mesh *mesh, const fc_placement *placements) {
    uint32_t set = 0;
    for (int m = 0; m < mesh->ndim; m++) {
        set |= placements[m].kind == FC_REPLICATE ? 1u << m : 0;
    }
    return set;
}

static bool before(const holder *a, const holder *b) {
    return a->peak != b->peak ? a->peak < b->peak : a->index < b->index;
}

static void sift_down(holder *heap, uint32_t count, uint32_t at) {
    holder moved = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child + 1 < count && before(&heap[child + 1], &heap[child])) {
            child++;
        }
        if (child >= count || !before(&heap[child], &moved)) {
            heap[at] = moved;
            return;
        }
        heap[at] = heap[child];
        at = child;
    }
}

/* Builds the heap of the holders of a tensor with `placements`. @return their number. */
static uint32_t gather_holders(spread *s, const fc_placement *placements) {
    uint32_t count = (uint32_t)holders(&s->mesh, placements);
    for (uint32_t i = 0; i < count; i++) {
        s->heap[i] = (holder){0, i};
        s->gained[i] = 0;
    }
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        int64_t coordinate[FC_MAX_MESH_DIMS];
        fc_mesh_coordinate(&s->mesh, rank, coordinate);
        s->number[rank] = (uint32_t)holder_index(&s->mesh, placements, coordinate);
        holder *h = &s->heap[s->number[rank]];
        h->peak = s->loads[rank] > h->peak ? s->loads[rank] : h->peak;
    }
    for (uint32_t i = count / 2; i-- > 0;) {
        sift_down(s->heap, count, i);
    }
    return count;
}

/* Chooses holders for the tensors that are replicated along exactly the mesh dimensions in `set`. */
static void place_set(spread *s, uint32_t set, const fc_mesh *mesh, size_t count, const uint64_t *bytes,
                      const fc_placement *placements, uint32_t *offsets) {
    int64_t ranks = fc_mesh_ranks(mesh);
    uint32_t candidates = 0;
    for (size_t i = 0; i < count; i++) {
        const fc_placement *p = placements + i * (size_t)mesh->ndim;
        if (replicated_by(mesh, p) != set) {
            continue;
        }
        if (candidates == 0) {
            candidates = gather_holders(s, p);
        }
        uint64_t boxes = (uint64_t)(ranks / holders(mesh, p)), box_bytes = bytes[i] / boxes + (bytes[i] % boxes != 0);
        holder *best = &s->heap[0];
        offsets[i] = best->index;
        s->gained[best->index] = saturating_add(s->gained[best->index], box_bytes);
        best->peak = saturating_add(best->peak, box_bytes);
        sift_down(s->heap, candidates, 0);
    }
    for (int64_t rank = 0; candidates > 0 && rank < s->ranks; rank++) {
        s->loads[rank] = saturating_add(s->loads[rank], s->gained[s->number[rank]]);
    }
}

fc_code fc_spread_owners(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                         uint32_t *offsets, fc_error *err) {
    spread s = {.mesh = choices_of(mesh, count, placements)};
    bool present[1 << FC_MAX_MESH_DIMS] = {false};
    fc_code code = FC_OK;
    s.ranks = fc_mesh_ranks(&s.mesh);
    s.loads = calloc((size_t)s.ranks, sizeof *s.loads);
    s.number = calloc((size_t)s.ranks, sizeof *s.number);
    s.heap = calloc((size_t)s.ranks, sizeof *s.heap);
    s.gained = calloc((size_t)s.ranks, sizeof *s.gained);
    if (!s.loads || !s.number || !s.heap || !s.gained) {
        code = fc_fail(err, FC_ENOMEM, "out of memory for the loads of %lld ranks", (long long)s.ranks);
        goto out;
    }
    for (size_t i = 0; i < count; i++) {
        present[replicated_by(mesh, placements + i * (size_t)mesh->ndim)] = true;
    }
    for (int size = 0; size <= mesh->ndim; size++) {
        for (uint32_t set = 0; set < 1u << mesh->ndim; set++) {
            if (present[set] && __builtin_popcount(set) == size) {
                place_set(&s, set, mesh, count, bytes, placements, offsets);
            }
        }
    }
out:
    free(s.loads);
    free(s.number);
    free(s.heap);
    free(s.gained);
    return code;
}
