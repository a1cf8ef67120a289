/*
 * Four-bit weights of bitsandbytes (NF4, FP4): X holds the codes of the whole weight in row-major order, two in a byte,
 * the first one in its high bits. Blocks of them share a scale, X.absmax; X.quant_map has the 16 values. The scales may
 * be codes themselves, with X.nested_absmax, X.nested_quant_map and an offset ("double quantization"). JSON in
 * X.quant_state.bitsandbytes__nf4 has the shape and the sizes of blocks.
 */
#include "base/checked.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "weights/dequantizer.h"

#include <string.h>

enum { MOST_STATE = 64 << 10, MAP = 16, NESTED_MAP = 256, PIECE = 2048 };

/* fc_computed_block.what. */
typedef struct blockwise {
    const fc_tensor *codes, *absmax, *map;
    const fc_tensor *nested_absmax, *nested_map; /* NULL: absmax are floats */
    int64_t size, nested_size;                   /* of blocks */
    float offset;                                /* of nested scales */
    bool alone;                                  /* no two computed blocks read the same codes */
} blockwise;

/* ---- computing ---- */

/* Reads some elements of a tensor that has them along its first dimension. */
static fc_code read_run(const fc_computed_block *b, const fc_tensor *t, int64_t from, int64_t count, fc_dtype dtype,
                        int buffer, void **out, fc_error *err) {
    const int64_t offsets[2] = {from, 0}, sizes[2] = {count, 1};
    const fc_box box = {t->ndim, offsets, sizes};
    const bool codes = t == ((const blockwise *)b->what)->codes;
    *out = fc_work_buffer(b->work, buffer, (size_t)count * fc_dtype_size(dtype));
    FC_NEED(*out, err, b->sources[0]->path);
    return fc_read_box_crc(b->sources[0], t, &box, dtype, *out,
                           codes && ((const blockwise *)b->what)->alone ? b->crcs[0] : NULL, err);
}

/* Reads the scales of blocks `first` to `last`. */
static fc_code read_scales(const fc_computed_block *b, int64_t first, int64_t last, float **out, fc_error *err) {
    const blockwise *w = b->what;
    const int64_t count = last - first + 1;
    void *codes = NULL, *nested = NULL, *map = NULL, *scales = NULL;
    if (!w->nested_absmax) {
        FC_TRY(read_run(b, w->absmax, first, count, FC_F32, 1, &scales, err));
        *out = scales;
        return FC_OK;
    }
    const int64_t outer = first / w->nested_size;
    FC_TRY(read_run(b, w->absmax, first, count, FC_U8, 2, &codes, err));
    FC_TRY(read_run(b, w->nested_absmax, outer, last / w->nested_size - outer + 1, FC_F32, 3, &nested, err));
    FC_TRY(read_run(b, w->nested_map, 0, NESTED_MAP, FC_F32, 4, &map, err));
    float *made = fc_work_buffer(b->work, 1, (size_t)count * sizeof *made);
    FC_NEED(made, err, b->sources[0]->path);
    for (int64_t i = 0; i < count; i++) {
        const float product = ((const float *)map)[((const unsigned char *)codes)[i]] *
                              ((const float *)nested)[(first + i) / w->nested_size - outer];
        made[i] = product + w->offset;
    }
    *out = made;
    return FC_OK;
}

/* @return the number of the first element of the block, in row-major order of the weight. */
static int64_t first_element(const fc_computed_block *b) {
    int64_t at = 0;
    for (int d = 0; d < b->box.ndim; d++) {
        at = at * b->tensor->shape[d] + b->box.offsets[d];
    }
    return at;
}

static fc_code compute(const fc_computed_block *b, fc_error *err) {
    const blockwise *w = b->what;
    const int64_t from = first_element(b), count = fc_box_volume(&b->box);
    const int64_t in_one = 2 * (int64_t)fc_dtype_size(w->codes->dtype), first = from / in_one;
    float *scales = NULL, values[PIECE], table[MAP];
    void *map = NULL, *codes = NULL;
    FC_TRY(read_run(b, w->map, 0, MAP, FC_F32, 4, &map, err));
    memcpy(table, map, sizeof table);
    FC_TRY(read_scales(b, from / w->size, (from + count - 1) / w->size, &scales, err));
    FC_TRY(read_run(b, w->codes, first, (from + count - 1) / in_one - first + 1, w->codes->dtype, 0, &codes, err));
    const unsigned char *bytes = codes;
    const size_t element = fc_dtype_size(b->tensor->dtype);
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t some = count - i < PIECE ? count - i : PIECE;
        for (int64_t k = 0; k < some; k++) {
            const int64_t at = from + i + k;
            const unsigned char both = bytes[at / 2 - first * in_one / 2];
            values[k] = table[at % 2 == 0 ? both >> 4 : both & 15] * scales[at / w->size - from / w->size];
        }
        fc_cast(FC_F32, values, b->tensor->dtype, (unsigned char *)b->out + (size_t)i * element, (size_t)some);
    }
    return FC_OK;
}

/* ---- finding ---- */

/* Reads the JSON that says what the tensors do not. */
static fc_code read_state(const fc_dequantizer *d, const fc_tensor *codes, json_t **out) {
    static const char *const ends[] = {".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"};
    static const int64_t start = 0;
    const fc_tensor *t = fc_dequantizer_near(d, codes->name, 0, ends[0]);
    json_error_t where;
    *out = NULL;
    t = t ? t : fc_dequantizer_near(d, codes->name, 0, ends[1]);
    if (!t || t->object || t->dtype != FC_U8 || t->ndim != 1 || t->shape[0] > MOST_STATE) {
        return fc_dequantizer_refuse(d, codes, "there is no %.256s%s next to it, or it is no text", codes->name,
                                     ends[0]);
    }
    if (d->source->format->layout_only) {
        return fc_dequantizer_refuse(d, codes, "its shape is the data of %.256s, which is not here", t->name);
    }
    char *text = fc_arena_alloc(d->scratch, (size_t)t->shape[0] + 1);
    FC_NEED(text, d->err, d->source->path);
    const fc_box box = {1, &start, t->shape};
    FC_TRY(fc_read_box(d->source, t, &box, FC_U8, text, d->err));
    *out = json_loadb(text, (size_t)t->shape[0], 0, &where);
    return *out ? FC_OK : fc_dequantizer_refuse(d, codes, "%.256s is no JSON: %s", t->name, where.text);
}

/* Whether a tensor is there, of this type, with `count` elements along its first dimension and one along others. */
static bool is_run(const fc_tensor *t, fc_dtype dtype, int64_t count) {
    return t && !t->object && t->dtype == dtype && t->ndim == 1 && t->shape[0] == count;
}

static int64_t blocks_of(int64_t count, int64_t size) {
    return count / size + (count % size != 0);
}

/* Checks that the parts of the weight fit each other. */
static fc_code check_parts(const fc_dequantizer *d, const blockwise *w, int64_t count, bool nested) {
    const fc_tensor *codes = w->codes;
    const int64_t in_one = 2 * (int64_t)fc_dtype_size(codes->dtype),
                  scales = w->size > 0 ? blocks_of(count, w->size) : 0;
    if (w->size <= 0 || (nested && w->nested_size <= 0)) {
        return fc_dequantizer_refuse(d, codes, "its quant_state has no size of blocks");
    }
    if (codes->ndim != 2 || codes->shape[1] != 1 || codes->shape[0] != blocks_of(count, in_one)) {
        return fc_dequantizer_refuse(d, codes, "it should have one column and %lld rows for a weight of %lld elements",
                                     (long long)blocks_of(count, in_one), (long long)count);
    }
    if (!is_run(w->absmax, nested ? FC_U8 : FC_F32, scales)) {
        return fc_dequantizer_refuse(d, codes, "%.256s should have %lld elements of type %s", w->absmax->name,
                                     (long long)scales, nested ? "uint8" : "float32");
    }
    if (!is_run(w->map, FC_F32, MAP)) {
        return fc_dequantizer_refuse(d, codes, "there is no %.256s.quant_map of 16 float32 next to it", codes->name);
    }
    if (nested && (!is_run(w->nested_absmax, FC_F32, blocks_of(scales, w->nested_size)) ||
                   !is_run(w->nested_map, FC_F32, NESTED_MAP))) {
        return fc_dequantizer_refuse(
            d, codes, "there are no %.256s.nested_absmax of %lld and nested_quant_map of 256 float32 next to it",
            codes->name, (long long)blocks_of(scales, w->nested_size));
    }
    return FC_OK;
}

/* Takes sizes, shape and offset from the state. */
static fc_code use_state(const fc_dequantizer *d, const json_t *state, blockwise *w, fc_tensor *like, int64_t *shape) {
    const json_t *dims = json_object_get(state, "shape");
    const char *nested_type = json_string_value(json_object_get(state, "nested_dtype"));
    const bool nested = w->absmax->dtype == FC_U8;
    int64_t count;
    if (json_array_size(dims) == 0 || json_array_size(dims) > FC_MAX_DIMS) {
        return fc_dequantizer_refuse(d, w->codes, "its quant_state has no shape");
    }
    like->ndim = (int)json_array_size(dims);
    like->shape = shape;
    for (int i = 0; i < like->ndim; i++) {
        shape[i] = (int64_t)json_integer_value(json_array_get(dims, (size_t)i));
    }
    if (!fc_numel(like->ndim, shape, &count) || count < 0) {
        return fc_dequantizer_refuse(d, w->codes, "the shape in its quant_state is too large");
    }
    if (nested && (!nested_type || strcmp(nested_type, "float32") != 0)) {
        return fc_dequantizer_refuse(d, w->codes, "its nested scales are not float32");
    }
    w->size = (int64_t)json_integer_value(json_object_get(state, "blocksize"));
    w->nested_size = (int64_t)json_integer_value(json_object_get(state, "nested_blocksize"));
    w->offset = (float)json_number_value(json_object_get(state, "nested_offset"));
    if (!nested) {
        w->nested_absmax = w->nested_map = NULL;
    }
    return check_parts(d, w, count, nested);
}

/* Chooses blocks that share no element of the codes where that is possible. @return whether none is shared. */
static bool choose_blocks(const fc_tensor *like, int64_t in_one, int64_t *block) {
    int64_t inner = 1;
    fc_computed_run(like, block);
    for (int d = like->ndim - 1; d >= 0; d--) {
        if (block[d] < like->shape[d]) {
            block[d] -= block[d] > in_one ? block[d] % in_one : 0;
            return block[d] * inner % in_one == 0 && (d == 0 || like->shape[d] * inner % in_one == 0);
        }
        inner *= like->shape[d];
    }
    return true;
}

fc_code fc_blockwise_add(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *scales) {
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS];
    fc_tensor like = *codes;
    blockwise *w = fc_arena_calloc(d->out->arena, 1, sizeof *w);
    json_t *state = NULL;
    FC_NEED(w, d->err, d->source->path);
    *w = (blockwise){.codes = codes,
                     .absmax = scales,
                     .map = fc_dequantizer_near(d, codes->name, 0, ".quant_map"),
                     .nested_absmax = fc_dequantizer_near(d, codes->name, 0, ".nested_absmax"),
                     .nested_map = fc_dequantizer_near(d, codes->name, 0, ".nested_quant_map")};
    FC_TRY(read_state(d, codes, &state));
    const fc_code rc = use_state(d, state, w, &like, shape);
    json_decref(state);
    FC_TRY(rc);
    like.dtype = d->dtype;
    w->alone = choose_blocks(&like, 2 * (int64_t)fc_dtype_size(codes->dtype), block);
    const fc_tensor *const shared[] = {w->absmax, w->map, w->nested_absmax, w->nested_map, w->alone ? NULL : codes};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        FC_TRY(shared[i] ? fc_computed_shares(d->out, 0, shared[i], d->err) : FC_OK);
    }
    return fc_computed_add(d->out, &like, NULL, block, compute, w, d->err);
}
