/*
 * Checks versions by their headers: what fc_delta_look reports becomes findings, and each full version is checked like
 * any checkpoint.
 */
#include "check/check.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* What is wrong with one version. */
typedef struct version_fault {
    fc_delta_fault_kind kind;
    int64_t number;
    const char *path, *message; /* in the arena */
    struct version_fault *next; /* the one before */
} version_fault;

typedef struct version_check {
    fc_check_run run;
    version_fault *faults;
} version_check;

static void keep_fault(void *context, const fc_delta_fault *fault) {
    version_check *c = context;
    version_fault *f = fc_check_alloc(&c->run, 1, sizeof *f);
    if (f) {
        *f = (version_fault){.kind = fault->kind,
                             .number = fault->number,
                             .path = fc_check_text(&c->run, "%s", fault->path),
                             .message = fc_check_text(&c->run, "%s", fault->message),
                             .next = c->faults};
        c->faults = f;
    }
}

static const char *keep_text(fc_check_run *c, const char *text) {
    return text ? fc_check_text(c, "%s", text) : NULL;
}

/* Adds a finding of a full version, whose checkpoint is closed afterwards. */
static void keep_finding(fc_check_run *c, const fc_finding *found) {
    fc_finding f = *found;
    const char **names = f.names ? fc_check_alloc(c, f.count, sizeof *names) : NULL;
    for (size_t i = 0; names && i < f.count; i++) {
        names[i] = keep_text(c, f.names[i]);
    }
    f.names = names;
    f.name = keep_text(c, f.name);
    f.other = keep_text(c, f.other);
    f.found = keep_text(c, f.found);
    f.expected = keep_text(c, f.expected);
    f.detail = keep_text(c, f.detail);
    fc_check_add(c, &f);
    if (c->count > 0) {
        c->findings[c->count - 1].fix = (fc_fix){FC_SETTING_NONE, NULL, 0}; /* its values are of the checkpoint */
    }
}

/* @param errors receives how many errors were found. */
static fc_code check_full(fc_check_run *c, const char *path, size_t *errors, fc_error *err) {
    fc_checkpoint *checkpoint = NULL;
    fc_report report;
    const fc_check_options how = {.setting_names = c->options->setting_names, .open = c->options->open};
    const fc_code rc = fc_check_path(path, &how, c->arena, &checkpoint, &report, err);
    for (size_t i = 0; rc == FC_OK && i < report.count; i++) {
        c->path = path;
        keep_finding(c, &report.findings[i]);
    }
    *errors = rc == FC_OK ? report.errors : 0;
    fc_checkpoint_close(checkpoint);
    return rc;
}

static void add_faults(version_check *c, int64_t number, bool damage) {
    static const fc_finding_kind kinds[] = {[FC_DELTA_DAMAGED] = FC_FOUND_VERSION_DAMAGED,
                                            [FC_DELTA_GAP] = FC_FOUND_VERSION_GAP,
                                            [FC_DELTA_FORK] = FC_FOUND_VERSION_FORK};
    for (const version_fault *f = c->faults; f; f = f->next) {
        if (f->number == number && (damage || f->kind != FC_DELTA_DAMAGED)) {
            fc_check_add(&c->run, &(fc_finding){.kind = kinds[f->kind], .name = f->path, .detail = f->message});
        }
    }
}

static fc_code check_versions(version_check *c, const char *path, fc_report *out, fc_error *err) {
    const fc_delta_look_options how = {.depth = FC_DELTA_HEADERS,
                                       .report = keep_fault,
                                       .context = c,
                                       .work = {.progress = c->run.options->open.progress}};
    fc_delta_survey survey;
    size_t tensors = 0;
    fc_progress_begin(how.work.progress, FC_PHASE_CHECKING, FC_COUNTED_TENSORS, 0);
    FC_TRY(fc_delta_look(path, &how, c->run.arena, &survey, err));
    for (size_t i = 0; i < survey.count; i++) {
        const fc_delta_seen *v = &survey.versions[i];
        size_t errors = 0;
        if (v->full) {
            FC_TRY(check_full(&c->run, v->path, &errors, err));
        }
        add_faults(c, v->number, errors == 0); /* check_full says what is damaged in more detail */
        tensors += v->tensors;
    }
    c->run.path = path;
    fc_check_sum_up(&c->run, out);
    out->tensors = tensors;
    return c->run.no_memory ? fc_no_memory(err, path) : FC_OK;
}

fc_code fc_delta_check(const char *path, const fc_check_options *options, fc_arena *arena, fc_report *out,
                       fc_error *err) {
    version_check c = {.run = {.path = path, .options = options, .arena = arena}};
    *out = (fc_report){0};
    return check_versions(&c, path, out, err);
}
