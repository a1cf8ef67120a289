/*
 * The table of element types. Formats map their own names onto it; nothing else knows sizes.
 */
#include "fsdpckpt/dtype.h"

#include <string.h>

static const fc_dtype_info table[FC_DTYPE_COUNT] = {
    [FC_F64] = {"float64", "f64", 8, 8, FC_CLASS_FLOAT},
    [FC_F32] = {"float32", "f32", 4, 4, FC_CLASS_FLOAT},
    [FC_F16] = {"float16", "f16", 2, 2, FC_CLASS_FLOAT},
    [FC_BF16] = {"bfloat16", "bf16", 2, 2, FC_CLASS_FLOAT},
    [FC_F8_E4M3FN] = {"float8_e4m3fn", "f8_e4m3fn", 1, 1, FC_CLASS_FLOAT},
    [FC_F8_E4M3FNUZ] = {"float8_e4m3fnuz", "f8_e4m3fnuz", 1, 1, FC_CLASS_FLOAT},
    [FC_F8_E5M2] = {"float8_e5m2", "f8_e5m2", 1, 1, FC_CLASS_FLOAT},
    [FC_F8_E5M2FNUZ] = {"float8_e5m2fnuz", "f8_e5m2fnuz", 1, 1, FC_CLASS_FLOAT},
    [FC_F8_E8M0FNU] = {"float8_e8m0fnu", "f8_e8m0fnu", 1, 1, FC_CLASS_FLOAT},
    [FC_F4_E2M1FN_X2] = {"float4_e2m1fn_x2", "f4_e2m1fn_x2", 1, 1, FC_CLASS_PACKED},
    [FC_I64] = {"int64", "i64", 8, 8, FC_CLASS_SIGNED},
    [FC_I32] = {"int32", "i32", 4, 4, FC_CLASS_SIGNED},
    [FC_I16] = {"int16", "i16", 2, 2, FC_CLASS_SIGNED},
    [FC_I8] = {"int8", "i8", 1, 1, FC_CLASS_SIGNED},
    [FC_U64] = {"uint64", "u64", 8, 8, FC_CLASS_UNSIGNED},
    [FC_U32] = {"uint32", "u32", 4, 4, FC_CLASS_UNSIGNED},
    [FC_U16] = {"uint16", "u16", 2, 2, FC_CLASS_UNSIGNED},
    [FC_U8] = {"uint8", "u8", 1, 1, FC_CLASS_UNSIGNED},
    [FC_BOOL] = {"bool", "bool", 1, 1, FC_CLASS_BOOL},
    [FC_C32] = {"complex32", "c32", 4, 2, FC_CLASS_COMPLEX},
    [FC_C64] = {"complex64", "c64", 8, 4, FC_CLASS_COMPLEX},
    [FC_C128] = {"complex128", "c128", 16, 8, FC_CLASS_COMPLEX},
    [FC_OPAQUE] = {"object", "object", 1, 1, FC_CLASS_OPAQUE},
};

const fc_dtype_info *fc_dtype_get(fc_dtype dtype) {
    return &table[dtype];
}

static bool equals(const char *name, size_t len, const char *entry) {
    return strlen(entry) == len && memcmp(name, entry, len) == 0;
}

bool fc_dtype_find(const char *name, size_t len, fc_dtype *out) {
    for (int i = 0; i < FC_OPAQUE; i++) {
        if (equals(name, len, table[i].torch_name) || equals(name, len, table[i].short_name)) {
            *out = (fc_dtype)i;
            return true;
        }
    }
    return false;
}
