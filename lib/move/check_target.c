/*
 * Compares a staged target with its source. See check_target.h. Nothing that the conversion has computed is used but
 * the digests of what it moved: names are made again from those of the source, the target is opened from its files, and
 * a few elements of each tensor are read on both sides through the manifests. A tensor that the writer stored as a view
 * of another is read at more places, because no digest covers its name.
 */
#include "move/check_target.h"

#include "checkpoint/open.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "plan/rename.h"
#include "read/stored_chunk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    SAMPLE_BYTES = 2048,     /* of elements that are read at one place; a smaller tensor is read whole */
    SAMPLE_READ = 512 << 10, /* of the sources, for elements that are computed */
    PLACES = 1,              /* of a tensor with a digest */
    PLACES_UNMOVED = 16,     /* of one without */
    BATCH = 128,             /* samples that are in memory at once */
    WIDER = 8                /* a cast makes elements at most so many times as large */
};

/* Elements that are read on both sides. */
typedef struct sample {
    const fc_tensor *source, *made;
    int ndim;
    int64_t dims[2 * FC_MAX_DIMS];
    unsigned char *from_source, *cast, *from_target; /* ROOM bytes each */
} sample;

enum { ROOM = SAMPLE_BYTES * WIDER };

typedef struct checking {
    const fc_written_target *written;
    const fc_checkpoint *source;
    fc_checkpoint *made;
    fc_arena *arena;
    const fc_tensor **by_name; /* the values of `made`, sorted */
    sample *samples;           /* BATCH of them */
    unsigned char *bytes;
    size_t count;
} checking;

static fc_code fail_value(const checking *c, const fc_target_tensor *t, fc_error *err, const char *what) {
    return fc_fail(err, FC_EIO,
                   "%s: %s %.256s of the target %s; nothing was replaced. The disk or fsdpckpt is at fault: "
                   "try again, and report it if this line comes again",
                   c->source->path, t->source->object ? "object" : "tensor", t->name, what);
}

/* Turns the error of reading the target, which nobody could have damaged yet, into one of writing it. */
static fc_code fail_target(const checking *c, fc_error *err) {
    err->code = FC_EIO;
    return fc_context(err, FC_EIO, "%s: the target was not written as planned, and nothing was replaced",
                      c->source->path);
}

/* Fails unless the source's name gives the name of the target's value. */
static fc_code check_name(const checking *c, fc_rename *rename, const fc_target_tensor *t, fc_error *err) {
    const char *name = NULL;
    fc_path path;
    bool changed = false;
    FC_TRY(fc_rename_apply(rename, t->source, c->arena, &name, &path, &changed, err));
    return strcmp(name, t->name) == 0 ? FC_OK : fail_value(c, t, err, "was planned from another value");
}

static fc_code check_names(const checking *c, fc_error *err) {
    const fc_target *target = c->written->target;
    fc_rename *rename = NULL;
    FC_TRY(fc_rename_new(c->written->selection, &rename, err));
    fc_code rc = FC_OK;
    for (size_t i = 0; i < target->ntensors; i++) {
        FC_TRY_GOTO(check_name(c, rename, &target->tensors[i], err), rc, out);
    }
out:
    fc_rename_free(rename);
    return rc;
}

static fc_code sort_names(checking *c, fc_error *err) {
    c->by_name = fc_arena_calloc(c->arena, c->made->ntensors, sizeof *c->by_name);
    FC_NEED(c->by_name, err, c->source->path);
    for (size_t i = 0; i < c->made->ntensors; i++) {
        c->by_name[i] = &c->made->tensors[i];
    }
    fc_sort_items(c->by_name, c->made->ntensors, sizeof *c->by_name, fc_order_named);
    return FC_OK;
}

/* Finds the first value of the target whose name is not before `name`. @return NULL: there is none. */
static const fc_tensor *find_at_least(const checking *c, const char *name) {
    size_t low = 0;
    FC_BISECT(low, c->made->ntensors, middle, strcmp(c->by_name[middle]->name, name) < 0);
    return low < c->made->ntensors ? c->by_name[low] : NULL;
}

static const fc_tensor *find_value(const checking *c, const char *name) {
    const fc_tensor *found = find_at_least(c, name);
    return found && strcmp(found->name, name) == 0 ? found : NULL;
}

/* Whether the target has values within the object `name`: in a torch.save file its members are values of their own. */
static fc_code has_members(const checking *c, const char *name, bool *has, fc_error *err) {
    const char *prefix = fc_arena_printf(c->arena, "%s.", name);
    const fc_tensor *found = prefix ? find_at_least(c, prefix) : NULL;
    *has = found && strncmp(found->name, prefix, strlen(prefix)) == 0;
    return prefix ? FC_OK : fc_no_memory(err, c->source->path);
}

/* Compares the digest that the target records with that of what was moved. */
static fc_code check_digest(const checking *c, size_t index, const fc_tensor *made, fc_error *err) {
    const fc_target_tensor *t = &c->written->target->tensors[index];
    fc_digest digest;
    if (c->written->unmoved[index]) {
        return FC_OK;
    }
    FC_TRY(fc_checkpoint_digest(c->made, made, FC_WHOLE_TENSOR, &digest, err));
    return digest.kind != FC_DIGEST_CRC64 || digest.value == c->written->digests[index]
               ? FC_OK
               : fail_value(c, t, err, "has another digest than what was read");
}

/* ---- elements ---- */

/* @return the elements that are read at one place. */
static int64_t sample_room(const checking *c, const fc_tensor *source, const fc_tensor *made) {
    const uint64_t read = SAMPLE_READ / fc_bytes_read_per_element(c->source, source);
    const uint64_t room = SAMPLE_BYTES / fc_dtype_size(made->dtype);
    return (int64_t)(read < 1 ? 1 : read < room ? read : room);
}

/* Chooses a box of about `room` elements, contiguous in the tensor, by the name of the tensor and the number of the
 * box. The last one is at the end of the tensor. */
static void choose_box(const fc_tensor *t, int64_t room, int number, bool last, int64_t *dims) {
    for (int d = t->ndim - 1; d >= 0; d--) {
        int64_t *offset = &dims[d], *size = &dims[t->ndim + d];
        *size = t->shape[d] < room ? t->shape[d] : room;
        room /= *size;
        const uint64_t free = (uint64_t)(t->shape[d] - *size) + 1;
        const uint64_t seed = ((uint64_t)number << 8) + (uint64_t)d;
        *offset = last ? (int64_t)free - 1 : (int64_t)(XXH3_64bits_withSeed(t->name, strlen(t->name), seed) % free);
        room = room < 1 ? 1 : room;
    }
}

static fc_code read_side(const checking *c, bool target, fc_error *err) {
    fc_box_request *requests = calloc(c->count + 1, sizeof *requests);
    FC_NEED(requests, err, c->source->path);
    for (size_t i = 0; i < c->count; i++) {
        const sample *s = &c->samples[i];
        requests[i] = (fc_box_request){.tensor = target ? s->made : s->source,
                                       .box = {s->ndim, s->dims, s->dims + s->ndim},
                                       .buf = target ? s->from_target : s->from_source};
    }
    const fc_work_options options = {.threads = c->written->work->threads};
    fc_code rc = fc_read_boxes(target ? c->made : c->source, NULL, requests, c->count, &options, err);
    free(requests);
    return rc == FC_ECORRUPT && target ? fail_target(c, err) : rc;
}

static fc_code compare_sample(const checking *c, sample *s, fc_error *err) {
    const fc_box box = {s->ndim, s->dims, s->dims + s->ndim};
    const size_t count = (size_t)fc_box_volume(&box);
    const unsigned char *expected = s->from_source;
    if (s->source->dtype != s->made->dtype) {
        fc_cast(s->source->dtype, s->from_source, s->made->dtype, s->cast, count);
        expected = s->cast;
    }
    if (memcmp(expected, s->from_target, count * fc_dtype_size(s->made->dtype)) == 0) {
        return FC_OK;
    }
    const fc_target_tensor like = {.source = s->source, .name = s->made->name};
    char what[256];
    snprintf(what, sizeof what, "has other values than the source at %s", fc_box_to_text(&box).s);
    return fail_value(c, &like, err, what);
}

/* Reads the samples on both sides and compares them. */
static fc_code compare_samples(checking *c, fc_error *err) {
    if (c->count == 0) {
        return FC_OK;
    }
    FC_TRY(read_side(c, false, err));
    FC_TRY(read_side(c, true, err));
    for (size_t i = 0; i < c->count; i++) {
        FC_TRY(compare_sample(c, &c->samples[i], err));
    }
    c->count = 0;
    return FC_OK;
}

static fc_code add_sample(checking *c, const fc_tensor *source, const fc_tensor *made, int number, bool last,
                          fc_error *err) {
    FC_TRY(c->count == BATCH ? compare_samples(c, err) : FC_OK);
    sample *s = &c->samples[c->count];
    s->source = source;
    s->made = made;
    s->ndim = made->ndim;
    s->from_source = c->bytes + c->count * 3 * ROOM;
    s->cast = s->from_source + ROOM;
    s->from_target = s->cast + ROOM;
    choose_box(made, sample_room(c, source, made), number, last, s->dims);
    c->count++;
    return FC_OK;
}

static fc_code add_samples(checking *c, size_t index, const fc_tensor *made, fc_error *err) {
    const fc_tensor *source = c->written->target->tensors[index].source;
    const int places = c->written->unmoved[index] ? PLACES_UNMOVED : PLACES;
    int64_t elements = 0;
    if (!fc_numel(made->ndim, made->shape, &elements) || elements == 0) {
        return FC_OK;
    }
    const bool small = elements <= sample_room(c, source, made);
    for (int i = 0; i < (small ? 1 : places); i++) {
        FC_TRY(add_sample(c, source, made, i, i > 0 && i == places - 1, err));
    }
    return FC_OK;
}

/* ---- values ---- */

static fc_code check_object(const checking *c, const fc_target_tensor *t, const char *name, const fc_tensor *made,
                            fc_error *err) {
    bool found = made && made->object;
    FC_TRY(found ? FC_OK : has_members(c, name, &found, err));
    return found ? FC_OK : fail_value(c, t, err, "is missing");
}

/* Whether the target's tensor has the shape that it is read back with. A LOCAL_STATE_DICT does not say that its flat
 * tensors are shards, so the reader takes rank 0's shard, the first elements, for the whole. */
static bool has_shape(const checking *c, const fc_tensor *source, const fc_tensor *made) {
    return fc_same_sizes(made->ndim, made->shape, source->ndim, source->shape) ||
           (c->written->target->flat_state && made->ndim == 1 && source->ndim == 1 &&
            made->shape[0] <= source->shape[0]);
}

static fc_code check_tensor(checking *c, size_t index, const fc_tensor *made, fc_error *err) {
    const fc_target_tensor *t = &c->written->target->tensors[index];
    if (made && made->object && made->object->refusal && c->written->target->flat_state) {
        return FC_OK; /* only the FSDP units of the model, which the files do not have, say what it is */
    }
    if (!made || made->object) {
        return fail_value(c, t, err, "is missing");
    }
    if (made->dtype != t->dtype || !has_shape(c, t->source, made)) {
        return fail_value(c, t, err, "has another dtype or shape");
    }
    FC_TRY(check_digest(c, index, made, err));
    return c->written->sampled ? add_samples(c, index, made, err) : FC_OK;
}

static fc_code check_value(checking *c, size_t index, fc_error *err) {
    const fc_target_tensor *t = &c->written->target->tensors[index];
    const fc_format_target *traits = &c->written->format->target;
    const char *name = traits->name_as_read ? traits->name_as_read(t, c->arena) : t->name;
    FC_NEED(name, err, c->source->path);
    const fc_tensor *made = find_value(c, name);
    return t->source->object ? check_object(c, t, name, made, err) : check_tensor(c, index, made, err);
}

static fc_code check_values(checking *c, fc_error *err) {
    const size_t count = c->written->target->ntensors;
    c->samples = calloc(BATCH, sizeof *c->samples);
    c->bytes = malloc((size_t)BATCH * 3 * ROOM);
    FC_NEED(c->samples && c->bytes, err, c->source->path);
    for (size_t i = 0; i < count; i++) {
        FC_TRY(check_value(c, i, err));
        FC_TRY(fc_progress_count(c->written->work->progress, 0, err)); /* ends when it is cancelled */
    }
    return compare_samples(c, err);
}

fc_code fc_check_target(const fc_written_target *written, fc_error *err) {
    checking c = {.written = written, .source = written->target->source, .arena = fc_arena_new()};
    fc_code rc;
    FC_TRY_GOTO(c.arena ? FC_OK : fc_no_memory(err, c.source->path), rc, out);
    FC_TRY_GOTO(check_names(&c, err), rc, out);
    FC_TRY_GOTO(fc_format_open(written->format, written->path, NULL, &c.made, err), rc, out);
    FC_TRY_GOTO(sort_names(&c, err), rc, out);
    rc = check_values(&c, err);
out:
    fc_checkpoint_close(c.made);
    fc_arena_free(c.arena);
    free(c.samples);
    free(c.bytes);
    return rc;
}
