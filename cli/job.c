/*
 * Runs a conversion: see job.h.
 */
#include "job.h"

#include "kept.h"
#include "options/hint.h"
#include "output/json_out.h"
#include "plan_rank.h"
#include "progress_view.h"
#include "ranks.h"
#include "recipe.h"
#include "resume.h"
#include "signals.h"
#include "source.h"
#include "target.h"
#include "unit_plan.h"
#include "weights.h"

#include "fsdpckpt/check.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <stdlib.h>
#include <string.h>

/* One conversion: its options, its source and its report. */
typedef struct job {
    const cli_call *call;
    const job_steps *steps;
    const options *o;
    fc_checkpoint *source;
    fc_mesh mesh;
    const fc_tp_plan *plan;
    fc_convert_options how;
    kept_files kept;
    ranks ranks;
    fc_convert_report report;
    size_t left_out; /* values left out before flattening */
    double seconds;  /* from the start of the command to the end of the conversion */
} job;

/* The default of huggingface_hub for the size of one file. */
static const uint64_t hub_file_bytes = UINT64_C(5000000000);

/* Chooses the size of the files of a full target. A target that is a directory is split even without the option, as by
 * save_pretrained. */
static fc_code choose_split(job *j, bool sharded, fc_error *err) {
    const options *o = j->o;
    bool can_split = j->how.format->writer.split != NULL;
    if (o->max_shard_size && !can_split) {
        return fc_fail(err, FC_EUSAGE, "--max-shard-size: the format '%s' is not split by size; use --to safetensors",
                       j->how.format->name);
    }
    bool directory = can_split && !sharded && o->output && target_is_directory(o->output);
    j->how.selection.max_file_bytes = o->max_shard_size ? o->max_shard_size : directory ? hub_file_bytes : 0;
    return FC_OK;
}

/* Parses GLOB=TYPE. The glob may have "=", the type has none. */
static fc_code parse_dtype_rule(const char *text, fc_arena *arena, fc_dtype_rule *rule, fc_error *err) {
    const char *type = strrchr(text, '=');
    if (!type || type == text) {
        return fc_fail(err, FC_EUSAGE, "--dtype-for: '%s' is not GLOB=TYPE, such as '*.norm.weight=f32'", text);
    }
    rule->keep = strcmp(type + 1, "keep") == 0;
    if (!rule->keep && !fc_dtype_find(type + 1, strlen(type + 1), &rule->dtype)) {
        return fc_fail(err, FC_EUSAGE, "--dtype-for: '%s': there is no dtype '%s'", text, type + 1);
    }
    if (!rule->keep && fc_dtype_get(rule->dtype)->cls != FC_CLASS_FLOAT) {
        return fc_fail(err, FC_EUSAGE,
                       "--dtype-for: '%s': %s is not a floating-point type; only those can be converted", text,
                       type + 1);
    }
    rule->glob = fc_arena_strndup(arena, text, (size_t)(type - text));
    return rule->glob ? FC_OK : fc_no_memory(err, NULL);
}

fc_code job_choose_dtypes(const cli_call *call, fc_selection *selection, fc_error *err) {
    const option_list *list = &call->options->dtype_for;
    selection->cast = option_given(call->options, OPT_DTYPE);
    selection->dtype = call->options->dtype;
    fc_dtype_rule *rules = fc_arena_calloc(call->arena, list->count + 1, sizeof *rules);
    FC_NEED(rules, err, NULL);
    for (size_t i = 0; i < list->count; i++) {
        FC_TRY(parse_dtype_rule(list->items[i], call->arena, &rules[i], err));
    }
    selection->dtype_rules = rules;
    selection->ndtype_rules = list->count;
    return FC_OK;
}

static fc_code prepare_job(job *j, const fc_layout_spec *spec, fc_error *err) {
    const options *o = j->o;
    j->how.selection.include = o->include.items;
    j->how.selection.exclude = o->exclude.items;
    j->how.selection.strip_prefix = o->strip_prefix;
    j->how.selection.rename = o->rename.items;
    j->how.selection.compress = o->compress;
    j->how.force = o->force;
    j->how.trust_objects = o->trust_objects;
    j->how.dry_run = o->dry_run;
    j->how.work.threads = (int)o->jobs;
    j->how.work.memory = o->memory;
    j->how.work.progress = j->call->progress;
    FC_TRY(job_choose_dtypes(j->call, &j->how.selection, err));
    FC_TRY(resume_prepare(j->call, &j->how, err));
    FC_TRY(target_format(o, spec != NULL, &j->how.format, err));
    if (j->how.format->target.adapt && option_given(o, OPT_POLICY)) {
        return fc_fail(err, FC_EUSAGE, "--policy: the format '%s' has no flat parameters", j->how.format->name);
    }
    FC_TRY(choose_split(j, spec != NULL, err));
    if (!spec) {
        return FC_OK;
    }
    FC_TRY(fc_layout_mesh(spec, &j->mesh, err));
    j->how.selection.mesh = &j->mesh;
    if (o->tp > 0) {
        FC_TRY(fc_tp_plan_load(o->tp_plan, j->call->arena, &j->plan, err));
        j->how.selection.tp_plan = j->plan;
    }
    return FC_OK;
}

/* Reports a target whose extension names another kind of file. */
static void report_format(const job *j) {
    const char *target = j->o->output;
    const fc_format *named = target_named_format(target);
    if (named && named != j->how.format && !target_is_directory(target)) {
        text_report("%s is of the format %s, despite its name", target, j->how.format->name);
    }
}

/* Reports what the format keeps in a way of its own, and what else the target needs. */
static void report_needs(const job *j) {
    const fc_format_target *traits = &j->how.format->target;
    size_t n = j->report.selected.objects;
    if (traits->objects_note && n > 0) {
        text_report("%zu %s kept %s", n, n == 1 ? "object is" : "objects are", traits->objects_note);
    }
    if (j->report.reshaped > 0) {
        text_report("%zu %s stored %s", j->report.reshaped, j->report.reshaped == 1 ? "tensor is" : "tensors are",
                    traits->reshaped_note);
    }
    if (traits->also_needed && !j->o->dry_run) {
        text_report("%s: %s", j->o->output, traits->also_needed);
    }
}

static fc_code convert_source(job *j, fc_error *err) {
    const options *o = j->o;
    bool shows = !o->quiet && ranks_speaks(&j->ranks);
    j->how.partial = j->left_out > 0 || o->local || o->noperands > 1;
    j->how.reporter.report = source_note;
    FC_TRY(kept_prepare(o, &j->how, j->call->arena, &j->kept, err));
    j->how.inputs = source_inputs(o, j->how.partial);
    fc_code rc =
        j->how.inputs ? fc_convert(j->source, o->output, &j->how, &j->report, err) : fc_no_memory(err, j->source->path);
    free((void *)j->how.inputs);
    FC_TRY(rc);
    j->seconds = progress_now() - j->call->started;
    j->report.selected.left_out += j->left_out;
    if (shows && o->output) {
        report_format(j);
    }
    if (shows) {
        report_needs(j);
    }
    return FC_OK;
}

/* The directory of an accelerate run also contains the optimizer, which is rarely wanted in a full file. */
static void hint_model(const job *j) {
    const options *o = j->o;
    if (j->how.format->target.set_sections) { /* a target for both */
        return;
    }
    const fc_checkpoint *source = j->source;
    bool both = source->producer && strcmp(source->producer, "accelerate") == 0 && source->ntensors > 0 &&
                strncmp(source->tensors[source->ntensors - 1].name, "optimizer.", 10) == 0;
    if (both && !j->how.selection.mesh && !o->include.count && !o->exclude.count && !o->model_only) {
        text_report("%s: model.* and optimizer.* were both converted; --model-only converts the model only",
                    j->source->path);
    }
}

/* With -v: reports the mesh of the target on stderr. */
static void report_mesh(const job *j) {
    for (int i = 0; i < j->mesh.ndim; i++) {
        text_report("mesh dimension %d: %s %lld", i, j->mesh.names[i], (long long)j->mesh.sizes[i]);
    }
}

static void print_job_text(const job *j, text_out *out) {
    const fc_convert_report *r = &j->report;
    char data[TEXT_SIZE_MAX], header[TEXT_SIZE_MAX], memory[TEXT_SIZE_MAX], low[TEXT_SIZE_MAX], rate[TEXT_SIZE_MAX];
    size_t data_files = r->files - r->indexes;
    text_name(out, j->o->output ? j->o->output : "the target");
    text_printf(out, "%s %zu %s, %zu %s, %s in %zu %s %s", j->o->dry_run ? " would hold" : ":", r->selected.tensors,
                r->selected.tensors == 1 ? "tensor" : "tensors", r->selected.objects,
                r->selected.objects == 1 ? "object" : "objects", text_bytes(data, r->data_bytes), data_files,
                j->how.format->name, data_files == 1 ? "file" : "files");
    if (r->indexes == 1) {
        text_printf(out, " and %s", r->index);
    } else if (r->indexes > 1) {
        text_printf(out, " and %zu %s", r->indexes, r->index);
    }
    if (j->o->compress && !j->o->dry_run) {
        double ratio = r->data_bytes > 0 ? (double)r->stored_bytes / (double)r->data_bytes : 1;
        text_printf(out, ", compressed to %s (%.1f %%)", text_bytes(low, r->stored_bytes), 100 * ratio);
    }
    if (!j->o->dry_run) {
        double speed = j->seconds > 0 ? (double)r->data_bytes / j->seconds : 0;
        text_printf(out, ", %.2f s, %s/s", j->seconds, text_bytes(rate, (uint64_t)speed));
    }
    text_puts(out, "\n");
    if (j->plan) {
        text_printf(out, "TP shards %zu of %zu tensors (plan ", r->selected.tp_sharded, r->selected.tensors);
        text_name(out, j->o->tp_plan ? j->o->tp_plan : "auto");
        text_puts(out, ")\n");
    }
    if (r->selected.idle_rules > 0) {
        text_printf(out, "%zu of the plan's %zu rules apply to no tensor, the first is '", r->selected.idle_rules,
                    fc_tp_plan_rules(j->plan));
        text_name(out, r->selected.idle_rule);
        text_puts(out, "'\n");
    }
    if (r->selected.left_out > 0 && !j->steps->print) {
        text_printf(out, "%zu left out by --include and --exclude\n", r->selected.left_out);
    }
    if (j->o->dry_run) {
        text_printf(out, "data per file: %s to %s; headers: about %s; memory for buffers: %s; nothing was written\n",
                    text_bytes(low, r->smallest_file), text_bytes(data, r->largest_file),
                    text_bytes(header, r->header_bytes), text_bytes(memory, r->memory));
        text_puts(out, j->o->compress ? "these are the sizes before compression; the files will be smaller\n" : "");
    }
}

static void print_job_json(const job *j, text_out *out) {
    const fc_convert_report *r = &j->report;
    json_out json;
    jw_document(&json, out, 1, "conversion");
    JSON_MEMBER(&json, string, "target", j->o->output);
    JSON_MEMBER(&json, string, "format", j->how.format->name);
    JSON_MEMBER(&json, bool, "dry_run", j->o->dry_run);
    JSON_UINTS(&json, {"tensors", r->selected.tensors}, {"objects", r->selected.objects},
               {"left_out", r->selected.left_out});
    if (j->plan) {
        JSON_UINTS(&json, {"tp_sharded", r->selected.tp_sharded}, {"tp_idle_rules", r->selected.idle_rules});
    }
    JSON_UINTS(&json, {"files", r->files}, {"data_bytes", r->data_bytes});
    if (j->o->compress && !j->o->dry_run) {
        JSON_MEMBER(&json, uint, "stored_bytes", r->stored_bytes);
    }
    JSON_UINTS(&json, {"largest_file", r->largest_file}, {"smallest_file", r->smallest_file}, {"memory", r->memory});
    if (j->o->dry_run) {
        JSON_MEMBER(&json, uint, "header_bytes", r->header_bytes);
    } else {
        JSON_MEMBER(&json, number, "seconds", j->seconds);
    }
    if (j->steps->print_json) {
        j->steps->print_json(j->steps->context, &json);
    }
    jw_end_document(&json);
}

/* The files of the old target that are in the new one. */
static void print_kept(const job *j, text_out *out) {
    text_puts(out, j->kept.names ? "kept:     " : "");
    for (const char *const *name = j->kept.names; name && *name; name++) {
        text_puts(out, name == j->kept.names ? "" : ", ");
        text_name(out, *name);
    }
    text_puts(out, j->kept.names ? "\n" : "");
}

static void print_report(const job *j, text_out *out) {
    if (j->o->json) {
        print_job_json(j, out);
    } else if (!j->o->quiet) {
        print_job_text(j, out);
        if (j->steps->print) {
            j->steps->print(j->steps->context, j->kept.names, out);
        }
        print_kept(j, out);
    }
}

/* Opens the model that has the order of the parameters, unless the source records it. */
static fc_code open_order(const job *j, fc_checkpoint **model, fc_error *err) {
    const char *why = NULL;
    if (fc_was_flat(j->source)) {
        return FC_OK;
    }
    FC_TRY(source_model(j->call, model, err));
    if (!*model && !fc_knows_model_order(j->source, &why)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: %s, and flat parameters depend on the order; give --schema FILE, a schema or a "
                       "torch.save file of the model",
                       j->source->path, why);
    }
    return FC_OK;
}

/* --policy: replaces the source by its flat parameters. Selection and renaming apply before that. */
static fc_code flatten_source(job *j, fc_error *err) {
    unit_plan plan = {.o = j->o, .source = j->source, .arena = fc_arena_new()};
    fc_checkpoint *model = NULL, *flat = NULL;
    fc_code rc;
    FC_TRY_GOTO(plan.arena ? FC_OK : fc_no_memory(err, j->source->path), rc, out);
    FC_TRY_GOTO(open_order(j, &model, err), rc, out);
    FC_TRY_GOTO(unit_plan_make(&plan, model, err), rc, out);
    for (size_t i = 0; i < plan.nwarnings && !j->o->quiet && ranks_speaks(&j->ranks); i++) {
        text_report("warning: %s", plan.warnings[i]);
    }
    FC_TRY_GOTO(fc_flatten(j->source, &plan.target, &plan.tree, &plan.units, j->o->dp, &flat, err), rc, out);
    fc_selection *s = &j->how.selection;
    j->source = flat;
    s->include = s->exclude = s->rename = NULL;
    s->strip_prefix = NULL;
    s->flat_state = true;
    s->is_sharded = fc_is_flattened;
    j->left_out = plan.selected.left_out;
out:
    fc_checkpoint_close(model);
    fc_arena_free(plan.arena);
    return rc;
}

/* Reports the warnings of check about dimensions that the tp ranks cannot divide evenly. */
static fc_code warn_uneven(const job *j, fc_error *err) {
    fc_check_options how = {.selection = &j->how.selection,
                            .setting_names = hint_settings,
                            .mesh = &j->mesh,
                            .tp_plan = j->plan,
                            .only_mesh = true};
    fc_report report;
    FC_TRY(fc_check(j->source, &how, j->call->arena, &report, err));
    for (size_t i = 0; i < report.count; i++) {
        fc_finding_kind kind = report.findings[i].kind;
        if (kind == FC_FOUND_TP_UNEVEN || kind == FC_FOUND_TP_EMPTY_SHARDS) {
            text_report("warning: %s", report.findings[i].message);
        }
    }
    return FC_OK;
}

/* --recipe: replaces the source by what the recipe makes of it. Selection and renaming apply before that. */
static fc_code apply_recipe(job *j, fc_error *err) {
    fc_selection *s = &j->how.selection;
    if (!j->o->recipe) {
        return recipe_check_options(j->o, err);
    }
    if (option_given(j->o, OPT_POLICY)) {
        return fc_fail(err, FC_EUSAGE, "--recipe cannot be combined with --policy; convert in two steps");
    }
    fc_code rc = recipe_apply(j->o, s, false, &j->source, &j->left_out, err);
    s->include = s->exclude = s->rename = NULL;
    s->strip_prefix = NULL;
    return rc;
}

/* Replaces the source by what the command, or else --recipe, and --quantize make of it. */
static fc_code change_source(job *j, fc_error *err) {
    const job_steps *s = j->steps;
    FC_TRY(s->change ? s->change(s->context, &j->source, &j->how, &j->left_out, err) : apply_recipe(j, err));
    return weights_quantize(j->o, &j->source, err);
}

/* --rank: prints the plan of one rank. */
static fc_code show_rank(const job *j, text_out *out, fc_error *err) {
    fc_selection selection = j->how.selection;
    fc_checkpoint *adapted = NULL;
    size_t left_out = 0;
    FC_TRY(fc_target_adapt(j->source, j->how.format, &selection, &left_out, &adapted, err));
    const fc_code rc = plan_rank(adapted ? adapted : j->source, &selection, (uint32_t)j->o->rank, j->o->json, out, err);
    fc_checkpoint_close(adapted);
    return rc;
}

static fc_code open_operand(const cli_call *call, fc_checkpoint **out, fc_error *err) {
    FC_TRY(source_open(call, call->options->operands[0], false, out, err));
    return weights_compute(call->options, out, err);
}

/* Prints the plan of one rank, or converts. */
static fc_code do_job(job *j, text_out *out, fc_error *err) {
    const options *o = j->o;
    bool speaks = ranks_speaks(&j->ranks);
    if (o->verbose && speaks) {
        source_report(o, j->source);
        report_mesh(j);
    }
    if (option_given(o, OPT_RANK)) {
        return speaks ? show_rank(j, out, err) : FC_OK;
    }
    FC_TRY(convert_source(j, err));
    if (!speaks) {
        return FC_OK;
    }
    if (j->plan && !o->quiet) {
        FC_TRY(warn_uneven(j, err));
    }
    if (j->source->note && !o->quiet) { /* only after success: a failure is one line */
        text_report("%s: %s", j->source->path, j->source->note);
    }
    print_report(j, out);
    if (!o->quiet && !j->how.selection.keep_layout) {
        hint_model(j);
    }
    return FC_OK;
}

/* Rank 0 converts the files that it has gathered. */
static fc_code do_gathered(job *j, const fc_commit *gathered, text_out *out, fc_error *err) {
    FC_TRY(source_open(j->call, fc_commit_path(gathered), false, &j->source, err));
    FC_TRY(weights_compute(j->o, &j->source, err));
    FC_TRY(change_source(j, err));
    return do_job(j, out, err);
}

/* --local: rank 0 converts the gathered files on its own; the other ranks wait for the result. */
static fc_code do_local(job *j, text_out *out, fc_error *err) {
    fc_commit *gathered = NULL;
    fc_code rc;
    fc_progress_begin(j->call->progress, FC_PHASE_GATHERING, FC_COUNTED_FILES, 0);
    FC_TRY_GOTO(ranks_gather(&j->ranks, j->o->operands[0], j->o->output, &gathered, err), rc, out);
    rc = fc_comm_agree(j->ranks.comm, gathered ? do_gathered(j, gathered, out, err) : FC_OK, err);
out:
    fc_commit_abort(gathered);
    return rc;
}

static fc_code open_job(job *j, const fc_layout_spec *spec, fc_error *err) {
    FC_TRY(prepare_job(j, spec, err));
    if (j->o->local) {
        return FC_OK;
    }
    FC_TRY((j->steps->open ? j->steps->open : open_operand)(j->call, &j->source, err));
    FC_TRY(source_note_selection(j->call, j->source, j->steps->print == NULL, err));
    FC_TRY(change_source(j, err));
    return option_given(j->o, OPT_POLICY) ? flatten_source(j, err) : FC_OK;
}

static fc_code run_ranks(job *j, text_out *out, fc_error *err) {
    if (j->o->local) {
        return do_local(j, out, err);
    }
    j->how.comm = j->ranks.comm;
    return do_job(j, out, err);
}

static fc_code run_job(cli_call *call, const fc_layout_spec *spec, bool keep_layout, const job_steps *steps,
                       fc_error *err) {
    const options *o = call->options;
    job j = {.call = call, .steps = steps, .o = o, .how = {.selection = {.keep_layout = keep_layout}}};
    fc_code rc = open_job(&j, spec, err);
    if (!option_given(o, OPT_RANK)) { /* printing a plan needs no clean-up */
        signals_cancel(call->progress);
    }
    FC_TRY_GOTO(ranks_begin(&j.ranks, o, call->progress, rc, err), rc, out);
    call->notes->silent = !ranks_speaks(&j.ranks);
    rc = run_ranks(&j, call->out, err);
out:
    rc = ranks_end(&j.ranks, rc);
    signals_cancel(NULL);
    fc_checkpoint_close(j.source);
    return rc;
}

static const job_steps usual = {.open = open_operand};

fc_code job_run(cli_call *call, const fc_layout_spec *spec, fc_error *err) {
    return run_job(call, spec, false, &usual, err);
}

fc_code job_run_steps(cli_call *call, const fc_layout_spec *spec, const job_steps *steps, fc_error *err) {
    return run_job(call, spec, false, steps, err);
}

fc_code job_keep_layout(cli_call *call, fc_error *err) {
    return run_job(call, NULL, true, &usual, err);
}
