/*
 * Buffers of modules, such as rotary frequencies: kept in the buffer dtype of mixed precision, and given back in their
 * own dtype for a checkpoint. Every rank has the whole buffer.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <string.h>

/* Only floating-point buffers are cast, as in _cast_buffers_to_dtype_and_device. */
static fc_dtype dtype_in_use(const fc_fsdp_unit *unit, fc_dtype own) {
    const fc_fsdp_unit_options *o = &unit->options;
    return o->has_buffer_dtype && fc_dtype_get(own)->cls == FC_CLASS_FLOAT ? o->buffer_dtype : own;
}

/* Copies `from` to a new array of another dtype. The source may have strides. */
static fc_code copy_as(const fc_array *from, fc_dtype dtype, fc_stream *stream, fc_array *out, fc_error *err) {
    fc_device *device = from->device;
    fc_array dense = {0};
    fc_code rc;
    *out = (fc_array){0};
    FC_TRY_GOTO(fc_array_clone(from, stream, &dense, err), rc, out);
    if (dtype == from->dtype) {
        *out = dense;
        dense = (fc_array){0};
        goto out;
    }
    FC_TRY_GOTO(fc_array_new(device, dtype, from->ndim, from->sizes, out, err), rc, out);
    rc = device->cast(device, from->dtype, dense.data, dtype, out->data, (size_t)fc_array_numel(from), stream, err);
    rc = rc == FC_OK ? device->synchronize(device, stream, err) : rc; /* `dense` is freed */
out:
    fc_array_free(&dense);
    if (rc != FC_OK) {
        fc_array_free(out);
    }
    return rc;
}

static fc_code add_buffer(fc_fsdp_unit *unit, const char *fqn, const fc_array *values, fc_fsdp_buffer **out,
                          fc_error *err) {
    fc_fsdp *fsdp = unit->fsdp;
    fc_fsdp_buffer *b = fc_arena_calloc(fsdp->arena, 1, sizeof *b);
    b = b && (b->fqn = fc_arena_strndup(fsdp->arena, fqn, strlen(fqn))) ? b : NULL;
    FC_NEED(b, err, fqn);
    b->dtype = values->dtype;
    FC_TRY_CONTEXT(copy_as(values, dtype_in_use(unit, values->dtype), fsdp->streams[FC_STREAM_COMPUTE], &b->array, err),
                   err, "unit '%s': buffer '%s'", unit->name, fqn);
    b->next = unit->buffers;
    unit->buffers = b;
    *out = b;
    return FC_OK;
}

fc_code fc_fsdp_add_buffer(fc_fsdp_unit *unit, const char *fqn, const fc_array *values, fc_fsdp_buffer **out,
                           fc_error *err) {
    *out = NULL;
    return fc_fsdp_note(unit->fsdp, add_buffer(unit, fqn, values, out, err));
}

fc_code fc_fsdp_saved_buffer(const fc_fsdp *fsdp, const fc_fsdp_buffer *buffer, fc_array *out, fc_error *err) {
    return copy_as(&buffer->array, buffer->dtype, fsdp->streams[FC_STREAM_COMPUTE], out, err);
}
