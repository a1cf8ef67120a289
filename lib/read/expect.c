/*
 * Announces what a worker reads next, so that servers begin to send it while the worker still moves what it has. See
 * source.h. All of this is only for speed: what cannot be announced is read as if it had not been.
 */
#include "read/source_private.h"

#include "base/checked.h"
#include "codec/strided.h"
#include "fsdpckpt/try.h"

enum { MOST_SPAN = 4 }; /* times the wanted bytes that are worth one request */

typedef struct wanted {
    fc_source *source;
    const fc_tensor *tensor;
    int64_t strides[FC_MAX_DIMS]; /* of the destination, in elements */
} wanted;

/* Adds bytes to the last range if they follow it closely, else as a new one. */
static void expect_bytes(fc_source *source, const expected *e) {
    expected *last = source->nexpected > 0 ? &source->expected[source->nexpected - 1] : NULL;
    const uint64_t end = last ? last->offset + last->size : 0;
    if (last && last->file == e->file && e->offset >= end && e->offset - end <= FC_GAP_REMOTE) {
        last->size = e->offset + e->size - last->offset;
    } else if (source->nexpected < MOST_EXPECTED) {
        source->expected[source->nexpected++] = *e;
    }
}

/* Whether one request for all bytes of a copy, with those between its runs, is faster than one for each run. */
static bool is_worth_one(const fc_strided *copy) {
    bool near = fc_strided_span(copy, 0) / MOST_SPAN <= fc_strided_bytes(copy);
    for (int i = 0; i < copy->n && near; i++) {
        near = copy->axes[i].src - fc_strided_span(copy, i + 1) <= FC_GAP_REMOTE;
    }
    return near;
}

/* Adds the bytes of an overlap if they are elements. Errors are those of the read that follows. */
static fc_code expect_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    const wanted *f = context;
    const fc_tensor *tensor = f->tensor;
    const int64_t element = fc_dtype_size(tensor->dtype);
    const fc_extent *extent = NULL;
    fc_strided copy;
    uint64_t start;
    FC_TRY(fc_source_extent(f->source, tensor, overlap->chunk, &extent, err));
    if (extent->codec != FC_CODEC_RAW ||
        !fc_source_first_byte(extent, tensor->chunks[overlap->chunk].dims, overlap, tensor->ndim, element, &start) ||
        !fc_strided_make(&copy, tensor->ndim, overlap->sizes, extent->strides, f->strides, element)) {
        return FC_OK;
    }
    const uint64_t span = (uint64_t)fc_strided_span(&copy, 0);
    if (fc_range_within(start, span, extent->length) && is_worth_one(&copy)) {
        expect_bytes(f->source, &(expected){extent->file, extent->offset + start, span});
    }
    return FC_OK;
}

void fc_source_expect(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box) {
    wanted f = {.source = source, .tensor = tensor};
    if (fc_row_major_strides(box->ndim, box->sizes, f.strides)) {
        fc_error ignored;
        (void)fc_coverage_visit(coverage, box, expect_overlap, &f, &ignored);
    }
}

void fc_source_announce(fc_source *source) {
    fc_error ignored;
    for (int i = 0; i < source->nexpected; i++) {
        const expected *e = &source->expected[i];
        fc_input *input = NULL;
        if (fc_source_open(source, e->file, &input, &ignored) == FC_OK) {
            fc_input_expect(input, e->size, e->offset);
        }
    }
    source->nexpected = 0;
}
