/*
 * inspect: shows the contents and the layout of a checkpoint.
 */
#include "inspect/inspect.h"
#include "options/command.h"
#include "options/suggest.h"
#include "out_file.h"
#include "recipe.h"
#include "signals.h"
#include "source.h"
#include "target.h"
#include "versions.h"

#include <string.h>

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

/* @return the value of this name, or the first of a folded line whose name was copied from the list; or NULL. */
static const fc_tensor *find_one(const inspection *in, const char *name) {
    for (size_t i = 0; i < in->checkpoint->ntensors; i++) {
        if (strcmp(in->checkpoint->tensors[i].name, name) == 0) {
            return &in->checkpoint->tensors[i];
        }
    }
    for (size_t i = 0; i < in->nlines; i++) {
        if (strcmp(in->lines[i].name, name) == 0) {
            return in->lines[i].first;
        }
    }
    return NULL;
}

static fc_code show_one(inspection *in, const options *o, const fc_stats_options *stats, fc_error *err) {
    const fc_tensor *t = find_one(in, o->tensor);
    if (t && o->stats) {
        FC_TRY(inspect_read_stats(in, &t, 1, stats, err));
    }
    if (t) {
        return o->json ? inspect_tensor_json(in, t, err) : inspect_tensor(in, t, err);
    }
    const fc_checkpoint *c = in->checkpoint;
    return suggest_name(c->path, c->ntensors ? &c->tensors[0].name : NULL, sizeof *c->tensors, c->ntensors, o->tensor,
                        err);
}

static fc_code write_page(void *context, text_out *out, fc_error *err) {
    inspection *in = context;
    text_out *before = in->out;
    in->out = out;
    fc_code rc = inspect_html(in, err);
    in->out = before;
    return rc;
}

static fc_code show_view(inspection *in, const options *o, const fc_stats_options *stats, fc_error *err) {
    if (o->html) {
        return out_file(o, in->checkpoint, o->html, o->force, 0, write_page, in, err);
    }
    if (o->tensor) {
        return show_one(in, o, stats, err);
    }
    return o->json ? inspect_json(in, err) : o->tree ? inspect_tree(in, err) : inspect_text(in, err);
}

static fc_code show_checkpoint(cli_call *call, const fc_checkpoint *checkpoint, fc_error *err) {
    const options *o = call->options;
    const fc_stats_options stats = {.histograms = o->json || o->html,
                                    .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress}};
    const inspect_options how = {.include = o->include.items,
                                 .exclude = o->exclude.items,
                                 .sort = (inspect_sort)o->sort,
                                 .depth = o->depth,
                                 .all = o->all,
                                 .headers_only = o->headers_only,
                                 .stats = o->stats && !o->tensor ? &stats : NULL};
    inspection in;
    fc_code rc;
    signals_cancel(call->progress);
    FC_TRY_GOTO(inspect_begin(&in, checkpoint, &how, call->out, err), rc, out);
    FC_TRY_GOTO(show_view(&in, o, &stats, err), rc, out);
    if (in.worst != FC_OK) {
        rc = in.worst;
        *err = in.first;
    }
out:
    signals_cancel(NULL);
    inspect_end(&in);
    return rc;
}

static fc_code run_inspect(cli_call *call, fc_error *err) {
    const options *o = call->options;
    if ((o->tree && (o->json || o->tensor)) || (o->html && (o->tree || o->json || o->tensor))) {
        return fc_fail(err, FC_EUSAGE,
                       "inspect: choose one of --tree, --json, --tensor and --html (only --tensor NAME and --json can "
                       "be combined)");
    }
    if (o->depth && (o->json || o->tensor || o->html)) {
        return fc_fail(err, FC_EUSAGE, "inspect: --depth applies to the list and to --tree only");
    }
    if (o->stats && (o->tree || o->depth || o->headers_only)) {
        return fc_fail(err, FC_EUSAGE, "inspect: --stats cannot be combined with --tree, --depth and --headers-only");
    }
    if (!o->recipe && (o->strip_prefix || o->rename.count)) {
        return fc_fail(err, FC_EUSAGE, "inspect: --strip-prefix and --rename change names only together with --recipe");
    }
    if (o->html) {
        FC_TRY(target_check(o->html, &target_html, err));
    }
    bool versions;
    FC_TRY(versions_meant(call,
                          TAKES(OPT_JSON) | TAKES(OPT_TENSOR) | TAKES(OPT_STATS) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY),
                          &versions, err));
    if (versions) {
        return versions_inspect(call, err);
    }
    fc_checkpoint *checkpoint = NULL;
    options rest;
    FC_TRY(recipe_open(call, &rest, o->operands[0], o->headers_only, &checkpoint, err));
    source_report(o, checkpoint);
    fc_code rc = source_note_selection(call, checkpoint, false, err);
    if (rc == FC_OK && o->stats && checkpoint->format->layout_only) {
        rc = fc_fail(err, FC_EUSAGE, "%s: a schema has no data: leave --stats out", checkpoint->path);
    }
    /* with -q, opening it was the whole test */
    if (rc == FC_OK && (o->html || !options_silent(o))) {
        rc = show_checkpoint(call, checkpoint, err);
    }
    fc_checkpoint_close(checkpoint);
    return rc;
}

static const option_help helps[] = {
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {OPT_STRIP_PREFIX,
     "with --recipe: remove PREFIX, and a dot that follows it, from the start of names before the recipe is "
     "applied"},
    {OPT_RENAME,
     "with --recipe: change names before it is applied, as sed -E does: s/regex/replacement/, with \\1, &, any "
     "delimiter and the flags g and i (repeatable, applied in order)"},
    {OPT_FORCE, "replace the file of --html if it exists"},
    {OPT_QUIET, "print nothing except for --json; the exit status is 0 if SRC opens and all its files exist"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt inspect ckpt/",
    "a summary and a table of the tensors",
    "fsdpckpt inspect ckpt/ --tensor model.tok_embeddings.weight",
    "one tensor, with its chunks drawn as a grid of ranks",
    "fsdpckpt inspect ckpt/ --headers-only --json | jq '.tensors[].name'",
    "the names only; the data files may be absent",
    "fsdpckpt inspect ckpt/ --stats",
    "mean, deviation, extremes and NaN of every tensor; this reads all data",
    "fsdpckpt inspect updates/ --stats",
    "versions of a model: what each stores, and what share it changes",
    NULL,
};

const command command_inspect = {
    .name = "inspect",
    .operands = "SRC",
    .summary = "show the contents and the layout of a checkpoint",
    .description =
        "Shows the format, the layout, the files and every tensor of SRC with its type, its shape and the "
        "grid of its chunks. Reads headers only, and the few bytes of the objects (step, lr, ...), which "
        "are decoded without executing anything. With --stats it reads all data, once.\n\nIf SRC is a delta or "
        "a directory of versions, it shows the versions with what each stores, and --stats also what share of "
        "the bytes and elements each changes; --tensor does so for one tensor.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) |
             TAKES(OPT_TREE) | TAKES(OPT_ALL) | TAKES(OPT_STATS) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) |
             TAKES(OPT_SORT) | TAKES(OPT_DEPTH) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_TENSOR) | TAKES(OPT_HTML) | TAKES(OPT_HEADERS_ONLY) | TAKES_EXTERNAL | TAKES(OPT_SCHEMA) |
             TAKES(OPT_TP_PLAN) | TAKES(OPT_JSON) | TAKES(OPT_FORCE),
    .usual = TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_TENSOR) | TAKES(OPT_TREE) |
             TAKES(OPT_ALL) | TAKES(OPT_SORT) | TAKES(OPT_HTML) | TAKES(OPT_STATS) | TAKES(OPT_JSON),
    .run = run_inspect,
};
