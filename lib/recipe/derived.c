/*
 * The checkpoint that a recipe makes: see derived.h. An unchanged value keeps its chunks and digests. A chunk of any
 * other is some elements of a chunk of the source: the same stored bytes, at another first element and other strides.
 */
#include "recipe/derived.h"

#include "fsdpckpt/comm.h"
#include "fsdpckpt/try.h"
#include "read/box.h"

#include <string.h>

static const fc_tensor *locate_box(const fc_tensor *tensor, size_t index, size_t *chunk) {
    const fc_recipe_place *p = &((const fc_recipe_origin *)tensor->detail)->places[index];
    *chunk = p->chunk;
    return p->source;
}

/* The elements are some of the source chunk's, whose strides were checked, so nothing can overflow. */
static void place_box(const fc_tensor *tensor, size_t index, fc_extent *extent) {
    const fc_recipe_place *p = &((const fc_recipe_origin *)tensor->detail)->places[index];
    const fc_tensor *from = p->source;
    int64_t strides[FC_PART_DIMS] = {0}, first = 0;
    for (int d = 0; d < from->ndim; d++) {
        first += (p->at[d] - from->chunks[p->chunk].dims[d]) * extent->strides[d];
    }
    for (int d = 0; d < tensor->ndim; d++) {
        const int s = p->steps->sdim[d];
        const bool wide = tensor->chunks[index].dims[tensor->ndim + d] > 1;
        strides[d] = wide && s >= 0 ? extent->strides[s] * p->steps->sstep[d] : 1;
    }
    extent->first += (uint64_t)first * fc_dtype_size(tensor->dtype);
    memset(extent->strides, 0, sizeof extent->strides);
    memcpy(extent->strides, strides, (size_t)tensor->ndim * sizeof *strides);
}

static fc_code compute_value(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                             void *buf, fc_error *err) {
    const fc_recipe_origin *o = tensor->detail;
    return fc_gather_read(derived->sources[0], tensor, o->gathered, index, crcs[0], buf, err);
}

/* Reads a tensor of the source again if a CRC-64 of it is recorded, which compares it. */
static fc_code check_tensor(const fc_checkpoint *source, const fc_tensor *tensor, fc_error *err) {
    fc_digest digest;
    fc_extent extent = {0};
    FC_TRY(fc_checkpoint_digest(source, tensor, FC_WHOLE_TENSOR, &digest, err));
    if (digest.kind != FC_DIGEST_CRC64 && tensor->nchunks > 0) {
        FC_TRY(fc_checkpoint_extent(source, tensor, 0, &extent, err));
    }
    return digest.kind == FC_DIGEST_CRC64 || extent.has_crc64 ? fc_compare_tensor(source, tensor, err) : FC_OK;
}

/*
 * Digests of whole tensors do not cover single chunks, so these tensors are read again; record CRCs were compared
 * already. The chunks of one source tensor follow each other.
 */
static fc_code check_boxes(const fc_checkpoint *checkpoint, const fc_comm *comm, fc_error *err) {
    const fc_checkpoint *source = ((const fc_derived *)checkpoint->state)->sources[0];
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    const fc_tensor *last = NULL;
    for (size_t i = share; i < checkpoint->ntensors; i += shares) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const fc_recipe_origin *o = t->detail;
        for (size_t k = 0; o->from.kind == FC_ORIGIN_PLACED && k < t->nchunks; k++) {
            const fc_tensor *from = o->places[k].source;
            if (from && from != last) {
                FC_TRY(check_tensor(source, from, err));
            }
            last = from ? from : last;
        }
    }
    return FC_OK;
}

static const fc_derived_kind recipe_kind = {
    .size = sizeof(fc_derived),
    .locate = locate_box,
    .place = place_box,
    .compute = compute_value,
    .check_inputs = check_boxes,
};

fc_code fc_recipe_derived_new(fc_checkpoint *source, fc_checkpoint **out, fc_error *err) {
    return fc_derived_new(&recipe_kind, &source, 1, out, err);
}

fc_code fc_recipe_derived_own(fc_checkpoint *derived, fc_error *err) {
    bool gathers = false;
    for (size_t i = 0; i < derived->ntensors; i++) {
        gathers = gathers || ((const fc_recipe_origin *)derived->tensors[i].detail)->gathered;
    }
    FC_TRY(gathers ? fc_derived_collect_crcs(derived, err) : FC_OK);
    fc_derived_own(derived);
    return FC_OK;
}
