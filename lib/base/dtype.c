/*
 * The table of element types. A new type needs a constant in dtype.h and a row here. Elsewhere it needs code only where
 * it differs from its class: a cast (lib/codec/cast.c), a place in the order of safetensors
 * (formats/safetensors/dtypes.c).
 */
#include "fsdpckpt/dtype.h"

#include <string.h>

/* A type that is its own component: constant, torch name, short name, bytes, class, NumPy kind, float fields. */
#define REAL(dtype, torch_name, short_name, size, cls, kind, ...)                                                      \
    [dtype] = {torch_name, short_name, size, size, cls, dtype, kind, __VA_ARGS__}

#define FLOAT(dtype, torch_name, short_name, size, kind, exponent, mantissa, bias)                                     \
    REAL(dtype, torch_name, short_name, size, FC_CLASS_FLOAT, kind, exponent, mantissa, bias)

#define COMPLEX(dtype, torch_name, short_name, size, component, kind)                                                  \
    [dtype] = {torch_name, short_name, size, (size) / 2, FC_CLASS_COMPLEX, component, kind, 0, 0, 0}

static const fc_dtype_info table[FC_DTYPE_COUNT] = {
    FLOAT(FC_F64, "float64", "f64", 8, 'f', 11, 52, 1023),
    FLOAT(FC_F32, "float32", "f32", 4, 'f', 8, 23, 127),
    FLOAT(FC_F16, "float16", "f16", 2, 'f', 5, 10, 15),
    FLOAT(FC_BF16, "bfloat16", "bf16", 2, 'V', 8, 7, 127),
    FLOAT(FC_F8_E4M3FN, "float8_e4m3fn", "f8_e4m3fn", 1, 'V', 4, 3, 7),
    FLOAT(FC_F8_E5M2, "float8_e5m2", "f8_e5m2", 1, 'V', 5, 2, 15),
    /* Fields cannot describe that 0x80 is NaN, or that there is no sign. */
    FLOAT(FC_F8_E4M3FNUZ, "float8_e4m3fnuz", "f8_e4m3fnuz", 1, 'V', 0, 0, 0),
    FLOAT(FC_F8_E5M2FNUZ, "float8_e5m2fnuz", "f8_e5m2fnuz", 1, 'V', 0, 0, 0),
    FLOAT(FC_F8_E8M0FNU, "float8_e8m0fnu", "f8_e8m0fnu", 1, 'V', 0, 0, 0),
    REAL(FC_F4_E2M1FN_X2, "float4_e2m1fn_x2", "f4_e2m1fn_x2", 1, FC_CLASS_PACKED, 'V', 0, 0, 0),
    REAL(FC_I64, "int64", "i64", 8, FC_CLASS_SIGNED, 'i', 0, 0, 0),
    REAL(FC_I32, "int32", "i32", 4, FC_CLASS_SIGNED, 'i', 0, 0, 0),
    REAL(FC_I16, "int16", "i16", 2, FC_CLASS_SIGNED, 'i', 0, 0, 0),
    REAL(FC_I8, "int8", "i8", 1, FC_CLASS_SIGNED, 'i', 0, 0, 0),
    REAL(FC_U64, "uint64", "u64", 8, FC_CLASS_UNSIGNED, 'u', 0, 0, 0),
    REAL(FC_U32, "uint32", "u32", 4, FC_CLASS_UNSIGNED, 'u', 0, 0, 0),
    REAL(FC_U16, "uint16", "u16", 2, FC_CLASS_UNSIGNED, 'u', 0, 0, 0),
    REAL(FC_U8, "uint8", "u8", 1, FC_CLASS_UNSIGNED, 'u', 0, 0, 0),
    REAL(FC_BOOL, "bool", "bool", 1, FC_CLASS_BOOL, 'b', 0, 0, 0),
    COMPLEX(FC_C32, "complex32", "c32", 4, FC_F16, 'V'),
    COMPLEX(FC_C64, "complex64", "c64", 8, FC_F32, 'c'),
    COMPLEX(FC_C128, "complex128", "c128", 16, FC_F64, 'c'),
    REAL(FC_OPAQUE, "object", "object", 1, FC_CLASS_OPAQUE, 'V', 0, 0, 0),
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
