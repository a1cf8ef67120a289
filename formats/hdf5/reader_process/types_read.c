/*
 * Maps an HDF5 datatype to an fc_dtype. All bit fields must match exactly.
 */
#include "hdf5/reader_process/types_read.h"

#include "hdf5/writer/types_write.h"

#include <stdio.h>
#include <string.h>

static bool read_float(hid_t type, fc_dtype *out) {
    size_t sign_at, exponent_at, exponent_bits, mantissa_at, mantissa_bits;
    size_t size = H5Tget_size(type);
    if (H5Tget_fields(type, &sign_at, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0 ||
        H5Tget_norm(type) != H5T_NORM_IMPLIED || H5Tget_offset(type) != 0 || H5Tget_precision(type) != 8 * size) {
        return false;
    }
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        const fc_dtype_info *f = fc_dtype_get((fc_dtype)i);
        if (f->exponent_bits > 0 && f->size == size && sign_at == 8 * size - 1 && exponent_at == f->mantissa_bits &&
            exponent_bits == f->exponent_bits && mantissa_at == 0 && mantissa_bits == f->mantissa_bits &&
            f->exponent_bias == H5Tget_ebias(type)) {
            *out = (fc_dtype)i;
            return true;
        }
    }
    return false;
}

/* Recognises integers that fill their bytes. Bit fields count as unsigned integers, as in h5py. */
static bool read_integer(hid_t type, H5T_class_t cls, fc_dtype *out) {
    size_t size = H5Tget_size(type);
    bool is_signed = cls == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2;
    if (H5Tget_precision(type) != 8 * size || H5Tget_offset(type) != 0) {
        return false;
    }
    switch (size) {
    case 1:
        *out = is_signed ? FC_I8 : FC_U8;
        return true;
    case 2:
        *out = is_signed ? FC_I16 : FC_U16;
        return true;
    case 4:
        *out = is_signed ? FC_I32 : FC_U32;
        return true;
    case 8:
        *out = is_signed ? FC_I64 : FC_U64;
        return true;
    default:
        return false;
    }
}

/* Whether it is h5py's bool: an enum of one byte with FALSE = 0 and TRUE = 1. */
static bool is_bool(hid_t type) {
    signed char no = -1, yes = -1;
    if (H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2) {
        return false;
    }
    for (unsigned i = 0; i < 2; i++) {
        signed char value = -1;
        char *name = H5Tget_member_name(type, i);
        if (name && H5Tget_member_value(type, i, &value) >= 0) {
            if (strcmp(name, "FALSE") == 0) {
                no = value;
            } else if (strcmp(name, "TRUE") == 0) {
                yes = value;
            }
        }
        H5free_memory(name);
    }
    return no == 0 && yes == 1;
}

/* @return false for a byte order other than big-endian and little-endian. */
static bool read_order(hid_t type, bool *swap) {
    H5T_order_t order = H5Tget_order(type);
    *swap = order == H5T_ORDER_BE && H5Tget_size(type) > 1;
    return order == H5T_ORDER_BE || order == H5T_ORDER_LE || H5Tget_size(type) == 1;
}

static bool member_is(hid_t type, unsigned index, const char *a, const char *b, size_t offset) {
    char *name = H5Tget_member_name(type, index);
    bool ok = name && (strcmp(name, a) == 0 || strcmp(name, b) == 0) && H5Tget_member_offset(type, index) == offset;
    H5free_memory(name);
    return ok;
}

/* Finds the complex type with components of type `real`. */
static bool find_complex(fc_dtype real, fc_dtype *out) {
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        const fc_dtype_info *info = fc_dtype_get((fc_dtype)i);
        if (info->cls == FC_CLASS_COMPLEX && info->component == real) {
            *out = (fc_dtype)i;
            return true;
        }
    }
    return false;
}

/* Recognises h5py's complex: a compound of two equal floats, r and i (others call them real and imag). */
static bool read_complex(hid_t type, fc_dtype *out, bool *swap) {
    fc_dtype real, imag;
    bool swap_imag = false, ok = false;
    size_t size = H5Tget_size(type);
    if (H5Tget_nmembers(type) != 2 || !member_is(type, 0, "r", "real", 0) ||
        !member_is(type, 1, "i", "imag", size / 2)) {
        return false;
    }
    hid_t a = H5Tget_member_type(type, 0), b = H5Tget_member_type(type, 1);
    if (H5Tget_class(a) == H5T_FLOAT && H5Tget_class(b) == H5T_FLOAT && read_float(a, &real) && read_float(b, &imag) &&
        real == imag && 2 * (size_t)fc_dtype_size(real) == size && read_order(a, swap) && read_order(b, &swap_imag) &&
        *swap == swap_imag) {
        ok = find_complex(real, out);
    }
    H5Tclose(a);
    H5Tclose(b);
    return ok;
}

/*
 * The attribute `dtype` gives a meaning to bytes whose HDF5 type has none (Keras stores bfloat16 as opaque). In our own
 * files it also decides about every type that is stored as this HDF5 type, because HDF5 cannot express them all.
 */
static bool read_name(hid_t type, size_t size, const char *name, bool trusted, fc_dtype *out) {
    fc_dtype named;
    if (!name || !fc_dtype_find(name, strlen(name), &named) || fc_dtype_size(named) != size) {
        return false;
    }
    bool matches = H5Tget_class(type) == H5T_OPAQUE;
    if (trusted && !matches) {
        hid_t expected = fc_h5_type_new(named);
        matches = expected >= 0 && H5Tequal(type, expected) > 0;
        H5Tclose(expected);
    }
    *out = named;
    return matches;
}

static bool has_pointers(hid_t type) {
    return H5Tdetect_class(type, H5T_VLEN) > 0 || H5Tdetect_class(type, H5T_REFERENCE) > 0 ||
           H5Tis_variable_str(type) > 0;
}

/* H5Tdetect_class does not see variable-length strings inside compounds as VLEN. */
static bool contains_variable_text(hid_t type) {
    H5T_class_t cls = H5Tget_class(type);
    bool found = false;
    if (cls == H5T_COMPOUND) {
        int n = H5Tget_nmembers(type);
        for (int i = 0; i < n && !found; i++) {
            hid_t member = H5Tget_member_type(type, (unsigned)i);
            found = member < 0 || contains_variable_text(member);
            H5Tclose(member);
        }
    } else if (cls == H5T_ARRAY) {
        hid_t base = H5Tget_super(type);
        found = base < 0 || contains_variable_text(base);
        H5Tclose(base);
    } else {
        found = cls == H5T_STRING && H5Tis_variable_str(type) > 0;
    }
    return found;
}

fc_h5_type fc_h5_type_read(hid_t type, const char *name, bool trusted_name) {
    fc_h5_type out = {FC_H5_FIXED_BYTES, FC_OPAQUE, false, H5Tget_size(type)};
    H5T_class_t cls = H5Tget_class(type);
    bool numbers = false;
    if (read_name(type, out.size, name, trusted_name, &out.dtype)) {
        out.cls = FC_H5_NUMBERS;
        return out;
    }
    out.dtype = FC_OPAQUE;
    switch (cls) {
    case H5T_FLOAT:
        numbers = read_float(type, &out.dtype) && read_order(type, &out.swap);
        break;
    case H5T_INTEGER:
    case H5T_BITFIELD:
        numbers = read_integer(type, cls, &out.dtype) && read_order(type, &out.swap);
        break;
    case H5T_ENUM:
        numbers = is_bool(type);
        out.dtype = FC_BOOL;
        break;
    case H5T_COMPOUND:
        numbers = read_complex(type, &out.dtype, &out.swap);
        break;
    case H5T_STRING:
        out.cls = FC_H5_STRINGS;
        return out;
    default:
        break;
    }
    if (numbers) {
        out.cls = FC_H5_NUMBERS;
    } else {
        out.cls = has_pointers(type) || contains_variable_text(type) ? FC_H5_POINTERS : FC_H5_FIXED_BYTES;
        out.dtype = FC_OPAQUE;
        out.swap = false;
    }
    return out;
}

void fc_h5_type_text(hid_t type, char *buf, size_t size) {
    static const char *const names[] = {"integer",  "float",     "time", "string",          "bitfield", "opaque",
                                        "compound", "reference", "enum", "variable-length", "array"};
    H5T_class_t cls = H5Tget_class(type);
    const char *name = cls >= 0 && (size_t)cls < sizeof names / sizeof *names ? names[cls] : "unknown";
    snprintf(buf, size, "%s of %zu bytes", name, H5Tget_size(type));
}
