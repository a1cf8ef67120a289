/*
 * Looks at a delta or at all versions of a directory: their headers, and what follows from their numbers. frames.c
 * reads the frames.
 */
#include "delta/look.h"

#include "codec/zstd.h"
#include "delta/version.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "safetensors/files.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_INDEX = 1 << 30 };

/* ---- what a path is ---- */

/* The index of a delta has one of these words; that of a model hardly ever, so it is not parsed twice. */
static fc_code is_delta_index(const char *index, bool *is, fc_error *err) {
    char *text = NULL;
    size_t size = 0;
    FC_TRY(fc_read_whole(index, "an index", MOST_INDEX, &text, &size, err));
    *is = memmem(text, size, DELTA_ENCODING, sizeof DELTA_ENCODING - 1) ||
          memmem(text, size, DELTA_BASE, sizeof DELTA_BASE - 1);
    free(text);
    return FC_OK;
}

static fc_code has_versions(const char *path, bool *has, fc_error *err) {
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, path, err);
    *has = false;
    for (const char *name; rc == FC_OK && !*has && (name = fc_dir_next(&dir)) != NULL;) {
        *has = fc_delta_number_of(name) != FC_DELTA_NO_NUMBER;
    }
    return fc_dir_close(&dir, rc, err);
}

static fc_code recognise(const char *path, fc_delta_place *out, fc_error *err) {
    char index[PATH_MAX];
    fc_error ignored = {FC_OK};
    bool is = false;
    *out = FC_DELTA_NOWHERE;
    if (fc_is_directory(path, &is, &ignored) != FC_OK || !is) {
        return FC_OK; /* whoever opens it says why */
    }
    if (fc_find_in(path, ST_INDEX_NAME, index, &ignored)) {
        if (is_delta_index(index, &is, &ignored) != FC_OK || !is) {
            return FC_OK;
        }
        fc_arena *arena = fc_arena_new();
        fc_delta_version v;
        FC_NEED(arena, err, path);
        const fc_code rc = fc_delta_version_open(arena, path, &v, &ignored);
        fc_arena_free(arena);
        *out = rc != FC_OK || v.base != FC_DELTA_NO_NUMBER ? FC_DELTA_VERSION : FC_DELTA_NOWHERE;
        return FC_OK;
    }
    FC_TRY(has_versions(path, &is, err));
    *out = is ? FC_DELTA_VERSIONS : FC_DELTA_NOWHERE;
    return FC_OK;
}

fc_code fc_delta_recognise(const char *path, fc_delta_place *out, fc_error *err) {
    const char *cached = NULL;
    *out = FC_DELTA_NOWHERE;
    if (!fc_is_remote(path)) {
        return recognise(path, out, err);
    }
    fc_arena *arena = fc_arena_new();
    FC_NEED(arena, err, path);
    fc_code rc = fc_hub_snapshot(path, arena, &cached, err); /* a model of the hub may be here */
    rc = rc == FC_OK ? recognise(cached ? cached : path, out, err) : rc;
    fc_arena_free(arena);
    return rc;
}

/* ---- headers ---- */

static void report_fault(fc_delta_looking *l, const fc_delta_fault *fault) {
    if (l->options->report) {
        l->options->report(l->options->context, fault);
    }
}

static void report_damage(void *context, const fc_delta_version *v, const fc_error *why) {
    report_fault(context, &(fc_delta_fault){.kind = FC_DELTA_DAMAGED,
                                            .code = why->code,
                                            .path = v->path,
                                            .number = v->number,
                                            .message = why->message});
}

/* Reads the headers of the tensors of a full version, whose bytes and sizes help with the deltas. */
static fc_code read_full_version(fc_delta_looking *l, fc_delta_looked *looked, fc_error *err) {
    fc_sync_model *model = fc_arena_calloc(l->headers, 1, sizeof *model);
    FC_NEED(model, err, looked->version->path);
    FC_TRY(fc_sync_model_read(l->headers, looked->version->path, model, err));
    looked->full = model;
    looked->seen->tensors = model->ntensors;
    looked->seen->files = model->nfiles;
    for (size_t i = 0; i < model->ntensors; i++) {
        looked->seen->stored_bytes += model->tensors[i].size; /* within files */
    }
    return FC_OK;
}

static fc_code list_frames(fc_delta_looking *l, const fc_delta_version *v, fc_delta_seen *seen, fc_error *err) {
    seen->frames = fc_arena_calloc(l->arena, v->ntensors + 1, sizeof *seen->frames);
    FC_NEED(seen->frames, err, v->path);
    for (size_t i = 0; i < v->ntensors; i++) {
        const fc_delta_tensor *t = &v->tensors[i];
        seen->frames[i] = (fc_delta_changed){.name = fc_arena_strndup(l->arena, t->name, strlen(t->name)),
                                             .stored_bytes = t->size,
                                             .bytes = FC_DELTA_UNKNOWN};
        FC_NEED(seen->frames[i].name, err, v->path);
    }
    seen->tensors = v->ntensors;
    seen->files = v->nfiles;
    seen->stored_bytes = v->stored_bytes;
    seen->encoding = v->encoding;
    seen->checksum = v->checksum;
    return FC_OK;
}

static fc_code look_at_headers(fc_delta_looking *l, fc_delta_version *v, fc_delta_looked *looked, fc_error *err) {
    const fc_delta_damage damage = {report_damage, l};
    fc_delta_seen *seen = looked->seen;
    *looked = (fc_delta_looked){.version = v, .seen = seen, .root = FC_DELTA_NO_ROOT};
    *seen = (fc_delta_seen){
        .path = fc_arena_strndup(l->arena, v->path, strlen(v->path)), .number = v->number, .base = v->base};
    FC_NEED(seen->path, err, v->path);
    FC_TRY(fc_progress_count(l->options->work.progress, 0, err));
    if (!v->damaged) {
        seen->full = v->base == FC_DELTA_NO_NUMBER;
        const fc_code rc = seen->full ? read_full_version(l, looked, err) : fc_delta_version_read(l->headers, v, err);
        FC_TRY(fc_delta_keep_damage(&damage, v, rc, err));
    }
    seen->damaged = v->damaged;
    if (v->damaged) {
        v->ntensors = 0;
        looked->full = NULL;
        return FC_OK;
    }
    return seen->full ? FC_OK : list_frames(l, v, seen, err);
}

static fc_code look_at_all_headers(fc_delta_looking *l, fc_delta_survey *out, fc_error *err) {
    const size_t count = l->all.count;
    l->looked = fc_arena_calloc(l->headers, count, sizeof *l->looked);
    out->versions = fc_arena_calloc(l->arena, count, sizeof *out->versions);
    FC_NEED(l->looked && out->versions, err, l->all.path);
    out->count = count;
    for (size_t i = 0; i < count; i++) {
        l->looked[i].seen = &out->versions[i];
        FC_TRY(look_at_headers(l, &l->all.versions[i], &l->looked[i], err));
    }
    return FC_OK;
}

/* ---- chains ---- */

static void report_gap(fc_delta_looking *l, const fc_delta_version *v) {
    fc_error line;
    (void)fc_fail(&line, FC_ECORRUPT, "%s: version %" PRId64 " changes version %" PRId64 ", which is not there",
                  v->path, v->number, v->base);
    report_fault(l, &(fc_delta_fault){.kind = FC_DELTA_GAP,
                                      .code = line.code,
                                      .path = v->path,
                                      .number = v->number,
                                      .other = v->base,
                                      .message = line.message});
}

static void report_fork(fc_delta_looking *l, const fc_delta_version *v, int64_t last) {
    fc_error line;
    (void)fc_fail(&line, FC_ECORRUPT,
                  "%s: version %" PRId64 " does not lead to version %" PRId64 ": the versions fork there", v->path,
                  v->number, last);
    report_fault(l, &(fc_delta_fault){.kind = FC_DELTA_FORK,
                                      .code = line.code,
                                      .path = v->path,
                                      .number = v->number,
                                      .other = last,
                                      .message = line.message});
}

/* Notes for the deltas of a chain which full version they begin with, up to the first one that is damaged. */
static void set_roots(fc_delta_looking *l, fc_delta_version *const *chain, size_t count, const fc_delta_version *end) {
    for (size_t i = 0; end && !end->damaged && i < count && !chain[i]->damaged; i++) {
        l->looked[chain[i] - l->all.versions].root = (size_t)(end - l->all.versions);
    }
}

/* Follows the chains back from the newest version; the next one ends before the first version of the last one. */
static fc_code look_at_chains(fc_delta_looking *l, fc_error *err) {
    fc_delta_version **chain = fc_arena_calloc(l->headers, l->all.count, sizeof(fc_delta_version *));
    FC_NEED(chain, err, l->all.path);
    for (size_t left = l->all.count; left > 0;) {
        fc_delta_version *last = &l->all.versions[left - 1], *end;
        const size_t count = fc_delta_walk_back(&l->all, last, chain, &end);
        size_t at = 0;
        for (const fc_delta_version *v; count > 0 && (v = fc_delta_next_fork(&l->all, chain, count, &at)) != NULL;) {
            if (!v->damaged) {
                report_fork(l, v, last->number);
            }
        }
        if (!end && fc_delta_is_gap(&l->all, chain[0])) {
            report_gap(l, chain[0]);
        }
        set_roots(l, chain, count, end);
        const int64_t before = end ? end->number : chain[0]->base;
        while (left > 0 && l->all.versions[left - 1].number >= before) {
            left--;
        }
    }
    return FC_OK;
}

/* ---- all ---- */

static fc_code list_versions(fc_delta_looking *l, const char *path, fc_error *err) {
    const fc_delta_damage damage = {report_damage, l};
    fc_delta_place place;
    FC_TRY(fc_delta_recognise(path, &place, err));
    if (place != FC_DELTA_VERSION) {
        return fc_delta_versions_list(l->headers, path, &damage, &l->all, err);
    }
    l->all = (fc_delta_versions){
        .path = path, .versions = fc_arena_calloc(l->headers, 1, sizeof(fc_delta_version)), .count = 1};
    FC_NEED(l->all.versions, err, path);
    const fc_code rc = fc_delta_version_open(l->headers, path, l->all.versions, err);
    return fc_delta_keep_damage(&damage, l->all.versions, rc, err);
}

static fc_code look(fc_delta_looking *l, const char *path, fc_delta_survey *out, fc_error *err) {
    FC_TRY(list_versions(l, path, err));
    FC_TRY(look_at_all_headers(l, out, err));
    FC_TRY(look_at_chains(l, err));
    FC_TRY(l->options->depth > FC_DELTA_HEADERS ? fc_delta_look_at_frames(l, err) : FC_OK);
    out->bytes_read = l->bytes_read;
    return FC_OK;
}

fc_code fc_delta_look(const char *path, const fc_delta_look_options *options, fc_arena *arena, fc_delta_survey *out,
                      fc_error *err) {
    fc_delta_looking l = {.options = options, .arena = arena, .headers = fc_arena_new()};
    fc_error why = {FC_OK};
    *out = (fc_delta_survey){NULL, 0, 0};
    fc_code rc = l.headers ? FC_OK : fc_no_memory(&why, path);
    if (rc == FC_OK && options->depth > FC_DELTA_HEADERS && !fc_zstd_is_built_in()) {
        rc = fc_fail(&why, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", path);
    }
    rc = rc == FC_OK ? look(&l, path, out, &why) : rc;
    fc_arena_free(l.headers);
    if (rc != FC_OK && err) {
        *err = why;
    }
    return rc;
}
