/*
 * Builds the HDF5 datatype that holds the bits of an element type. Values are never converted by HDF5; these types
 * exist so that other programs read meaning, and they equal HDF5 2.0's predefined ones bit for bit.
 */
#include "hdf5/writer/types_write.h"

#include <stddef.h>
#include <string.h>

static hid_t custom_float(const fc_dtype_info *info) {
    size_t bits = 8 * (size_t)info->size;
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    if (type < 0) {
        return type;
    }
    /* Fields before size: they must fit the old size now and the new one afterwards, never the other way round. */
    if (H5Tset_fields(type, bits - 1, info->mantissa_bits, info->exponent_bits, 0, info->mantissa_bits) < 0 ||
        H5Tset_precision(type, bits) < 0 || H5Tset_size(type, info->size) < 0 ||
        H5Tset_ebias(type, info->exponent_bias) < 0 || H5Tset_norm(type, H5T_NORM_IMPLIED) < 0 ||
        H5Tset_inpad(type, H5T_PAD_ZERO) < 0 || H5Tset_pad(type, H5T_PAD_ZERO, H5T_PAD_ZERO) < 0) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

/*
 * No fields describe that an exponent of ones is a number, that 0x80 is NaN, or that there is no sign. HDF5 would
 * silently read wrong values from such a float, so it is stored as its bits; the attribute dtype gives them a meaning.
 */
static hid_t floating(fc_dtype dtype) {
    const fc_dtype_info *info = fc_dtype_get(dtype);
    if (dtype == FC_F64) {
        return H5Tcopy(H5T_IEEE_F64LE);
    }
    if (dtype == FC_F32) {
        return H5Tcopy(H5T_IEEE_F32LE);
    }
    bool has_fields = info->exponent_bits > 0 && dtype != FC_F8_E4M3FN;
    return has_fields ? custom_float(info) : H5Tcopy(H5T_STD_U8LE);
}

static hid_t integer(const fc_dtype_info *info) {
    bool is_signed = info->cls == FC_CLASS_SIGNED;
    switch (info->size) {
    case 1:
        return H5Tcopy(is_signed ? H5T_STD_I8LE : H5T_STD_U8LE);
    case 2:
        return H5Tcopy(is_signed ? H5T_STD_I16LE : H5T_STD_U16LE);
    case 4:
        return H5Tcopy(is_signed ? H5T_STD_I32LE : H5T_STD_U32LE);
    default:
        return H5Tcopy(is_signed ? H5T_STD_I64LE : H5T_STD_U64LE);
    }
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
    const fc_dtype_info *info = fc_dtype_get(dtype);
    switch (info->cls) {
    case FC_CLASS_FLOAT:
        return floating(dtype);
    case FC_CLASS_PACKED:
        return H5Tcopy(H5T_STD_U8LE);
    case FC_CLASS_SIGNED:
    case FC_CLASS_UNSIGNED:
        return integer(info);
    case FC_CLASS_BOOL:
        return boolean();
    case FC_CLASS_COMPLEX:
        return complex_of(floating(info->component));
    case FC_CLASS_OPAQUE:
        return opaque_byte();
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
