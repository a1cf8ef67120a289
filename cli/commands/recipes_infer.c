/*
 * recipes --infer: see recipes_infer.h. The recipe goes to standard output or a file, and what was found to stderr.
 */
#include "commands/recipes_infer.h"

#include "out_file.h"
#include "output/text.h"
#include "signals.h"
#include "source.h"

#include "fsdpckpt/compare.h"
#include "fsdpckpt/infer.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

enum { MOST_LISTED = 20 };

typedef struct job {
    cli_call *call;
    fc_checkpoint *a, *b;
    fc_infer_report report;
} job;

fc_code recipes_check_options(const options *o, fc_error *err) {
    static const option_id needs[] = {OPT_OUTPUT, OPT_CONFIG, OPT_MODEL_ONLY};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        if (option_given(o, needs[i])) {
            return fc_fail(err, FC_EUSAGE, "--%s needs --infer", option_table[needs[i]].name);
        }
    }
    return o->noperands > 1 ? fc_fail(err, FC_EUSAGE, "two checkpoints need --infer") : FC_OK;
}

static fc_code write_recipe(void *context, text_out *out, fc_error *err) {
    const job *j = context;
    (void)err;
    text_puts(out, j->report.recipe);
    return FC_OK;
}

/* Rounds down, so that 100 % means all. */
static double percent(const fc_infer_report *r) {
    const double share = r->elements ? 1000.0 * (double)r->agree / (double)r->elements : 0;
    return (double)(long)share / 10;
}

static void report_names(const char *what, const char *const *names, size_t count) {
    for (size_t i = 0; i < count && i < MOST_LISTED; i++) {
        text_report("%s%s", what, names[i]);
    }
    if (count > MOST_LISTED) {
        text_report("%sand %zu more", what, count - MOST_LISTED);
    }
}

static void report_unexplained(const job *j) {
    const fc_infer_report *r = &j->report;
    for (size_t i = 0; i < r->nunexplained && i < MOST_LISTED; i++) {
        const fc_unexplained *u = &r->unexplained[i];
        char place[32 * FC_MAX_DIMS] = "";
        int64_t index[FC_MAX_DIMS] = {0};
        if (u->differs) {
            size_t used = 0;
            fc_unravel(u->tensor->ndim, u->tensor->shape, u->first, index);
            for (int d = 0; d < u->tensor->ndim; d++) {
                const int n = snprintf(place + used, sizeof place - used, "%s%lld", d ? ", " : "", (long long)index[d]);
                used += n > 0 ? (size_t)n : 0;
            }
        }
        text_report("not explained: %s of %s%s%s%s%s%s", u->name, u->in_a ? j->a->path : j->b->path,
                    u->why       ? "; "
                    : u->nearest ? "; the nearest is "
                                 : "; no tensor of the other side has its shape",
                    u->why       ? u->why
                    : u->nearest ? u->nearest
                                 : "",
                    u->differs ? ", which differs first at [" : "", place, u->differs ? "]" : "");
    }
    if (r->nunexplained > MOST_LISTED) {
        text_report("not explained: and %zu more", r->nunexplained - MOST_LISTED);
    }
}

static fc_code show_report(const job *j, fc_error *err) {
    const fc_infer_report *r = &j->report;
    const bool proven = r->explained == r->tensors && r->nunexplained == 0;
    if (!r->recipe) {
        text_report("%s and %s: these are not the same weights: %.1f %% of the elements agree", j->a->path, j->b->path,
                    percent(r));
        err->message[0] = '\0';
        return FC_EFOUND;
    }
    FC_TRY(out_result(j->call, j->a, 0, write_recipe, (void *)j, err));
    if (!j->call->options->quiet) {
        report_names("left out: ", r->dropped, r->ndropped);
        report_names("a guess: ", r->guesses, r->nguesses);
        report_unexplained(j);
        text_report(proven ? "proven: %zu rules make all %zu tensors of %s, bit for bit"
                           : "not proven: %zu rules make %zu tensors of %s, bit for bit",
                    r->rules, r->explained, j->b->path);
    }
    err->message[0] = '\0'; /* of a layout that was tried */
    return proven ? FC_OK : FC_EFOUND;
}

static fc_code find_recipe(job *j, fc_error *err) {
    const options *o = j->call->options;
    fc_infer_options how = {.work = {.threads = (int)o->jobs, .memory = o->memory, .progress = j->call->progress}};
    FC_TRY(source_config(o, j->b, j->call->arena, &how.config, err));
    if (!how.config) {
        FC_TRY(source_config(o, j->a, j->call->arena, &how.config, err));
    }
    signals_cancel(j->call->progress);
    const fc_code rc = fc_recipe_infer(j->a, j->b, &how, j->call->arena, &j->report, err);
    signals_cancel(NULL);
    return rc;
}

/* ---- from names alone ---- */

static void report_left(const job *j) {
    const fc_infer_report *r = &j->report;
    for (size_t i = 0; i < r->nunexplained && i < MOST_LISTED; i++) {
        const fc_unexplained *u = &r->unexplained[i];
        text_report("no rule: %s%s%s", u->name, u->why ? "; the nearest does not fit: " : "", u->why ? u->why : "");
    }
    if (r->nunexplained > MOST_LISTED) {
        text_report("no rule: and %zu more", r->nunexplained - MOST_LISTED);
    }
}

static void report_base(const fc_infer_report *r) {
    text_report("the names are those of %s%s%s%s%s%s", r->base, r->also ? ", or of " : "", r->also ? r->also : "",
                r->model && !r->for_model ? ", which is not for the model '" : "",
                r->model && !r->for_model ? r->model : "", r->model && !r->for_model ? "'" : "");
}

static fc_code show_proposal(const job *j, fc_error *err) {
    const fc_infer_report *r = &j->report;
    FC_TRY(out_result(j->call, j->a, 0, write_recipe, (void *)j, err));
    if (!j->call->options->quiet) {
        report_base(r);
        report_names("left out: ", r->dropped, r->ndropped);
        report_names("a guess: ", r->guesses, r->nguesses);
        report_left(j);
        text_report("not proven: %zu rules take %zu of %zu tensors by their names; "
                    "'fsdpckpt recipes --infer A B' proves a recipe with the same weights as B",
                    r->rules, r->explained, r->tensors);
    }
    err->message[0] = '\0'; /* of a rule that was tried */
    return r->nunexplained == 0 ? FC_OK : FC_EFOUND;
}

static fc_code propose_recipe(job *j, fc_error *err) {
    const options *o = j->call->options;
    const char *config = NULL;
    FC_TRY(source_config(o, j->a, j->call->arena, &config, err));
    FC_TRY(fc_recipe_propose(j->a, config, j->call->arena, &j->report, err));
    return show_proposal(j, err);
}

fc_code recipes_infer(cli_call *call, fc_error *err) {
    const options *o = call->options;
    job j = {.call = call};
    fc_code rc;
    if (o->noperands == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "--infer needs two checkpoints of the same weights: "
                       "fsdpckpt recipes --infer A B -o mine.json; or one, for a proposal from its names");
    }
    if (o->noperands == 1) {
        FC_TRY_GOTO(source_open(call, o->operands[0], true, &j.a, err), rc, out);
        rc = propose_recipe(&j, err);
        goto out;
    }
    FC_TRY_GOTO(source_open(call, o->operands[0], false, &j.a, err), rc, out);
    FC_TRY_GOTO(source_open(call, o->operands[1], false, &j.b, err), rc, out);
    FC_TRY_GOTO(find_recipe(&j, err), rc, out);
    rc = show_report(&j, err);
out:
    fc_checkpoint_close(j.a);
    fc_checkpoint_close(j.b);
    return rc;
}
