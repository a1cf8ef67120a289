/*
 * The data of flat parameters: flatten, view, cut and pad. The layout says where, fc_device moves.
 */
#include "fsdpckpt/flat_param.h"
#include "base/try.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <string.h>

static char *at(const fc_array *array, int64_t element) {
    return (char *)array->data + element * (int64_t)fc_dtype_size(array->dtype);
}

/* A 1-D view of `count` elements from `start` on. */
static fc_code piece(const fc_array *flat, int64_t start, int64_t count, fc_array *out, fc_error *err) {
    return fc_array_over(flat->device, flat->dtype, 1, &count, at(flat, count > 0 ? start : 0), out, err);
}

/* The runs of padding are shorter than an alignment unit or the world size: they are made on the host. */
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
        fc_code rc = run->device->copy(run->device, at(run, start), block, (size_t)count * size, stream, err);
        if (rc == FC_OK) {
            rc = run->device->synchronize(run->device, stream, err); /* `block` is gone when this returns */
        }
        if (rc != FC_OK) {
            return rc;
        }
    }
    return FC_OK;
}

fc_code fc_flat_view(const fc_flat_layout *layout, const fc_array *flat, size_t param, fc_array *out, fc_error *err) {
    const fc_flat_param *p = &layout->params[param];
    fc_code rc =
        fc_array_over(flat->device, flat->dtype, p->ndim, p->shape, at(flat, p->numel > 0 ? p->offset : 0), out, err);
    for (int d = 0; rc == FC_OK && d < p->ndim; d++) {
        out->strides[d] = p->strides[d];
    }
    if (rc == FC_OK) {
        out->requires_grad = p->requires_grad;
    }
    return rc;
}

static fc_code check_param(const fc_flat_layout *layout, size_t param, const fc_array *array, fc_error *err) {
    const fc_flat_param *p = &layout->params[param];
    bool same = array->ndim == p->ndim && array->dtype == layout->dtype;
    for (int d = 0; same && d < p->ndim; d++) {
        same = array->sizes[d] == p->shape[d];
    }
    return same ? FC_OK
                : fc_fail(err, FC_EUSAGE, "%s: the array to flatten has another shape or dtype than the parameter",
                          p->fqn);
}

fc_code fc_flat_flatten(const fc_flat_layout *layout, const fc_array *params, const fc_array *flat, fc_stream *stream,
                        fc_error *err) {
    int64_t offset = 0;
    size_t param = 0;
    for (size_t i = 0; i < layout->npieces; i++) {
        int64_t numel = layout->numels_with_padding[i];
        fc_array to;
        fc_code rc;
        if (layout->is_padding[i]) {
            rc = piece(flat, offset, numel, &to, err);
            rc = rc == FC_OK ? pad_with_value(&to, stream, err) : rc;
        } else {
            rc = check_param(layout, param, &params[param], err);
            rc = rc == FC_OK ? fc_flat_view(layout, flat, param, &to, err) : rc;
            rc = rc == FC_OK ? fc_array_copy(&to, &params[param], stream, err) : rc;
            param++;
        }
        if (rc != FC_OK) {
            return rc;
        }
        offset += numel;
    }
    return FC_OK;
}

fc_code fc_flat_shard(const fc_flat_layout *layout, const fc_array *flat, int64_t rank, const fc_array *shard,
                      fc_stream *stream, fc_error *err) {
    int64_t padding = fc_flat_shard_padding(layout, rank), count = layout->shard_numel - padding;
    fc_array from, to, rest;
    FC_TRY(piece(flat, rank * layout->shard_numel, count, &from, err));
    FC_TRY(piece(shard, 0, count, &to, err));
    FC_TRY(fc_array_copy(&to, &from, stream, err));
    if (padding > 0) {
        FC_TRY(piece(shard, count, padding, &rest, err));
        FC_TRY(shard->device->zero(shard->device, rest.data, fc_array_bytes(&rest), stream, err));
    }
    return FC_OK;
}

fc_code fc_flat_shard_view(const fc_flat_layout *layout, const fc_array *shard, int64_t rank, size_t param,
                           fc_array *out, fc_error *err) {
    fc_flat_shard_info info = fc_flat_shard_of(layout, param, rank);
    return piece(shard, info.offset_in_shard, info.numel_in_shard, out, err);
}
