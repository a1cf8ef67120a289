/*
 * Parts of a delta, and the delta that one process writes from one part. See part.h.
 */
#include "delta/part.h"

#include "codec/zstd.h"
#include "delta/model.h"
#include "delta/version.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "net/remote.h"
#include "read/budget.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- encoders ---- */

fc_code fc_delta_take_encoder(fc_delta_part *part, fc_delta_encoder **out, fc_error *err) {
    pthread_mutex_lock(&part->lock);
    const int number = part->taken++;
    const bool have = number < part->nencoders;
    part->nencoders += !have;
    pthread_mutex_unlock(&part->lock);
    const fc_code rc = have ? FC_OK : fc_delta_encoder_new(&part->how, number, &part->encoders[number], err);
    *out = part->encoders[number];
    return rc;
}

static void free_encoders(void *context) {
    fc_delta_part *part = context;
    for (int i = 0; i < part->nencoders; i++) {
        fc_delta_encoder_free(part->encoders[i]);
    }
    part->nencoders = 0;
}

/* ---- parts ---- */

static fc_code part_begin(fc_delta_part *part, const char *path, const fc_delta_options *options, fc_error *err) {
    *part = (fc_delta_part){.arena = fc_arena_new(),
                            .options = *options,
                            .how = {.encoding = options->encoding,
                                    .checksum = options->checksum,
                                    .level = options->level ? options->level : 1},
                            .report = {.number = options->number, .base = options->base}};
    part->options.selection = (fc_selection){.include = NULL};
    part->options.inputs = NULL;
    pthread_mutex_init(&part->lock, NULL);
    FC_NEED(part->arena, err, path);
    if (!fc_zstd_is_built_in()) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", path);
    }
    FC_TRY(fc_delta_checksum_check(options->checksum, path, err));
    return fc_delta_choose_numbers(path, &part->report.number, &part->report.base, err);
}

static void part_end(fc_delta_part *part) {
    free_encoders(part);
    fc_commit_abort(part->scratch);
    pthread_mutex_destroy(&part->lock);
    fc_arena_free(part->arena);
}

fc_code fc_delta_part_new(const char *path, const fc_delta_options *options, fc_delta_part **out, fc_error *err) {
    fc_delta_part *part = malloc(sizeof *part);
    *out = NULL;
    FC_NEED(part, err, path);
    fc_code rc = part_begin(part, path, options, err);
    rc = rc == FC_OK ? fc_commit_scratch(path, &part->scratch, err) : rc;
    if (rc != FC_OK) {
        fc_delta_part_free(part);
        return rc;
    }
    part->how.directory = fc_commit_path(part->scratch);
    *out = part;
    return FC_OK;
}

void fc_delta_part_free(fc_delta_part *part) {
    if (part) {
        part_end(part);
        free(part);
    }
}

void fc_delta_part_count(fc_delta_part *part, fc_progress *progress) {
    part->options.work.progress = progress;
}

const fc_delta_report *fc_delta_part_report(const fc_delta_part *part) {
    return &part->report;
}

const char *fc_delta_part_name(const fc_delta_part *part, size_t index) {
    return part->members[index].name;
}

bool fc_delta_part_size(const fc_delta_part *part, fc_delta_encoding encoding, uint64_t *bytes) {
    bool complete = true;
    *bytes = 0;
    for (size_t i = 0; i < part->report.changed; i++) {
        const fc_delta_frame *frame = &part->members[i].found->frames[encoding];
        *bytes += frame->size;
        complete = complete && frame->in;
    }
    return complete;
}

/* Sorts the members by name, and describes the delta. */
static fc_delta_content content_of(fc_delta_part *part, fc_delta_encoding encoding) {
    fc_delta_report *r = &part->report;
    fc_sort_items(part->members, r->changed, sizeof *part->members, fc_order_texts);
    r->encoding = encoding;
    fc_delta_part_size(part, encoding, &r->stored_bytes);
    return (fc_delta_content){.number = r->number,
                              .base = r->base,
                              .encoding = encoding,
                              .checksum = part->how.checksum,
                              .members = part->members,
                              .count = r->changed};
}

fc_code fc_delta_part_write(fc_delta_part *part, fc_delta_encoding encoding, const char *folder, unsigned file,
                            unsigned files, fc_error *err) {
    const fc_delta_content content = content_of(part, encoding);
    return fc_delta_write_data(folder, &content, file, files, err);
}

/* ---- a delta of one process ---- */

typedef struct maker {
    fc_delta_part part;
    const fc_checkpoint *old, *changed;
    const fc_selection *selection;
} maker;

/* Chooses the encoding with the smaller frames, of those that all changed tensors have. */
static fc_delta_encoding choose_encoding(fc_delta_encoding wanted, uint64_t xor_bytes, uint64_t overwrite_bytes,
                                         bool can_overwrite) {
    const bool smaller = can_overwrite && overwrite_bytes < xor_bytes;
    return wanted != FC_DELTA_AUTO ? wanted : smaller ? FC_DELTA_OVERWRITE : FC_DELTA_XOR;
}

static fc_code make_content(void *context, const char *scratch, fc_delta_sender *sender, fc_delta_content *content,
                            fc_error *err) {
    maker *m = context;
    uint64_t sizes[FC_DELTA_ENCODINGS];
    m->part.how.directory = scratch;
    m->part.how.sender = sender;
    FC_TRY(fc_delta_part_add(&m->part, m->old, m->changed, m->selection, err));
    fc_delta_part_size(&m->part, FC_DELTA_XOR, &sizes[FC_DELTA_XOR]);
    const bool can_overwrite = fc_delta_part_size(&m->part, FC_DELTA_OVERWRITE, &sizes[FC_DELTA_OVERWRITE]);
    *content = content_of(
        &m->part, choose_encoding(m->part.how.encoding, sizes[FC_DELTA_XOR], sizes[FC_DELTA_OVERWRITE], can_overwrite));
    return FC_OK;
}

static void release(void *context) {
    maker *m = context;
    free_encoders(&m->part);
}

static fc_code check_sides(const maker *m, const char *path, const fc_delta_options *o, fc_error *err) {
    const fc_checkpoint *sides[] = {m->old, m->changed};
    for (int i = 0; i < 2; i++) {
        if (sides[i]->format->layout_only) {
            return fc_fail(err, FC_EUSAGE, "%s: a schema has no data to compare", sides[i]->path);
        }
        FC_TRY(fc_checkpoint_spare(sides[i], path, false, err));
    }
    if (fc_is_remote(path) && o->encoding == FC_DELTA_AUTO) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: a delta in a bucket has one encoding from the start: choose xor or overwrite", path);
    }
    return o->inputs ? fc_check_inputs(path, o->inputs, "a file", err) : FC_OK;
}

/* OLD may say which version it is. */
static fc_code choose_base(const char *old, int64_t *base, fc_error *err) {
    int64_t known;
    FC_TRY(fc_sync_known_version(old, &known, err));
    if (known != FC_DELTA_NO_NUMBER && *base != FC_DELTA_NO_NUMBER && *base != known) {
        return fc_fail(err, FC_EUSAGE, "%s: the model has version %" PRId64 ", not version %" PRId64, old, known,
                       *base);
    }
    *base = known != FC_DELTA_NO_NUMBER ? known : *base;
    return FC_OK;
}

fc_code fc_delta_write(const fc_checkpoint *old, const fc_checkpoint *changed, const char *path,
                       const fc_delta_options *options, fc_delta_report *report, fc_error *err) {
    maker m = {.old = old, .changed = changed, .selection = &options->selection};
    const fc_delta_publication publication = {.path = path,
                                              .force = options->force,
                                              .forbidden =
                                                  fc_checkpoint_forbidden(old) | fc_checkpoint_forbidden(changed),
                                              .memory = options->work.memory,
                                              .reporter = options->reporter,
                                              .progress = options->work.progress,
                                              .context = &m,
                                              .make = make_content,
                                              .release = release};
    fc_delta_options own = *options;
    fc_code rc;
    *report = (fc_delta_report){.number = own.number};
    FC_TRY(choose_base(old->path, &own.base, err));
    FC_TRY_GOTO(part_begin(&m.part, path, &own, err), rc, out);
    FC_TRY_GOTO(check_sides(&m, path, options, err), rc, out);
    FC_TRY_GOTO(fc_memory_check(options->work.memory, err), rc, out);
    m.part.options.work.memory = fc_delta_workers_memory(path, options->work.memory);
    rc = fc_delta_publish(&publication, err);
out:
    *report = m.part.report;
    part_end(&m.part);
    return rc;
}
