/*
 * Flat parameters: the parameters of an FSDP unit, one after another in one array that is divided into equal chunks
 * over the ranks. Semantics: torch/distributed/fsdp/_flat_param.py (FlatParamHandle), with and without use_orig_params.
 *
 * The layout is pure arithmetic. train/flat_data.h moves the data.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** One parameter of a unit. A list of them is in the order of named_modules and their parameters. A parameter that
 *  several modules share is in the list once for each of them. */
typedef struct fc_flat_desc {
    const char *fqn;
    int ndim;
    const int64_t *shape;
    const int64_t *strides; /**< in elements; NULL: row-major. Others, e.g. of a transpose, must leave no gaps */
    fc_dtype dtype;
    bool requires_grad;
    int64_t shared_with; /**< index of the earlier parameter that it is tied to, or -1 */
} fc_flat_desc;

/** A parameter within the flat one. */
typedef struct fc_flat_param {
    const char *fqn;
    int ndim;
    const int64_t *shape, *strides;
    bool contiguous; /**< whether it is row-major; else it is viewed with its strides (as_strided) */
    bool requires_grad;
    int64_t numel;
    int64_t offset; /**< in the unsharded flat parameter, in elements, including alignment padding */
} fc_flat_param;

/** An additional name of a shared parameter, which is flattened once (torch's SharedParamInfo). */
typedef struct fc_flat_shared {
    const char *fqn;
    size_t primary; /**< index into fc_flat_layout.params */
} fc_flat_shared;

/** Where the parameters of a unit are, on all ranks. The arena that it was made in owns it. */
typedef struct fc_flat_layout {
    fc_dtype dtype;
    bool requires_grad; /**< whether any parameter requires a gradient */
    int64_t world_size;
    int64_t aligned_numel; /**< parameters begin at multiples of it, in elements; 0 without use_orig_params */
    const fc_flat_param *params;
    size_t nparams;
    const fc_flat_shared *shared;
    size_t nshared;
    const int64_t *numels_with_padding; /**< elements of each parameter and each padding (`_numels_with_padding`) */
    const bool *is_padding;             /**< which of them are padding (`_is_padding_mask`) */
    size_t nentries;                    /**< number of entries of both */
    int64_t numel;                      /**< elements of the unsharded flat parameter, including alignment padding */
    int64_t shard_numel; /**< elements of each rank's shard, including padding: ceil(numel / world_size) */
} fc_flat_layout;

/**
 * Lays out `count` parameters over `world_size` ranks.
 * @param use_orig_params aligns every parameter to 16 bytes of `compute_dtype`, and the end to the world size.
 * @param compute_dtype   the dtype of the unsharded parameters: that of mixed precision, or their own.
 * @param arena           owns the layout, which borrows the names.
 * @return FC_EUSAGE with the name of the parameter: no parameters, no elements, a type that is not floating-point,
 * several dtypes, different requires_grad without use_orig_params, strides with gaps, or a wrong shared_with.
 */
fc_code fc_flat_layout_new(const fc_flat_desc *descs, size_t count, int64_t world_size, bool use_orig_params,
                           fc_dtype compute_dtype, fc_arena *arena, fc_flat_layout *out, fc_error *err);

/** The part of a parameter in a rank's shard (_ShardParamInfo). All numbers are 0 if there is none. */
typedef struct fc_flat_shard_info {
    bool in_shard;
    int64_t offset_in_shard, numel_in_shard;    /**< in elements */
    int64_t intra_param_start, intra_param_end; /**< first and last element of the flattened parameter in the shard */
} fc_flat_shard_info;

/** Returns the part of parameter `param` in the shard of `rank`. */
fc_flat_shard_info fc_flat_shard_of(const fc_flat_layout *layout, size_t param, int64_t rank);

/** A box of a parameter whose elements are consecutive in a shard. */
typedef struct fc_flat_box {
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS]; /**< in the parameter, in elements */
    int64_t strides[FC_MAX_DIMS];                     /**< of its elements in the shard */
    int64_t at;                                       /**< its first element in the shard */
} fc_flat_box;

/**
 * Divides the part of parameter `param` in the shard of `rank` into boxes, at most 2 × ndim - 1, and calls `visit` for
 * each. Stops at the first code other than FC_OK and returns it.
 */
fc_code fc_flat_shard_visit(const fc_flat_layout *layout, size_t param, int64_t rank,
                            fc_code (*visit)(void *context, const fc_flat_box *box, fc_error *err), void *context,
                            fc_error *err);

/** Returns the number of padding elements at the end of the shard of `rank` (`_shard_numel_padded`). */
int64_t fc_flat_shard_padding(const fc_flat_layout *layout, int64_t rank);

/** The value that torch fills alignment padding with. It must never matter, and is easy to see if it does. */
#define FC_FLAT_PADDING_VALUE 42

FC_END_DECLS
