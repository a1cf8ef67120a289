/*
 * See source_crc.h. Sums of bare CRCs (core/crc.h): what was written comes part by part, what is recorded chunk by
 * chunk, in any order.
 */
#include "move/source_crc.h"

#include "fsdpckpt/format.h"

#include "core/crc.h"

#include <stdlib.h>

/* What is known of a tensor of the target. */
typedef struct sum {
    uint32_t crc;
    bool torn; /* some item is no run of the tensor, so that its CRC-32 says nothing about it */
} sum;

struct fc_source_crc {
    const fc_wanted *wanted;
    sum *sums; /* one for each of wanted->tensors */
};

fc_code fc_source_crc_new(const fc_wanted *wanted, fc_source_crc **out, fc_error *err) {
    const fc_checkpoint *source = wanted->source;
    fc_digest digest = {.kind = FC_DIGEST_NONE};
    *out = NULL;
    for (size_t i = 0; source->format->digest && i < wanted->ntensors; i++) {
        const fc_tensor *t = wanted->tensors[i].source;
        if (t->object || t->nchunks == 0) {
            continue;
        }
        /* A source records digests of all or none, so one tells. That it is damaged is for whoever moves it to say. */
        if (fc_checkpoint_digest(source, t, 0, &digest, NULL) != FC_OK) {
            digest.kind = FC_DIGEST_NONE;
        }
        break;
    }
    if (digest.kind != FC_DIGEST_CRC32) {
        return FC_OK;
    }
    fc_source_crc *crc = calloc(1, sizeof *crc);
    sum *sums = calloc(wanted->ntensors, sizeof *sums);
    if (!crc || !sums) {
        free(crc);
        free(sums);
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    *crc = (fc_source_crc){wanted, sums};
    *out = crc;
    return FC_OK;
}

void fc_source_crc_free(fc_source_crc *crc) {
    if (crc) {
        free(crc->sums);
        free(crc);
    }
}

/* Whether the elements of a box follow each other in the tensor, and how many are behind them there. */
static bool is_run(const fc_tensor *t, const int64_t *offsets, const int64_t *sizes, uint64_t *behind) {
    bool cut = false; /* an axis before this one has more than one index, so this one must be whole */
    *behind = 0;
    for (int d = 0; d < t->ndim; d++) {
        if (cut && sizes[d] != t->shape[d]) {
            return false;
        }
        cut = cut || sizes[d] > 1;
        *behind = *behind * (uint64_t)t->shape[d] + (uint64_t)(t->shape[d] - offsets[d] - sizes[d]);
    }
    return true;
}

void fc_source_crc_add(fc_source_crc *crc, const fc_part *part) {
    for (size_t i = 0; crc && i < part->nitems; i++) {
        const fc_part_item *item = &part->items[i];
        const fc_wanted_tensor *wanted = &crc->wanted->tensors[item->tensor];
        const fc_tensor *t = wanted->source;
        uint64_t bytes = fc_part_item_bytes(crc->wanted, item), behind;
        if (item->owner != part->rank || bytes == 0) {
            continue;
        }
        sum *s = &crc->sums[item->tensor];
        if (!item->owned || !is_run(t, item->dims, item->dims + t->ndim, &behind)) {
            s->torn = true;
            continue;
        }
        uint32_t bare = fc_crc32_finish(item->crc32, bytes); /* which takes off what it puts on */
        s->crc ^= fc_crc32_shift(bare, behind * fc_dtype_size(wanted->dtype));
    }
}

/* Whether the CRC-32 of chunk `index` is that of its elements in row-major order, and what it adds to the tensor's. */
static fc_code chunk_sum(const fc_checkpoint *source, const fc_tensor *t, size_t index, bool *known, uint32_t *out,
                         fc_error *err) {
    const fc_box box = fc_chunk_box(t, &t->chunks[index]);
    const uint32_t element = fc_dtype_size(t->dtype);
    uint64_t bytes = (uint64_t)fc_box_volume(&box) * element, behind;
    fc_digest digest;
    fc_extent extent;
    *known = false;
    if (!is_run(t, box.offsets, box.sizes, &behind)) {
        return FC_OK;
    }
    fc_code rc = fc_checkpoint_digest(source, t, index, &digest, err);
    if (rc != FC_OK || digest.kind != FC_DIGEST_CRC32 || digest.length != bytes) {
        return rc;
    }
    rc = fc_checkpoint_extent(source, t, index, &extent, err);
    if (rc != FC_OK || extent.codec != FC_CODEC_RAW || extent.swap || extent.negate || extent.conjugate ||
        extent.first != 0 || extent.offset != digest.offset) {
        return rc;
    }
    int64_t stride = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (box.sizes[d] > 1 && extent.strides[d] != stride) {
            return FC_OK;
        }
        stride *= box.sizes[d];
    }
    *known = true;
    *out = fc_crc32_shift(fc_crc32_finish((uint32_t)digest.value, bytes), behind * element);
    return FC_OK;
}

fc_code fc_source_crc_check(const fc_source_crc *crc, size_t index, fc_error *err) {
    if (!crc || crc->sums[index].torn) {
        return FC_OK;
    }
    const fc_checkpoint *source = crc->wanted->source;
    const fc_wanted_tensor *wanted = &crc->wanted->tensors[index];
    const fc_tensor *t = wanted->source;
    int64_t covered = 0, all = 0;
    uint32_t recorded = 0;
    if (t->object || wanted->dtype != t->dtype || !fc_numel(t->ndim, t->shape, &all)) {
        return FC_OK;
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_box box = fc_chunk_box(t, &t->chunks[i]);
        bool known;
        uint32_t added = 0;
        fc_code rc = chunk_sum(source, t, i, &known, &added, err);
        if (rc != FC_OK || !known) {
            return rc;
        }
        recorded ^= added;
        covered += fc_box_volume(&box);
    }
    if (covered != all ||
        recorded == crc->sums[index].crc) { /* replicas cover more: which was read is not known here */
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: tensor %s: its data does not have the CRC-32 that its file records: it is damaged; fsdpckpt "
                   "verify tells in which file",
                   source->path, t->name);
}
