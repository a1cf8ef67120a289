/*
 * Reads chunks that are stored with filters. See stored_chunk.h.
 */
#include "read/stored_chunk.h"

#include "base/checked.h"
#include "codec/filter.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "read/decode_lean.h"

#include <inttypes.h>

enum { WORKSPACE_STEP = 256 << 10 };

fc_decode_plan fc_decode_plan_choose(const fc_extent *extent, uint32_t element, size_t window, uint64_t limit) {
    fc_decode_plan d = {FC_WAY_FORMAT, 0, false};
    uint64_t size = extent->length, whole;
    if (fc_codec_is_read_by_format(extent->codec)) {
        return d;
    }
    d.way = FC_WAY_NONE;
    d.planes = fc_decode_gives_planes(extent, element);
    if (!d.planes && !fc_decode_workspace(extent, &size)) {
        return d;
    }
    d.way = FC_WAY_WINDOW;
    if (size <= window) {
        return d;
    }
    /* Rounded up, so that chunks of slightly different compressed sizes can reuse each other's workspaces. */
    bool fits = fc_add_u64(size, WORKSPACE_STEP - 1, &size) && fc_add_u64(size, extent->decoded, &whole) &&
                whole <= limit / 8 * 7;
    if (!fits && fc_decode_lean_can(extent)) {
        d.way = FC_WAY_LEAN;
        d.planes = false;
        return d;
    }
    d.way = FC_WAY_MEMORY;
    d.extra = size / WORKSPACE_STEP * WORKSPACE_STEP;
    return d;
}

/* Stored bytes of a chunk that is decoded through the window. */
typedef struct stored {
    const fc_input *input;
    uint64_t offset;
} stored;

static fc_code read_stored(void *context, uint64_t at, unsigned char *bytes, size_t size, fc_error *err) {
    const stored *s = context;
    return fc_pread_full(s->input->fd, bytes, size, s->offset + at, s->input->path, err);
}

static fc_code read_and_decode(const fc_decode_plan *plan, const fc_extent *extent, uint32_t element,
                               const fc_decode_buffers *buffers, unsigned char *out, fc_error *err) {
    fc_input *input = buffers->input;
    const size_t length = (size_t)extent->length;
    if (plan->way == FC_WAY_LEAN) {
        stored s = {input, extent->offset};
        return fc_decode_lean(extent, read_stored, &s, buffers->window, buffers->window_size, element, out, err);
    }
    unsigned char *workspace = buffers->workspace;
    if (plan->way == FC_WAY_WINDOW) {
        workspace = buffers->window;
        FC_TRY(fc_pread_full(input->fd, workspace, length, extent->offset, input->path, err));
    } else {
        FC_TRY(fc_input_read(input, workspace, length, extent->offset, buffers->window, buffers->window_size, err));
    }
    return plan->planes ? fc_filter_undo(&extent->filters.items[1], workspace, length, element, NULL, out,
                                         (size_t)extent->decoded, err)
                        : fc_decode_filters(extent, workspace, element, out, err);
}

fc_code fc_decode_plan_read(const fc_decode_plan *plan, const fc_extent *extent, uint32_t element,
                            const fc_decode_buffers *buffers, unsigned char *out, fc_error *err) {
    FC_TRY_CONTEXT(read_and_decode(plan, extent, element, buffers, out, err), err,
                   "%s: offset %" PRIu64 ": a chunk of %" PRIu64 " stored bytes", buffers->input->path, extent->offset,
                   extent->length);
    return FC_OK;
}

/* Finds the extent of the first chunk, which is like all others, if the tensor is computed. */
static bool find_computed(const fc_checkpoint *source, const fc_tensor *tensor, fc_extent *extent) {
    return tensor->nchunks > 0 && tensor->chunks[0].place.kind == FC_PLACE_NONE &&
           fc_checkpoint_extent(source, tensor, 0, extent, NULL) == FC_OK && extent->codec == FC_CODEC_COMPUTED;
}

bool fc_is_computed(const fc_checkpoint *source, const fc_tensor *tensor) {
    fc_extent extent;
    return find_computed(source, tensor, &extent);
}

uint64_t fc_bytes_read_per_element(const fc_checkpoint *source, const fc_tensor *tensor) {
    const uint64_t size = fc_dtype_size(tensor->dtype);
    fc_extent extent;
    if (!find_computed(source, tensor, &extent) || extent.decoded < size) {
        return size;
    }
    const uint64_t read = extent.length / (extent.decoded / size);
    return read > size ? read : size;
}

/*
 * All chunks of a tensor are stored alike, so looking at the first is enough. An error is ignored here: the worker that
 * reads the chunk reports it.
 */
bool fc_gains_from_large_tiles(const fc_checkpoint *source, const fc_tensor *tensor) {
    fc_extent extent;
    if (tensor->nchunks == 0 || fc_checkpoint_extent(source, tensor, 0, &extent, NULL) != FC_OK) {
        return false;
    }
    int last = tensor->ndim - 1;
    return extent.codec == FC_CODEC_FILTERED || fc_codec_is_read_by_format(extent.codec) ||
           (last >= 0 && tensor->chunks[0].dims[tensor->ndim + last] > 1 && extent.strides[last] != 1);
}
