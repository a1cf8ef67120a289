/*
 * Writes a sharded target from several processes without a communicator. See shards.h. A rank's notes are what the
 * writer keeps of its files, then for each value the sum of what was written and whether the writer wrote it itself,
 * and then what fc_staged_tell says of files in a bucket.
 */
#include "fsdpckpt/shards.h"

#include "checkpoint/memory_data.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "io/staged_objects.h"
#include "move/file.h"
#include "move/write_files.h"

#include <stdlib.h>
#include <string.h>

/* A conversion of this process alone. */
typedef struct apart {
    fc_arena *arena;
    fc_target target;
    fc_convert_report report;
    fc_conversion m;
} apart;

static fc_code refuse_objects(const fc_shards *shards, const fc_target *target, fc_error *err) {
    for (size_t i = 0; shards->format->target.holds_pickles && !shards->trust_objects && i < target->ntensors; i++) {
        const fc_tensor *object = target->tensors[i].source;
        fc_object_verdict verdict = {.risk = FC_OBJECT_HARMLESS};
        FC_TRY(object->object && object->nchunks > 0
                   ? fc_checkpoint_object_verdict(shards->source, object, &verdict, err)
                   : FC_OK);
        if (verdict.risk != FC_OBJECT_HARMLESS) {
            fc_code rc = fc_fail(err, FC_EUNSUPPORTED, "%s: object %.256s: %s", shards->source->path, object->name,
                                 verdict.reason);
            return fc_advise(err, rc, FC_HINT_TRUST_OBJECTS, object->name);
        }
    }
    return FC_OK;
}

static fc_code plan_shards(const fc_shards *shards, apart *a, fc_error *err) {
    const fc_selection selection = {.keep_layout = true,
                                    .may_be_empty = true,
                                    .traits = &shards->format->target,
                                    .owner_offsets = shards->owner_offsets};
    if (!shards->format->writer.notes) {
        return fc_fail(err, FC_EUNSUPPORTED, "the format '%s' cannot be written by several processes",
                       shards->format->name);
    }
    a->arena = fc_arena_new();
    FC_NEED(a->arena, err, shards->source->path);
    FC_TRY(fc_target_new(shards->source, &selection, a->arena, &a->target, &a->report.selected, err));
    return refuse_objects(shards, &a->target, err);
}

/* Finds the items from `first` on that are moved together, and lists the values among them whose data must be fetched.
 * @return the index after the last item. */
static size_t next_batch(const fc_conversion *m, const fc_target_file *file, size_t first, size_t *indices,
                         size_t *count) {
    const fc_checkpoint *source = m->target->source;
    uint64_t bytes = 0;
    size_t end = first;
    for (*count = 0; end < file->nitems; end++) {
        const fc_target_item *item = &file->items[end];
        const size_t index = (size_t)(m->target->tensors[item->tensor].source - source->tensors);
        if (!item->owned || !fc_memory_lacks_data(source, index)) {
            continue;
        }
        const uint64_t size = fc_target_item_bytes(m->target, item);
        if (*count > 0 && bytes + size > m->shards->batch_bytes) {
            break;
        }
        bytes += size;
        indices[(*count)++] = index;
    }
    return end;
}

static fc_code move_fetched(const fc_conversion *m, const fc_target_file *file, fc_error *err) {
    size_t *indices = calloc(file->nitems + 1, sizeof *indices), count;
    fc_code rc = indices ? FC_OK : fc_no_memory(err, file->path);
    for (size_t first = 0, end; rc == FC_OK && first < file->nitems; first = end) {
        fc_target_file batch = *file;
        end = next_batch(m, file, first, indices, &count);
        batch.items += first;
        batch.nitems = end - first;
        rc = count > 0 ? m->shards->fetch(m->shards->context, indices, count, err) : FC_OK;
        rc = rc == FC_OK ? fc_move_file(m->target, &batch, &m->move, err) : rc;
    }
    free(indices);
    return rc;
}

static fc_code begin_shards(const fc_shards *shards, const fc_work_options *options, apart *a, fc_error *err) {
    FC_TRY(plan_shards(shards, a, err));
    a->m = (fc_conversion){.target = &a->target,
                           .leads = true,
                           .apart = true,
                           .writer = {shards->format, NULL},
                           .move = {.work = options ? *options : (fc_work_options){0}},
                           .report = &a->report,
                           .move_file = shards->fetch ? move_fetched : NULL,
                           .shards = shards};
    a->m.move.crc32 = shards->format->target.wants_crc32;
    a->m.move.digests = calloc(a->target.ntensors + 1, sizeof *a->m.move.digests);
    a->m.unmoved = calloc(a->target.ntensors + 1, sizeof *a->m.unmoved);
    FC_NEED(a->m.move.digests && a->m.unmoved, err, shards->staging);
    return shards->format->writer.create(&a->target, shards->staging, &a->m.writer, err);
}

static void end_shards(apart *a) {
    if (a->m.writer.state) {
        a->m.writer.format->writer.destroy(&a->m.writer);
    }
    free(a->m.move.digests);
    free(a->m.unmoved);
    fc_arena_free(a->arena);
}

/* Appends the sums, so that the notes are complete. */
static fc_code add_sums(const apart *a, fc_notes *notes, fc_error *err) {
    const size_t count = a->target.ntensors;
    bool added = fc_notes_add(notes, a->m.move.digests, count * sizeof *a->m.move.digests) &&
                 fc_notes_add(notes, a->m.unmoved, count * sizeof *a->m.unmoved);
    return added ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_shards_write(const fc_shards *shards, uint32_t rank, const fc_work_options *options, void **out,
                        size_t *size, fc_error *err) {
    apart a = {.arena = NULL};
    fc_notes notes = {NULL, 0, 0};
    fc_code rc;
    FC_TRY_GOTO(begin_shards(shards, options, &a, err), rc, out);
    FC_TRY_GOTO(fc_write_noted(&a.m, rank, &notes, err), rc, out);
    if (!a.m.writer.format->writer.notes->take) {
        const uint64_t none = 0;
        FC_TRY_GOTO(fc_notes_add(&notes, &none, sizeof none) ? FC_OK : fc_no_memory(err, NULL), rc, out);
    }
    FC_TRY_GOTO(add_sums(&a, &notes, err), rc, out);
    FC_TRY_GOTO(fc_staged_tell(shards->staging, false, &notes, err), rc, out);
    *out = notes.data;
    *size = notes.size;
    notes.data = NULL;
out:
    free(notes.data);
    end_shards(&a);
    return rc;
}

static fc_code add_rank(apart *a, const char *staging, const unsigned char *notes, size_t size, fc_error *err) {
    const fc_format_writer *writer = &a->m.writer.format->writer;
    const size_t count = a->target.ntensors, sums = count * (sizeof *a->m.move.digests + sizeof *a->m.unmoved);
    uint64_t length = 0;
    if (size >= sizeof length) {
        memcpy(&length, notes, sizeof length);
    }
    const size_t rest = size < sizeof length + sums ? 0 : size - sizeof length - sums;
    if (size < sizeof length + sums || length > rest || (length < rest && !fc_is_staged(staging))) {
        return fc_fail(err, FC_EUSAGE, "the notes of a rank are those of other values");
    }
    notes += sizeof length;
    FC_TRY(length > 0 ? writer->notes->add(&a->m.writer, notes, (size_t)length, err) : FC_OK);
    notes += length;
    for (size_t i = 0; i < count; i++) {
        uint64_t sum;
        memcpy(&sum, notes + i * sizeof sum, sizeof sum);
        a->m.move.digests[i] ^= sum;
        a->m.unmoved[i] |= notes[count * sizeof sum + i] != 0;
    }
    return length < rest ? fc_staged_adopt(staging, notes + sums, rest - (size_t)length, err) : FC_OK;
}

fc_code fc_shards_finish(const fc_shards *shards, const void *const *notes, const size_t *sizes, size_t count,
                         fc_error *err) {
    apart a = {.arena = NULL};
    fc_code rc;
    FC_TRY_GOTO(begin_shards(shards, NULL, &a, err), rc, out);
    for (size_t i = 0; i < count; i++) {
        FC_TRY_GOTO(add_rank(&a, shards->staging, notes[i], sizes[i], err), rc, out);
    }
    FC_TRY_GOTO(fc_finish_digests(&a.m, err), rc, out);
    rc = shards->format->writer.finish(&a.m.writer, a.m.move.digests, err);
out:
    end_shards(&a);
    return rc;
}
