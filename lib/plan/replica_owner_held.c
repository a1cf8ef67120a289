/*
 * Chooses which rank stores a replicated box when not every rank of the mesh holds its local box: under pipeline
 * parallelism, a stage holds only its own layers. See replica_owner.h.
 */
#include "fsdpckpt/replica_owner.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

typedef struct held {
    const fc_checkpoint *source;
    const fc_mesh *mesh;
    bool *holds; /* for each rank, whether a chunk of the tensor in hand is its box */
    uint64_t *loads;
} held;

static void mark_holders(const held *h, const fc_tensor *t) {
    memset(h->holds, 0, (size_t)fc_mesh_ranks(h->mesh) * sizeof *h->holds);
    for (size_t i = 0; i < t->nchunks; i++) {
        h->holds[t->chunks[i].rank] = true;
    }
}

/* Whether holder number `offset` has each box. Adds up the load of the busiest of them. */
static bool holder_has_all(const held *h, const fc_tensor *t, const fc_placement *placements, uint32_t offset,
                           uint64_t *peak) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    *peak = 0;
    for (size_t i = 0; i < t->nchunks; i++) {
        fc_mesh_coordinate(h->mesh, t->chunks[i].rank, coordinate);
        const int64_t owner = fc_replica_owner(h->mesh, placements, coordinate, offset);
        if (!h->holds[owner]) {
            return false;
        }
        *peak = h->loads[owner] > *peak ? h->loads[owner] : *peak;
    }
    return true;
}

/* Adds the boxes of a tensor to the loads of the ranks that store them. */
static void add_loads(const held *h, const fc_tensor *t, const fc_placement *placements, uint32_t offset) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    for (size_t i = 0; i < t->nchunks; i++) {
        fc_mesh_coordinate(h->mesh, t->chunks[i].rank, coordinate);
        if (fc_replica_owner(h->mesh, placements, coordinate, offset) == t->chunks[i].rank) {
            h->loads[t->chunks[i].rank] += fc_chunk_data_bytes(t, &t->chunks[i]);
        }
    }
}

/* How many ranks hold each box of a tensor with these placements. */
static uint32_t holders_of(const fc_mesh *mesh, const fc_placement *placements) {
    uint32_t count = 1;
    for (int i = 0; i < mesh->ndim; i++) {
        count *= placements[i].kind == FC_REPLICATE ? (uint32_t)mesh->sizes[i] : 1;
    }
    return count;
}

static fc_code choose(const held *h, const fc_tensor *t, const fc_placement *placements, uint32_t *offset,
                      fc_error *err) {
    const uint32_t count = holders_of(h->mesh, placements);
    uint64_t least = UINT64_MAX, peak;
    bool found = false;
    mark_holders(h, t);
    if (holder_has_all(h, t, placements, *offset, &peak)) {
        return FC_OK; /* the choice of fc_spread_owners */
    }
    for (uint32_t k = 0; k < count; k++) {
        if (holder_has_all(h, t, placements, k, &peak) && (!found || peak < least)) {
            *offset = k;
            least = peak;
            found = true;
        }
    }
    return found
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "%s: tensor '%s': its chunks are on ranks that form no row of the mesh",
                         h->source->path, t->name);
}

static fc_code spread(const held *h, const fc_placement *placements, uint32_t *offsets, fc_error *err) {
    uint64_t *bytes = calloc(h->source->ntensors + 1, sizeof *bytes);
    FC_NEED(bytes, err, h->source->path);
    for (size_t i = 0; i < h->source->ntensors; i++) {
        const fc_tensor *t = &h->source->tensors[i];
        const fc_box whole = {t->ndim, NULL, t->shape};
        bytes[i] = (uint64_t)fc_box_volume(&whole) * fc_dtype_size(t->dtype);
    }
    fc_code rc = fc_spread_owners(h->mesh, h->source->ntensors, bytes, placements, offsets, err);
    free(bytes);
    return rc;
}

fc_code fc_held_owners(const fc_checkpoint *source, const fc_mesh *mesh, const fc_placement *placements,
                       uint32_t *owner_offsets, fc_error *err) {
    const size_t ranks = (size_t)fc_mesh_ranks(mesh);
    held h = {.source = source,
              .mesh = mesh,
              .holds = calloc(ranks, sizeof *h.holds),
              .loads = calloc(ranks, sizeof *h.loads)};
    fc_code rc;
    FC_TRY_GOTO(h.holds && h.loads ? FC_OK : fc_no_memory(err, source->path), rc, out);
    FC_TRY_GOTO(spread(&h, placements, owner_offsets, err), rc, out);
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        const fc_placement *own = placements + i * (size_t)mesh->ndim;
        if (!t->object) {
            FC_TRY_GOTO(choose(&h, t, own, &owner_offsets[i], err), rc, out);
            add_loads(&h, t, own, owner_offsets[i]);
        }
    }
out:
    free(h.holds);
    free(h.loads);
    return rc;
}
