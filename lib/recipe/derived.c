/*
 * The checkpoint that a recipe makes: see derived.h. An unchanged value keeps its chunks and digests. A chunk of any
 * other is some elements of a chunk of the source: the same stored bytes, at another first element and other strides.
 */
#include "recipe/derived.h"

#include "checkpoint/identity.h"
#include "engine/read_box.h"
#include "fsdpckpt/comm.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* fc_checkpoint.state. The format is a copy of the source's, with some functions replaced. */
typedef struct state {
    fc_checkpoint *source;
    bool owned;
    fc_source_crc *crc; /* CRCs of what gathered values have read of the source; NULL: there are none */
    fc_format format;
} state;

static fc_checkpoint *source_of(const fc_checkpoint *checkpoint) {
    return ((const state *)checkpoint->state)->source;
}

/* Zeros: one element that is repeated. The largest elements have 16 bytes. */
static fc_extent extent_of_zeros(const fc_tensor *tensor) {
    static const unsigned char zero[16];
    fc_extent extent = fc_inline_extent(zero, fc_dtype_size(tensor->dtype));
    extent.strides[0] = 0;
    return extent;
}

static fc_code recipe_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err) {
    const fc_recipe_origin *o = tensor->detail;
    const fc_checkpoint *source = source_of(checkpoint);
    if (o->gathered || o->copied) {
        *out = fc_computed_extent(tensor, index);
        return FC_OK;
    }
    if (o->tensor) {
        return fc_checkpoint_extent(source, o->tensor, index, out, err);
    }
    if (o->json) {
        *out = fc_inline_extent(o->json, strlen(o->json));
        return FC_OK;
    }
    const fc_recipe_place *p = &o->places[index];
    const fc_tensor *from = p->steps->source;
    if (!from) {
        *out = extent_of_zeros(tensor);
        return FC_OK;
    }
    FC_TRY_CONTEXT(fc_checkpoint_extent(source, from, p->chunk, out, err), err, "tensor %.256s", tensor->name);
    /* The elements are some of the source chunk's, whose strides were checked, so nothing can overflow. */
    int64_t strides[FC_PART_DIMS] = {0}, first = 0;
    for (int d = 0; d < from->ndim; d++) {
        first += (p->at[d] - from->chunks[p->chunk].dims[d]) * out->strides[d];
    }
    for (int d = 0; d < tensor->ndim; d++) {
        const int s = p->steps->sdim[d];
        const bool wide = tensor->chunks[index].dims[tensor->ndim + d] > 1;
        strides[d] = wide && s >= 0 ? out->strides[s] * p->steps->sstep[d] : 1;
    }
    out->first += (uint64_t)first * fc_dtype_size(tensor->dtype);
    memset(out->strides, 0, sizeof out->strides);
    memcpy(out->strides, strides, (size_t)tensor->ndim * sizeof *strides);
    return FC_OK;
}

static fc_code recipe_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                           fc_error *err) {
    const fc_recipe_origin *o = tensor->detail;
    const state *s = checkpoint->state;
    if (o->gathered) {
        return fc_gather_read(s->source, tensor, o->gathered, index, s->crc, buf, err);
    }
    if (o->copied) {
        const fc_box all = fc_chunk_box(tensor, &tensor->chunks[index]);
        return fc_read_box(s->source, o->tensor, &all, tensor->dtype, buf, err);
    }
    const fc_tensor *from = o->tensor ? o->tensor : o->places[index].steps->source;
    return s->source->format->reader.read(s->source, from, o->tensor ? index : o->places[index].chunk, buf, err);
}

static fc_code recipe_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err) {
    const fc_recipe_origin *o = object->detail;
    *json = o->json;
    return o->json ? FC_OK : fc_checkpoint_object_json(source_of(checkpoint), o->tensor, arena, json, err);
}

/* Only an unchanged value has the source's digests. */
static fc_code recipe_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                             fc_error *err) {
    const fc_recipe_origin *o = tensor->detail;
    *out = (fc_digest){.kind = FC_DIGEST_NONE};
    return !o->tensor || o->copied ? FC_OK : fc_checkpoint_digest(source_of(checkpoint), o->tensor, index, out, err);
}

static fc_code recipe_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    const fc_recipe_origin *o = object->detail;
    const fc_checkpoint *source = source_of(checkpoint);
    return o->json ? FC_OK : source->format->reader.check_object(source, o->tensor, err);
}

static fc_code recipe_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    const fc_checkpoint *source = source_of(checkpoint);
    return source->format->reader.check_file(source, index, err);
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
static fc_code recipe_check_inputs(const fc_checkpoint *checkpoint, fc_comm *comm, fc_error *err) {
    const fc_checkpoint *source = source_of(checkpoint);
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    const fc_tensor *last = NULL;
    for (size_t i = share; i < checkpoint->ntensors; i += shares) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const fc_recipe_origin *o = t->detail;
        for (size_t k = 0; o->places && k < t->nchunks; k++) {
            const fc_tensor *from = o->places[k].steps->source;
            if (from && from != last) {
                FC_TRY(check_tensor(source, from, err));
            }
            last = from ? from : last;
        }
    }
    fc_source_crc *crc = ((const state *)checkpoint->state)->crc;
    if (crc) {
        FC_TRY(fc_source_crc_join(crc, comm, err));
        FC_TRY(fc_source_crc_check(crc, comm, err));
    }
    return fc_checkpoint_check_inputs(source, comm, err);
}

static void recipe_close(fc_checkpoint *checkpoint) {
    const state *s = checkpoint->state;
    fc_source_crc_free(s->crc);
    if (s->owned) {
        fc_checkpoint_close(s->source);
    }
}

static void make_format(state *s) {
    const fc_format *of = s->source->format;
    s->format = *of;
    s->format.reader.open = NULL;
    s->format.reader.close = recipe_close;
    s->format.reader.extent = recipe_extent;
    s->format.reader.read = recipe_read;
    s->format.reader.object_json = of->reader.object_json ? recipe_object_json : NULL;
    s->format.reader.records_json = false; /* the source decodes it */
    s->format.reader.digest = recipe_digest;
    s->format.reader.check_object = of->reader.check_object ? recipe_check_object : NULL;
    s->format.reader.check_file = of->reader.check_file ? recipe_check_file : NULL;
    s->format.reader.check_inputs = recipe_check_inputs;
    s->format.verifier.verify = NULL; /* it can only check the source */
    s->format.verifier.verify_chunk = NULL;
}

fc_checkpoint *fc_recipe_derived_new(fc_checkpoint *source) {
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *made = arena ? fc_arena_calloc(arena, 1, sizeof *made) : NULL;
    state *s = made ? fc_arena_calloc(arena, 1, sizeof *s) : NULL;
    if (!s) {
        fc_arena_free(arena);
        return NULL;
    }
    s->source = source;
    make_format(s);
    *made = *source;
    made->arena = arena;
    made->state = s;
    made->format = &s->format;
    made->tensors = NULL;
    made->ntensors = 0;
    made->whole = false;
    made->seal = NULL; /* its digests belong to the source's tensors */
    made->mesh = (fc_mesh){0};
    return made;
}

fc_code fc_recipe_derived_own(fc_checkpoint *derived, fc_checkpoint *source, fc_error *err) {
    state *s = derived->state;
    bool gathers = false;
    for (size_t i = 0; i < derived->ntensors; i++) {
        gathers = gathers || ((const fc_recipe_origin *)derived->tensors[i].detail)->gathered;
    }
    if (gathers) {
        FC_TRY(fc_source_crc_new(source, source->tensors, source->ntensors, &s->crc, err));
    }
    s->owned = true;
    return FC_OK;
}
