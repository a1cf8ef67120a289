/*
 * Which scale belongs to which element of a quantized weight: see scales.h.
 */
#include "weights/scales.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "read/box.h"

/* DeepSeek's blocks, which all others who name their scales alike use too. */
enum { USUAL_BLOCK = 128 };

static int64_t divided_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* @return the elements along a dimension that share a scale, or 0 if that cannot be told. */
static int64_t block_of(int64_t size, int64_t scales, int64_t known) {
    if (scales <= 0) {
        return 0;
    }
    if (scales == 1 || scales == size) {
        return scales == 1 ? size : 1;
    }
    if (known > 0) {
        return divided_up(size, known) == scales ? known : 0;
    }
    if (divided_up(size, USUAL_BLOCK) == scales) {
        return USUAL_BLOCK;
    }
    return size % scales == 0 ? size / scales : 0;
}

static fc_code refuse_shape(const fc_scaled *w, const int64_t *shape, fc_error *err) {
    static const int64_t start[FC_MAX_DIMS];
    const fc_box weight = {w->codes->ndim, start, shape}, scales = {w->scales->ndim, start, w->scales->shape};
    return fc_fail(
        err, FC_EUNSUPPORTED,
        "tensor %.256s, a quantized weight %s, does not fit its scales %s: the blocks are neither 128 x 128, "
        "nor equal parts, nor those of the model's quantization_config.weight_block_size",
        w->codes->name, fc_box_to_text(&weight).s, fc_box_to_text(&scales).s);
}

static bool are_scales(const fc_tensor *t) {
    return fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT || t->dtype == FC_U8;
}

fc_code fc_scaled_fit(fc_scaled *w, const int64_t *shape, const int64_t *blocks, fc_error *err) {
    const fc_tensor *scales = w->scales;
    int64_t count = 0;
    if (!are_scales(scales)) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %.256s: scales of type %s are not known", scales->name,
                       fc_dtype_get(scales->dtype)->torch_name);
    }
    if (fc_numel(scales->ndim, scales->shape, &count) && count == 1) {
        w->ndim = 0;
        return FC_OK;
    }
    w->ndim = scales->ndim;
    if (scales->ndim > w->codes->ndim) {
        return refuse_shape(w, shape, err);
    }
    for (int d = 0; d < w->ndim; d++) {
        const int from_end = w->codes->ndim - d;
        w->block[d] = block_of(shape[d], scales->shape[d], from_end > 2 ? 1 : blocks[2 - from_end]);
        if (shape[d] > 0 && w->block[d] == 0) {
            return refuse_shape(w, shape, err);
        }
    }
    return FC_OK;
}

fc_code fc_scales_as_floats(const fc_computed_block *b, const fc_tensor *scales, const fc_box *box, float **out,
                            fc_error *err) {
    const size_t count = (size_t)fc_box_volume(box);
    const bool exponents = scales->dtype == FC_U8;
    unsigned char *raw = exponents ? fc_work_buffer(b->work, 2, count) : NULL;
    *out = fc_work_buffer(b->work, 1, count * sizeof **out);
    FC_NEED(*out && (!exponents || raw), err, b->sources[0]->path);
    FC_TRY(fc_read_box_crc(b->sources[0], scales, box, exponents ? FC_U8 : FC_F32, exponents ? raw : (void *)*out, NULL,
                           err));
    if (exponents) {
        fc_cast(FC_F8_E8M0FNU, raw, FC_F32, *out, count);
    }
    return FC_OK;
}

fc_code fc_scales_read(const fc_computed_block *b, const fc_scaled *w, fc_scale_box *out, fc_error *err) {
    const fc_box scales = {w->scales->ndim, out->offsets, out->sizes};
    for (int d = 0; d < w->scales->ndim; d++) {
        const bool cut = d < w->ndim;
        out->offsets[d] = cut ? b->box.offsets[d] / w->block[d] : 0;
        out->sizes[d] = cut ? (b->box.offsets[d] + b->box.sizes[d] - 1) / w->block[d] - out->offsets[d] + 1 : 1;
    }
    fc_row_major_strides(scales.ndim, out->sizes, out->strides);
    return fc_scales_as_floats(b, w->scales, &scales, &out->values, err);
}
