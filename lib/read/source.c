/*
 * Reads the source: from the overlaps of a tile with chunks to bytes in its buffer. It resolves chunks to extents,
 * keeps the most recent extents and files, and chooses how to read: long runs directly, short ones through a window.
 * Offsets and strides come from files: every product is checked, and nothing outside the extent is ever read.
 */
#include "read/source_private.h"

#include "base/checked.h"
#include "base/pages.h"
#include "checkpoint/identity.h"
#include "codec/strided.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/input.h"
#include "plan/box_text.h"
#include "read/stored_chunk.h"
#include "read/streamed.h"
#include "read/tuning.h"
#include "read/window.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CLAIMED = 64 };

size_t fc_source_overhead(void) {
    return sizeof(fc_source) + FC_INPUT_ROOM(0);
}

fc_code fc_source_new(const fc_checkpoint *checkpoint, fc_decoded *decoded, size_t scratch, int files, fc_source **out,
                      fc_error *err) {
    fc_source *source = calloc(1, sizeof *source);
    void *window = source ? fc_pages_new(FC_INPUT_ROOM(scratch)) : NULL;
    if (!window) {
        free(source);
        return fc_no_memory(err, checkpoint->path);
    }
    source->checkpoint = checkpoint;
    source->decoded = decoded;
    source->scratch = window;
    source->scratch_size = scratch;
    source->nfiles = files < 1 ? 1 : files > FC_OPEN_FILES ? FC_OPEN_FILES : files;
    for (int i = 0; i < FC_OPEN_FILES; i++) {
        source->files[i].input.fd = -1;
    }
    *out = source;
    return FC_OK;
}

void fc_source_free(fc_source *source) {
    if (!source) {
        return;
    }
    for (int i = 0; i < FC_OPEN_FILES; i++) {
        fc_input_close(&source->files[i].input);
    }
    fc_pages_free(source->scratch, FC_INPUT_ROOM(source->scratch_size));
    free(source);
}

void fc_source_check_objects(fc_source *source) {
    source->checks_objects = true;
}

void fc_source_use_cache(fc_source *source) {
    source->cached = true;
}

void fc_source_watch(fc_source *source, fc_source_crc *crc, bool elements) {
    source->crc = crc;
    source->elements = elements;
}

fc_code fc_source_open(fc_source *source, uint32_t index, fc_input **out, fc_error *err) {
    const fc_checkpoint *checkpoint = source->checkpoint;
    if (index >= checkpoint->nfiles) {
        return fc_fail(err, FC_ECORRUPT, "%s: refers to file number %" PRIu32 " of %zu", checkpoint->path, index,
                       checkpoint->nfiles);
    }
    open_file *oldest = &source->files[0];
    for (int i = 0; i < source->nfiles; i++) {
        open_file *f = &source->files[i];
        if (f->input.fd >= 0 && f->file == index) {
            f->last_use = ++source->clock;
            *out = &f->input;
            return FC_OK;
        }
        if (f->input.fd < 0 || (oldest->input.fd >= 0 && f->last_use < oldest->last_use)) {
            oldest = f;
        }
    }
    fc_input_close(&oldest->input);
    FC_TRY(fc_input_open(&oldest->input, checkpoint->files[index].path, err));
    fc_code rc = fc_identity_check(checkpoint, index, oldest->input.fd, err);
    if (rc != FC_OK) {
        fc_input_close(&oldest->input);
        return rc;
    }
    oldest->input.cache_only |= source->cached;
    oldest->file = index;
    oldest->last_use = ++source->clock;
    *out = &oldest->input;
    return FC_OK;
}

fc_code fc_source_extent(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent **out,
                         fc_error *err) {
    uint64_t h = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9e3779b97f4a7c15u >> 40;
    cached_extent *slot = &source->extents[(h + chunk) % FC_EXTENT_CACHE];
    if (slot->tensor != tensor || slot->chunk != chunk) {
        const fc_format *format = source->checkpoint->format;
        slot->tensor = NULL;
        FC_TRY(fc_checkpoint_extent(source->checkpoint, tensor, chunk, &slot->extent, err));
        if (tensor->object && source->checks_objects && format->reader.check_object) {
            FC_TRY(format->reader.check_object(source->checkpoint, tensor, err));
        }
        slot->tensor = tensor;
        slot->chunk = chunk;
    }
    *out = &slot->extent;
    return FC_OK;
}

/* Returns whether the bytes of an extent are the elements, with nothing to decode. */
static bool is_plain(const fc_extent *extent) {
    return extent->codec == FC_CODEC_RAW || extent->codec == FC_CODEC_INLINE;
}

/* Reads one window at `offset` and scatters it. It bypasses the page cache only when every byte is used: the gaps may
   be needed next. */
static fc_code read_window(fc_source *source, fc_input *input, uint64_t start, uint64_t at, const fc_strided *step,
                           unsigned char *out, fc_error *err) {
    const uint64_t offset = start + at;
    if (step->n == 0) {
        FC_TRY(fc_input_read(input, out, (size_t)step->unit, offset, source->scratch, source->scratch_size, err));
        if (source->walk.wanted) {
            fc_crc_walk_add(&source->walk, at, out, (size_t)step->unit);
        }
        return FC_OK;
    }
    size_t span = (size_t)fc_strided_span(step, 0);
    const unsigned char *bytes = source->scratch;
    if (fc_strided_is_dense(step)) {
        FC_TRY(fc_input_read_near(input, source->scratch, span, offset, &bytes, err));
    } else {
        FC_TRY(fc_pread_full(input->fd, source->scratch, span, offset, input->path, err));
    }
    fc_strided_copy(step, bytes, out);
    if (source->walk.wanted) {
        fc_crc_walk_add_strided(&source->walk, at, step, bytes);
    }
    return FC_OK;
}

/* Reads `copy`, whose first element is `at` bytes after `start` in the file, window by window in ascending order. */
static fc_code read_strided(fc_source *source, fc_input *input, uint64_t start, uint64_t at, const fc_strided *copy,
                            unsigned char *out, fc_error *err) {
    fc_window w = fc_window_choose(copy, source->scratch_size);
    int64_t index[FC_MAX_DIMS] = {0}, src = 0, dst = 0;
    bool grouped = w.group > 1;
    fc_strided step = {copy->unit, 0, {{0, 0, 0}}};
    int first = grouped ? w.whole - 1 : w.whole;
    step.n = copy->n - first;
    memcpy(step.axes, copy->axes + first, (size_t)step.n * sizeof *step.axes);
    for (;;) {
        if (grouped) {
            int64_t left = copy->axes[first].size - index[first];
            step.axes[0].size = left < w.group ? left : w.group;
        }
        FC_TRY(read_window(source, input, start, at + (uint64_t)src, &step, out + dst, err));
        int i = w.whole - 1;
        for (; i >= 0; i--) {
            int64_t by = grouped && i == first ? step.axes[0].size : 1;
            index[i] += by;
            src += by * copy->axes[i].src;
            dst += by * copy->axes[i].dst;
            if (index[i] < copy->axes[i].size) {
                break;
            }
            src -= index[i] * copy->axes[i].src;
            dst -= index[i] * copy->axes[i].dst;
            index[i] = 0;
        }
        if (i < 0) {
            return FC_OK;
        }
    }
}

static fc_decode_plan plan_of(const fc_source *source, const fc_tensor *tensor, const fc_extent *extent) {
    return fc_decode_plan_choose(extent, fc_dtype_size(tensor->dtype), source->scratch_size,
                                 fc_decoded_limit(source->decoded));
}

/* Whether a chunk that does not fit the memory for decoding is decoded part by part. */
static bool is_streamed(const fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    return fc_can_stream(source->checkpoint, tensor, chunk, extent, fc_decoded_limit(source->decoded));
}

/* Reads and decodes a whole chunk; an fc_decode_fn. */
static fc_code decode_chunk(void *context, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                            unsigned char *workspace, unsigned char *out, fc_error *err) {
    fc_source *source = context;
    const fc_checkpoint *checkpoint = source->checkpoint;
    const fc_decode_plan plan = plan_of(source, tensor, extent);
    if (plan.way == FC_WAY_NONE) {
        return fc_fail(err, FC_ECORRUPT, "offset %" PRIu64 ": the chunk's sizes are invalid", extent->offset);
    }
    if (plan.way == FC_WAY_FORMAT) {
        return checkpoint->format->reader.read
                   ? checkpoint->format->reader.read(checkpoint, tensor, chunk, out, err)
                   : fc_fail(err, FC_EUNSUPPORTED, "%s: decoding this chunk is not supported", checkpoint->path);
    }
    fc_input *input = NULL;
    FC_TRY(fc_source_open(source, extent->file, &input, err));
    const fc_decode_buffers buffers = {input, source->scratch, source->scratch_size, workspace};
    return fc_decode_plan_read(&plan, extent, fc_dtype_size(tensor->dtype), &buffers, out, err);
}

/* Copies an overlap of a chunk whose file holds its elements, and collects their CRC. */
static fc_code copy_plain(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                          uint64_t start, const fc_strided *copy, unsigned char *out, fc_error *err) {
    fc_input *input = NULL;
    FC_TRY(fc_source_open(source, extent->file, &input, err));
    if (source->crc) {
        fc_crc_walk_begin(&source->walk, tensor, chunk, extent);
    }
    fc_code rc;
    FC_TRY_GOTO(read_strided(source, input, extent->offset, start, copy, out, err), rc, out);
    if (source->crc && source->walk.layout != FC_CRC_NONE) {
        source->walk.bytes = (uint64_t)fc_strided_bytes(copy);
        fc_crc_walk_end(&source->walk, source->crc, tensor, chunk, extent);
    }
out:
    source->walk.wanted = false;
    return rc;
}

/*
 * Copies an overlap, which starts `start` bytes into the decoded bytes, to `out`. Clears `*placed` when the chunk must
 * be decoded and is not available now.
 */
static fc_code copy_overlap(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                            uint64_t start, const fc_strided *copy, unsigned char *out, bool *placed, fc_error *err) {
    *placed = true;
    if (extent->codec == FC_CODEC_INLINE) {
        fc_strided_copy(copy, extent->bytes + start, out);
        return FC_OK;
    }
    if (extent->codec == FC_CODEC_RAW) {
        return copy_plain(source, tensor, chunk, extent, start, copy, out, err);
    }
    if (is_streamed(source, tensor, chunk, extent)) {
        return fc_copy_streamed(source->checkpoint, tensor, chunk, start, copy, out, err);
    }
    const unsigned char *bytes = NULL;
    const fc_decode_plan plan = plan_of(source, tensor, extent);
    fc_code rc = fc_decoded_try(source->decoded, tensor, chunk, extent, plan.extra, decode_chunk, source, &bytes, err);
    *placed = bytes != NULL;
    if (!bytes) {
        return rc;
    }
    if (plan.planes) {
        const uint32_t element = fc_dtype_size(tensor->dtype);
        fc_strided_unshuffle(copy, bytes, (size_t)extent->decoded / element, element, start, out);
    } else {
        fc_strided_copy(copy, bytes + start, out);
    }
    fc_decoded_release(source->decoded, tensor, chunk, fc_strided_bytes(copy));
    return FC_OK;
}

bool fc_source_first_byte(const fc_extent *extent, const int64_t *dims, const fc_overlap *overlap, int ndim,
                          int64_t element, uint64_t *start) {
    uint64_t at = extent->first;
    for (int d = 0; d < ndim; d++) {
        int64_t bytes;
        if (extent->strides[d] < 0 || !fc_mul_i64(overlap->offsets[d] - dims[d], extent->strides[d], &bytes) ||
            !fc_mul_i64(bytes, element, &bytes) || !fc_add_u64(at, (uint64_t)bytes, &at)) {
            return false;
        }
    }
    *start = at;
    return true;
}

typedef struct fill {
    fc_source *source;
    const fc_tensor *tensor;
    const fc_box *box;
    int64_t strides[FC_MAX_DIMS]; /* of the destination, in elements */
    unsigned char *out;
    int64_t filled;
    size_t claimed[MOST_CLAIMED]; /* chunks that must be decoded and are not copied yet */
    int nclaimed;
} fill;

static fc_code place_overlap(fill *f, const fc_overlap *overlap, const fc_extent *extent, bool *placed, fc_error *err) {
    const fc_tensor *tensor = f->tensor;
    const fc_dtype_info *type = fc_dtype_get(tensor->dtype);
    fc_strided copy;
    uint64_t start;
    if (extent->filters.count > sizeof extent->filters.items / sizeof *extent->filters.items) {
        return fc_fail(err, FC_EUNSUPPORTED, "offset %" PRIu64 ": %d HDF5 filters are not supported", extent->offset,
                       extent->filters.count);
    }
    uint64_t available = is_plain(extent) ? extent->length : extent->decoded;
    if (!fc_source_first_byte(extent, tensor->chunks[overlap->chunk].dims, overlap, tensor->ndim, type->size, &start) ||
        !fc_strided_make(&copy, tensor->ndim, overlap->sizes, extent->strides, f->strides, type->size) ||
        !fc_range_within(start, (uint64_t)fc_strided_span(&copy, 0), available)) {
        return fc_fail(err, FC_ECORRUPT, "offset %" PRIu64 ": the elements exceed the %" PRIu64 " stored bytes",
                       extent->offset, available);
    }
    int64_t at = 0, volume = 1;
    for (int d = 0; d < tensor->ndim; d++) {
        at += (overlap->offsets[d] - f->box->offsets[d]) * f->strides[d];
        volume *= overlap->sizes[d];
    }
    unsigned char *out = f->out + at * type->size;
    FC_TRY(copy_overlap(f->source, tensor, overlap->chunk, extent, start, &copy, out, placed, err));
    if (!*placed) {
        return FC_OK;
    }
    if (extent->swap) {
        fc_strided_swap(&copy, out, type->swap_size);
    }
    if (extent->negate || extent->conjugate) {
        bool complex = type->cls == FC_CLASS_COMPLEX;
        fc_strided_flip(&copy, out, type->swap_size, extent->negate, extent->negate != (complex && extent->conjugate));
    }
    f->filled += volume;
    return FC_OK;
}

static fc_code try_overlap(fill *f, const fc_overlap *overlap, const fc_extent *extent, bool *placed, fc_error *err) {
    fc_code rc = place_overlap(f, overlap, extent, placed, err);
    if (rc == FC_OK) {
        return rc;
    }
    fc_box box = fc_chunk_box(f->tensor, &f->tensor->chunks[overlap->chunk]);
    return fc_context(err, rc, "tensor %s, chunk %s", f->tensor->name, fc_box_to_text(&box).s);
}

/* Tries one claimed chunk. `*placed`: its data is copied. */
static fc_code try_claim(fill *f, uint32_t chunk, bool *placed, fc_error *err) {
    fc_overlap overlap = {.chunk = chunk};
    fc_box box = fc_chunk_box(f->tensor, &f->tensor->chunks[chunk]);
    fc_box_intersect(&box, f->box, overlap.offsets, overlap.sizes);
    const fc_extent *extent;
    FC_TRY(fc_source_extent(f->source, f->tensor, chunk, &extent, err));
    return try_overlap(f, &overlap, extent, placed, err);
}

/* Tries the claimed chunks in order. Copied ones leave the list; after an error the others stay, to be released. */
static fc_code try_claimed(fill *f, fc_error *err) {
    int before = f->nclaimed;
    f->nclaimed = 0;
    fc_code rc = FC_OK;
    for (int i = 0; i < before; i++) {
        bool placed = false;
        rc = rc != FC_OK ? rc : try_claim(f, f->claimed[i], &placed, err);
        if (!placed) {
            f->claimed[f->nclaimed++] = f->claimed[i];
        }
    }
    return rc;
}

/* Copies all claimed chunks. While another worker decodes one chunk, this one decodes the next; it waits only when none
   is available. */
static fc_code place_claimed(fill *f, fc_error *err) {
    while (f->nclaimed > 0) {
        uint64_t seen = fc_decoded_changes(f->source->decoded);
        int before = f->nclaimed;
        FC_TRY(try_claimed(f, err));
        if (f->nclaimed == before) {
            fc_decoded_wait(f->source->decoded, seen);
        }
    }
    return FC_OK;
}

/* Copies an overlap that needs no decoding. Claims the chunk of any other. */
static fc_code visit_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    fill *f = context;
    const fc_extent *extent = NULL;
    FC_TRY(
        fc_source_extent(f->source, f->tensor, overlap->chunk, &extent, err)); /* formats name the tensor themselves */
    if (is_plain(extent) || is_streamed(f->source, f->tensor, overlap->chunk, extent)) {
        bool placed;
        return try_overlap(f, overlap, extent, &placed, err);
    }
    if (f->nclaimed == MOST_CLAIMED) {
        FC_TRY(place_claimed(f, err));
    }
    FC_TRY(fc_decoded_claim(f->source->decoded, f->tensor, overlap->chunk, err));
    f->claimed[f->nclaimed++] = overlap->chunk;
    return FC_OK;
}

static fc_code fill_box(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                        unsigned char *out, fc_error *err) {
    fill f = {.source = source, .tensor = tensor, .box = box, .out = out};
    int64_t volume = fc_box_volume(box);
    if (!fc_row_major_strides(box->ndim, box->sizes, f.strides)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: the box %s is too large", tensor->name, fc_box_to_text(box).s);
    }
    fc_code rc = fc_coverage_visit(coverage, box, visit_overlap, &f, err);
    rc = rc == FC_OK ? place_claimed(&f, err) : rc;
    for (int i = 0; i < f.nclaimed; i++) { /* after an error */
        fc_decoded_release(source->decoded, tensor, f.claimed[i], 0);
    }
    FC_TRY(rc);
    if (f.filled != volume) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: chunks hold %" PRId64 " of the %" PRId64 " elements %s",
                       tensor->name, f.filled, volume, fc_box_to_text(box).s);
    }
    return FC_OK;
}

/* Adds the elements of a box, or one that the box `repeats`, to the CRC-64 of the tensor. */
static fc_code add_elements(fc_source *source, const fc_tensor *tensor, const fc_box *box, bool repeats,
                            const unsigned char *elements, fc_error *err) {
    bool wanted = false;
    if (source->crc && source->elements) {
        FC_TRY(fc_source_crc_wants(source->crc, tensor, &wanted, err));
    }
    return wanted ? fc_source_crc_add(source->crc, tensor, box, repeats, elements, err) : FC_OK;
}

fc_code fc_source_fill(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                       unsigned char *out, fc_error *err) {
    FC_TRY(fill_box(source, coverage, tensor, box, out, err));
    return add_elements(source, tensor, box, false, out, err);
}

fc_code fc_source_fill_one(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                           unsigned char *out, fc_error *err) {
    int64_t ones[FC_MAX_DIMS];
    for (int d = 0; d < box->ndim; d++) {
        ones[d] = 1;
    }
    const fc_box first = {box->ndim, box->offsets, ones};
    FC_TRY(fill_box(source, coverage, tensor, &first, out, err));
    return add_elements(source, tensor, box, true, out, err);
}

fc_code fc_source_bytes(fc_source *source, uint32_t file, uint64_t offset, unsigned char *out, size_t size,
                        fc_error *err) {
    fc_input *input = NULL;
    FC_TRY(fc_source_open(source, file, &input, err));
    return fc_input_read(input, out, size, offset, source->scratch, source->scratch_size, err);
}
