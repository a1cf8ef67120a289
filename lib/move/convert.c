/*
 * Converts a checkpoint: selects, proves coverage, writes all files and commits. Only this file and write_files.c call
 * a format's writer.
 */
#include "fsdpckpt/move.h"

#include "base/checked.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/try.h"
#include "integrity/source_crc.h"
#include "io/commit.h"
#include "io/staged_objects.h"
#include "move/check_readable.h"
#include "move/check_request.h"
#include "move/check_target.h"
#include "move/held.h"
#include "move/resume.h"
#include "move/write_files.h"
#include "net/remote.h"
#include "ranks/exchange.h"
#include "read/box.h"
#include "read/budget.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum {
    /* Generous estimates of the headers per file and per tensor. The free space is checked against them. */
    HEADER_BYTES_FILE = 16 << 10,
    HEADER_BYTES_ITEM = 2 << 10,
    /* What index.h5 needs per box of a tensor. */
    MAPPING_BYTES = 160,
};

/* Fails before anything is written if PyTorch would run code when it loads the target. */
static fc_code check_objects(const fc_target *target, const fc_convert_options *options, fc_error *err) {
    for (size_t i = 0; i < target->ntensors && options->format->target.holds_pickles && !options->trust_objects; i++) {
        const fc_tensor *object = target->tensors[i].source;
        fc_object_verdict verdict;
        FC_TRY(fc_checkpoint_object_verdict(target->source, object, &verdict, err));
        if (verdict.risk != FC_OBJECT_HARMLESS) {
            fc_code rc = fc_fail(err, verdict.risk == FC_OBJECT_RUNS ? FC_ECORRUPT : FC_EUNSUPPORTED,
                                 "%s: object %.256s: %s", target->source->path, object->name, verdict.reason);
            return fc_advise(err, rc, FC_HINT_TRUST_OBJECTS, object->name);
        }
    }
    return FC_OK;
}

/* Proves that every target element is covered exactly once, before anything is created. */
static fc_code check_coverage(const fc_target *target, fc_progress *progress, fc_error *err) {
    fc_progress_begin(progress, FC_PHASE_PLANNING, FC_COUNTED_TENSORS, target->ntensors);
    for (size_t i = 0; i < target->ntensors && !target->source->format->layout_only; i++) {
        fc_coverage *coverage = NULL;
        FC_TRY_CONTEXT(fc_coverage_within(target->source, target->tensors[i].source, NULL, &coverage, err), err, "%s",
                       target->source->path);
        fc_coverage_free(coverage);
        FC_TRY(fc_progress_count(progress, 1, err));
    }
    return FC_OK;
}

/* Lets the format check the opened headers for damage. Names and offsets from damaged headers would be wrong. */
static fc_code check_headers(const fc_checkpoint *source, fc_progress *progress, fc_error *err) {
    if (!source->format->reader.check_file) {
        return FC_OK;
    }
    fc_progress_begin(progress, FC_PHASE_PLANNING, FC_COUNTED_FILES, source->nfiles);
    for (size_t i = 0; i < source->nfiles; i++) {
        FC_TRY(source->format->reader.check_file(source, i, err));
        FC_TRY(fc_progress_count(progress, 1, err));
    }
    return FC_OK;
}

/* Adds up the data bytes of the ranks' files. */
static fc_code add_loads(const fc_target *target, const uint64_t *loads, fc_convert_report *report, fc_error *err) {
    int64_t ranks = fc_mesh_ranks(target->mesh);
    report->smallest_file = UINT64_MAX;
    for (int64_t rank = 0; rank < ranks; rank++) {
        uint64_t bytes = loads[rank];
        if (!fc_add_u64(report->data_bytes, bytes, &report->data_bytes)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", target->source->path);
        }
        report->largest_file = bytes > report->largest_file ? bytes : report->largest_file;
        report->smallest_file = bytes < report->smallest_file ? bytes : report->smallest_file;
    }
    return FC_OK;
}

static size_t count_sections(const fc_target *target) {
    size_t sections = 1;
    for (size_t i = 1; i < target->ntensors; i++) {
        sections += target->tensors[i].section != target->tensors[i - 1].section;
    }
    return sections;
}

static fc_code measure_target(const fc_target *target, const fc_convert_options *options, fc_convert_report *report,
                              fc_error *err) {
    bool sharded = target->mesh->ndim > 0;
    size_t ranks = (size_t)fc_mesh_ranks(target->mesh);
    uint64_t *loads = calloc(ranks, sizeof *loads);
    FC_NEED(loads, err, target->source->path);
    report->index = options->format->target.index ? options->format->target.index(target) : NULL;
    report->indexes = report->index ? count_sections(target) : 0;
    report->files = (options->format->target.files ? options->format->target.files(target) : ranks) + report->indexes;
    fc_code rc;
    FC_TRY_GOTO(fc_target_loads(target, loads, err), rc, out);
    rc = add_loads(target, loads, report, err);
out:
    free(loads);
    uint64_t mappings;
    report->header_bytes = report->files * (HEADER_BYTES_FILE + target->ntensors * (uint64_t)HEADER_BYTES_ITEM);
    if (sharded && (!fc_mul_u64(fc_target_boxes(target), MAPPING_BYTES, &mappings) ||
                    !fc_add_u64(report->header_bytes, mappings, &report->header_bytes))) {
        report->header_bytes = UINT64_MAX;
    }
    return rc;
}

/* Joins and compares the sums of the chunks. */
static fc_code check_chunks(const fc_conversion *m, fc_error *err) {
    FC_TRY(fc_source_crc_join(m->move.recorded, m->comm, err));
    return fc_source_crc_check(m->move.recorded, m->comm, fc_read_crc64, err);
}

/*
 * Compares what was read with what the source and its own inputs record. Chunks come first, because their errors name
 * the offset.
 */
static fc_code check_source(const fc_conversion *m, fc_error *err) {
    const fc_checkpoint *source = m->target->source;
    fc_code checked = check_chunks(m, err);
    if (!source->format->reader.check_inputs) {
        return checked;
    }
    FC_TRY(fc_ranks_agree(m->comm, checked, err));
    return source->format->reader.check_inputs(source, m->comm, err);
}

/* Allocates what a conversion needs, and creates the writer. */
static fc_code prepare_conversion(fc_conversion *m, const char *staging, fc_error *err) {
    const fc_checkpoint *source = m->target->source;
    m->move.digests = calloc(m->target->ntensors + 1, sizeof *m->move.digests);
    m->unmoved = calloc(m->target->ntensors + 1, sizeof *m->unmoved);
    FC_NEED(m->move.digests && m->unmoved, err, NULL);
    FC_TRY(fc_source_crc_new(source, source->tensors, source->ntensors, &m->move.recorded, err));
    return fc_has_writer(m) ? m->writer.format->writer.create(m->target, staging, &m->writer, err) : FC_OK;
}

/* Compares what was written with the source. */
static fc_code check_written(const fc_conversion *m, const char *staging, const fc_convert_options *options,
                             fc_error *err) {
    const fc_written_target written = {.target = m->target,
                                       .format = options->format,
                                       .selection = &options->selection,
                                       .path = staging,
                                       .digests = m->move.digests,
                                       .unmoved = m->unmoved,
                                       .sampled = !m->move_file && !fc_is_staged(staging),
                                       .work = &m->move.work};
    return fc_check_target(&written, err);
}

/* Goes on with what an earlier run has written. */
static fc_code open_resume(fc_conversion *m, const fc_convert_options *options, const fc_commit *commit,
                           const char *path, fc_error *err) {
    const fc_resume_options how = {.path = path,
                                   .folder = fc_commit_folder(commit),
                                   .convert = options,
                                   .bytes = m->report->data_bytes,
                                   .recorded = m->move.recorded};
    return fc_resume_open(m->target, &how, &m->move.resume, err);
}

/* Ends it. What is written stays for the next run, unless it was found to be wrong.
 * @param flushes whether what no record has yet is of use: after a failure, and in a bucket, where files may not appear
 */
static void close_resume(const fc_conversion *m, fc_commit *commit, bool flushes, bool wrong) {
    if (m->move.resume) {
        if (flushes && !wrong) {
            fc_resume_flush(m->move.resume);
        }
        fc_commit_keep(commit, fc_resume_has_tiles(m->move.resume) && !wrong);
        fc_resume_free(m->move.resume);
    }
}

/* @param path of the target. @param staging where it is written. @param commit NULL on ranks that do not lead. */
static fc_code write_all(const fc_target *target, const char *path, const char *staging, fc_commit *commit,
                         const fc_convert_options *options, fc_convert_report *report, fc_error *err) {
    fc_conversion m = {.target = target,
                       .comm = options->comm,
                       .leads = fc_ranks_leads(options->comm),
                       .apart = !options->own_shards &&
                                fc_writes_apart(target, options->format, options->comm, fc_is_staged(staging)),
                       .move_file = options->own_shards && options->comm ? fc_held_move_file : NULL,
                       .staging = staging,
                       .writer = {options->format, NULL},
                       .move = {.work = options->work},
                       .report = report};
    m.move.share = m.comm ? (uint32_t)m.comm->rank : 0;
    m.move.shares = m.comm ? (uint32_t)m.comm->size : 0;
    m.move.crc32 = options->format->target.wants_crc32;
    bool wrong = false;
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_agree(m.comm, prepare_conversion(&m, staging, err), err), rc, out);
    FC_TRY_GOTO(options->resumable ? open_resume(&m, options, commit, path, err) : FC_OK, rc, out);
    FC_TRY_GOTO(m.move_file ? fc_held_choose(&m, err) : FC_OK, rc, out);
    FC_TRY_GOTO(fc_write_files(&m, err), rc, out);
    fc_progress_begin(m.move.work.progress, FC_PHASE_CHECKING, FC_COUNTED_BYTES, 0);
    FC_TRY_GOTO(fc_ranks_join_sums(m.comm, FC_OK, m.move.digests, target->ntensors, err), rc, out);
    rc = check_source(&m, err);
    rc = rc == FC_OK ? fc_finish_digests(&m, err) : rc;
    wrong = rc == FC_ECORRUPT;
    FC_TRY_GOTO(rc, rc, out);
    if (m.leads) {
        FC_TRY_GOTO(options->format->writer.finish(&m.writer, m.move.digests, err), rc, out);
        rc = check_written(&m, staging, options, err);
        wrong = rc != FC_OK && rc != FC_EINTERRUPTED && rc != FC_ENOMEM && rc != FC_EIO;
    }
out:
    close_resume(&m, commit, rc != FC_OK || fc_is_staged(staging), wrong);
    if (fc_has_writer(&m)) {
        options->format->writer.destroy(&m.writer);
    }
    free(m.move.digests);
    free(m.unmoved);
    free(m.movers);
    free(m.first_chunks);
    fc_source_crc_free(m.move.recorded);
    return rc;
}

/* Writes into the staging path that rank 0 has created. `begun`: how that went. @param joined what the caller ends with
 * fc_commit_abort after rank 0 has ended `commit` */
static fc_code fill_staging(const fc_target *target, const char *path, fc_commit *commit, fc_commit **joined,
                            const fc_convert_options *options, fc_convert_report *report, fc_code begun,
                            fc_error *err) {
    const char *staging = commit ? fc_commit_path(commit) : NULL;
    fc_arena *arena = fc_arena_new();
    fc_code mine = begun == FC_OK && !arena ? fc_no_memory(err, NULL) : begun;
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_share_path(options->comm, mine, &staging, arena, err), rc, out);
    mine = commit ? FC_OK : fc_commit_join(staging, joined, err);
    FC_TRY_GOTO(fc_ranks_agree(options->comm, mine, err), rc, out);
    FC_TRY_GOTO(write_all(target, path, staging, commit, options, report, err), rc, out);
    FC_TRY_GOTO(fc_progress_count(options->work.progress, 0, err), rc, out);
    rc = fc_checkpoint_unchanged(target->source, err);
out:
    fc_arena_free(arena);
    return rc;
}

static fc_code finish_commit(fc_commit *commit, const fc_convert_options *options, fc_error *err) {
    fc_code rc = options->add_files ? options->add_files(options->add_context, fc_commit_path(commit), err) : FC_OK;
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    fc_commit_count(commit, options->work.progress);
    return fc_commit_finish(commit, err);
}

/* Writes to a staging path. If all ranks succeed, rank 0, which has the commit, moves it to the target path. */
static fc_code write_staged(const fc_target *target, const char *path, fc_commit *commit,
                            const fc_convert_options *options, fc_convert_report *report, fc_code begun,
                            fc_error *err) {
    fc_commit *joined = NULL;
    fc_code mine = fill_staging(target, path, commit, &joined, options, report, begun, err);
    fc_code rc = fc_ranks_agree(options->comm, mine, err);
    if (rc == FC_OK && commit) {
        rc = finish_commit(commit, options, err);
    } else {
        fc_commit_abort(commit);
    }
    rc = fc_ranks_agree(options->comm, rc, err);
    fc_commit_abort(joined);
    return rc;
}

/* Each file of a target in a bucket has two descriptors until it is visible. */
static fc_code check_descriptors(const char *path, size_t files, fc_error *err) {
    enum { OTHERS = 128 };
    struct rlimit limit;
    if (!path || !fc_is_remote(path) || getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 2 > files + OTHERS) {
        return FC_OK;
    }
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: %zu files are made there at once, and this process may open %" PRIu64
                   ": allow it more (ulimit -n %zu)",
                   path, files, (uint64_t)limit.rlim_cur, 2 * files + (size_t)(4 * OTHERS));
}

/* Several processes cannot write one file in a bucket. */
static fc_code check_ranks(const fc_target *target, const char *path, const fc_convert_options *options,
                           fc_error *err) {
    if (!path || !fc_is_remote(path) || !options->comm || options->comm->size == 1 ||
        fc_writes_apart(target, options->format, options->comm, true)) {
        return FC_OK;
    }
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: %d processes cannot write %s%s to a bucket: run one process, without mpirun, or write it on "
                   "this machine, and upload it",
                   path, options->comm->size, target->compress ? "compressed " : "", options->format->name);
}

/* Rank 0 creates the staging path of the target; the others have none. */
static fc_code begin_commit(const fc_commit_options *how, bool fits, size_t files, const fc_convert_options *options,
                            const fc_target *target, fc_commit **out, fc_error *err) {
    if (!fits) {
        return fc_fail(err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", target->source->path);
    }
    FC_TRY(check_descriptors(how->path, files, err));
    FC_TRY(check_ranks(target, how->path, options, err));
    if (options->dry_run) {
        return how->path ? fc_commit_check(how, err) : FC_OK;
    }
    return fc_ranks_leads(options->comm) ? fc_commit_begin(how, out, err) : FC_OK;
}

static fc_code write_target(const fc_target *target, const char *path, const fc_convert_options *options,
                            fc_convert_report *report, fc_error *err) {
    fc_commit *commit = NULL;
    uint64_t bytes = 0;
    bool fits = fc_add_u64(report->data_bytes, report->header_bytes, &bytes);
    if (target->compress) {
        /* Compressed data may fit where the raw data would not: only the write shows it. */
        bytes = report->header_bytes;
    }
    const fc_format *format = options->format;
    const fc_commit_options how = {.path = path,
                                   .is_directory = fc_target_is_directory(target, format),
                                   .force = options->force,
                                   .bytes = bytes,
                                   .resumable = options->resumable,
                                   .is_own_file = fc_is_own_file,
                                   .forbidden = fc_checkpoint_forbidden(target->source),
                                   .also = options->added,
                                   .reporter = options->reporter};
    if (!options->dry_run) {
        fc_progress_begin(options->work.progress, FC_PHASE_COPYING, FC_COUNTED_BYTES,
                          report->data_bytes / (options->comm ? (uint64_t)options->comm->size : 1));
    }
    fc_code begun = begin_commit(&how, fits, report->files, options, target, &commit, err);
    if (options->dry_run) {
        return fc_ranks_agree(options->comm, begun, err);
    }
    FC_TRY(write_staged(target, path, commit, options, report, begun, err));
    if (commit) {
        fc_seal_forget(path);
    }
    return FC_OK;
}

/* Whether a value of the target is that of the source, under the same name. */
static bool is_unchanged(const fc_target_tensor *t) {
    bool same =
        t->dtype == t->source->dtype && strcmp(t->name, t->source->name) == 0 && t->path.count == t->source->path.count;
    for (size_t i = 0; i < t->path.count && same; i++) {
        same = strcmp(t->path.elements[i].key, t->source->path.elements[i].key) == 0;
    }
    return same;
}

/* Whether the target holds everything that the files of the source hold. Another format may lack what this one has, and
 * what is computed from a checkpoint has a format of its own. */
static bool holds_all(const fc_target *target, const fc_convert_options *options, const fc_convert_report *report) {
    const fc_checkpoint *source = target->source;
    bool all =
        source->whole && source->format == options->format && !options->partial && report->selected.left_out == 0;
    for (size_t i = 0; i < target->ntensors && all; i++) {
        all = is_unchanged(&target->tensors[i]);
    }
    return all;
}

/* The target must not replace an input, unless it holds everything of it. */
static fc_code check_target(const fc_target *target, const char *path, const fc_convert_options *options,
                            const fc_convert_report *report, fc_error *err) {
    FC_TRY(fc_checkpoint_spare(target->source, path, holds_all(target, options, report), err));
    return options->inputs ? fc_check_inputs(path, options->inputs, "a file", err) : FC_OK;
}

static size_t count_reshaped(const fc_target *target, const fc_format_target *traits) {
    size_t count = 0;
    for (size_t i = 0; traits->reshapes && i < target->ntensors; i++) {
        const fc_target_tensor *t = &target->tensors[i];
        count += !t->source->object && traits->reshapes(t->dtype, t->source->ndim);
    }
    return count;
}

/* Selects the values. @param adapted receives what the format makes of the source, for fc_checkpoint_close, or NULL */
static fc_code select_values(const fc_checkpoint *source, const fc_convert_options *options, fc_arena *arena,
                             fc_checkpoint **adapted, fc_target *target, fc_selected *selected, fc_error *err) {
    fc_selection selection = options->selection;
    size_t left_out = 0;
    selection.traits = &options->format->target;
    FC_TRY(fc_target_adapt(source, options->format, &selection, &left_out, adapted, err));
    FC_TRY(fc_target_new(*adapted ? *adapted : source, &selection, arena, target, selected, err));
    selected->left_out += left_out;
    return FC_OK;
}

/* Plans on each rank, before the target is touched. */
static fc_code plan_conversion(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                               fc_arena *arena, fc_checkpoint **adapted, fc_target *target, fc_convert_report *report,
                               fc_error *err) {
    FC_TRY(fc_check_request(source, path, options, err));
    fc_progress_begin(options->work.progress, FC_PHASE_PLANNING, FC_COUNTED_TENSORS, 0);
    FC_NEED(arena, err, NULL);
    report->memory = options->work.memory ? options->work.memory : FC_DEFAULT_MEMORY;
    FC_TRY(select_values(source, options, arena, adapted, target, &report->selected, err));
    source = target->source;
    if (path) {
        FC_TRY(check_target(target, path, options, report, err));
        FC_TRY(fc_check_target_name(target, path, options->format, err));
    }
    FC_TRY(fc_check_all_readable(target, err));
    FC_TRY(check_headers(source, options->work.progress, err));
    FC_TRY(check_objects(target, options, err));
    FC_TRY(check_coverage(target, options->work.progress, err));
    FC_TRY(measure_target(target, options, report, err));
    report->reshaped = count_reshaped(target, &options->format->target);
    report->stored_bytes = report->data_bytes;
    return FC_OK;
}

fc_code fc_convert(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                   fc_convert_report *report, fc_error *err) {
    fc_convert_report local;
    fc_target target = {0};
    fc_checkpoint *adapted = NULL;
    if (!report) {
        report = &local;
    }
    memset(report, 0, sizeof *report);
    fc_arena *arena = fc_arena_new();
    fc_code mine = plan_conversion(source, path, options, arena, &adapted, &target, report, err);
    fc_code rc = fc_ranks_compare(options->comm, mine, &target, err);
    if (mine == FC_OK && rc == FC_OK) {
        rc = write_target(&target, path, options, report, err);
    }
    fc_arena_free(arena);
    fc_checkpoint_close(adapted);
    return rc;
}
