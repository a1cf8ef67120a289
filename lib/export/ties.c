/*
 * Finds tied tensors by their data: a checkpoint that stores both under their names does not say that they are tied.
 */
#include "export/export.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* The embedding and the head are the only tied tensors, so many tensors of one shape are layers. */
enum { MOST_ALIKE = 4 };

static bool same_shape(const fc_tensor *a, const fc_tensor *b) {
    return a->dtype == b->dtype && a->ndim == b->ndim && a->ndim > 0 &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
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

static bool is_candidate(const fc_tensor *tensor, const fc_tensor *other, const fc_name_table *wanted) {
    return other != tensor && !other->object && same_shape(tensor, other) &&
           fc_export_find(wanted, other->name) != FC_NO_NAME;
}

fc_code fc_export_find_twin(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_name_table *wanted,
                            const fc_tensor **out, fc_error *err) {
    const fc_tensor *alike[MOST_ALIKE];
    size_t count = 0;
    uint64_t mine, other;
    *out = NULL;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (is_candidate(tensor, t, wanted)) {
            if (count == MOST_ALIKE) {
                return FC_OK;
            }
            alike[count++] = t;
        }
    }
    FC_TRY(count > 0 ? digest_of(checkpoint, tensor, &mine, err) : FC_OK);
    for (size_t i = 0; i < count && !*out; i++) {
        FC_TRY(digest_of(checkpoint, alike[i], &other, err));
        *out = mine == other ? alike[i] : NULL;
    }
    return FC_OK;
}
