/*
 * Reading the source: from the pieces of a tile to bytes in its buffer. Resolves chunks to extents, keeps the last few
 * of them and their files at hand, and chooses how to read: runs straight to their place, or a window and a gather.
 *
 * Offsets and strides come from files: every product is checked, and nothing outside the extent is ever read.
 */
#include "engine/source.h"

#include "base/checked.h"
#include "base/pages.h"
#include "base/try.h"
#include "checkpoint/identity.h"
#include "codec/strided.h"
#include "engine/stored_chunk.h"
#include "engine/tuning.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "io/input.h"
#include "plan/box_text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_CLAIMED = 64 };

typedef struct cached_extent {
    const fc_tensor *tensor; /* NULL: free */
    size_t chunk;
    fc_extent extent;
} cached_extent;

typedef struct open_file {
    uint32_t file;
    fc_input input; /* fd -1: free */
    uint64_t last_use;
} open_file;

struct fc_source {
    const fc_checkpoint *checkpoint;
    fc_decoded *decoded;
    unsigned char *scratch;
    size_t scratch_size;
    cached_extent extents[FC_EXTENT_CACHE];
    open_file files[FC_OPEN_FILES];
    int nfiles; /* of them in use at most */
    uint64_t clock;
    fc_source_crc *crc;  /* NULL: nothing is compared */
    bool elements;       /* with `crc`: adds those of the elements, too */
    fc_crc_walk walk;    /* of the piece that is being read */
    bool checks_objects; /* before they are read */
};

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

void fc_source_watch(fc_source *source, fc_source_crc *crc, bool elements) {
    source->crc = crc;
    source->elements = elements;
}

/* File `index`, from those that are open or in place of the one used longest ago. */
static fc_code open_cached(fc_source *source, uint32_t index, fc_input **out, fc_error *err) {
    const fc_checkpoint *checkpoint = source->checkpoint;
    if (index >= checkpoint->nfiles) {
        return fc_fail(err, FC_ECORRUPT, "%s: file number %" PRIu32 " of %zu", checkpoint->path, index,
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
    fc_code rc = fc_input_open(&oldest->input, checkpoint->files[index].path, err);
    rc = rc == FC_OK ? fc_identity_check(checkpoint, index, oldest->input.fd, err) : rc;
    if (rc != FC_OK) {
        fc_input_close(&oldest->input);
    }
    oldest->file = index;
    oldest->last_use = ++source->clock;
    *out = &oldest->input;
    return rc;
}

static fc_code resolve(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent **out, fc_error *err) {
    uint64_t h = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9e3779b97f4a7c15u >> 40;
    cached_extent *slot = &source->extents[(h + chunk) % FC_EXTENT_CACHE];
    if (slot->tensor != tensor || slot->chunk != chunk) {
        const fc_format *format = source->checkpoint->format;
        slot->tensor = NULL;
        fc_code rc = fc_checkpoint_extent(source->checkpoint, tensor, chunk, &slot->extent, err);
        if (rc == FC_OK && tensor->object && source->checks_objects && format->reader.check_object) {
            rc = format->reader.check_object(source->checkpoint, tensor, err);
        }
        if (rc != FC_OK) {
            return rc;
        }
        slot->tensor = tensor;
        slot->chunk = chunk;
    }
    *out = &slot->extent;
    return FC_OK;
}

/* Whether the bytes of an extent are the elements, with nothing to decode. */
static bool is_plain(const fc_extent *extent) {
    return extent->codec == FC_CODEC_RAW || extent->codec == FC_CODEC_INLINE;
}

/* How much of a strided copy one read covers: the axes from `whole` on entirely, and `group` steps of the one before.
 */
typedef struct window {
    int whole;
    int64_t group; /* 1: the axis before `whole` is stepped through one by one */
} window;

/* Widens the window from the innermost axis outwards while gaps are small and it fits the scratch buffer. */
static window choose_window(const fc_strided *copy, size_t scratch) {
    window w = {copy->n, 1};
    int64_t span = copy->unit;
    if (span >= FC_DIRECT_RUN || (uint64_t)span > scratch) {
        return w;
    }
    while (w.whole > 0) {
        const fc_axis *axis = &copy->axes[w.whole - 1];
        if (axis->src - span > FC_GAP_READ) {
            break;
        }
        int64_t wider = span + axis->src * (axis->size - 1);
        if ((uint64_t)wider > scratch) {
            w.group = ((int64_t)scratch - span) / axis->src + 1; /* src > 0, else it would have fitted */
            break;
        }
        span = wider;
        w.whole--;
    }
    return w;
}

/* Adds the source's bytes of a window, `at` bytes behind the start of their chunk, to the walk: in runs as they lie in
   the source, which may be longer than those of the copy. */
static void add_window(fc_crc_walk *walk, uint64_t at, const fc_strided *part, const unsigned char *bytes) {
    int64_t index[FC_MAX_DIMS] = {0}, run = part->unit, src = 0;
    int n = part->n, i;
    for (; n > 0 && part->axes[n - 1].src == run; n--) {
        run *= part->axes[n - 1].size;
    }
    do {
        fc_crc_walk_add(walk, at + (uint64_t)src, bytes + src, (size_t)run);
        for (i = n - 1; i >= 0; i--) {
            src += part->axes[i].src;
            if (++index[i] < part->axes[i].size) {
                break;
            }
            src -= index[i] * part->axes[i].src;
            index[i] = 0;
        }
    } while (i >= 0);
}

/* Reads one window at `offset` and spreads it. Past the page cache only what is wanted whole: what lies between the
   pieces may be wanted next. */
static fc_code read_window(fc_source *source, fc_input *input, uint64_t start, uint64_t at, const fc_strided *part,
                           unsigned char *out, fc_error *err) {
    const uint64_t offset = start + at;
    if (part->n == 0) {
        fc_code rc = fc_input_read(input, out, (size_t)part->unit, offset, source->scratch, source->scratch_size, err);
        if (rc == FC_OK && source->walk.wanted) {
            fc_crc_walk_add(&source->walk, at, out, (size_t)part->unit);
        }
        return rc;
    }
    size_t span = (size_t)fc_strided_span(part, 0);
    const unsigned char *bytes = source->scratch;
    fc_code rc = fc_strided_is_dense(part) ? fc_input_read_near(input, source->scratch, span, offset, &bytes, err)
                                           : fc_pread_full(input->fd, source->scratch, span, offset, input->path, err);
    if (rc == FC_OK) {
        fc_strided_copy(part, bytes, out);
    }
    if (rc == FC_OK && source->walk.wanted) {
        add_window(&source->walk, at, part, bytes);
    }
    return rc;
}

/* Reads `copy`, whose first element is `at` bytes behind `start` in the file, window by window in ascending order. */
static fc_code read_strided(fc_source *source, fc_input *input, uint64_t start, uint64_t at, const fc_strided *copy,
                            unsigned char *out, fc_error *err) {
    window w = choose_window(copy, source->scratch_size);
    int64_t index[FC_MAX_DIMS] = {0}, src = 0, dst = 0;
    bool grouped = w.group > 1;
    fc_strided part = {copy->unit, 0, {{0, 0, 0}}};
    int first = grouped ? w.whole - 1 : w.whole;
    part.n = copy->n - first;
    memcpy(part.axes, copy->axes + first, (size_t)part.n * sizeof *part.axes);
    for (;;) {
        if (grouped) {
            int64_t left = copy->axes[first].size - index[first];
            part.axes[0].size = left < w.group ? left : w.group;
        }
        FC_TRY(read_window(source, input, start, at + (uint64_t)src, &part, out + dst, err));
        int i = w.whole - 1;
        for (; i >= 0; i--) {
            int64_t by = grouped && i == first ? part.axes[0].size : 1;
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

static fc_decoding decoding_of(const fc_source *source, const fc_tensor *tensor, const fc_extent *extent) {
    return fc_decoding_choose(extent, fc_dtype_size(tensor->dtype), source->scratch_size,
                              fc_decoded_limit(source->decoded));
}

/* Brings a whole chunk into memory and decodes it; fc_decode_fn. */
static fc_code decode_chunk(void *context, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                            unsigned char *workspace, unsigned char *out, fc_error *err) {
    fc_source *source = context;
    const fc_checkpoint *checkpoint = source->checkpoint;
    const fc_decoding decoding = decoding_of(source, tensor, extent);
    if (decoding.way == FC_WAY_NONE) {
        return fc_fail(err, FC_ECORRUPT, "offset %" PRIu64 ": the chunk's sizes make no sense", extent->offset);
    }
    if (decoding.way == FC_WAY_FORMAT) {
        return checkpoint->format->reader.read
                   ? checkpoint->format->reader.read(checkpoint, tensor, chunk, out, err)
                   : fc_fail(err, FC_EUNSUPPORTED, "%s: the chunk cannot be decoded", checkpoint->path);
    }
    fc_input *input = NULL;
    FC_TRY(open_cached(source, extent->file, &input, err));
    const fc_lent lent = {input, source->scratch, source->scratch_size, workspace};
    return fc_decoding_read(&decoding, extent, fc_dtype_size(tensor->dtype), &lent, out, err);
}

/* The piece being placed: from `start` bytes into the decoded bytes to `out`. Not `*placed` when its chunk must be
   decoded and is not to be had now. */
static fc_code copy_piece(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                          uint64_t start, const fc_strided *copy, unsigned char *out, bool *placed, fc_error *err) {
    *placed = true;
    if (extent->codec == FC_CODEC_INLINE) {
        fc_strided_copy(copy, extent->bytes + start, out);
        return FC_OK;
    }
    if (extent->codec == FC_CODEC_RAW) {
        fc_input *input = NULL;
        fc_code rc = open_cached(source, extent->file, &input, err);
        if (rc == FC_OK && source->crc) {
            fc_crc_walk_begin(&source->walk, tensor, chunk, extent);
        }
        rc = rc == FC_OK ? read_strided(source, input, extent->offset, start, copy, out, err) : rc;
        if (rc == FC_OK && source->crc && source->walk.lies != FC_CRC_NONE) {
            source->walk.bytes = (uint64_t)fc_strided_bytes(copy);
            fc_crc_walk_end(&source->walk, source->crc, tensor, chunk, extent);
        }
        source->walk.wanted = false;
        return rc;
    }
    const unsigned char *bytes = NULL;
    const fc_decoding decoding = decoding_of(source, tensor, extent);
    fc_code rc =
        fc_decoded_try(source->decoded, tensor, chunk, extent, decoding.extra, decode_chunk, source, &bytes, err);
    *placed = rc == FC_OK && bytes;
    if (*placed) {
        if (decoding.planes) {
            const uint32_t element = fc_dtype_size(tensor->dtype);
            fc_strided_unshuffle(copy, bytes, (size_t)extent->decoded / element, element, start, out);
        } else {
            fc_strided_copy(copy, bytes + start, out);
        }
        fc_decoded_release(source->decoded, tensor, chunk, fc_strided_bytes(copy));
    }
    return rc;
}

/* The byte of the piece's first element within the decoded bytes. @return false when a number overflows. */
static bool first_byte(const fc_extent *extent, const int64_t *dims, const fc_overlap *piece, int ndim, int64_t element,
                       uint64_t *start) {
    uint64_t at = extent->first;
    for (int d = 0; d < ndim; d++) {
        int64_t bytes;
        if (extent->strides[d] < 0 || !fc_mul_i64(piece->offsets[d] - dims[d], extent->strides[d], &bytes) ||
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
    size_t claimed[MOST_CLAIMED]; /* chunks that must be decoded and are not placed yet */
    int nclaimed;
} fill;

static fc_code place_piece(fill *f, const fc_overlap *piece, const fc_extent *extent, bool *placed, fc_error *err) {
    const fc_tensor *tensor = f->tensor;
    const fc_dtype_info *type = fc_dtype_get(tensor->dtype);
    fc_strided copy;
    uint64_t start;
    if (extent->filters.count > sizeof extent->filters.ids) {
        return fc_fail(err, FC_EUNSUPPORTED, "offset %" PRIu64 ": %d HDF5 filters", extent->offset,
                       extent->filters.count);
    }
    uint64_t available = is_plain(extent) ? extent->length : extent->decoded;
    if (!first_byte(extent, tensor->chunks[piece->chunk].dims, piece, tensor->ndim, type->size, &start) ||
        !fc_strided_make(&copy, tensor->ndim, piece->sizes, extent->strides, f->strides, type->size) ||
        !fc_range_within(start, (uint64_t)fc_strided_span(&copy, 0), available)) {
        return fc_fail(err, FC_ECORRUPT,
                       "offset %" PRIu64 ": the elements reach beyond the %" PRIu64 " bytes that are stored",
                       extent->offset, available);
    }
    int64_t at = 0, volume = 1;
    for (int d = 0; d < tensor->ndim; d++) {
        at += (piece->offsets[d] - f->box->offsets[d]) * f->strides[d];
        volume *= piece->sizes[d];
    }
    unsigned char *out = f->out + at * type->size;
    fc_code rc = copy_piece(f->source, tensor, piece->chunk, extent, start, &copy, out, placed, err);
    if (rc != FC_OK || !*placed) {
        return rc;
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

static fc_code try_piece(fill *f, const fc_overlap *piece, const fc_extent *extent, bool *placed, fc_error *err) {
    fc_code rc = place_piece(f, piece, extent, placed, err);
    if (rc == FC_OK) {
        return rc;
    }
    fc_box box = fc_chunk_box(f->tensor, &f->tensor->chunks[piece->chunk]);
    return fc_context(err, rc, "tensor %s, chunk %s", f->tensor->name, fc_box_to_text(&box).s);
}

/* Tries what is claimed and not placed yet, in the order of the pieces; what is placed leaves the list. */
static fc_code try_claimed(fill *f, fc_error *err) {
    int before = f->nclaimed;
    f->nclaimed = 0;
    fc_code rc = FC_OK;
    for (int i = 0; i < before; i++) {
        fc_overlap piece = {.chunk = f->claimed[i]};
        fc_box box = fc_chunk_box(f->tensor, &f->tensor->chunks[piece.chunk]);
        fc_box_intersect(&box, f->box, piece.offsets, piece.sizes);
        const fc_extent *extent;
        bool placed = false;
        rc = rc == FC_OK ? resolve(f->source, f->tensor, piece.chunk, &extent, err) : rc;
        rc = rc == FC_OK ? try_piece(f, &piece, extent, &placed, err) : rc;
        if (!placed) {
            f->claimed[f->nclaimed++] = piece.chunk;
        }
    }
    return rc;
}

/* Places everything that is claimed. While another worker decodes a chunk, this one decodes the next; it waits only
   when none is to be had. */
static fc_code place_claimed(fill *f, fc_error *err) {
    fc_code rc = FC_OK;
    while (rc == FC_OK && f->nclaimed > 0) {
        uint64_t seen = fc_decoded_changes(f->source->decoded);
        int before = f->nclaimed;
        rc = try_claimed(f, err);
        if (rc == FC_OK && f->nclaimed == before) {
            fc_decoded_wait(f->source->decoded, seen);
        }
    }
    return rc;
}

/* Places a piece whose bytes can be read as they are; claims the chunk of one that must be decoded. */
static fc_code visit_piece(void *context, const fc_overlap *piece, fc_error *err) {
    fill *f = context;
    const fc_extent *extent = NULL;
    fc_code rc = resolve(f->source, f->tensor, piece->chunk, &extent, err);
    if (rc != FC_OK) {
        return rc; /* formats name the tensor, or the dataset, themselves */
    }
    if (is_plain(extent)) {
        bool placed;
        return try_piece(f, piece, extent, &placed, err);
    }
    rc = f->nclaimed == MOST_CLAIMED ? place_claimed(f, err) : FC_OK;
    rc = rc == FC_OK ? fc_decoded_claim(f->source->decoded, f->tensor, piece->chunk, err) : rc;
    if (rc == FC_OK) {
        f->claimed[f->nclaimed++] = piece->chunk;
    }
    return rc;
}

fc_code fc_source_fill(fc_source *source, const fc_coverage *coverage, const fc_tensor *tensor, const fc_box *box,
                       unsigned char *out, fc_error *err) {
    fill f = {.source = source, .tensor = tensor, .box = box, .out = out};
    int64_t volume = fc_box_volume(box);
    if (!fc_row_major_strides(box->ndim, box->sizes, f.strides)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: the box %s is too large", tensor->name, fc_box_to_text(box).s);
    }
    fc_code rc = fc_coverage_visit(coverage, box, visit_piece, &f, err);
    rc = rc == FC_OK ? place_claimed(&f, err) : rc;
    for (int i = 0; i < f.nclaimed; i++) { /* after an error */
        fc_decoded_release(source->decoded, tensor, f.claimed[i], 0);
    }
    if (rc == FC_OK && f.filled != volume) {
        rc = fc_fail(err, FC_ECORRUPT, "tensor %s: chunks hold %" PRId64 " of the %" PRId64 " elements %s",
                     tensor->name, f.filled, volume, fc_box_to_text(box).s);
    }
    bool wanted = false;
    if (rc == FC_OK && source->crc && source->elements) {
        rc = fc_source_crc_wants(source->crc, tensor, &wanted, err);
    }
    return rc == FC_OK && wanted ? fc_source_crc_add(source->crc, tensor, box, out, err) : rc;
}

fc_code fc_source_bytes(fc_source *source, uint32_t file, uint64_t offset, unsigned char *out, size_t size,
                        fc_error *err) {
    fc_input *input = NULL;
    FC_TRY(open_cached(source, file, &input, err));
    return fc_input_read(input, out, size, offset, source->scratch, source->scratch_size, err);
}
