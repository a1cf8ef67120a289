/*
 * The table of attributes. A new attribute is a row here and a line in docs/HDF5_SCHEMA.md.
 */
#include "hdf5/schema.h"

#include <string.h>

static const fc_h5_attribute_info table[FC_H5_A_COUNT] = {
    [FC_H5_A_SCHEMA] = {"fsdpckpt_schema", FC_H5_INT},
    [FC_H5_A_PRODUCER] = {"producer", FC_H5_TEXT},
    [FC_H5_A_LAYOUT] = {"layout", FC_H5_TEXT},
    [FC_H5_A_MESH_SHAPE] = {"mesh_shape", FC_H5_INTS},
    [FC_H5_A_MESH_NAMES] = {"mesh_names", FC_H5_TEXTS},
    [FC_H5_A_WORLD_SIZE] = {"world_size", FC_H5_INT},
    [FC_H5_A_RANK] = {"rank", FC_H5_INT},
    [FC_H5_A_TABLES] = {"tables", FC_H5_REFERENCE},
    [FC_H5_A_TABLES_AT] = {"tables_at", FC_H5_UINT},
    [FC_H5_A_MISSING] = {"missing_shards_read_as", FC_H5_TEXT},
    [FC_H5_A_HEADER_CRC64] = {"header_crc64", FC_H5_UINT},
    [FC_H5_A_KIND] = {"kind", FC_H5_TEXT},
    [FC_H5_A_DTYPE] = {"dtype", FC_H5_TEXT},
    [FC_H5_A_FQN] = {"fqn", FC_H5_TEXT},
    [FC_H5_A_PLACEMENTS] = {"placements", FC_H5_TEXT},
    [FC_H5_A_GLOBAL_SHAPE] = {"global_shape", FC_H5_INTS},
    [FC_H5_A_OFFSETS] = {"offsets", FC_H5_INTS},
    [FC_H5_A_OWNER] = {"owner", FC_H5_INT},
    [FC_H5_A_ENCODING] = {"encoding", FC_H5_TEXT},
    [FC_H5_A_JSON] = {"json", FC_H5_TEXT},
    [FC_H5_A_CRC64] = {"crc64", FC_H5_UINT},
};

const fc_h5_attribute_info *fc_h5_attribute_get(fc_h5_attribute attribute) {
    return &table[attribute];
}

fc_h5_attribute fc_h5_attribute_find(const char *name) {
    int i = 0;
    while (i < FC_H5_A_COUNT && strcmp(table[i].name, name) != 0) {
        i++;
    }
    return (fc_h5_attribute)i;
}
