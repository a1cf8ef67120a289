/*
 * Finds tied tensors by their data: a checkpoint that stores both under their names does not say that they are tied.
 */
#include "base/crc.h"
#include "export/export.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* The embedding and the head are the only tied tensors, so many tensors of one shape are layers. */
enum { MOST_ALIKE = 4 };

typedef struct alike {
    const fc_tensor *tensors[MOST_ALIKE];
    size_t count; /* may exceed MOST_ALIKE */
} alike;

struct fc_export_shapes {
    const fc_checkpoint *checkpoint;
    fc_name_table *table; /* from dtype and shape to an index in groups */
    alike *groups;
};

typedef struct shape_key {
    int64_t values[FC_MAX_DIMS + 1]; /* the dtype, then the shape */
    size_t bytes;                    /* in use */
} shape_key;

static void key_of(const fc_tensor *t, shape_key *key) {
    key->values[0] = t->dtype;
    memcpy(key->values + 1, t->shape, (size_t)t->ndim * sizeof *t->shape);
    key->bytes = (size_t)(t->ndim + 1) * sizeof *key->values;
}

/* Adds a tensor to its group, which may be a new one. */
static bool add_tensor(fc_export_shapes *shapes, const fc_tensor *t, size_t *ngroups, fc_arena *arena) {
    shape_key key;
    key_of(t, &key);
    size_t at = fc_name_table_find(shapes->table, (const char *)key.values, key.bytes);
    if (at == FC_NO_NAME) {
        const char *kept = fc_arena_copy(arena, key.values, key.bytes, 1);
        if (!kept) {
            return false;
        }
        at = fc_name_table_put(shapes->table, kept, key.bytes, (*ngroups)++);
    }
    alike *group = &shapes->groups[at];
    if (group->count < MOST_ALIKE) {
        group->tensors[group->count] = t;
    }
    group->count++;
    return true;
}

fc_export_shapes *fc_export_shapes_new(const fc_checkpoint *checkpoint, const fc_name_table *wanted, fc_arena *arena) {
    const size_t n = checkpoint->ntensors;
    size_t ngroups = 0;
    fc_export_shapes *shapes = fc_arena_calloc(arena, 1, sizeof *shapes);
    alike *groups = fc_arena_calloc(arena, n + 1, sizeof *groups);
    fc_name_table *table = fc_name_table_new(arena, n + 1);
    if (!shapes || !groups || !table) {
        return NULL;
    }
    *shapes = (fc_export_shapes){checkpoint, table, groups};
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const bool candidate = !t->object && t->ndim > 0 && fc_export_find(wanted, t->name) != FC_NO_NAME;
        if (candidate && !add_tensor(shapes, t, &ngroups, arena)) {
            return NULL;
        }
    }
    return shapes;
}

static fc_code add_bytes(void *context, const void *bytes, size_t size, fc_error *err) {
    uint64_t *crc = context;
    (void)err;
    *crc = fc_crc64(*crc, bytes, size);
    return FC_OK;
}

/* Takes the recorded digest of a tensor, or computes it. */
static fc_code digest_of(const fc_checkpoint *checkpoint, const fc_tensor *t, uint64_t *out, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box whole = {t->ndim, origin, t->shape};
    fc_digest recorded;
    FC_TRY(fc_checkpoint_digest(checkpoint, t, FC_WHOLE_TENSOR, &recorded, err));
    *out = recorded.kind == FC_DIGEST_CRC64 ? recorded.value : 0;
    return recorded.kind == FC_DIGEST_CRC64 ? FC_OK
                                            : fc_read_stream(checkpoint, t, &whole, t->dtype, add_bytes, out, err);
}

fc_code fc_export_find_twin(const fc_export_shapes *shapes, const fc_tensor *tensor, const fc_tensor **out,
                            fc_error *err) {
    shape_key key;
    key_of(tensor, &key);
    const size_t at = fc_name_table_find(shapes->table, (const char *)key.values, key.bytes);
    const alike *group = at == FC_NO_NAME ? NULL : &shapes->groups[at];
    uint64_t mine = 0, other = 0;
    *out = NULL;
    if (!group || group->count > MOST_ALIKE) {
        return FC_OK;
    }
    FC_TRY(digest_of(shapes->checkpoint, tensor, &mine, err));
    for (size_t i = 0; i < group->count && !*out; i++) {
        FC_TRY(digest_of(shapes->checkpoint, group->tensors[i], &other, err));
        *out = mine == other ? group->tensors[i] : NULL;
    }
    return FC_OK;
}
