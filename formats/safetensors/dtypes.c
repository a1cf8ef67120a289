/*
 * The table of safetensors' dtypes, in the order of the reference implementation's enumeration (0.8). That order
 * decides the order of the tensors in a file.
 */
#include "safetensors/dtypes.h"

#include <string.h>

static const fc_st_dtype table[] = {
    {"BOOL", 8, true, FC_BOOL},
    {"F4", 4, true, FC_F4_E2M1FN_X2}, /* The header counts numbers; torch counts bytes, which hold two. */
    {"F6_E2M3", 6, false, FC_U8},
    {"F6_E3M2", 6, false, FC_U8},
    {"U8", 8, true, FC_U8},
    {"I8", 8, true, FC_I8},
    {"F8_E5M2", 8, true, FC_F8_E5M2},
    {"F8_E4M3", 8, true, FC_F8_E4M3FN},
    {"F8_E8M0", 8, true, FC_F8_E8M0FNU},
    {"F8_E4M3FNUZ", 8, true, FC_F8_E4M3FNUZ},
    {"F8_E5M2FNUZ", 8, true, FC_F8_E5M2FNUZ},
    {"I16", 16, true, FC_I16},
    {"U16", 16, true, FC_U16},
    {"F16", 16, true, FC_F16},
    {"BF16", 16, true, FC_BF16},
    {"I32", 32, true, FC_I32},
    {"U32", 32, true, FC_U32},
    {"F32", 32, true, FC_F32},
    {"C64", 64, true, FC_C64},
    {"F64", 64, true, FC_F64},
    {"I64", 64, true, FC_I64},
    {"U64", 64, true, FC_U64},
};

const fc_st_dtype *fc_st_dtype_find(const char *name) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

int fc_st_dtype_order(const fc_st_dtype *dtype) {
    return (int)(dtype - table);
}

fc_st_stored fc_st_stored_as(fc_dtype dtype, int ndim) {
    switch (dtype) {
    case FC_C32:
        return (fc_st_stored){fc_st_dtype_find("F16"), 1, 2, true};
    case FC_C128:
        return (fc_st_stored){fc_st_dtype_find("F64"), 1, 2, true};
    case FC_F4_E2M1FN_X2:
        return ndim > 0 ? (fc_st_stored){fc_st_dtype_find("F4"), 2, 0, false}
                        : (fc_st_stored){fc_st_dtype_find("F4"), 1, 2, true};
    default:
        for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
            if (table[i].readable && table[i].dtype == dtype) {
                return (fc_st_stored){&table[i], 1, 0, false};
            }
        }
        return (fc_st_stored){fc_st_dtype_find("U8"), 1, 0, true}; /* unreachable: objects have no dtype */
    }
}
