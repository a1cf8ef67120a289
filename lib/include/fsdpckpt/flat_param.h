/*
 * Flat parameters: the parameters of an FSDP unit laid out behind each other in one array, which is cut in equal chunks
 * over the ranks. Semantics: torch/distributed/fsdp/_flat_param.py (FlatParamHandle), with use_orig_params both ways.
 *
 * Two sides: the layout is pure arithmetic, the functions on arrays move data with fc_device.
 */
#ifndef FSDPCKPT_FLAT_PARAM_H
#define FSDPCKPT_FLAT_PARAM_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/array.h"

#ifdef __cplusplus
extern "C" {
#endif

/** One parameter of a unit, in the order of named_modules and their parameters, shared ones as often as they occur. */
typedef struct fc_flat_desc {
    const char *fqn;
    int ndim;
    const int64_t *shape;
    const int64_t *strides; /**< elements; NULL: row-major. Other ones must leave no gaps, as those of a transpose */
    fc_dtype dtype;
    bool requires_grad;
    int64_t shared_with; /**< index of the parameter that it is, or -1 */
} fc_flat_desc;

/** A parameter in the flat one. */
typedef struct fc_flat_param {
    const char *fqn;
    int ndim;
    const int64_t *shape, *strides;
    bool contiguous; /**< row-major; else it is viewed with its strides (as_strided) */
    bool requires_grad;
    int64_t numel;
    int64_t offset; /**< elements from the start of the unsharded flat parameter, alignment padding counted */
} fc_flat_param;

/** A further name of a parameter that is flattened once (torch's SharedParamInfo). */
typedef struct fc_flat_shared {
    const char *fqn;
    size_t primary; /**< index into fc_flat_layout.params */
} fc_flat_shared;

/** How a unit's parameters lie, on all ranks. Lives in the arena it was made in. */
typedef struct fc_flat_layout {
    fc_dtype dtype;
    bool requires_grad; /**< of any parameter */
    int64_t world_size;
    int64_t aligned_numel; /**< parameters start at multiples of this; 0: no alignment (use_orig_params=False) */
    const fc_flat_param *params;
    size_t nparams;
    const fc_flat_shared *shared;
    size_t nshared;
    const int64_t *numels_with_padding; /**< parameters and alignment padding in order: `_numels_with_padding` */
    const bool *is_padding;             /**< `_is_padding_mask` */
    size_t npieces;
    int64_t numel;       /**< of the unsharded flat parameter, alignment padding counted */
    int64_t shard_numel; /**< of every rank's shard, the padding of the last ones counted: ceil(numel / world_size) */
} fc_flat_layout;

/**
 * Lays out `count` parameters over `world_size` ranks.
 * @param use_orig_params aligns every parameter to 16 bytes of `compute_dtype`, and the end to the world size.
 * @param compute_dtype   of the unsharded parameters: that of mixed precision, or their own.
 * @param arena           owns the layout; the names are borrowed.
 * @return FC_EUSAGE, naming the parameter: none at all, no floating point, not one dtype for all, requires_grad not
 *         uniform without use_orig_params, strides with gaps, a bad shared_with; no elements at all.
 */
fc_code fc_flat_layout_new(const fc_flat_desc *descs, size_t count, int64_t world_size, bool use_orig_params,
                           fc_dtype compute_dtype, fc_arena *arena, fc_flat_layout *out, fc_error *err);

/** What a rank's shard holds of a parameter (_ShardParamInfo); the numbers are 0 where it holds nothing. */
typedef struct fc_flat_shard_info {
    bool in_shard;
    int64_t offset_in_shard, numel_in_shard;
    int64_t intra_param_start, intra_param_end; /**< elements of the flattened parameter, the end inclusive */
} fc_flat_shard_info;

fc_flat_shard_info fc_flat_shard_of(const fc_flat_layout *layout, size_t param, int64_t rank);

/** Elements of padding at the end of the shard of `rank` (`_shard_numel_padded`). */
int64_t fc_flat_shard_padding(const fc_flat_layout *layout, int64_t rank);

/** What torch fills alignment padding with: it must never matter, and is easy to see when it does. */
#define FC_FLAT_PADDING_VALUE 42

/**
 * Fills `flat` (at least layout->numel elements) from the parameters, which have their layout's shapes.
 * @param params layout->nparams arrays, without the shared ones.
 */
fc_code fc_flat_flatten(const fc_flat_layout *layout, const fc_array *params, const fc_array *flat, fc_stream *stream,
                        fc_error *err);

/** A view of parameter `param` within `flat`, an unsharded flat parameter, gradient or optimizer state. */
fc_code fc_flat_view(const fc_flat_layout *layout, const fc_array *flat, size_t param, fc_array *out, fc_error *err);

/** Copies the chunk of `rank` out of `flat` and pads it with zeros to layout->shard_numel. `shard` is 1-D. */
fc_code fc_flat_shard(const fc_flat_layout *layout, const fc_array *flat, int64_t rank, const fc_array *shard,
                      fc_stream *stream, fc_error *err);

/** A 1-D view of what `shard`, that of `rank`, holds of parameter `param`; no elements where it holds none. */
fc_code fc_flat_shard_view(const fc_flat_layout *layout, const fc_array *shard, int64_t rank, size_t param,
                           fc_array *out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
