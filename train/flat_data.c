/*
 * Flattens, views, shards and pads the data of flat parameters. The layout decides where; fc_device moves the bytes.
 */
#include "fsdpckpt/train/flat_data.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"

#include <string.h>

static char *at(const fc_array *array, int64_t element) {
    return (char *)array->data + element * (int64_t)fc_dtype_size(array->dtype);
}

/* A 1-D view of the `count` elements from `start` on. */
static fc_code view_run(const fc_array *flat, int64_t start, int64_t count, fc_array *out, fc_error *err) {
    return fc_array_over(flat->device, flat->dtype, 1, &count, at(flat, count > 0 ? start : 0), out, err);
}

/* Padding is shorter than an alignment unit or the number of ranks, so it is prepared in host memory. */
static fc_code pad_with_value(const fc_array *run, fc_stream *stream, fc_error *err) {
    unsigned char value[8], block[512];
    double number = FC_FLAT_PADDING_VALUE;
    uint32_t size = fc_dtype_size(run->dtype);
    fc_cast(FC_F64, &number, run->dtype, value, 1);
    int64_t most = (int64_t)(sizeof block / size), left = run->sizes[0];
    for (int64_t i = 0; i < most; i++) {
        memcpy(block + i * size, value, size);
    }
    for (int64_t start = 0; left > 0; left -= most, start += most) {
        int64_t count = left < most ? left : most;
        FC_TRY(run->device->copy(run->device, at(run, start), block, (size_t)count * size, stream, err));
        FC_TRY(run->device->synchronize(run->device, stream, err)); /* `block` ends with this function */
    }
    return FC_OK;
}

fc_code fc_flat_view(const fc_flat_layout *layout, const fc_array *flat, size_t param, fc_array *out, fc_error *err) {
    const fc_flat_param *p = &layout->params[param];
    FC_TRY(
        fc_array_over(flat->device, flat->dtype, p->ndim, p->shape, at(flat, p->numel > 0 ? p->offset : 0), out, err));
    for (int d = 0; d < p->ndim; d++) {
        out->strides[d] = p->strides[d];
    }
    out->requires_grad = p->requires_grad;
    return FC_OK;
}

static fc_code check_param(const fc_flat_layout *layout, size_t param, const fc_array *array, fc_error *err) {
    const fc_flat_param *p = &layout->params[param];
    bool same = array->ndim == p->ndim && array->dtype == layout->dtype;
    for (int d = 0; same && d < p->ndim; d++) {
        same = array->sizes[d] == p->shape[d];
    }
    if (!same) {
        return fc_fail(err, FC_EUSAGE, "%s: the array to flatten has another shape or dtype than the parameter",
                       p->fqn);
    }
    return FC_OK;
}

fc_code fc_flat_flatten(const fc_flat_layout *layout, const fc_array *params, const fc_array *flat, fc_stream *stream,
                        fc_error *err) {
    int64_t offset = 0;
    size_t param = 0;
    for (size_t i = 0; i < layout->nentries; i++) {
        int64_t numel = layout->numels_with_padding[i];
        fc_array to;
        if (layout->is_padding[i]) {
            FC_TRY(view_run(flat, offset, numel, &to, err));
            FC_TRY(pad_with_value(&to, stream, err));
        } else {
            FC_TRY(check_param(layout, param, &params[param], err));
            FC_TRY(fc_flat_view(layout, flat, param, &to, err));
            FC_TRY(fc_array_copy(&to, &params[param], stream, err));
            param++;
        }
        offset += numel;
    }
    return FC_OK;
}

fc_code fc_flat_shard(const fc_flat_layout *layout, const fc_array *flat, int64_t rank, const fc_array *shard,
                      fc_stream *stream, fc_error *err) {
    int64_t padding = fc_flat_shard_padding(layout, rank), count = layout->shard_numel - padding;
    fc_array from, to, rest;
    FC_TRY(view_run(flat, rank * layout->shard_numel, count, &from, err));
    FC_TRY(view_run(shard, 0, count, &to, err));
    FC_TRY(fc_array_copy(&to, &from, stream, err));
    if (padding > 0) {
        FC_TRY(view_run(shard, count, padding, &rest, err));
        FC_TRY(shard->device->zero(shard->device, rest.data, fc_array_bytes(&rest), stream, err));
    }
    return FC_OK;
}

fc_code fc_flat_shard_view(const fc_flat_layout *layout, const fc_array *shard, int64_t rank, size_t param,
                           fc_array *out, fc_error *err) {
    fc_flat_shard_info info = fc_flat_shard_of(layout, param, rank);
    return view_run(shard, info.offset_in_shard, info.numel_in_shard, out, err);
}
