/*
 * Builds the HDF5 datatype that holds the bits of an element type. Values are never converted by HDF5; these types
 * exist so that other programs read meaning, and they equal HDF5 2.0's predefined ones bit for bit.
 */
#include "hdf5/writer/types_write.h"

#include <stddef.h>
#include <string.h>

/* A little-endian float with an implied leading bit, as its fields lie in the bits. */
typedef struct float_layout {
    size_t size;
    size_t sign_at, exponent_at, exponent_bits, mantissa_at, mantissa_bits;
    size_t bias;
} float_layout;

static const float_layout float16 = {2, 15, 10, 5, 0, 10, 15};
static const float_layout bfloat16 = {2, 15, 7, 8, 0, 7, 127};
static const float_layout e5m2 = {1, 7, 2, 5, 0, 2, 15};

static hid_t custom_float(const float_layout *f) {
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    if (type < 0) {
        return type;
    }
    /* Fields before size: they must fit the old size now and the new one afterwards, never the other way round. */
    if (H5Tset_fields(type, f->sign_at, f->exponent_at, f->exponent_bits, f->mantissa_at, f->mantissa_bits) < 0 ||
        H5Tset_precision(type, 8 * f->size) < 0 || H5Tset_size(type, f->size) < 0 || H5Tset_ebias(type, f->bias) < 0 ||
        H5Tset_norm(type, H5T_NORM_IMPLIED) < 0 || H5Tset_inpad(type, H5T_PAD_ZERO) < 0 ||
        H5Tset_pad(type, H5T_PAD_ZERO, H5T_PAD_ZERO) < 0) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

/* As h5py writes numpy.bool_. */
static hid_t boolean(void) {
    static const signed char no = 0, yes = 1;
    hid_t type = H5Tenum_create(H5T_STD_I8LE);
    if (type >= 0 && (H5Tenum_insert(type, "FALSE", &no) < 0 || H5Tenum_insert(type, "TRUE", &yes) < 0)) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

/* As h5py writes numpy's complex types. Takes over `part`. */
static hid_t complex_of(hid_t part) {
    if (part < 0) {
        return part;
    }
    size_t size = H5Tget_size(part);
    hid_t type = H5Tcreate(H5T_COMPOUND, 2 * size);
    if (type >= 0 && (H5Tinsert(type, "r", 0, part) < 0 || H5Tinsert(type, "i", size, part) < 0)) {
        H5Tclose(type);
        type = H5I_INVALID_HID;
    }
    H5Tclose(part);
    return type;
}

/* Opaque bytes without a tag: h5py finds no conversion for tagged ones and refuses to read them. */
static hid_t opaque_byte(void) {
    hid_t type = H5Tcreate(H5T_OPAQUE, 1);
    if (type >= 0 && H5Tset_tag(type, "") < 0) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

hid_t fc_h5_type_new(fc_dtype dtype) {
    switch (dtype) {
    case FC_F64:
        return H5Tcopy(H5T_IEEE_F64LE);
    case FC_F32:
        return H5Tcopy(H5T_IEEE_F32LE);
    case FC_F16:
        return custom_float(&float16);
    case FC_BF16:
        return custom_float(&bfloat16);
    case FC_F8_E5M2:
        return custom_float(&e5m2);
    case FC_F8_E4M3FN:
    case FC_F8_E4M3FNUZ:
    case FC_F8_E5M2FNUZ:
    case FC_F8_E8M0FNU:
    case FC_F4_E2M1FN_X2:
        /* No field layout says that an exponent of ones is a number, that 0x80 is NaN, or that there is no sign: as a
           float HDF5 reads wrong values, in silence. The bits, and the attribute dtype. */
        return H5Tcopy(H5T_STD_U8LE);
    case FC_I64:
        return H5Tcopy(H5T_STD_I64LE);
    case FC_I32:
        return H5Tcopy(H5T_STD_I32LE);
    case FC_I16:
        return H5Tcopy(H5T_STD_I16LE);
    case FC_I8:
        return H5Tcopy(H5T_STD_I8LE);
    case FC_U64:
        return H5Tcopy(H5T_STD_U64LE);
    case FC_U32:
        return H5Tcopy(H5T_STD_U32LE);
    case FC_U16:
        return H5Tcopy(H5T_STD_U16LE);
    case FC_U8:
        return H5Tcopy(H5T_STD_U8LE);
    case FC_BOOL:
        return boolean();
    case FC_C32:
        return complex_of(custom_float(&float16));
    case FC_C64:
        return complex_of(H5Tcopy(H5T_IEEE_F32LE));
    case FC_C128:
        return complex_of(H5Tcopy(H5T_IEEE_F64LE));
    case FC_OPAQUE:
        return opaque_byte();
    case FC_DTYPE_COUNT:
        break;
    }
    return H5I_INVALID_HID;
}

/* All bits set is NaN in every float but the two below, the largest unsigned number, and no value of bool. */
void fc_h5_absent_value(fc_dtype dtype, unsigned char value[FC_H5_ELEMENT_MAX]) {
    size_t size = fc_dtype_size(dtype);
    memset(value, 0xff, FC_H5_ELEMENT_MAX);
    if (dtype == FC_F8_E4M3FNUZ || dtype == FC_F8_E5M2FNUZ) {
        value[0] = 0x80; /* their only NaN */
    } else if (fc_dtype_get(dtype)->cls == FC_CLASS_SIGNED) {
        memset(value, 0, size);
        value[size - 1] = 0x80;
    }
}
