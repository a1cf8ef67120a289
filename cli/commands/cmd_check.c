/*
 * check: tests whether a checkpoint is consistent and fits a reference or a mesh. Passes options to fc_check_path and
 * prints its report to stdout and to the file of --junit.
 */
#include "commands/check_print.h"
#include "options/command.h"
#include "options/hint.h"
#include "out_file.h"
#include "recipe.h"
#include "source.h"
#include "target.h"
#include "versions.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* One check: its options, open checkpoints and report. */
typedef struct job {
    const options *o;
    fc_checkpoint *reference, *checkpoint;
    fc_mesh mesh;
    const fc_tp_plan *plan;
    fc_selection selection;
    fc_check_options how;
    fc_report report;
    const cli_call *call;
    fc_progress *progress;
    bool versions; /* SRC is a delta or a directory of versions */
} job;

static fc_code open_reference(job *j, fc_error *err) {
    const options *o = j->o;
    const char *path = o->schema ? o->schema : o->against;
    if (o->schema && o->against) {
        return fc_fail(err, FC_EUSAGE, "check: --against and --schema both name a reference; give only one");
    }
    if (!path && (option_given(o, OPT_ALLOW_MISSING) || option_given(o, OPT_ALLOW_UNEXPECTED))) {
        return fc_fail(err, FC_EUSAGE, "check: --allow-missing and --allow-unexpected need --against or --schema");
    }
    if (!path) {
        return FC_OK;
    }
    const fc_open_options how = {.headers_only = true,
                                 .follow_external = o->follow_external,
                                 .others = j->how.open.others,
                                 .progress = j->progress,
                                 .session = j->call->session};
    FC_TRY(fc_check_given(path, o->schema ? "a schema" : "a checkpoint or a schema", err));
    FC_TRY(fc_checkpoint_open_model(path, &how, NULL, &j->reference, err));
    if (o->schema && !j->reference->format->layout_only) {
        return fc_fail(err, FC_EUSAGE, "--schema %s: is a checkpoint (%s), not a schema; use --against", path,
                       j->reference->format->description);
    }
    FC_TRY(source_take_model(j->call, &j->reference, err));
    j->how.reference = j->reference;
    if (!fc_flat_parameter(j->reference, NULL) && fc_knows_model_order(j->reference, NULL)) {
        j->how.model = j->reference;
    }
    return FC_OK;
}

static fc_code read_mesh(job *j, fc_error *err) {
    const options *o = j->o;
    fc_layout_spec spec = {.replicas = o->replicas, .dp = o->dp, .tp = o->tp};
    if (o->tp_plan && o->tp == 0) {
        return fc_fail(err, FC_EUSAGE, "check: --tp-plan needs --tp N, the number of tensor-parallel ranks");
    }
    if (o->dp == 0 && o->tp == 0 && o->replicas == 0) {
        return FC_OK;
    }
    FC_TRY(fc_layout_mesh(&spec, &j->mesh, err));
    j->how.mesh = &j->mesh;
    if (o->tp > 0) {
        FC_TRY(fc_tp_plan_load(o->tp_plan, j->call->arena, &j->plan, err));
        j->how.tp_plan = j->plan;
    }
    return FC_OK;
}

static fc_code prepare_check(job *j, fc_error *err) {
    const options *o = j->o;
    j->selection = source_selection(o);
    j->how.selection = &j->selection;
    j->how.setting_names = hint_settings;
    j->how.allow_missing = o->allow_missing.items;
    j->how.allow_unexpected = o->allow_unexpected.items;
    j->how.open.follow_external = o->follow_external;
    j->how.open.progress = j->progress;
    j->how.open.session = j->call->session;
    if (o->json && o->github) {
        return fc_fail(err, FC_EUSAGE, "check: choose one of --json and --github");
    }
    if (o->junit) {
        FC_TRY(target_check(o->junit, &target_xml, err));
    }
    FC_TRY(read_mesh(j, err));
    return open_reference(j, err);
}

/* The report of an earlier run may be replaced, but no other file. */
static bool is_xml(const char *path) {
    char head[5] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool xml =
        fd >= 0 && read(fd, head, sizeof head) == (ssize_t)sizeof head && memcmp(head, "<?xml", sizeof head) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return xml;
}

static fc_code write_junit(void *context, text_out *out, fc_error *err) {
    (void)err;
    check_print_junit(out, context);
    return FC_OK;
}

static fc_code show_report(const job *j, text_out *out, fc_error *err) {
    const options *o = j->o;
    check_view c = {.path = j->checkpoint ? j->checkpoint->path : o->operands[0],
                    .reference = j->reference ? j->reference->path : NULL,
                    .schema = o->schema,
                    .mesh = j->how.mesh != NULL,
                    .versions = j->versions,
                    .report = &j->report};
    beside sides[2];
    if (j->checkpoint && j->reference && !o->verbose && !o->json && !o->github) {
        FC_TRY(beside_find(j->checkpoint, j->reference, j->call->arena, &sides[0], err));
        FC_TRY(beside_find(j->reference, j->checkpoint, j->call->arena, &sides[1], err));
        c.beside[0] = &sides[0];
        c.beside[1] = &sides[1];
    }
    bool replaced = o->force || (o->junit && is_xml(o->junit));
    if (j->checkpoint) {
        source_report(o, j->checkpoint);
    }
    if (j->report.idle_exclude) {
        source_add_note(j->call, "%s: %s", c.path, j->report.idle_exclude);
    }
    if (o->junit) {
        FC_TRY(out_file(o, j->checkpoint, o->junit, replaced, 0, write_junit, &c, err));
    }
    if (!options_silent(o)) {
        (o->json ? check_print_json : o->github ? check_print_github : check_print_text)(out, &c);
    }
    return FC_OK;
}

static fc_code run_check(cli_call *call, fc_error *err) {
    job j = {
        .o = call->options, .call = call, .progress = call->progress, .how = {.open = {.others = source_others(call)}}};
    options rest;
    fc_code rc;
    FC_TRY(recipe_check_options(j.o, err));
    FC_TRY(versions_meant(call, TAKES(OPT_JSON) | TAKES(OPT_GITHUB) | TAKES(OPT_JUNIT) | TAKES(OPT_FORCE), &j.versions,
                          err));
    if (recipe_changes(j.o) || j.o->model_only) { /* damage is then an error, not a finding */
        FC_TRY(recipe_open(call, &rest, j.o->operands[0], true, &j.checkpoint, err));
        j.o = call->options;
    }
    FC_TRY_GOTO(prepare_check(&j, err), rc, out);
    rc = j.versions     ? fc_delta_check(j.o->operands[0], &j.how, call->arena, &j.report, err)
         : j.checkpoint ? fc_check(j.checkpoint, &j.how, call->arena, &j.report, err)
                        : fc_check_path(j.o->operands[0], &j.how, call->arena, &j.checkpoint, &j.report, err);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(show_report(&j, call->out, err), rc, out);
    rc = j.report.errors > 0 ? FC_EFOUND : FC_OK;
out:
    fc_checkpoint_close(j.checkpoint);
    fc_checkpoint_close(j.reference);
    return rc;
}

static const option_help helps[] = {
    {OPT_DP, "check against a mesh of N data-parallel ranks (FSDP)"},
    {OPT_TP, "check against a mesh of N tensor-parallel ranks, sharded as the TP plan defines"},
    {OPT_REPLICAS, "check against a mesh of N replicas (HSDP)"},
    {OPT_SCHEMA, "file from 'fsdpckpt schema' with the expected names, shapes and dtypes; it also describes the "
                 "contents of FSDP1's flat parameters"},
    {OPT_FORCE, "replace the file of --junit even if it is not XML"},
    {OPT_QUIET, "print nothing except for --json; the exit status is the result"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt check ckpt/",
    "is it complete?",
    "fsdpckpt check ckpt/ --schema model.json --github",
    "does it still fit the model? prints annotations for a pull request",
    "fsdpckpt check ckpt/ --against last-week/ --exclude 'optim.*' --junit report.xml",
    "the same, compared with another checkpoint, without the optimizer",
    "fsdpckpt check ckpt/ --dp 8 --tp 2",
    "does it fit that mesh?",
    NULL,
};

const command command_check = {
    .name = "check",
    .operands = "SRC",
    .summary = "check that a checkpoint is complete and fits a model or a mesh",
    .description = "Checks that all files of SRC exist and that its chunks cover every tensor exactly once; that "
                   "optimizer state belongs to parameters; with --against or --schema, that names, shapes and dtypes "
                   "are the expected ones; and with --dp, --tp and --replicas, that SRC fits that mesh. Reports all "
                   "findings in one run, each with the option that fixes it, if there is one. Reads headers only, "
                   "which takes milliseconds; verify checks the data.\n\nIn a directory of versions it finds those "
                   "that are damaged or "
                   "incomplete, whose base is missing, or that do not lead to the newest one.\n\nThe exit status is 1 "
                   "if there are errors, and "
                   "0 if there are only warnings or no findings. --strip-prefix and --rename apply to SRC and show "
                   "what would remain after a conversion with them; globs match names before or after renaming.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_AGAINST) | TAKES(OPT_SCHEMA) | TAKES(OPT_DP) |
             TAKES(OPT_TP) | TAKES(OPT_REPLICAS) | TAKES(OPT_TP_PLAN) | TAKES(OPT_ALLOW_MISSING) |
             TAKES(OPT_ALLOW_UNEXPECTED) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) | TAKES(OPT_JUNIT) | TAKES(OPT_GITHUB) | TAKES(OPT_FORCE) |
             TAKES_EXTERNAL | TAKES(OPT_JSON),
    .usual = TAKES(OPT_AGAINST) | TAKES(OPT_SCHEMA) | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_MODEL_ONLY) |
             TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_ALLOW_MISSING) | TAKES(OPT_JUNIT) | TAKES(OPT_JSON),
    .run = run_check,
};
