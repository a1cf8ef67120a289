/*
 * The whole way of the data: select, prove coverage, reserve, move, commit. The only caller of a format's writer.
 * Rank by rank: memory does not grow with the number of ranks.
 */
#include "fsdpckpt/move.h"

#include "core/checked.h"
#include "move/tuning.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* What a file and one of its tensors cost in headers, estimated high: the free space is checked against it. */
    HEADER_BYTES_FILE = 16 << 10,
    HEADER_BYTES_ITEM = 2 << 10,
    /* And what index.h5 needs for each box of a tensor. */
    MAPPING_BYTES = 160,
};

/* Fail closed: nothing is created before every wanted element is known to be covered exactly once. */
static fc_code check_coverage(const fc_wanted *wanted, fc_error *err) {
    for (size_t i = 0; i < wanted->ntensors && !wanted->source->format->layout_only; i++) {
        fc_coverage *coverage = NULL;
        fc_code rc = fc_coverage_within(wanted->source, wanted->tensors[i].source, NULL, &coverage, err);
        if (rc != FC_OK) {
            return fc_context(err, rc, "%s", wanted->source->path);
        }
        fc_coverage_free(coverage);
    }
    return FC_OK;
}

/* Sums up what the ranks' files store. */
static fc_code add_loads(const fc_wanted *wanted, const uint64_t *loads, fc_convert_report *report, fc_error *err) {
    int64_t ranks = fc_mesh_ranks(wanted->mesh);
    report->smallest_part = UINT64_MAX;
    for (int64_t rank = 0; rank < ranks; rank++) {
        uint64_t bytes = loads[rank];
        if (!fc_add_u64(report->data_bytes, bytes, &report->data_bytes)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", wanted->source->path);
        }
        report->largest_part = bytes > report->largest_part ? bytes : report->largest_part;
        report->smallest_part = bytes < report->smallest_part ? bytes : report->smallest_part;
    }
    return FC_OK;
}

static fc_code measure(const fc_wanted *wanted, const fc_convert_options *options, fc_convert_report *report,
                       fc_error *err) {
    bool sharded = wanted->mesh->ndim > 0;
    size_t ranks = (size_t)fc_mesh_ranks(wanted->mesh);
    uint64_t *loads = calloc(ranks, sizeof *loads);
    if (!loads) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", wanted->source->path);
    }
    report->files = options->format->files ? options->format->files(wanted) : ranks + sharded;
    fc_code rc = fc_wanted_loads(wanted, loads, err);
    rc = rc == FC_OK ? add_loads(wanted, loads, report, err) : rc;
    free(loads);
    uint64_t mappings;
    report->header_bytes = report->files * (HEADER_BYTES_FILE + wanted->ntensors * (uint64_t)HEADER_BYTES_ITEM);
    if (sharded && (!fc_mul_u64(fc_wanted_boxes(wanted), MAPPING_BYTES, &mappings) ||
                    !fc_add_u64(report->header_bytes, mappings, &report->header_bytes))) {
        report->header_bytes = UINT64_MAX;
    }
    return rc;
}

static bool has_chunks(const fc_part *part) {
    for (size_t i = 0; i < part->nitems; i++) {
        if (part->items[i].chunk) {
            return true;
        }
    }
    return false;
}

static fc_code compress_part(const fc_wanted *wanted, const fc_part *part, fc_writer *writer,
                             const fc_move_options *options, fc_convert_report *report, fc_error *err) {
    uint64_t stored = 0, raw = 0;
    fc_code rc = fc_compress_part(wanted, part, writer, options, &stored, err);
    for (size_t i = 0; i < part->nitems; i++) {
        raw += part->items[i].chunk ? fc_part_item_bytes(wanted, &part->items[i]) : 0;
    }
    report->stored_bytes = report->stored_bytes - raw + stored;
    return rc;
}

/* One file of the target. */
static fc_code write_file(const fc_wanted *wanted, fc_writer *writer, fc_part *part, const fc_move_options *options,
                          fc_convert_report *report, fc_error *err) {
    fc_code rc = writer->format->reserve(writer, part, err);
    if (rc == FC_OK) {
        rc = fc_move_part(wanted, part, options, err);
    }
    if (rc == FC_OK && has_chunks(part)) {
        rc = compress_part(wanted, part, writer, options, report, err);
    }
    if (rc == FC_OK && writer->format->seal) {
        rc = writer->format->seal(writer, part, err);
    }
    return rc;
}

static fc_code write_part(const fc_wanted *wanted, fc_writer *writer, uint32_t rank, const fc_move_options *options,
                          fc_convert_report *report, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_part part;
    if (!arena) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    fc_code rc = fc_wanted_part(wanted, rank, arena, &part, err);
    size_t first = 0;
    while (rc == FC_OK && (first < part.nitems || first == 0)) { /* a rank that holds nothing has a file, too */
        size_t count = writer->format->split ? writer->format->split(writer, &part, first) : part.nitems;
        fc_part file = {.rank = rank, .items = part.items + first, .nitems = count};
        rc = write_file(wanted, writer, &file, options, report, err);
        first += count ? count : 1;
    }
    fc_arena_free(arena);
    return rc;
}

static bool is_cancelled(const fc_move_options *options) {
    return options->progress && atomic_load(&options->progress->cancel);
}

/* What was written of a tensor against the digest that the source records for it, if any. */
static fc_code check_digest(const fc_checkpoint *source, const fc_wanted_tensor *tensor, uint64_t found,
                            fc_error *err) {
    fc_digest recorded;
    fc_code rc = fc_checkpoint_digest(source, tensor->source, FC_WHOLE_TENSOR, &recorded, err);
    if (rc != FC_OK || recorded.kind != FC_DIGEST_CRC64 || recorded.value == found) {
        return rc;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: tensor %s: its data has the digest %016" PRIx64 ", recorded is %016" PRIx64
                   ": it is damaged; fsdpckpt verify tells in which file",
                   source->path, tensor->source->name, found, recorded.value);
}

/* Makes the tensors' digests of their sums, and compares them with what the source says they are. */
static fc_code finish_digests(const fc_wanted *wanted, const fc_format *format, uint64_t *digests, fc_error *err) {
    for (size_t i = 0; i < wanted->ntensors; i++) {
        const fc_wanted_tensor *tensor = &wanted->tensors[i];
        if (tensor->source->object && format->objects_note) {
            continue; /* not moved here */
        }
        const fc_box whole = {tensor->source->ndim, NULL, tensor->source->shape};
        uint64_t bytes = (uint64_t)fc_box_volume(&whole) * fc_dtype_size(tensor->dtype);
        digests[i] = fc_crc64_finish(digests[i], bytes);
        fc_code rc =
            tensor->dtype == tensor->source->dtype ? check_digest(wanted->source, tensor, digests[i], err) : FC_OK;
        if (rc != FC_OK) {
            return rc;
        }
    }
    return FC_OK;
}

static fc_code write_all(const fc_wanted *wanted, const char *staging, const fc_convert_options *options,
                         fc_convert_report *report, fc_error *err) {
    fc_writer writer = {options->format, NULL};
    int64_t ranks = fc_mesh_ranks(wanted->mesh);
    fc_move_options move = options->move;
    uint64_t *digests = calloc(wanted->ntensors + 1, sizeof *digests);
    move.crc32 = options->format->wants_crc32;
    move.digests = digests;
    fc_code rc =
        digests ? options->format->create(wanted, staging, &writer, err) : fc_fail(err, FC_ENOMEM, "out of memory");
    for (int64_t rank = 0; rank < ranks && rc == FC_OK; rank++) {
        rc = is_cancelled(&options->move) ? fc_fail(err, FC_EINTERRUPTED, "interrupted")
                                          : write_part(wanted, &writer, (uint32_t)rank, &move, report, err);
    }
    if (rc == FC_OK) {
        rc = finish_digests(wanted, options->format, digests, err);
    }
    if (rc == FC_OK) {
        rc = options->format->finish(&writer, digests, err);
    }
    options->format->destroy(&writer);
    free(digests);
    return rc;
}

static fc_code write_target(const fc_wanted *wanted, const char *target, const fc_convert_options *options,
                            fc_convert_report *report, fc_error *err) {
    fc_commit *commit = NULL;
    uint64_t bytes;
    if (!fc_add_u64(report->data_bytes, report->header_bytes, &bytes)) {
        return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", wanted->source->path);
    }
    if (wanted->compress) {
        bytes = report->header_bytes; /* what is compressed may fit where the data would not: only writing tells */
    }
    const fc_format *format = options->format;
    bool is_directory = format->is_directory ? format->is_directory(wanted) : wanted->mesh->ndim > 0;
    if (options->dry_run) {
        return !target ? FC_OK : fc_commit_check(target, is_directory, options->force, bytes, err);
    }
    fc_code rc = fc_commit_begin(target, is_directory, options->force, bytes, &commit, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (options->move.progress) {
        options->move.progress->total = report->data_bytes;
    }
    rc = write_all(wanted, fc_commit_path(commit), options, report, err);
    if (rc == FC_OK && is_cancelled(&options->move)) {
        rc = fc_fail(err, FC_EINTERRUPTED, "interrupted");
    }
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    return fc_commit_finish(commit, err);
}

/* What can be said before anything is looked at. */
static fc_code check_request(const fc_checkpoint *source, const char *target, const fc_convert_options *options,
                             fc_error *err) {
    if (!options->format->create) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the format '%s' is only read, not written",
                       target ? target : source->path, options->format->name);
    }
    if (source->format->layout_only && !options->dry_run) {
        return fc_fail(err, FC_EUSAGE, "%s: a schema, which holds no data to convert: it can be planned with --dry-run",
                       source->path);
    }
    if (options->move.memory && options->move.memory < FC_LEAST_MEMORY) {
        return fc_fail(err, FC_EUSAGE, "%" PRIu64 " bytes of memory are too few: --memory must be at least 1M",
                       options->move.memory);
    }
    if (!target && !options->dry_run) {
        return fc_fail(err, FC_EUSAGE, "%s: no target is named", source->path);
    }
    return FC_OK;
}

fc_code fc_convert(const fc_checkpoint *source, const char *target, const fc_convert_options *options,
                   fc_convert_report *report, fc_error *err) {
    fc_convert_report local;
    fc_wanted wanted;
    if (!report) {
        report = &local;
    }
    memset(report, 0, sizeof *report);
    fc_code rc = check_request(source, target, options, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (target && fc_checkpoint_needs(source, target)) {
        return fc_fail(err, FC_EUSAGE, "%s: is a file of the checkpoint that is read: name another target", target);
    }
    report->memory = options->move.memory ? options->move.memory : FC_DEFAULT_MEMORY;
    if (options->selection.compress && !options->format->place) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the format '%s' has no compression", source->path,
                       options->format->name);
    }
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    fc_selection selection = options->selection;
    selection.self_contained = options->format->self_contained;
    rc = fc_wanted_new(source, &selection, arena, &wanted, &report->selected, err);
    if (rc == FC_OK) {
        rc = check_coverage(&wanted, err);
    }
    if (rc == FC_OK) {
        rc = measure(&wanted, options, report, err);
        report->stored_bytes = report->data_bytes;
    }
    if (rc == FC_OK) {
        rc = write_target(&wanted, target, options, report, err);
    }
    fc_arena_free(arena);
    return rc;
}
