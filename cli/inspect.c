/*
 * What the ways to show a checkpoint share: see inspect.h.
 */
#include "inspect.h"

#include "fsdpckpt/format.h"

#include <string.h>
#include <sys/stat.h>

static uint64_t add_saturated(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

uint64_t inspect_elements(const fc_tensor *tensor) {
    int64_t n;
    return fc_numel(tensor->ndim, tensor->shape, &n) ? (uint64_t)n : UINT64_MAX;
}

uint64_t inspect_bytes(const fc_tensor *tensor) {
    uint64_t bytes;
    return __builtin_mul_overflow(inspect_elements(tensor), (uint64_t)fc_dtype_size(tensor->dtype), &bytes) ? UINT64_MAX
                                                                                                            : bytes;
}

void inspect_totals(const inspection *in, totals *out) {
    const fc_checkpoint *c = in->checkpoint;
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        if (t->object) {
            out->objects++;
            continue;
        }
        out->tensors++;
        out->chunks += t->nchunks;
        out->elements = add_saturated(out->elements, inspect_elements(t));
        out->bytes = add_saturated(out->bytes, inspect_bytes(t));
        out->by_dtype[t->dtype]++;
        out->elements_by_dtype[t->dtype] = add_saturated(out->elements_by_dtype[t->dtype], inspect_elements(t));
    }
    for (size_t i = 0; i < c->nfiles && !in->headers_only; i++) {
        struct stat st;
        if (stat(c->files[i].path, &st) == 0) {
            out->file_bytes = add_saturated(out->file_bytes, (uint64_t)st.st_size);
        }
    }
}

const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_cut *c, char *buf, size_t size) {
    const fc_mesh *mesh = &in->checkpoint->mesh;
    if (tensor->placements && mesh->ndim > 0) {
        fc_placements_format(mesh->ndim, tensor->placements, buf, (int)size);
    } else if (c->placed) {
        fc_placements_format(c->mesh_ndim, c->placements, buf, (int)size);
    } else {
        buf[0] = '\0';
    }
    return buf;
}

const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err) {
    const char *json = NULL;
    if (in->headers_only || !in->checkpoint->format->reader.object_json) {
        err->message[0] = '\0';
        return NULL;
    }
    fc_code rc = fc_checkpoint_object_json(in->checkpoint, object, arena, &json, err);
    if (rc == FC_OK) {
        return json;
    }
    /* What only this build cannot show is said in its place; damage is the result of the command. */
    if (in->worst == FC_OK && rc != FC_EUNSUPPORTED) {
        in->worst = rc;
        in->first = *err;
    }
    return NULL;
}

fc_code inspect_no_memory(const inspection *in, fc_error *err) {
    return fc_fail(err, FC_ENOMEM, "%s: out of memory", in->checkpoint->path);
}
