/*
 * Element types with the names that torch uses. Values are moved as bits; only fc_cast changes them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

typedef enum fc_dtype {
    FC_F64,
    FC_F32,
    FC_F16,
    FC_BF16,
    FC_F8_E4M3FN,
    FC_F8_E4M3FNUZ,
    FC_F8_E5M2,
    FC_F8_E5M2FNUZ,
    FC_F8_E8M0FNU,
    FC_F4_E2M1FN_X2, /**< two 4-bit floats in a byte; torch counts the byte as one element */
    FC_I64,
    FC_I32,
    FC_I16,
    FC_I8,
    FC_U64,
    FC_U32,
    FC_U16,
    FC_U8,
    FC_BOOL,
    FC_C32,
    FC_C64,
    FC_C128,
    FC_OPAQUE, /**< the bytes of an object (fc_object), one byte per element */
    FC_DTYPE_COUNT
} fc_dtype;

typedef enum fc_dtype_class {
    FC_CLASS_FLOAT,
    FC_CLASS_PACKED, /**< several numbers per element; these are moved, but cannot be cast */
    FC_CLASS_SIGNED,
    FC_CLASS_UNSIGNED,
    FC_CLASS_BOOL,
    FC_CLASS_COMPLEX,
    FC_CLASS_OPAQUE
} fc_dtype_class;

/** The properties of one type. */
typedef struct fc_dtype_info {
    const char *torch_name; /**< the attribute of the module torch, such as "bfloat16" */
    const char *short_name; /**< the name on the command line, such as "bf16" */
    uint32_t size;          /**< bytes per element */
    uint32_t swap_size;     /**< bytes that are reversed to change the byte order; for complex types half of `size` */
    fc_dtype_class cls;
    fc_dtype component; /**< for complex types the type of the real part, otherwise the type itself */
    char numpy_kind;    /**< NumPy's type code, such as 'f'; 'V' (raw bytes) where NumPy has no such type */
    /** The fields of a float with an implied leading bit; 0 for other types. The sign is the highest bit. */
    uint8_t exponent_bits, mantissa_bits;
    uint16_t exponent_bias;
} fc_dtype_info;

/** @return the properties of `dtype`; never NULL. */
const fc_dtype_info *fc_dtype_get(fc_dtype dtype);

/** @return the size of one element in bytes. */
static inline uint32_t fc_dtype_size(fc_dtype dtype) {
    return fc_dtype_get(dtype)->size;
}

/** Finds a type by its torch_name or short_name of `len` bytes. @return false when there is none. */
bool fc_dtype_find(const char *name, size_t len, fc_dtype *out);

FC_END_DECLS
