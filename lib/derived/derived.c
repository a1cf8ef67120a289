/*
 * Derived checkpoints: see derived.h. Every function of the format is here once; what a kind adds is in
 * fc_derived_kind.
 */
#include "derived/derived.h"

#include "checkpoint/extent.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/try.h"
#include "read/box.h"

#include <string.h>

static fc_checkpoint *first_of(const fc_checkpoint *checkpoint) {
    return ((const fc_derived *)checkpoint->state)->sources[0];
}

/* Zeros: one element that is repeated. The largest elements have 16 bytes. */
static fc_extent make_zeros(const fc_tensor *tensor) {
    static const unsigned char zero[16];
    fc_extent extent = fc_inline_extent(zero, fc_dtype_size(tensor->dtype));
    extent.strides[0] = 0;
    return extent;
}

static fc_code place_chunk(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                           fc_error *err) {
    const fc_derived_kind *kind = ((const fc_derived *)checkpoint->state)->kind;
    size_t chunk;
    const fc_tensor *from = kind->locate(tensor, index, &chunk);
    if (!from) {
        *out = make_zeros(tensor);
        return FC_OK;
    }
    FC_TRY_CONTEXT(fc_checkpoint_extent(first_of(checkpoint), from, chunk, out, err), err, "tensor %.256s",
                   tensor->name);
    kind->place(tensor, index, out);
    return FC_OK;
}

static fc_code derived_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                              fc_error *err) {
    const fc_origin *o = tensor->detail;
    switch (o->kind) {
    case FC_ORIGIN_KEPT:
        return fc_checkpoint_extent(first_of(checkpoint), o->tensor, index, out, err);
    case FC_ORIGIN_PLACED:
        return place_chunk(checkpoint, tensor, index, out, err);
    case FC_ORIGIN_TEXT:
        *out = fc_inline_extent(o->text, strlen(o->text));
        return FC_OK;
    case FC_ORIGIN_COMPUTED:
        break;
    }
    *out = fc_computed_extent(tensor, index, o->reads);
    return FC_OK;
}

/* Only a format's own chunks and computed ones are read, so there is a chunk of the source for all others. */
static fc_code derived_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                            fc_error *err) {
    fc_derived *d = checkpoint->state;
    const fc_origin *o = tensor->detail;
    const fc_tensor *from = o->tensor;
    if (o->kind == FC_ORIGIN_COMPUTED) {
        const bool again = o->read && atomic_exchange(&o->read[index], true); /* the cache may have evicted it */
        return d->kind->compute(d, tensor, index, again ? d->no_crcs : d->crcs, buf, err);
    }
    if (o->kind == FC_ORIGIN_PLACED) {
        from = d->kind->locate(tensor, index, &index);
    }
    return d->sources[0]->format->reader.read(d->sources[0], from, index, buf, err);
}

/* Never called for a computed chunk. */
static fc_code derived_read_part(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at,
                                 void *buf, size_t size, fc_error *err) {
    fc_derived *d = checkpoint->state;
    const fc_origin *o = tensor->detail;
    const fc_tensor *from = o->kind == FC_ORIGIN_PLACED ? d->kind->locate(tensor, index, &index) : o->tensor;
    const fc_format_reader *reader = &d->sources[0]->format->reader;
    return reader->read_part ? reader->read_part(d->sources[0], from, index, at, buf, size, err)
                             : fc_advise(err,
                                         fc_fail(err, FC_EUNSUPPORTED,
                                                 "%s: a compressed chunk is larger than the memory for decoding",
                                                 d->sources[0]->path),
                                         FC_HINT_MEMORY, NULL);
}

static fc_code derived_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                   const char **json, fc_error *err) {
    const fc_origin *o = object->detail;
    *json = o->text;
    return o->text ? FC_OK : fc_checkpoint_object_json(first_of(checkpoint), o->tensor, arena, json, err);
}

static fc_code derived_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                              fc_error *err) {
    const fc_derived_kind *kind = ((const fc_derived *)checkpoint->state)->kind;
    const fc_origin *o = tensor->detail;
    const fc_tensor *from = o->kind == FC_ORIGIN_KEPT ? o->tensor : NULL;
    if (o->kind == FC_ORIGIN_PLACED && kind->placed_has_digest && index != FC_WHOLE_TENSOR) {
        from = kind->locate(tensor, index, &index);
    }
    *out = (fc_digest){.kind = FC_DIGEST_NONE};
    return from ? fc_checkpoint_digest(first_of(checkpoint), from, index, out, err) : FC_OK;
}

static fc_code derived_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    const fc_origin *o = object->detail;
    const fc_checkpoint *source = first_of(checkpoint);
    return o->text ? FC_OK : source->format->reader.check_object(source, o->tensor, err);
}

/* The files of the sources follow each other, after the path if the kind lists it. */
static fc_code derived_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    const fc_derived *d = checkpoint->state;
    const size_t own = d->kind->lists_path;
    if (index < own) {
        return FC_OK;
    }
    size_t i = 0;
    for (index -= own; index >= d->sources[i]->nfiles; i++) {
        index -= d->sources[i]->nfiles;
    }
    const fc_format_reader *reader = &d->sources[i]->format->reader;
    return reader->check_file ? reader->check_file(d->sources[i], index, err) : FC_OK;
}

static fc_code derived_check_inputs(const fc_checkpoint *checkpoint, fc_comm *comm, fc_error *err) {
    const fc_derived *d = checkpoint->state;
    for (size_t i = 0; i < d->count; i++) {
        FC_TRY(d->crcs[i] ? fc_source_crc_join(d->crcs[i], comm, err) : FC_OK);
    }
    for (size_t i = 0; i < d->count; i++) {
        FC_TRY(d->crcs[i] ? fc_source_crc_check(d->crcs[i], comm, fc_read_crc64, err) : FC_OK);
    }
    FC_TRY(d->kind->check_inputs ? d->kind->check_inputs(checkpoint, comm, err) : FC_OK);
    for (size_t i = 0; i < d->count; i++) {
        FC_TRY(fc_checkpoint_check_inputs(d->sources[i], comm, err));
    }
    return FC_OK;
}

static fc_code derived_visit_sums(const fc_checkpoint *checkpoint,
                                  fc_code (*visit)(void *context, fc_source_crc *sums, const fc_read_state *state,
                                                   fc_error *err),
                                  void *context, fc_error *err) {
    const fc_derived *d = checkpoint->state;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_origin *o = checkpoint->tensors[i].detail;
        const fc_read_state flags = {.flags = o->read, .count = checkpoint->tensors[i].nchunks};
        const fc_read_state progress = {.numbers = o->progress, .count = o->nprogress};
        FC_TRY(o->kind == FC_ORIGIN_COMPUTED && o->read ? visit(context, NULL, &flags, err) : FC_OK);
        FC_TRY(o->progress ? visit(context, NULL, &progress, err) : FC_OK);
    }
    for (size_t i = 0; i < d->count; i++) {
        const fc_format_reader *reader = &d->sources[i]->format->reader;
        FC_TRY(d->crcs[i] ? visit(context, d->crcs[i], NULL, err) : FC_OK);
        FC_TRY(reader->visit_sums ? reader->visit_sums(d->sources[i], visit, context, err) : FC_OK);
    }
    return FC_OK;
}

static void derived_rest(const fc_checkpoint *checkpoint) {
    const fc_derived *d = checkpoint->state;
    for (size_t i = 0; i < d->count; i++) {
        fc_checkpoint_rest(d->sources[i]);
    }
}

static void derived_close(fc_checkpoint *checkpoint) {
    fc_derived *d = checkpoint->state;
    if (d->kind->free) {
        d->kind->free(d);
    }
    for (size_t i = 0; i < d->count; i++) {
        fc_source_crc_free(d->crcs[i]);
        if (d->owned) {
            fc_checkpoint_close(d->sources[i]);
        }
    }
}

static fc_format make_format(const fc_derived_kind *kind, const fc_format *of) {
    fc_format format = *of;
    if (kind->name) {
        format = (fc_format){.name = kind->name, .description = kind->name};
    }
    format.reader = (fc_format_reader){
        .close = derived_close,
        .rest = derived_rest,
        .extent = derived_extent,
        .read = derived_read,
        .read_part = derived_read_part,
        .object_json = derived_object_json,
        .digest = derived_digest,
        .check_object = of->reader.check_object ? derived_check_object : NULL,
        .check_inputs = derived_check_inputs,
        .visit_sums = derived_visit_sums,
        .check_file = derived_check_file,
    };
    format.verifier.verify = NULL; /* it can only check the source */
    format.verifier.verify_chunk = NULL;
    return format;
}

static fc_code fill_derived(fc_checkpoint *made, fc_arena *arena, const fc_derived_kind *kind,
                            fc_checkpoint *const *sources, size_t count, fc_error *err) {
    const fc_checkpoint *first = sources[0];
    fc_derived *d = fc_arena_calloc(arena, 1, kind->size);
    fc_checkpoint **copies = fc_arena_copy(arena, sources, count, sizeof *copies);
    fc_source_crc **crcs = fc_arena_calloc(arena, 2 * count, sizeof *crcs);
    FC_NEED(d && copies && crcs, err, first->path);
    d->kind = kind;
    d->sources = copies;
    d->count = count;
    d->crcs = crcs;
    d->no_crcs = crcs + count;
    d->format = make_format(kind, first->format);
    *made = *first;
    made->arena = arena;
    made->state = d;
    made->format = &d->format;
    made->tensors = NULL;
    made->ntensors = 0;
    made->whole = false;
    made->seal = NULL; /* its digests belong to the source's tensors */
    made->mesh = (fc_mesh){0};
    for (size_t i = 1; i < count && !made->risk; i++) {
        made->risk = sources[i]->risk;
    }
    const fc_file own = {made->path, made->path};
    return count > 1 || kind->lists_path ? fc_files_gather(made, kind->lists_path ? &own : NULL, d->sources, count, err)
                                         : FC_OK;
}

fc_code fc_derived_new(const fc_derived_kind *kind, fc_checkpoint *const *sources, size_t count, fc_checkpoint **out,
                       fc_error *err) {
    *out = NULL;
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *made = arena ? fc_arena_calloc(arena, 1, sizeof *made) : NULL;
    const fc_code rc =
        made ? fill_derived(made, arena, kind, sources, count, err) : fc_no_memory(err, sources[0]->path);
    if (rc != FC_OK) {
        fc_arena_free(arena);
        return rc;
    }
    *out = made;
    return FC_OK;
}

void fc_derived_own(fc_checkpoint *derived) {
    ((fc_derived *)derived->state)->owned = true;
}

void fc_derived_lend(fc_checkpoint *derived, const fc_checkpoint *source) {
    fc_derived *d = derived->state;
    while (d->sources[0] != source) {
        d = d->sources[0]->state;
    }
    d->owned = false;
}

const fc_tensor *fc_derived_kept(const fc_checkpoint *derived, const fc_tensor *tensor, const fc_checkpoint *source) {
    while (tensor && derived != source) {
        const fc_origin *o = tensor->detail;
        tensor = o->kind == FC_ORIGIN_KEPT ? o->tensor : NULL;
        derived = first_of(derived);
    }
    return tensor;
}

fc_code fc_derived_set_tensors(fc_checkpoint *derived, const fc_tensor *tensors, size_t count, fc_error *err) {
    fc_tensor *kept = fc_arena_copy(derived->arena, tensors, count, sizeof *kept);
    FC_NEED(kept, err, derived->path);
    derived->tensors = kept;
    derived->ntensors = count;
    return FC_OK;
}

fc_code fc_derived_finish(fc_checkpoint *derived, fc_code rc, fc_checkpoint **out) {
    if (rc != FC_OK) {
        fc_checkpoint_close(derived);
        return rc;
    }
    fc_derived_own(derived);
    *out = derived;
    return FC_OK;
}

bool fc_derived_cut(fc_tensor *t, const int64_t *block, size_t count, fc_arena *arena) {
    int64_t at[FC_MAX_DIMS] = {0};
    fc_chunk *chunks = fc_arena_calloc(arena, count, sizeof *chunks);
    int64_t *dims = fc_arena_calloc(arena, count, 2 * ((size_t)t->ndim + 1) * sizeof *dims);
    for (size_t i = 0; chunks && dims && i < count; i++, dims += 2 * t->ndim) {
        for (int d = 0; d < t->ndim; d++) {
            dims[d] = at[d];
            dims[t->ndim + d] = t->shape[d] - at[d] < block[d] ? t->shape[d] - at[d] : block[d];
        }
        chunks[i] = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
        for (int d = t->ndim - 1; d >= 0 && (at[d] += block[d]) >= t->shape[d]; d--) {
            at[d] = 0;
        }
    }
    t->chunks = chunks;
    t->nchunks = count;
    return chunks && dims;
}

fc_code fc_derived_collect_crcs(fc_checkpoint *derived, fc_error *err) {
    const fc_derived *d = derived->state;
    for (size_t i = 0; i < d->count; i++) {
        const fc_checkpoint *source = d->sources[i];
        FC_TRY(fc_source_crc_new(source, source->tensors, source->ntensors, &d->crcs[i], err));
    }
    return FC_OK;
}

fc_code fc_derived_record_reads(const fc_checkpoint *derived, const fc_tensor *tensor, fc_origin *origin,
                                fc_error *err) {
    origin->read = fc_arena_calloc(derived->arena, tensor->nchunks, sizeof *origin->read);
    return origin->read || tensor->nchunks == 0 ? FC_OK : fc_no_memory(err, derived->path);
}

fc_code fc_derived_add_header(fc_checkpoint *derived, const char *path, fc_error *err) {
    const fc_open_options all = {.headers_only = false};
    const char *copy = fc_arena_strndup(derived->arena, path, strlen(path));
    FC_NEED(copy, err, path);
    return fc_identities_add_header(derived, copy, &all, err);
}

fc_derived *fc_derived_of(const fc_checkpoint *checkpoint, const fc_derived_kind *kind) {
    if (checkpoint->format->reader.close != derived_close) {
        return NULL;
    }
    fc_derived *d = checkpoint->state;
    return d->kind == kind ? d : NULL;
}

bool fc_derived_checks(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    if (checkpoint->format->reader.close != derived_close) {
        return false;
    }
    const fc_derived *d = checkpoint->state;
    const fc_origin *o = tensor->detail;
    return d->kind->checks_computed && o->kind == FC_ORIGIN_COMPUTED;
}
