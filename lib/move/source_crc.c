/*
 * See source_crc.h. Sums of bare CRCs (core/crc.h): what one worker reads of a chunk comes run by run, as it lies in
 * the file, and goes to the chunk's sum with the zeros that are behind it in its record.
 */
#include "move/source_crc.h"

#include "fsdpckpt/format.h"
#include "move/record_crc.h"
#include "plan/box_text.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

/* What is known of a chunk. Memory that is never touched where a source records nothing. */
typedef struct chunk_sum {
    atomic_uint_least64_t bytes;    /* read so far */
    atomic_uint_least32_t sum;      /* of them, bare */
    atomic_uint_least32_t recorded; /* 0: no worker of this process has seen any */
    atomic_uint_least32_t lies;     /* fc_crc_lies */
} chunk_sum;

struct fc_source_crc {
    const fc_checkpoint *checkpoint;
    size_t *first; /* of each tensor: the number of its first chunk, among those of all tensors; and of the end */
    chunk_sum *sums;
    atomic_bool any;
};

fc_code fc_source_crc_new(const fc_checkpoint *checkpoint, fc_source_crc **out, fc_error *err) {
    const size_t n = checkpoint->ntensors;
    fc_source_crc *crc = calloc(1, sizeof *crc);
    *out = NULL;
    if (crc) {
        crc->checkpoint = checkpoint;
        crc->first = calloc(n + 1, sizeof *crc->first);
    }
    if (crc && crc->first) {
        for (size_t i = 0; i < n; i++) { /* they are in memory, so their number does not overflow */
            crc->first[i + 1] = crc->first[i] + checkpoint->tensors[i].nchunks;
        }
        crc->sums = calloc(crc->first[n] + 1, sizeof *crc->sums);
    }
    if (!crc || !crc->sums) {
        fc_source_crc_free(crc);
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    *out = crc;
    return FC_OK;
}

void fc_source_crc_free(fc_source_crc *crc) {
    if (crc) {
        free(crc->first);
        free(crc->sums);
        free(crc);
    }
}

/* ---- a worker's walk ---- */

/* Whether the elements of a chunk are all of its stored bytes, each once, in whatever order of the axes. */
static bool fills_record(const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    int64_t stride = 1; /* of the axis that comes next, from the innermost outwards */
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

/* How the elements of a chunk lie in their record. */
static fc_crc_lies how_it_lies(const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    if (extent->crc32 == 0 || extent->codec != FC_CODEC_RAW) {
        return FC_CRC_NONE;
    }
    if (fills_record(tensor, chunk, extent)) {
        return FC_CRC_WHOLE;
    }
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    return fc_is_row_major(box.ndim, box.sizes, extent->strides) ? FC_CRC_RUN : FC_CRC_SCATTERED;
}

void fc_crc_walk_begin(fc_crc_walk *walk, const fc_tensor *tensor, size_t chunk, const fc_extent *extent) {
    walk->lies = how_it_lies(tensor, chunk, extent);
    walk->wanted = walk->lies == FC_CRC_WHOLE || walk->lies == FC_CRC_RUN;
    walk->at = walk->bytes = 0;
    walk->sum = 0;
}

static const fc_crc32_factor *factor_of(fc_crc_walk *walk, uint64_t distance) {
    size_t slot = (size_t)(distance * 0x9e3779b97f4a7c15u >> 61);
    if (walk->known[slot].distance != distance) {
        walk->known[slot].distance = distance;
        fc_crc32_factor_init(&walk->known[slot].factor, distance);
    }
    return &walk->known[slot].factor;
}

void fc_crc_walk_add(fc_crc_walk *walk, uint64_t at, const unsigned char *bytes, size_t size) {
    uint32_t crc = fc_crc32_bare(bytes, size);
    if (walk->sum != 0) {
        crc ^= fc_crc32_multiply(factor_of(walk, at + size - walk->at), walk->sum);
    }
    walk->sum = crc;
    walk->at = at + size;
    walk->bytes += size;
}

static chunk_sum *sum_of(fc_source_crc *crc, const fc_tensor *tensor, size_t chunk) {
    return &crc->sums[crc->first[tensor - crc->checkpoint->tensors] + chunk];
}

void fc_crc_walk_end(const fc_crc_walk *walk, fc_source_crc *crc, const fc_tensor *tensor, size_t chunk,
                     const fc_extent *extent) {
    chunk_sum *sum = sum_of(crc, tensor, chunk);
    uint32_t shifted = fc_crc32_shift(walk->sum, extent->length - walk->at);
    atomic_fetch_xor_explicit(&sum->sum, shifted, memory_order_relaxed);
    atomic_fetch_add_explicit(&sum->bytes, walk->bytes, memory_order_relaxed);
    atomic_store_explicit(&sum->recorded, extent->crc32, memory_order_relaxed);
    atomic_store_explicit(&sum->lies, walk->lies, memory_order_relaxed);
    atomic_store_explicit(&crc->any, true, memory_order_relaxed);
}

/* ---- when all is read ---- */

/* The numbers of `count` chunks, to `numbers` or from there: the sums, the bytes, then what is known of the record. */
static void pack(fc_source_crc *crc, uint64_t *numbers, size_t count, bool back) {
    for (size_t i = 0; i < count; i++) {
        chunk_sum *sum = &crc->sums[i];
        uint64_t *known = &numbers[2 * count + i];
        if (back) {
            atomic_store(&sum->sum, (uint32_t)numbers[i]);
            atomic_store(&sum->bytes, numbers[count + i]);
            atomic_store(&sum->recorded, (uint32_t)*known);
            atomic_store(&sum->lies, (uint32_t)(*known >> 32));
        } else {
            numbers[i] = atomic_load(&sum->sum);
            numbers[count + i] = atomic_load(&sum->bytes);
            *known = (uint64_t)atomic_load(&sum->lies) << 32 | atomic_load(&sum->recorded);
        }
    }
}

static fc_code join_numbers(fc_comm *comm, uint64_t *numbers, size_t count, fc_error *err) {
    static const fc_reduce how[] = {FC_REDUCE_XOR, FC_REDUCE_SUM, FC_REDUCE_MAX};
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < sizeof how / sizeof *how; i++) {
        rc = comm->all_reduce(comm, numbers + i * count, count, FC_U64, how[i], NULL, err);
    }
    return rc;
}

fc_code fc_source_crc_join(fc_source_crc *crc, fc_comm *comm, fc_error *err) {
    if (!comm) {
        return FC_OK;
    }
    const size_t count = crc->first[crc->checkpoint->ntensors];
    uint64_t any = atomic_load(&crc->any);
    fc_code rc = comm->all_reduce(comm, &any, 1, FC_U64, FC_REDUCE_MAX, NULL, err);
    if (rc != FC_OK || !any) {
        return rc;
    }
    atomic_store(&crc->any, true);
    uint64_t *numbers = calloc(count + 1, 3 * sizeof *numbers);
    rc = fc_comm_agree(comm, numbers ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory"), err);
    if (rc == FC_OK && numbers) {
        pack(crc, numbers, count, false);
        rc = join_numbers(comm, numbers, count, err);
    }
    if (rc == FC_OK && numbers) {
        pack(crc, numbers, count, true);
    }
    free(numbers);
    return rc;
}

static fc_code damaged(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t chunk, uint32_t found,
                       uint32_t recorded, fc_error *err) {
    const fc_chunk *at = &tensor->chunks[chunk];
    const fc_box box = fc_chunk_box(tensor, at);
    return fc_fail(err, FC_ECORRUPT,
                   "%s: offset %" PRIu64 ": tensor %s, chunk %s: damaged: the CRC-32 of its data is %08" PRIx32
                   ", the archive says %08" PRIx32 "; fsdpckpt verify lists all that is damaged",
                   checkpoint->files[at->file].path, at->offset, tensor->name, fc_box_to_text(&box).s, found, recorded);
}

/* A chunk that is its record, or something of one that is seen to with the others in it. */
static fc_code check_chunk(const fc_source_crc *crc, size_t index, size_t chunk, fc_record_crcs *records,
                           fc_error *err) {
    const fc_tensor *tensor = &crc->checkpoint->tensors[index];
    chunk_sum *sum = &crc->sums[crc->first[index] + chunk];
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[chunk]);
    const uint64_t bytes = (uint64_t)fc_box_volume(&box) * fc_dtype_size(tensor->dtype);
    const uint32_t recorded = atomic_load(&sum->recorded), lies = atomic_load(&sum->lies);
    if (lies == FC_CRC_NONE) {
        return FC_OK;
    }
    const uint64_t moved = atomic_load(&sum->bytes);
    const bool all = moved == bytes && lies != FC_CRC_SCATTERED;
    if (lies != FC_CRC_WHOLE || !all) {
        return fc_record_crcs_add(records, tensor, chunk, moved, all, atomic_load(&sum->sum), err);
    }
    const uint32_t found = fc_crc32_finish(atomic_load(&sum->sum), bytes);
    return found == recorded ? FC_OK : damaged(crc->checkpoint, tensor, chunk, found, recorded, err);
}

fc_code fc_source_crc_check(const fc_source_crc *crc, const fc_comm *comm, fc_error *err) {
    const fc_checkpoint *checkpoint = crc->checkpoint;
    fc_record_crcs records = {.checkpoint = checkpoint};
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < checkpoint->ntensors && atomic_load(&crc->any); i++) {
        for (size_t k = 0; rc == FC_OK && k < checkpoint->tensors[i].nchunks; k++) {
            rc = check_chunk(crc, i, k, &records, err);
        }
    }
    rc = rc == FC_OK ? fc_record_crcs_check(&records, comm, err) : rc;
    fc_record_crcs_free(&records);
    return rc;
}
