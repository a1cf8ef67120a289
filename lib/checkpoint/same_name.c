/*
 * Tables of tensor names. See same_name.h.
 */
#include "checkpoint/same_name.h"

#include <string.h>

fc_name_table *fc_names_of(const fc_checkpoint *source, fc_arena *arena) {
    fc_name_table *names = fc_name_table_new(arena, source->ntensors);
    for (size_t i = 0; names && i < source->ntensors; i++) {
        fc_name_table_put(names, source->tensors[i].name, strlen(source->tensors[i].name), i);
    }
    return names;
}

fc_code fc_find_same_name(const fc_tensor *tensors, size_t count, const char **name, fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *names = scratch ? fc_name_table_new(scratch, count) : NULL;
    *name = NULL;
    for (size_t i = 0; names && i < count && !*name; i++) {
        if (fc_name_table_put(names, tensors[i].name, strlen(tensors[i].name), i) != i) {
            *name = tensors[i].name;
        }
    }
    fc_arena_free(scratch);
    return names ? FC_OK : fc_no_memory(err, NULL);
}
