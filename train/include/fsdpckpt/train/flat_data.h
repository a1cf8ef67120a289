/*
 * The data of flat parameters: arrays that are flattened, viewed, cut into shards and padded. flat_param.h has the
 * layout, which decides where elements are.
 */
#pragma once

#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/gather/array.h"

FC_BEGIN_DECLS

/**
 * Fills `flat`, which has at least layout->numel elements, from the parameters, which have the shapes of the layout.
 * @param params layout->nparams arrays, without additional names of shared ones.
 */
fc_code fc_flat_flatten(const fc_flat_layout *layout, const fc_array *params, const fc_array *flat, fc_stream *stream,
                        fc_error *err);

/** Makes a view of parameter `param` in `flat`, an unsharded flat parameter, gradient or optimizer state. */
fc_code fc_flat_view(const fc_flat_layout *layout, const fc_array *flat, size_t param, fc_array *out, fc_error *err);

/** Copies the chunk of `rank` out of `flat` and pads it with zeros to layout->shard_numel. `shard` is 1-D. */
fc_code fc_flat_shard(const fc_flat_layout *layout, const fc_array *flat, int64_t rank, const fc_array *shard,
                      fc_stream *stream, fc_error *err);

/** Makes a 1-D view of the part of parameter `param` in `shard`, the shard of `rank`. It may have no elements. */
fc_code fc_flat_shard_view(const fc_flat_layout *layout, const fc_array *shard, int64_t rank, size_t param,
                           fc_array *out, fc_error *err);

FC_END_DECLS
