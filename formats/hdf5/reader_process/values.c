/*
 * Converts HDF5 values to JSON text. See values.h.
 */
#include "hdf5/reader_process/values.h"

#include "fsdpckpt/mesh.h"
#include "hdf5/reader_process/child.h"
#include "hdf5/reader_process/types_read.h"

#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANK = 32 };

static void append_float(fc_text *t, double value, int digits) {
    char buf[48];
    if (isnan(value)) {
        snprintf(buf, sizeof buf, "{\"$float\": \"nan\"}");
    } else if (isinf(value)) {
        snprintf(buf, sizeof buf, "{\"$float\": \"%s\"}", value > 0 ? "inf" : "-inf");
    } else {
        snprintf(buf, sizeof buf, "%.*g", digits, value);
        if (!strpbrk(buf, ".e")) {
            strcat(buf, ".0"); /* so that it is read back as a float */
        }
    }
    fc_text_raw(t, buf);
}

/* How the elements in memory are printed. */
typedef enum element_kind { AS_SIGNED, AS_UNSIGNED, AS_F32, AS_F64, AS_BOOL, AS_FIXED, AS_VARIABLE } element_kind;

typedef struct elements {
    element_kind kind;
    H5T_str_t padding;
    size_t size; /* bytes of an element in memory */
    const unsigned char *at;
} elements;

static void append_fixed(fc_text *t, const elements *e) {
    const char *s = (const char *)e->at;
    size_t len = e->padding == H5T_STR_NULLTERM ? strnlen(s, e->size) : e->size;
    while (e->padding != H5T_STR_NULLTERM && len > 0 && s[len - 1] == (e->padding == H5T_STR_SPACEPAD ? ' ' : '\0')) {
        len--;
    }
    fc_text_string(t, s, len);
}

static void append_element(fc_text *t, elements *e) {
    char buf[32] = "";
    int64_t i;
    double d;
    float f;
    char *s;
    switch (e->kind) {
    case AS_SIGNED:
    case AS_UNSIGNED:
        memcpy(&i, e->at, sizeof i);
        snprintf(buf, sizeof buf, e->kind == AS_SIGNED ? "%" PRId64 : "%" PRIu64, i);
        break;
    case AS_F64:
        memcpy(&d, e->at, sizeof d);
        append_float(t, d, 17);
        break;
    case AS_F32:
        memcpy(&f, e->at, sizeof f);
        append_float(t, f, 9);
        break;
    case AS_BOOL:
        snprintf(buf, sizeof buf, "%s", *e->at ? "true" : "false");
        break;
    case AS_FIXED:
        append_fixed(t, e);
        break;
    case AS_VARIABLE:
        memcpy(&s, e->at, sizeof s);
        fc_text_string(t, s ? s : "", s ? strlen(s) : 0);
        break;
    }
    fc_text_raw(t, buf);
    e->at += e->size;
}

static void append_nested(fc_text *t, elements *e, int ndim, const hsize_t *dims) {
    if (ndim == 0) {
        append_element(t, e);
        return;
    }
    fc_text_raw(t, "[");
    for (hsize_t i = 0; i < dims[0] && !t->failed; i++) {
        fc_text_raw(t, i ? ", " : "");
        append_nested(t, e, ndim - 1, dims + 1);
    }
    fc_text_raw(t, "]");
}

/* Chooses the type in memory, and how to print it. @return a type that the caller closes, or a negative number. */
static hid_t memory_type(hid_t type, elements *e) {
    fc_h5_type known = fc_h5_type_read(type, NULL, false);
    hid_t memory = H5I_INVALID_HID;
    if (known.cls == FC_H5_STRINGS) {
        e->kind = H5Tis_variable_str(type) > 0 ? AS_VARIABLE : AS_FIXED;
        e->padding = H5Tget_strpad(type);
        memory = H5Tcopy(type);
    } else if (known.cls == FC_H5_NUMBERS && known.dtype == FC_BOOL) {
        e->kind = AS_BOOL;
        memory = H5Tcopy(type);
    } else if (known.cls == FC_H5_NUMBERS && H5Tget_class(type) == H5T_INTEGER) {
        bool is_signed = fc_dtype_get(known.dtype)->cls == FC_CLASS_SIGNED;
        e->kind = is_signed ? AS_SIGNED : AS_UNSIGNED;
        memory = H5Tcopy(is_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64);
    } else if (known.cls == FC_H5_NUMBERS && known.dtype == FC_F64) {
        e->kind = AS_F64;
        memory = H5Tcopy(H5T_NATIVE_DOUBLE);
    } else if (known.cls == FC_H5_NUMBERS &&
               (known.dtype == FC_F32 || known.dtype == FC_F16 || known.dtype == FC_BF16)) {
        e->kind = AS_F32; /* exact for all three */
        memory = H5Tcopy(H5T_NATIVE_FLOAT);
    }
    e->size = memory >= 0 ? H5Tget_size(memory) : 0;
    return memory;
}

/* Writes a value that has no JSON form: its type, and its bytes if they have a meaning. */
static void append_other(fc_text *t, hid_t type, hid_t attribute, hsize_t count) {
    char text[64];
    fc_h5_type known = fc_h5_type_read(type, NULL, false);
    fc_h5_type_text(type, text, sizeof text);
    fc_text_raw(t, "{\"$hdf5\": {\"type\": \"");
    fc_text_raw(t, text);
    fc_text_raw(t, "\"");
    if (known.cls != FC_H5_POINTERS && known.size > 0 && count <= FC_MAX_TEXT / 2 / known.size) {
        unsigned char *raw = fc_h5_child_calloc((size_t)count * known.size + 1, 1);
        if (H5Aread(attribute, type, raw) >= 0) {
            fc_text_raw(t, ", \"bytes\": ");
            fc_text_base64(t, raw, (size_t)count * known.size);
        }
        free(raw);
    }
    fc_text_raw(t, "}}");
}

/* Gets the shape of a dataspace of at most MAX_RANK dimensions. @return the number of elements, or -1. */
static int64_t shape_of(hid_t space, int *ndim, hsize_t *dims) {
    *ndim = H5Sget_simple_extent_ndims(space);
    hssize_t n = H5Sget_simple_extent_npoints(space);
    if (*ndim < 0 || *ndim > MAX_RANK || n < 0 || H5Sget_simple_extent_dims(space, dims, NULL) < 0) {
        return -1;
    }
    return n;
}

static bool read_values(fc_text *t, hid_t object, bool is_attribute, hid_t type, hid_t space) {
    hsize_t dims[MAX_RANK];
    int ndim;
    elements e = {0};
    int64_t count = shape_of(space, &ndim, dims);
    hid_t memory = memory_type(type, &e);
    unsigned char *raw = NULL;
    bool ok = false;
    if (memory < 0 || count < 0 || e.size == 0 || (uint64_t)count > FC_MAX_TEXT / e.size) {
        goto out;
    }
    raw = fc_h5_child_calloc((size_t)count + 1, e.size);
    if ((is_attribute ? H5Aread(object, memory, raw) : H5Dread(object, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, raw)) <
        0) {
        goto out;
    }
    e.at = raw;
    append_nested(t, &e, ndim, dims);
    if (e.kind == AS_VARIABLE) {
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, raw);
    }
    ok = true;
out:
    free(raw);
    if (memory >= 0) {
        H5Tclose(memory);
    }
    return ok;
}

void fc_text_attribute(fc_text *text, hid_t attribute) {
    hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    hssize_t count = H5Sget_simple_extent_npoints(space);
    if (type < 0 || space < 0 || H5Sget_simple_extent_type(space) == H5S_NULL) {
        fc_text_raw(text, "null");
    } else if (!read_values(text, attribute, true, type, space)) {
        append_other(text, type, attribute, count < 0 ? 0 : (hsize_t)count);
    }
    if (space >= 0) {
        H5Sclose(space);
    }
    if (type >= 0) {
        H5Tclose(type);
    }
}

bool fc_text_dataset(fc_text *text, hid_t dataset) {
    hid_t type = H5Dget_type(dataset), space = H5Dget_space(dataset);
    bool ok = true;
    if (H5Sget_simple_extent_type(space) == H5S_NULL) {
        fc_text_raw(text, "null");
    } else {
        ok = read_values(text, dataset, false, type, space) && !text->failed;
    }
    if (text->no_memory) {
        fc_h5_child_no_memory();
    }
    H5Sclose(space);
    H5Tclose(type);
    return ok;
}

char *fc_h5_attribute_text(hid_t object, const char *name) {
    char *out = NULL;
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) {
        return NULL;
    }
    hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    bool variable = type >= 0 && H5Tis_variable_str(type) > 0;
    if (type < 0 || space < 0 || H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1) {
        goto out;
    }
    if (variable) {
        char *value = NULL;
        if (H5Aread(attribute, type, &value) >= 0 && value) {
            out = strcpy(fc_h5_child_calloc(strlen(value) + 1, 1), value);
        }
        H5Dvlen_reclaim(type, space, H5P_DEFAULT, &value);
    } else {
        size_t size = H5Tget_size(type);
        out = size <= FC_MAX_TEXT ? fc_h5_child_calloc(1, size + 1) : NULL;
        if (out && H5Aread(attribute, type, out) < 0) {
            free(out);
            out = NULL;
        }
    }
    if (out && !fc_is_utf8(out, strlen(out))) {
        free(out);
        out = NULL;
    }
out:
    H5Sclose(space);
    H5Tclose(type);
    H5Aclose(attribute);
    return out;
}

bool fc_h5_read_u64(hid_t object, const char *name, uint64_t *value) {
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) {
        return false;
    }
    hid_t space = H5Aget_space(attribute), type = H5Aget_type(attribute);
    bool read = H5Tequal(type, H5T_STD_U64LE) > 0 && H5Sget_simple_extent_npoints(space) == 1 &&
                H5Aread(attribute, H5T_NATIVE_UINT64, value) >= 0;
    H5Tclose(type);
    H5Sclose(space);
    H5Aclose(attribute);
    return read;
}

int64_t fc_h5_read_i64s(hid_t object, const char *name, int64_t *values, size_t max) {
    int64_t count = -1;
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) {
        return -1;
    }
    hid_t space = H5Aget_space(attribute), type = H5Aget_type(attribute);
    hssize_t n = H5Sget_simple_extent_npoints(space);
    if (H5Tget_class(type) == H5T_INTEGER && n >= 0 && (size_t)n <= max &&
        (n == 0 || H5Aread(attribute, H5T_NATIVE_INT64, values) >= 0)) {
        count = n;
        for (hssize_t i = 0; i < n; i++) {
            count = values[i] < 0 ? -1 : count;
        }
    }
    H5Tclose(type);
    H5Sclose(space);
    H5Aclose(attribute);
    return count;
}

char *fc_h5_read_names(hid_t object, const char *name) {
    char *joined = NULL, **values = NULL;
    if (H5Aexists(object, name) <= 0) {
        return NULL;
    }
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    hid_t space = H5Aget_space(attribute), type = H5Aget_type(attribute);
    hssize_t n = H5Sget_simple_extent_npoints(space);
    if (H5Tis_variable_str(type) > 0 && n > 0 && n <= FC_MAX_MESH_DIMS) {
        values = fc_h5_child_calloc((size_t)n, sizeof *values);
        if (H5Aread(attribute, type, values) >= 0) {
            size_t size = 1;
            for (hssize_t i = 0; i < n; i++) {
                size += (values[i] ? strlen(values[i]) : 0) + 1;
            }
            joined = fc_h5_child_calloc(1, size);
            for (hssize_t i = 0; i < n; i++) {
                strcat(joined, i ? "\n" : "");
                strcat(joined, values[i] ? values[i] : "");
            }
            H5Dvlen_reclaim(type, space, H5P_DEFAULT, values);
        }
    }
    free(values);
    H5Tclose(type);
    H5Sclose(space);
    H5Aclose(attribute);
    return joined;
}
