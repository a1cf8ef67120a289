/*
 * Builds the HDF5 datatype for each element type. HDF5 never converts values; the types only tell other programs what
 * the bits mean. They equal HDF5 2.0's predefined types bit for bit.
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
    /* Sets the fields before the size, because they must fit both the old and the new size. */
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
 * Fields cannot describe that an exponent of all ones is a number, that 0x80 is NaN, or that there is no sign. HDF5
 * would silently read wrong values from such a float, so its bits are stored as an integer; the attribute dtype gives
 * them a meaning.
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

/* Builds the type in which h5py writes numpy.bool_. */
static hid_t boolean(void) {
    static const signed char no = 0, yes = 1;
    hid_t type = H5Tenum_create(H5T_STD_I8LE);
    if (type >= 0 && (H5Tenum_insert(type, "FALSE", &no) < 0 || H5Tenum_insert(type, "TRUE", &yes) < 0)) {
        H5Tclose(type);
        return H5I_INVALID_HID;
    }
    return type;
}

/* Builds the type in which h5py writes numpy's complex types. Closes `part`. */
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

/* Builds an opaque byte without a tag, because h5py cannot read tagged ones. */
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

/* All bits set is NaN in every float except the two below, the largest unsigned number, and not a value of bool. */
void fc_h5_absent_value(fc_dtype dtype, unsigned char value[FC_H5_ELEMENT_MAX]) {
    size_t size = fc_dtype_size(dtype);
    memset(value, 0xff, FC_H5_ELEMENT_MAX);
    if (dtype == FC_F8_E4M3FNUZ || dtype == FC_F8_E5M2FNUZ) {
        value[0] = 0x80; /* the only NaN of these types */
    } else if (fc_dtype_get(dtype)->cls == FC_CLASS_SIGNED) {
        memset(value, 0, size);
        value[size - 1] = 0x80;
    }
}
