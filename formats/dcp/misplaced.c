/*
 * Chunks that `.metadata` lists at wrong places. PyTorch 2.10 and later compute other boxes than the ranks of FSDP2
 * over TP hold if the rows do not divide (fc_recorded_box), and DCP stores each rank's local tensor under such a box.
 * The layout follows from the ranks in the names of the data files, and the sizes of the stored tensors prove it. Then
 * the chunks get the boxes that their ranks held. Rows are lost if several ranks had boxes that were said to be empty,
 * because DCP stores only one of these.
 */
#include "dcp/packed.h"
#include "dcp/stages.h"

#include "fsdpckpt/mesh.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "sharding/recorded.h"
#include "torch/object/item.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* FSDP over TP along dimension `d` of a tensor. */
typedef struct over_tp {
    fc_mesh mesh; /* dp × tp */
    int d;
    int64_t rows;
} over_tp;

typedef fc_code box_function(int, const int64_t *, const fc_mesh *, const fc_placement *, const int64_t *, int64_t *,
                             int64_t *, fc_error *);

/* @return whether the box of `rank` begins at `range[0]` and has range[1] rows, after setting `range` to it. */
static bool rows_of(const over_tp *o, int64_t rank, box_function *box, int64_t *range) {
    const fc_placement placements[] = {{FC_STRIDED_SHARD, 0, o->mesh.sizes[1]}, {FC_SHARD, 0, 0}};
    int64_t coordinate[FC_MAX_MESH_DIMS];
    fc_mesh_coordinate(&o->mesh, rank % fc_mesh_ranks(&o->mesh), coordinate); /* replicas and stages come outside */
    return box(1, &o->rows, &o->mesh, placements, coordinate, &range[0], &range[1], NULL) == FC_OK;
}

/* Finds the only dimension along which the chunks differ from the tensor. @return -1 if there is none, or several. */
static int sharded_dimension(const fc_tensor *t) {
    int found = -1;
    for (int d = 0; d < t->ndim; d++) {
        bool whole = true;
        for (size_t i = 0; whole && i < t->nchunks; i++) {
            whole = t->chunks[i].dims[t->ndim + d] == t->shape[d];
        }
        if (!whole && found >= 0) {
            return -1;
        }
        found = whole ? found : d;
    }
    return found;
}

/* Whether every chunk is listed at the box that PyTorch computes for its rank, and these are not all true. */
static bool lists_wrong_boxes(const fc_tensor *t, const over_tp *o) {
    bool wrong = false;
    int64_t listed[2], held[2];
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        if (chunk->rank == FC_NO_RANK || !rows_of(o, chunk->rank, fc_recorded_box, listed) ||
            listed[0] != chunk->dims[o->d] || listed[1] != chunk->dims[t->ndim + o->d]) {
            return false;
        }
        wrong = wrong || (rows_of(o, chunk->rank, fc_local_box, held) && memcmp(listed, held, sizeof held) != 0);
    }
    return wrong;
}

/* Advances to the next mesh of up to about `ranks` ranks. Starts at sizes of 0. @return false after the last one. */
static bool next_mesh(fc_mesh *mesh, int64_t ranks) {
    if (mesh->ndim == 0) {
        *mesh = (fc_mesh){.ndim = 2, .sizes = {1, 2}, .names = {"dp", "tp"}};
    }
    mesh->sizes[0]++;
    if (mesh->sizes[0] * mesh->sizes[1] >= ranks + mesh->sizes[1]) { /* the last ranks may have stored nothing */
        mesh->sizes[0] = 2;
        mesh->sizes[1]++;
    }
    return mesh->sizes[0] * mesh->sizes[1] < ranks + mesh->sizes[1];
}

static bool next_wrong(const fc_tensor *t, int64_t ranks, over_tp *o) {
    while (next_mesh(&o->mesh, ranks)) {
        if (lists_wrong_boxes(t, o)) {
            return true;
        }
    }
    return false;
}

static int64_t ranks_of(const fc_dcp_builder *b) {
    int64_t ranks = 0;
    for (size_t i = 0; i < b->nfiles; i++) {
        ranks = b->files[i].rank != FC_NO_RANK && b->files[i].rank >= ranks ? (int64_t)b->files[i].rank + 1 : ranks;
    }
    return ranks < (1 << 20) ? ranks : 0;
}

/* torch.chunk gives all ranks but the last equal shares. Everything else needs a closer look. */
static bool has_equal_shares(const fc_tensor *t, int d) {
    int64_t most = 0;
    for (size_t i = 0; i < t->nchunks; i++) {
        most = t->chunks[i].dims[t->ndim + d] > most ? t->chunks[i].dims[t->ndim + d] : most;
    }
    bool plain = most > 0;
    for (size_t i = 0; plain && i < t->nchunks; i++) {
        const int64_t *dims = t->chunks[i].dims;
        plain = dims[t->ndim + d] == most || dims[d] + dims[t->ndim + d] == t->shape[d];
    }
    return plain;
}

static bool start_search(const fc_dcp_builder *b, const fc_tensor *t, over_tp *o) {
    const int d = t->object || t->nchunks < 2 ? -1 : sharded_dimension(t);
    *o = (over_tp){.d = d, .rows = d >= 0 ? t->shape[d] : 0};
    return d >= 0 && !has_equal_shares(t, d) && ranks_of(b) > 0;
}

bool fc_dcp_may_be_misplaced(const fc_dcp_builder *b, const fc_tensor *tensor) {
    over_tp o;
    return start_search(b, tensor, &o) && next_wrong(tensor, ranks_of(b), &o);
}

/* Reads how many rows the stored tensor of a chunk has. @return -1 if the item cannot be read or is another one. */
static int64_t stored_rows(const fc_dcp_builder *b, const fc_tensor *t, const fc_chunk *chunk, int d) {
    const char *path = b->checkpoint->files[chunk->place.file].path;
    fc_torch_item item;
    fc_torch_tensor stored = {0};
    int fd;
    uint64_t size;
    int64_t rows = -1;
    if (fc_open_input(path, &fd, &size, NULL) != FC_OK) {
        return -1;
    }
    if (fc_dcp_open_item(fd, path, chunk, &item, NULL) == FC_OK) {
        if (fc_torch_tensor_decode(item.pickle, item.pickle->root, &stored, NULL) == FC_OK && stored.ndim == t->ndim) {
            rows = stored.sizes[d];
        }
        fc_torch_item_close(&item);
    }
    close(fd);
    return rows;
}

/* Whether the stored tensors have the sizes that FSDP2 gives their ranks. */
static bool is_proved(const fc_dcp_builder *b, const fc_tensor *t, const over_tp *o) {
    int64_t held[2];
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        if (!rows_of(o, chunk->rank, fc_local_box, held) ||
            (held[1] != chunk->dims[t->ndim + o->d] && stored_rows(b, t, chunk, o->d) != held[1])) {
            return false;
        }
    }
    return true;
}

/* Gives the chunks the boxes that their ranks held. @return the number of rows that are in no chunk. */
static int64_t move_chunks(fc_tensor *t, const over_tp *o) {
    int64_t lost = o->rows, held[2];
    for (size_t i = 0; i < t->nchunks; i++) {
        int64_t *dims = (int64_t *)(uintptr_t)t->chunks[i].dims;
        rows_of(o, t->chunks[i].rank, fc_local_box, held);
        dims[o->d] = held[0];
        dims[t->ndim + o->d] = held[1];
        lost -= held[1];
    }
    return lost;
}

static fc_code add_note(const fc_dcp_builder *b, const fc_tensor *first, size_t count, const over_tp *o,
                        size_t incomplete) {
    fc_arena *arena = b->checkpoint->arena;
    const char *some =
        incomplete == 0 ? "" : fc_arena_printf(arena, "; PyTorch stored only some rows of %zu of them", incomplete);
    const char *more = count == 1 ? "" : fc_arena_printf(arena, " and %zu more", count - 1);
    if (some && more) {
        b->checkpoint->note = fc_arena_printf(
            arena,
            "%s%s: PyTorch listed wrong boxes, because FSDP over TP does not divide %" PRId64 " rows by dp %" PRId64
            " × tp %" PRId64 "; the sizes of the stored tensors give the true ones%s",
            first->name, more, o->rows, o->mesh.sizes[0], o->mesh.sizes[1], some);
    }
    return some && more && b->checkpoint->note ? FC_OK : fc_no_memory(b->err, b->metadata_path);
}

fc_code fc_dcp_move_misplaced(fc_dcp_builder *b) {
    const int64_t ranks = ranks_of(b);
    const fc_tensor *first = NULL;
    over_tp o, of_first = {.d = -1};
    size_t count = 0, incomplete = 0;
    for (size_t i = 0; i < b->ntensors; i++) {
        fc_tensor *t = &b->tensors[i];
        bool proved = false;
        if (!start_search(b, t, &o)) {
            continue;
        }
        while (!proved && next_wrong(t, ranks, &o)) {
            proved = is_proved(b, t, &o);
        }
        if (proved) {
            incomplete += move_chunks(t, &o) != 0;
            of_first = count++ == 0 ? o : of_first;
            first = first ? first : t;
        }
        fc_dcp_drop_empty_chunks(t);
    }
    return count > 0 ? add_note(b, first, count, &of_first, incomplete) : FC_OK;
}
