/*
 * Gives the tensors of an export the dtypes, the order and the files that they have in the reference.
 */
#include "export/export.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

fc_name_table *fc_export_names(const fc_checkpoint *checkpoint, fc_arena *arena) {
    fc_name_table *names = fc_name_table_new(arena, checkpoint->ntensors + 1);
    for (size_t i = 0; names && i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (!t->object) {
            fc_name_table_put(names, t->name, strlen(t->name), i);
        }
    }
    return names;
}

size_t fc_export_find(const fc_name_table *names, const char *name) {
    return fc_name_table_find(names, name, strlen(name));
}

bool fc_export_casts(fc_dtype from, fc_dtype to) {
    const fc_dtype_info *a = fc_dtype_get(from), *b = fc_dtype_get(to);
    return a->cls == FC_CLASS_FLOAT && b->cls == FC_CLASS_FLOAT && fc_dtype_size(from) > 1 && fc_dtype_size(to) > 1;
}

static int in_order(const void *a, const void *b) {
    const fc_target_tensor *x = a, *y = b;
    FC_ORDER_BY(x->file, y->file);
    return FC_ORDER(x->source, y->source);
}

fc_code fc_export_arrange(void *context, fc_target_tensor *tensors, size_t count, fc_error *err) {
    const fc_export_reference *like = context;
    const fc_checkpoint *reference = like->weights;
    fc_arena *arena = fc_arena_new();
    const fc_name_table *names = arena ? fc_export_names(reference, arena) : NULL;
    for (size_t i = 0; names && i < count; i++) {
        size_t at = fc_export_find(names, tensors[i].name);
        if (at != FC_NO_NAME) {
            const fc_tensor *t = &reference->tensors[at];
            tensors[i].dtype = t->dtype;
            tensors[i].file = t->nchunks > 0 && !like->other_files ? t->chunks[0].place.file : 0;
        }
    }
    if (names) {
        fc_sort_items(tensors, count, sizeof *tensors, in_order);
    }
    fc_arena_free(arena);
    return names ? FC_OK : fc_no_memory(err, reference->path);
}
