/*
 * Tensors that Megatron-Core 0.6 to 0.14 flattened (fully_sharded_model_space). Each data-parallel rank has a run of
 * the row-major elements of a tensor-parallel shard. `.metadata` lists such a tensor with one dimension more: the
 * number of shards along each dimension, and then the elements of a shard. Its entry in mcore_data has the shape of the
 * whole tensor. Here a tensor gets that shape, and each run becomes the boxes that it consists of. Semantics:
 * megatron/core/dist_checkpointing/strategies/torch.py and resharding.py (nd_flattened_tensor).
 */
#include "dcp/extent.h"
#include "dcp/stages.h"

#include "base/checked.h"
#include "flat/flat_boxes.h"
#include "fsdpckpt/try.h"
#include "sharding/flat_runs.h"
#include "torch/file/file.h"

/* fc_tensor.detail of a tensor that was flattened. */
typedef struct flattened {
    fc_tensor listed;                  /* as `.metadata` lists it */
    const fc_flat_position *positions; /* of its boxes in the runs of `listed` */
} flattened;

/* Computes the shape of a shard. @return false if the listed sizes do not belong to a tensor of `shape`. */
static bool shard_shape(const fc_tensor *listed, const int64_t *shape, int64_t *shard) {
    const int n = listed->ndim - 1;
    int64_t elements;
    for (int d = 0; d < n; d++) {
        if (listed->shape[d] == 0 || shape[d] % listed->shape[d] != 0) {
            return false;
        }
        shard[d] = shape[d] / listed->shape[d];
    }
    for (size_t i = 0; i < listed->nchunks; i++) {
        for (int d = 0; d < n; d++) {
            if (listed->chunks[i].dims[listed->ndim + d] != 1) {
                return false;
            }
        }
    }
    return fc_numel(n, shard, &elements) && elements == listed->shape[n];
}

/* Starts iterating over the boxes of a chunk's run within its shard. */
static bool start_run(const fc_tensor *listed, size_t chunk, const int64_t *shard, fc_flat_run *run) {
    const int n = listed->ndim - 1;
    const int64_t *dims = listed->chunks[chunk].dims;
    return fc_flat_run_start(run, n, shard, dims[n], dims[n] + dims[listed->ndim + n]);
}

/* Adds the boxes of a chunk's run. `t->chunks` may be NULL: then they are only counted. */
static void add_boxes(const fc_tensor *listed, size_t chunk, const int64_t *shard, fc_tensor *t, int64_t *dims,
                      fc_flat_position *positions) {
    const int n = t->ndim;
    const fc_chunk *stored = &listed->chunks[chunk];
    int64_t box[2 * FC_MAX_DIMS], start;
    fc_flat_run run;
    if (!start_run(listed, chunk, shard, &run)) {
        return;
    }
    for (; fc_flat_run_next(&run, box, &start); t->nchunks++) {
        if (!t->chunks) {
            continue;
        }
        int64_t *own = dims + 2 * (size_t)n * t->nchunks;
        for (int d = 0; d < n; d++) {
            own[d] = stored->dims[d] * shard[d] + box[d];
            own[n + d] = box[n + d];
        }
        fc_chunk *out = (fc_chunk *)(uintptr_t)&t->chunks[t->nchunks];
        *out = *stored;
        out->dims = own;
        positions[t->nchunks] = (fc_flat_position){chunk, start - stored->dims[n]};
    }
}

static void add_all_boxes(const fc_tensor *listed, const int64_t *shard, fc_tensor *t, int64_t *dims,
                          fc_flat_position *positions) {
    t->nchunks = 0;
    for (size_t i = 0; i < listed->nchunks; i++) {
        add_boxes(listed, i, shard, t, dims, positions);
    }
}

static fc_code restore(const fc_dcp_builder *b, fc_tensor *t, const int64_t *shape) {
    fc_arena *arena = b->checkpoint->arena;
    int64_t shard[FC_MAX_DIMS];
    size_t width;
    flattened *f = fc_arena_calloc(arena, 1, sizeof *f);
    FC_NEED(f, b->err, b->metadata_path);
    f->listed = *t;
    t->ndim--;
    t->shape = shape;
    t->chunks = NULL;
    if (!fc_torch_shape_fits(t->dtype, t->ndim, shape) || !shard_shape(&f->listed, shape, shard)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name,
                           "its shape before Megatron flattened it, in mcore_data, does not fit its size");
    }
    add_all_boxes(&f->listed, shard, t, NULL, NULL);
    fc_chunk *chunks = fc_arena_calloc(arena, t->nchunks + 1, sizeof *chunks);
    fc_flat_position *positions = fc_arena_calloc(arena, t->nchunks + 1, sizeof *positions);
    int64_t *dims =
        fc_mul_size(t->nchunks + 1, 2 * (size_t)t->ndim, &width) ? fc_arena_calloc(arena, width, sizeof *dims) : NULL;
    FC_NEED(chunks && positions && dims, b->err, b->metadata_path);
    t->chunks = chunks;
    add_all_boxes(&f->listed, shard, t, dims, positions);
    f->positions = positions;
    t->detail = f;
    return FC_OK;
}

/* Restores the tensor of an entry of mcore_data, if it was flattened. */
static fc_code restore_entry(const fc_dcp_builder *b, fc_pv name, fc_pv values) {
    const uint32_t number = fc_pv_typeof(name) == FC_PV_STR ? fc_pickle_record(b->p, name)->tag[0] : 0;
    const fc_pv size = number > 0 && fc_pv_typeof(values) == FC_PV_DICT
                           ? fc_torch_dict_get(b->p, values, "nd_reformulated_orig_global_shape")
                           : 0;
    fc_tensor *t = number > 0 ? &b->tensors[number - 1] : NULL;
    if (!size || t->object || t->detail) {
        return FC_OK;
    }
    int64_t *shape = fc_arena_calloc(b->checkpoint->arena, (size_t)t->ndim, sizeof *shape);
    FC_NEED(shape, b->err, b->metadata_path);
    if (t->ndim == 0 || !fc_dcp_read_size(b->p, size, t->ndim - 1, shape)) {
        return fc_dcp_fail(b, FC_ECORRUPT, t->name,
                           "its shape before Megatron flattened it, in mcore_data, is invalid");
    }
    return restore(b, t, shape);
}

fc_code fc_dcp_restore_flattened(const fc_dcp_builder *b, fc_pv metadata) {
    const fc_pv dict = fc_pickle_slot(b->p, metadata, FC_METADATA_MEGATRON);
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(dict) == FC_PV_DICT ? fc_pickle_items(b->p, dict, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        FC_TRY(restore_entry(b, pairs[i], pairs[i + 1]));
    }
    return FC_OK;
}

fc_dcp_listed fc_dcp_find_listed(const fc_tensor *tensor, size_t index) {
    const flattened *f = tensor->object ? NULL : tensor->detail;
    if (!f) {
        return (fc_dcp_listed){.tensor = tensor, .chunk = tensor->chunks[index], .is_first = true};
    }
    const fc_flat_position *p = &f->positions[index];
    fc_dcp_listed out = {.tensor = &f->listed, .chunk = f->listed.chunks[p->chunk], .at = p->at};
    out.chunk.place.file =
        tensor->chunks[index].place.file; /* other files may have been put before those of this checkpoint */
    out.is_first = index == 0 || p[-1].chunk != p->chunk;
    return out;
}
