/*
 * Brings a model to another version, in place: finds the chain of versions, compares its headers with the model, and
 * applies it in rounds of as many deltas as the memory allows. Each round is checked, written to the journal and
 * replayed (journal.h). Where the chain begins with a full version, the deltas are applied to its copy instead, before
 * it replaces the model.
 */
#include "codec/zstd.h"
#include "delta/decode.h"
#include "delta/heads.h"
#include "delta/record.h"
#include "delta/round.h"
#include "delta/stage.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "net/remote.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <unistd.h>

typedef struct applier {
    const char *path; /* of the model */
    const fc_delta_apply_options *options;
    fc_delta_apply_report *report;
    fc_arena *arena;
    fc_delta_versions versions;
    fc_delta_version **chain; /* the deltas; a full version before them is in `full` */
    size_t count;
    const fc_delta_version *full;
    fc_sync_model model; /* what the deltas are applied to */
} applier;

/* ---- the plan ---- */

static fc_code choose_version(applier *a, fc_error *err) {
    const fc_delta_apply_options *o = a->options;
    fc_delta_apply_report *r = a->report;
    FC_TRY(fc_sync_version(a->path, o->base, &r->from, err));
    if (o->dry_run && r->replayed != FC_DELTA_NO_NUMBER) {
        r->from = r->replayed;
    }
    r->to = o->up_to != FC_DELTA_NO_NUMBER ? o->up_to : a->versions.versions[a->versions.count - 1].number;
    if (r->to < r->from) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: the model has version %" PRId64 ", and deltas do not lead back to version %" PRId64
                       ": copy the base of the run again, and apply the versions up to that one",
                       a->path, r->from, r->to);
    }
    return FC_OK;
}

static fc_code find_chain(applier *a, fc_error *err) {
    FC_TRY(fc_delta_versions_chain(a->arena, &a->versions, a->report->from, a->report->to, &a->chain, &a->count, err));
    if (a->count > 0 && a->chain[0]->base == FC_DELTA_NO_NUMBER) {
        a->full = *a->chain++;
        a->report->full = a->full->number;
        a->count--;
    }
    a->report->deltas = a->count;
    for (size_t k = 0; k < a->count; k++) {
        FC_TRY(fc_delta_version_read(a->arena, a->chain[k], err));
        a->report->stored_bytes += a->chain[k]->stored_bytes;
    }
    return FC_OK;
}

/* Compares the deltas with the model that they are applied to, in the folder `path`. */
static fc_code read_model(applier *a, const char *path, fc_error *err) {
    FC_TRY(fc_sync_model_read(a->arena, path, &a->model, err));
    fc_delta_heads_read(a->chain, a->count);
    for (size_t k = 0; k < a->count; k++) {
        FC_TRY(fc_delta_fits(&a->model, a->chain[k], &a->chain[k]->window, err));
    }
    for (size_t i = 0; i < a->model.ntensors; i++) {
        fc_sync_tensor *t = &a->model.tensors[i];
        if (t->changes) {
            a->report->tensors++;
            a->report->bytes += t->size; /* within files that are there */
            FC_TRY(t->file->changes || a->full ? FC_OK : fc_sync_file_check(t->file, err));
            t->file->changes = true;
        }
    }
    return FC_OK;
}

/* ---- rounds ---- */

/* Returns how many of the deltas from `first` on fit into the memory of one worker. */
static size_t count_fitting(const applier *a, size_t first) {
    const uint64_t budget = a->options->work.memory ? a->options->work.memory : FC_DEFAULT_MEMORY;
    size_t n = 1;
    while (first + n < a->count && fc_delta_round_memory(a->chain + first, n + 1) <= budget) {
        n++;
    }
    return n;
}

static fc_code apply_rounds(applier *a, size_t first, size_t n, fc_journal *journal, fc_error *err) {
    const fc_delta_round round = {
        .model = &a->model, .versions = a->chain + first, .count = n, .journal = journal, .work = a->options->work};
    return fc_delta_apply_round(&round, err);
}

/* From here on a failure leaves a journal with which the next run completes this. */
static fc_code put_in_place(const applier *a, fc_journal *journal, int64_t version, fc_error *err) {
    int64_t replayed;
    a->report->changed_bytes += fc_journal_changed(journal);
    FC_TRY(fc_journal_commit(journal, version, err));
    return fc_journal_replay(a->path, &replayed, a->options->work.progress, err);
}

static fc_code apply_in_place(applier *a, fc_error *err) {
    for (size_t first = 0, n; first < a->count; first += n) {
        fc_journal *journal = NULL;
        n = count_fitting(a, first);
        fc_code rc = fc_journal_new(a->path, &journal, err);
        rc = rc == FC_OK ? apply_rounds(a, first, n, journal, err) : rc;
        rc = rc == FC_OK ? put_in_place(a, journal, a->chain[first + n - 1]->number, err) : rc;
        fc_journal_free(journal);
        if (rc != FC_OK && first > 0) {
            return fc_context(err, rc, "%s: it has version %" PRId64 " now", a->path, a->chain[first - 1]->number);
        }
        FC_TRY(rc);
    }
    return FC_OK;
}

/* The copy of a full version gets its deltas before it replaces the model. */
static fc_code apply_full(applier *a, fc_error *err) {
    fc_progress *progress = a->options->work.progress;
    const char *staged = fc_arena_printf(a->arena, "%s/" SYNC_STAGED, a->path);
    fc_journal *journal = NULL;
    fc_code rc;
    FC_NEED(staged, err, a->path);
    FC_TRY_GOTO(fc_stage_version(a->full->path, a->path, progress, err), rc, out);
    FC_TRY_GOTO(read_model(a, staged, err), rc, out);
    for (size_t first = 0, n; first < a->count; first += n) {
        n = count_fitting(a, first);
        FC_TRY_GOTO(apply_rounds(a, first, n, NULL, err), rc, out);
    }
    FC_TRY_GOTO(fc_journal_new(a->path, &journal, err), rc, out);
    FC_TRY_GOTO(fc_stage_finish(a->path, journal, progress, err), rc, out);
    rc = put_in_place(a, journal, a->report->to, err);
out:
    if (rc == FC_OK || !fc_journal_is_committed(journal)) {
        fc_stage_remove(a->path);
    }
    fc_journal_free(journal);
    return rc;
}

/* ---- the whole ---- */

static fc_code apply_chain(applier *a, fc_error *err) {
    FC_TRY(choose_version(a, err));
    if (a->report->from == a->report->to) {
        return FC_OK;
    }
    FC_TRY(find_chain(a, err));
    if (a->full && !a->options->dry_run) {
        return apply_full(a, err);
    }
    FC_TRY(read_model(a, a->full ? a->full->path : a->path, err));
    return a->options->dry_run ? FC_OK : apply_in_place(a, err);
}

/* Completes what an earlier run began, and removes what it left behind. */
static fc_code recover(const applier *a, fc_error *err) {
    FC_TRY(fc_journal_replay(a->path, &a->report->replayed, a->options->work.progress, err));
    fc_stage_remove(a->path);
    return FC_OK;
}

static fc_code apply_locked(applier *a, fc_error *err) {
    int lock;
    fc_code rc = fc_sync_lock(a->path, a->options, &lock, err);
    rc = rc == FC_OK ? recover(a, err) : rc;
    rc = rc == FC_OK ? apply_chain(a, err) : rc;
    if (lock >= 0) {
        close(lock);
    }
    return rc;
}

static fc_code check_folders(applier *a, const char *updates, fc_error *err) {
    const char *folders[] = {updates, a->path};
    for (int i = 0; i < 2; i++) {
        bool is_folder;
        FC_TRY(fc_is_directory(folders[i], &is_folder, err));
        if (!is_folder) {
            return fc_fail(err, FC_EUSAGE, "%s: this is not the folder of %s", folders[i],
                           i == 0 ? "versions" : "a model");
        }
    }
    if (fc_is_remote(a->path)) {
        return fc_fail(
            err, FC_EUNSUPPORTED,
            "%s: is on a server, and files are changed in place only on this machine: download the model first",
            a->path);
    }
    if (!fc_zstd_is_built_in()) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", updates);
    }
    return fc_delta_versions_list(a->arena, updates, NULL, &a->versions, err);
}

fc_code fc_delta_apply(const char *updates, const char *model, const fc_delta_apply_options *options,
                       fc_delta_apply_report *report, fc_error *err) {
    applier a = {.path = model, .options = options, .report = report, .arena = fc_arena_new()};
    fc_code rc;
    *report = (fc_delta_apply_report){.replayed = FC_DELTA_NO_NUMBER, .full = FC_DELTA_NO_NUMBER};
    FC_TRY_GOTO(a.arena ? FC_OK : fc_no_memory(err, model), rc, out);
    FC_TRY_GOTO(check_folders(&a, updates, err), rc, out);
    if (options->dry_run) {
        FC_TRY_GOTO(fc_journal_look(model, &report->replayed, err), rc, out);
    }
    rc = options->dry_run ? apply_chain(&a, err) : apply_locked(&a, err);
out:
    fc_arena_free(a.arena);
    return rc;
}
