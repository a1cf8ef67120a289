/*
 * Compares what was read with recorded CRCs. See source_crc.h. All sums are bare CRCs (base/crc.h): a worker collects a
 * chunk's CRC run by run in file order, and adds it to the chunk's sum as if zeros followed up to the record's end.
 */
#include "integrity/source_crc.h"

#include "base/crc.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/try.h"
#include "integrity/record_crc.h"
#include "integrity/tile_digest.h"
#include "plan/box_text.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* The sums of one chunk. The memory is never touched where a source records nothing. */
typedef struct chunk_sum {
    atomic_uint_least64_t bytes;    /* read so far */
    atomic_uint_least64_t sum;      /* bare CRC of these bytes */
    atomic_uint_least64_t recorded; /* 0: no worker of this process has read any */
    atomic_uint_least32_t layout;   /* fc_crc_layout */
} chunk_sum;

/* The sums of one whole tensor. */
typedef struct tensor_sum {
    atomic_uint_least64_t bytes, sum; /* of its elements; see chunk_sum */
    atomic_uint_least8_t recorded;    /* 0: not looked up yet; 1: no CRC-64; 2: a CRC-64 is recorded */
} tensor_sum;

struct fc_source_crc {
    const fc_checkpoint *checkpoint;
    const fc_tensor *tensors;
    size_t count;
    size_t *first; /* count + 1 numbers: each tensor's first chunk among those of all tensors, and their total */
    chunk_sum *sums;
    tensor_sum *whole;
    atomic_bool any;
};

fc_code fc_source_crc_new(const fc_checkpoint *checkpoint, const fc_tensor *tensors, size_t count, fc_source_crc **out,
                          fc_error *err) {
    fc_source_crc *crc = calloc(1, sizeof *crc);
    *out = NULL;
    if (crc) {
        *crc = (fc_source_crc){.checkpoint = checkpoint, .tensors = tensors, .count = count};
        crc->first = calloc(count + 1, sizeof *crc->first);
        crc->whole = calloc(count + 1, sizeof *crc->whole);
    }
    if (crc && crc->first) {
        for (size_t i = 0; i < count; i++) { /* the chunks are in memory, so their number does not overflow */
            crc->first[i + 1] = crc->first[i] + tensors[i].nchunks;
        }
        crc->sums = calloc(crc->first[count] + 1, sizeof *crc->sums);
    }
    if (!crc || !crc->sums || !crc->whole) {
        fc_source_crc_free(crc);
        return fc_no_memory(err, checkpoint->path);
    }
    *out = crc;
    return FC_OK;
}

void fc_source_crc_free(fc_source_crc *crc) {
    if (crc) {
        free(crc->first);
        free(crc->sums);
        free(crc->whole);
        free(crc);
    }
}

/* ---- a worker's walk ---- */

/* Returns whether the elements of a chunk fill its stored bytes, each once, in any order of the axes. */
static bool fills_record(const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    int64_t stride = 1; /* of the next axis, from the innermost outwards */
    bool seen[FC_MAX_DIMS] = {false};
    for (int left = box.ndim; left > 0; left--) {
        int next = -1;
        for (int d = box.ndim - 1; d >= 0 && next < 0; d--) {
            next = !seen[d] && (box.sizes[d] == 1 || extent->strides[d] == stride) ? d : -1;
        }
        if (next < 0) {
            return false;
        }
        seen[next] = true;
        stride *= box.sizes[next];
    }
    return extent->first == 0 && (uint64_t)stride * fc_dtype_size(tensor->dtype) == extent->length;
}

/* Returns how the elements of a chunk are laid out in their record. */
static fc_crc_layout layout_of(const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    if ((extent->crc32 == 0 && !extent->has_crc64) || extent->codec != FC_CODEC_RAW) {
        return FC_CRC_NONE;
    }
    if (extent->has_crc64) { /* other writers' files and flat parameters may have chunks that are only part of it */
        return fills_record(tensor, chunk, extent) ? FC_CRC_WIDE : FC_CRC_NONE;
    }
    if (fills_record(tensor, chunk, extent)) {
        return FC_CRC_WHOLE;
    }
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    return fc_is_row_major(box.ndim, box.sizes, extent->strides) ? FC_CRC_RUN : FC_CRC_SCATTERED;
}

void fc_crc_walk_begin(fc_crc_walk *walk, const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    const fc_crc_layout layout = layout_of(tensor, chunk, extent);
    if ((layout == FC_CRC_WIDE) != (walk->layout == FC_CRC_WIDE)) {
        memset(walk->known, 0, sizeof walk->known); /* these factors are of the other kind */
    }
    walk->layout = layout;
    walk->wanted = layout == FC_CRC_WHOLE || layout == FC_CRC_RUN || layout == FC_CRC_WIDE;
    walk->at = walk->bytes = 0;
    walk->sum = 0;
}

/* Returns the sum as if `distance` zero bytes followed. */
static uint64_t shifted(fc_crc_walk *walk, uint64_t distance) {
    const bool wide = walk->layout == FC_CRC_WIDE;
    size_t slot = (size_t)(distance * 0x9e3779b97f4a7c15u >> 61);
    if (walk->known[slot].distance != distance) {
        walk->known[slot].distance = distance;
        if (wide) {
            fc_crc64_factor_init(&walk->known[slot].factor.of64, distance);
        } else {
            fc_crc32_factor_init(&walk->known[slot].factor.of32, distance);
        }
    }
    return wide ? fc_crc64_multiply(&walk->known[slot].factor.of64, walk->sum)
                : fc_crc32_multiply(&walk->known[slot].factor.of32, (uint32_t)walk->sum);
}

void fc_crc_walk_add(fc_crc_walk *walk, uint64_t at, const unsigned char *bytes, size_t size) {
    uint64_t crc = walk->layout == FC_CRC_WIDE ? fc_crc64_bare(bytes, size) : fc_crc32_bare(bytes, size);
    if (walk->sum != 0) {
        crc ^= shifted(walk, at + size - walk->at);
    }
    walk->sum = crc;
    walk->at = at + size;
    walk->bytes += size;
}

void fc_crc_walk_add_strided(fc_crc_walk *walk, uint64_t at, const fc_strided *step, const unsigned char *bytes) {
    int64_t index[FC_MAX_DIMS] = {0}, run = step->unit, src = 0;
    int n = step->n, i;
    for (; n > 0 && step->axes[n - 1].src == run; n--) {
        run *= step->axes[n - 1].size;
    }
    do {
        fc_crc_walk_add(walk, at + (uint64_t)src, bytes + src, (size_t)run);
        for (i = n - 1; i >= 0; i--) {
            src += step->axes[i].src;
            if (++index[i] < step->axes[i].size) {
                break;
            }
            src -= index[i] * step->axes[i].src;
            index[i] = 0;
        }
    } while (i >= 0);
}

static chunk_sum *sum_of(fc_source_crc *crc, const fc_tensor *tensor, size_t chunk) {
    return &crc->sums[crc->first[tensor - crc->tensors] + chunk];
}

void fc_crc_walk_end(const fc_crc_walk *walk, fc_source_crc *crc, const fc_tensor *tensor, size_t chunk,
                     const fc_extent *extent) {
    chunk_sum *sum = sum_of(crc, tensor, chunk);
    const bool wide = walk->layout == FC_CRC_WIDE;
    const uint64_t after = extent->length - walk->at;
    const uint64_t in_place = wide ? fc_crc64_shift(walk->sum, after) : fc_crc32_shift((uint32_t)walk->sum, after);
    atomic_fetch_xor_explicit(&sum->sum, in_place, memory_order_relaxed);
    atomic_fetch_add_explicit(&sum->bytes, walk->bytes, memory_order_relaxed);
    atomic_store_explicit(&sum->recorded, wide ? extent->crc64 : extent->crc32, memory_order_relaxed);
    atomic_store_explicit(&sum->layout, walk->layout, memory_order_relaxed);
    atomic_store_explicit(&crc->any, true, memory_order_relaxed);
}

/* ---- saving ---- */

size_t fc_source_crc_count(const fc_source_crc *crc) {
    return crc->first[crc->count] + crc->count;
}

fc_saved_sum fc_source_crc_save(const fc_source_crc *crc, size_t index) {
    const size_t chunks = crc->first[crc->count];
    if (index >= chunks) {
        tensor_sum *whole = &crc->whole[index - chunks];
        return (fc_saved_sum){.bytes = atomic_load(&whole->bytes), .sum = atomic_load(&whole->sum)};
    }
    chunk_sum *sum = &crc->sums[index];
    return (fc_saved_sum){atomic_load(&sum->bytes), atomic_load(&sum->sum), atomic_load(&sum->recorded),
                          atomic_load(&sum->layout)};
}

bool fc_source_crc_load(fc_source_crc *crc, size_t index, const fc_saved_sum *saved) {
    const size_t chunks = crc->first[crc->count];
    if (index >= chunks + crc->count || saved->layout > FC_CRC_WIDE) {
        return false;
    }
    if (index >= chunks) {
        atomic_fetch_add(&crc->whole[index - chunks].bytes, saved->bytes);
        atomic_fetch_xor(&crc->whole[index - chunks].sum, saved->sum);
    } else {
        chunk_sum *sum = &crc->sums[index];
        atomic_fetch_add(&sum->bytes, saved->bytes);
        atomic_fetch_xor(&sum->sum, saved->sum);
        atomic_store(&sum->recorded, saved->recorded);
        atomic_store(&sum->layout, (uint32_t)saved->layout);
    }
    atomic_store(&crc->any, true);
    return true;
}

/* ---- tensors as a whole ---- */

fc_code fc_source_crc_wants(fc_source_crc *crc, const fc_tensor *tensor, bool *wants, fc_error *err) {
    tensor_sum *sum = &crc->whole[tensor - crc->tensors];
    *wants = false;
    if (atomic_load_explicit(&sum->recorded, memory_order_relaxed) == 0) {
        fc_digest digest;
        FC_TRY(fc_checkpoint_digest(crc->checkpoint, tensor, FC_WHOLE_TENSOR, &digest, err));
        atomic_store_explicit(&sum->recorded, digest.kind == FC_DIGEST_CRC64 ? 2 : 1, memory_order_relaxed);
    }
    *wants = atomic_load_explicit(&sum->recorded, memory_order_relaxed) == 2;
    return FC_OK;
}

fc_code fc_source_crc_add(fc_source_crc *crc, const fc_tensor *tensor, const fc_box *box, bool repeats,
                          const unsigned char *bytes, fc_error *err) {
    tensor_sum *sum = &crc->whole[tensor - crc->tensors];
    uint64_t found;
    if (repeats) {
        found = fc_repeat_digest(tensor, NULL, box, bytes).tensor;
    } else {
        FC_TRY(fc_box_digest_make(tensor, box, bytes, &found, err));
    }
    const uint64_t size = (uint64_t)fc_box_volume(box) * fc_dtype_size(tensor->dtype);
    atomic_fetch_xor_explicit(&sum->sum, found, memory_order_relaxed);
    atomic_fetch_add_explicit(&sum->bytes, size, memory_order_relaxed);
    atomic_store_explicit(&crc->any, true, memory_order_relaxed);
    return FC_OK;
}

fc_code fc_source_check_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, uint64_t found,
                               fc_error *err) {
    fc_digest recorded;
    FC_TRY(fc_checkpoint_digest(checkpoint, tensor, FC_WHOLE_TENSOR, &recorded, err));
    if (recorded.kind != FC_DIGEST_CRC64 || recorded.value == found) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: %s %s: damaged: the digest of its data is %016" PRIx64 " but %s records %016" PRIx64
                   "; fsdpckpt verify finds the damaged file",
                   checkpoint->path, tensor->object ? "object" : "tensor", tensor->name, found,
                   checkpoint->seal ? checkpoint->seal->path : "its header", recorded.value);
}

/*
 * Checks a tensor whose elements were all added. If ranks have read some of them twice, the sum is useless, and one
 * rank reads the tensor `again`; NULL on the others.
 */
static fc_code check_tensor(const fc_source_crc *crc, size_t index, fc_read_again *again, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_tensor *tensor = &crc->tensors[index];
    const fc_box whole = {tensor->ndim, origin, tensor->shape};
    const uint64_t bytes = (uint64_t)fc_box_volume(&whole) * fc_dtype_size(tensor->dtype);
    const uint64_t added = atomic_load(&crc->whole[index].bytes);
    if (added == 0 || added < bytes) {
        return FC_OK;
    }
    uint64_t found = fc_crc64_finish(atomic_load(&crc->whole[index].sum), bytes);
    if (added > bytes) {
        if (!again) {
            return FC_OK;
        }
        FC_TRY(again(crc->checkpoint, tensor, &whole, &found, err));
    }
    return fc_source_check_digest(crc->checkpoint, tensor, found, err);
}

/* ---- after everything is read ---- */

/* What the ranks combine: sums and bytes of all chunks followed by all tensors, then the known runs of the records. */
typedef struct exchange {
    uint64_t *sums, *bytes, *recorded, *layout;
    size_t chunks;
} exchange;

static void pack_sums(const fc_source_crc *crc, const exchange *to) {
    for (size_t i = 0; i < to->chunks; i++) {
        chunk_sum *sum = &crc->sums[i];
        to->sums[i] = atomic_load(&sum->sum);
        to->bytes[i] = atomic_load(&sum->bytes);
        to->recorded[i] = atomic_load(&sum->recorded);
        to->layout[i] = atomic_load(&sum->layout);
    }
    for (size_t i = 0; i < crc->count; i++) {
        to->sums[to->chunks + i] = atomic_load(&crc->whole[i].sum);
        to->bytes[to->chunks + i] = atomic_load(&crc->whole[i].bytes);
    }
}

static void unpack_sums(fc_source_crc *crc, const exchange *from) {
    for (size_t i = 0; i < from->chunks; i++) {
        chunk_sum *sum = &crc->sums[i];
        atomic_store(&sum->sum, from->sums[i]);
        atomic_store(&sum->bytes, from->bytes[i]);
        atomic_store(&sum->recorded, from->recorded[i]);
        atomic_store(&sum->layout, (uint32_t)from->layout[i]);
    }
    for (size_t i = 0; i < crc->count; i++) {
        atomic_store(&crc->whole[i].sum, from->sums[from->chunks + i]);
        atomic_store(&crc->whole[i].bytes, from->bytes[from->chunks + i]);
    }
}

static fc_code join_numbers(fc_comm *comm, uint64_t *numbers, size_t count, fc_error *err) {
    static const fc_reduce how[] = {FC_REDUCE_XOR, FC_REDUCE_SUM, FC_REDUCE_MAX, FC_REDUCE_MAX};
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        FC_TRY(comm->all_reduce(comm, numbers + i * count, count, FC_U64, how[i], err));
    }
    return FC_OK;
}

fc_code fc_source_crc_join(fc_source_crc *crc, fc_comm *comm, fc_error *err) {
    if (!comm) {
        return FC_OK;
    }
    const size_t chunks = crc->first[crc->count], count = chunks + crc->count;
    uint64_t any = atomic_load(&crc->any);
    FC_TRY(comm->all_reduce(comm, &any, 1, FC_U64, FC_REDUCE_MAX, err));
    if (!any) {
        return FC_OK;
    }
    atomic_store(&crc->any, true);
    uint64_t *numbers = calloc(count + 1, 4 * sizeof *numbers);
    fc_code rc;
    FC_TRY_GOTO(fc_comm_agree(comm, numbers ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    if (numbers) { /* if one rank has none, the ranks have agreed on an error */
        const exchange all = {numbers, numbers + count, numbers + 2 * count, numbers + 3 * count, chunks};
        pack_sums(crc, &all);
        FC_TRY_GOTO(join_numbers(comm, numbers, count, err), rc, out);
        unpack_sums(crc, &all);
    }
out:
    free(numbers);
    return rc;
}

static fc_code fail_damaged(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, bool wide,
                            uint64_t found, uint64_t recorded, fc_error *err) {
    const fc_chunk *at = &tensor->chunks[chunk];
    const fc_box box = fc_chunk_box(tensor, at);
    const int digits = wide ? 16 : 8;
    return fc_fail(err, FC_ECORRUPT,
                   "%s: offset %" PRIu64 ": tensor %s, chunk %s: damaged: the CRC-%d of its data is %0*" PRIx64
                   " but the %s records %0*" PRIx64 "; fsdpckpt verify lists all damage",
                   checkpoint->files[at->place.file].path, at->place.offset, tensor->name, fc_box_to_text(&box).s,
                   4 * digits, digits, found, wide ? "header" : "archive", digits, recorded);
}

/*
 * Checks a chunk that fills its record; `again` as in check_tensor. Any other chunk is checked together with the rest
 * of its record.
 */
static fc_code check_chunk(const fc_source_crc *crc, size_t index, size_t chunk, fc_read_again *again,
                           fc_record_crcs *records, fc_error *err) {
    const fc_tensor *tensor = &crc->tensors[index];
    chunk_sum *sum = &crc->sums[crc->first[index] + chunk];
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    const uint64_t bytes = (uint64_t)fc_box_volume(&box) * fc_dtype_size(tensor->dtype);
    const uint64_t recorded = atomic_load(&sum->recorded), moved = atomic_load(&sum->bytes);
    const uint32_t layout = atomic_load(&sum->layout);
    const bool wide = layout == FC_CRC_WIDE, all = moved == bytes && layout != FC_CRC_SCATTERED;
    if (layout == FC_CRC_NONE || (wide && (moved < bytes || (moved > bytes && !again)))) {
        return FC_OK;
    }
    if (!wide && (layout != FC_CRC_WHOLE || !all)) {
        return fc_record_crcs_add(records, tensor, chunk, moved, all, (uint32_t)atomic_load(&sum->sum), err);
    }
    uint64_t found = wide ? fc_crc64_finish(atomic_load(&sum->sum), bytes)
                          : fc_crc32_finish((uint32_t)atomic_load(&sum->sum), bytes);
    if (!all) { /* ranks have read some of it twice, so the sum is useless */
        FC_TRY(again(crc->checkpoint, tensor, &box, &found, err));
    }
    return found == recorded ? FC_OK : fail_damaged(crc->checkpoint, tensor, chunk, wide, found, recorded, err);
}

fc_code fc_source_crc_check(const fc_source_crc *crc, const fc_comm *comm, fc_read_again *again, fc_error *err) {
    fc_record_crcs records = {.checkpoint = crc->checkpoint};
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    const size_t count = atomic_load(&crc->any) ? crc->count : 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < crc->tensors[i].nchunks; k++) {
            FC_TRY_GOTO(check_chunk(crc, i, k, i % shares == share ? again : NULL, &records, err), rc, out);
        }
    }
    FC_TRY_GOTO(fc_record_crcs_check(&records, comm, err), rc, out);
    for (size_t i = 0; i < count; i++) { /* after the records, whose errors name the offset */
        FC_TRY_GOTO(check_tensor(crc, i, i % shares == share ? again : NULL, err), rc, out);
    }
out:
    fc_record_crcs_free(&records);
    return rc;
}
