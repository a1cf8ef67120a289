/*
 * diff: compares two checkpoints tensor by tensor. Passes options to fc_compare_paths and prints its report.
 */
#include "commands/diff_print.h"
#include "options/command.h"
#include "recipe.h"
#include "signals.h"
#include "source.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

/* One comparison: its options, open checkpoints and report. */
typedef struct job {
    const options *o;
    fc_checkpoint *a, *b;
    fc_selection selection;
    fc_compare_options how;
    const cli_call *call;
    fc_compare_report report;
} job;

static void prepare_diff(job *j) {
    const options *o = j->o;
    j->selection = source_selection(o);
    j->how = (fc_compare_options){.selection = &j->selection,
                                  .tolerant = option_given(o, OPT_RTOL) || option_given(o, OPT_ATOL),
                                  .rtol = o->rtol,
                                  .atol = o->atol,
                                  .equal_nan = o->equal_nan,
                                  .data = o->data,
                                  .quick = options_silent(o),
                                  .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = j->call->progress},
                                  .open = {.follow_external = o->follow_external,
                                           .others = source_others(j->call),
                                           .progress = j->call->progress,
                                           .session = j->call->session}};
}

static fc_code compare_sources(job *j, fc_error *err) {
    const options *o = j->o;
    fc_checkpoint *model = NULL;
    fc_code rc;
    signals_cancel(j->call->progress);
    if (j->a) {
        rc = fc_compare(j->a, j->b, &j->how, j->call->arena, &j->report, err);
        goto out;
    }
    FC_TRY_GOTO(source_model(j->call, &model, err), rc, out);
    j->how.model = model;
    FC_TRY_GOTO(
        fc_compare_paths(o->operands[0], o->operands[1], &j->how, j->call->arena, &j->a, &j->b, &j->report, err), rc,
        out);
    if (o->schema && !fc_was_flat(j->a) && !fc_was_flat(j->b)) {
        rc = fc_fail(err, FC_EUSAGE,
                     "%s, %s: neither has flat parameters of FSDP1, so --schema does not apply; leave it out",
                     o->operands[0], o->operands[1]);
    }
out:
    signals_cancel(NULL);
    fc_checkpoint_close(model);
    j->how.model = NULL;
    return rc;
}

static fc_code show_report(const job *j, fc_error *err) {
    diff_view d = {.a = j->a ? j->a->path : j->o->operands[0],
                   .b = j->b ? j->b->path : j->o->operands[1],
                   .options = &j->how,
                   .verbose = j->o->verbose > 0,
                   .report = &j->report};
    beside sides[2];
    if (j->a && j->b && !d.verbose && !j->o->json) {
        FC_TRY(beside_find(j->a, j->b, j->call->arena, &sides[0], err));
        FC_TRY(beside_find(j->b, j->a, j->call->arena, &sides[1], err));
        d.beside[0] = &sides[0];
        d.beside[1] = &sides[1];
    }
    if (j->report.idle_exclude) {
        source_add_note(j->call, "%s and %s: %s", d.a, d.b, j->report.idle_exclude);
    }
    if (!options_silent(j->o)) {
        (j->o->json ? diff_print_json : diff_print_text)(j->call->out, &d);
    }
    if (j->report.damage != FC_OK) { /* it explains the differences, or makes the comparison meaningless */
        *err = j->report.damaged;
        return j->report.damage;
    }
    return j->report.different + j->report.only_a + j->report.only_b > 0 ? FC_EFOUND : FC_OK;
}

static fc_code run_diff(cli_call *call, fc_error *err) {
    job j = {.o = call->options, .call = call};
    options rest;
    fc_code rc;
    FC_TRY_GOTO(recipe_check_options(j.o, err), rc, out);
    if (recipe_changes(j.o) || j.o->model_only) {
        FC_TRY_GOTO(recipe_open(call, &rest, j.o->operands[0], false, &j.a, err), rc, out);
        j.o = call->options;
        FC_TRY_GOTO(source_open(call, j.o->operands[1], false, &j.b, err), rc, out);
    }
    prepare_diff(&j);
    FC_TRY_GOTO(compare_sources(&j, err), rc, out);
    rc = show_report(&j, err);
out:
    fc_checkpoint_close(j.a);
    fc_checkpoint_close(j.b);
    return rc;
}

static const option_help helps[] = {
    {OPT_RECIPE,
     "give the tensors of A the names and layouts of another program: the name of a shipped recipe (see "
     "'fsdpckpt recipes'), a JSON file, or auto. --include, --exclude, --strip-prefix and --rename then apply "
     "to A only, before the recipe"},
    {OPT_VERBOSE, "also list values that are the same"},
    {OPT_QUIET, "print nothing and, without --json, stop at the first difference; the exit status is the result"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt diff ckpt/ model.h5",
    "does the file hold the same bits as the shards?",
    "fsdpckpt diff bf16.h5 fp32.h5 --rtol 1e-2 --atol 1e-6",
    "how far apart are they?",
    "fsdpckpt diff old/ new/ --exclude 'optim.*' -q && echo same",
    "in a script",
    NULL,
};

const command command_diff = {
    .name = "diff",
    .operands = "A B",
    .summary = "compare two checkpoints tensor by tensor",
    .description =
        "Compares the values of A and B in any formats and layouts, and shows each difference: how many elements "
        "differ, the largest deviation, and the first element that differs. Without a tolerance every bit counts: 0 "
        "and -0 differ, and a NaN equals only a NaN with the same bits. Where both record the same digest, the data is "
        "not read: a digest describes the data that was written, and --data reads the data that is there now. Objects "
        "with different bytes are equal if they decode to the same value.\n\nWith --rtol or --atol, elements are "
        "compared in float64 like numpy.isclose(A, B, rtol, atol, equal_nan): B is the reference, a NaN equals nothing "
        "without --equal-nan, and dtypes may differ.\n\nThe exit status is 1 if there are differences and 0 if there "
        "are none. It is 3 if data that was read does not match the CRCs of a torch archive or the digests of "
        "fsdpckpt; the damage is reported after the list. --strip-prefix and --rename apply to both sides; globs match "
        "names before or after renaming.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_RTOL) | TAKES(OPT_ATOL) | TAKES(OPT_EQUAL_NAN) |
             TAKES(OPT_DATA) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES_EXTERNAL |
             TAKES(OPT_SCHEMA) | TAKES(OPT_JSON),
    .usual = TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_RENAME) | TAKES(OPT_RECIPE) |
             TAKES(OPT_DATA) | TAKES(OPT_RTOL) | TAKES(OPT_ATOL) | TAKES(OPT_JSON) | TAKES(OPT_QUIET),
    .run = run_diff,
};
