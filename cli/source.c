/*
 * Opens the source of a command: see source.h.
 */
#include "source.h"

#include "options/suggest.h"
#include "output/text.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/export.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void source_note(void *unused, const char *line) {
    (void)unused;
    text_report("%s", line);
}

static void add_note_once(void *context, const char *line) {
    cli_notes *notes = context;
    bool again = notes->count == CLI_MOST_NOTES;
    for (size_t i = 0; i < notes->count && !again; i++) {
        again = strcmp(notes->lines[i], line) == 0;
    }
    char *copy = again ? NULL : strdup(line);
    if (copy) {
        notes->lines[notes->count++] = copy;
    }
}

fc_reporter source_others(const cli_call *call) {
    return (fc_reporter){add_note_once, call->notes};
}

const char **source_inputs(const options *o, bool operands) {
    const char *const named[] = {o->against, o->schema, o->tp_plan, o->policy,
                                 o->classes, o->recipe, o->config,  o->like};
    const size_t most = sizeof named / sizeof *named;
    const char **inputs = calloc(o->noperands + most + 1, sizeof *inputs);
    size_t count = 0;
    for (size_t i = 0; inputs && i < most; i++) {
        if (named[i]) { /* skips words that are not files, such as the plan "auto" */
            inputs[count++] = named[i];
        }
    }
    for (size_t i = 0; inputs && operands && i < o->noperands; i++) {
        inputs[count++] = o->operands[i];
    }
    return inputs;
}

fc_code source_config(const options *o, const fc_checkpoint *source, fc_arena *arena, const char **out, fc_error *err) {
    const char *slash = strrchr(source->path, '/');
    char *in = fc_arena_printf(arena, "%s/config.json", source->path);
    char *next = fc_arena_printf(arena, "%.*sconfig.json", slash ? (int)(slash + 1 - source->path) : 0, source->path);
    FC_NEED(in && next, err, source->path);
    *out = o->config ? o->config : fc_access(in, F_OK) == 0 ? in : fc_access(next, F_OK) == 0 ? next : NULL;
    return FC_OK;
}

fc_code source_spare(const options *o, const char *target, fc_error *err) {
    const char **inputs = source_inputs(o, true);
    fc_code rc = inputs ? fc_check_inputs(target, inputs, "a file", err) : fc_no_memory(err, target);
    free(inputs);
    return rc;
}

fc_code source_model(const cli_call *call, fc_checkpoint **out, fc_error *err) {
    const options *o = call->options;
    /* Only names and shapes are needed, so the data files may be absent. */
    const fc_open_options how = {.headers_only = true,
                                 .follow_external = o->follow_external,
                                 .reporter = {source_note},
                                 .others = source_others(call),
                                 .progress = call->progress,
                                 .session = call->session};
    *out = NULL;
    FC_TRY(o->schema ? fc_check_given(o->schema, "a schema or a checkpoint", err) : FC_OK);
    return o->schema ? fc_checkpoint_open_model(o->schema, &how, NULL, out, err) : FC_OK;
}

/* The tensors of a delta are frames, and no weights. */
static fc_code refuse_delta(const char *path, fc_error *err) {
    fc_delta_place place;
    FC_TRY(fc_delta_recognise(path, &place, err));
    return place == FC_DELTA_NOWHERE
               ? FC_OK
               : fc_fail(err, FC_EUSAGE,
                         "%s: this is a %s, which has no weights but what changed: give the model, and this as --delta",
                         path, place == FC_DELTA_VERSION ? "delta" : "directory of versions");
}

/* Opens the source, and refuses options that do not apply to it. */
static fc_code open_checked(const options *o, const char *path, const fc_open_options *how, const fc_checkpoint *model,
                            fc_checkpoint **out, fc_error *err) {
    FC_TRY(refuse_delta(path, err));
    fc_code rc = fc_checkpoint_open_model(path, how, model, out, err);
    if (rc != FC_OK && fc_access(path, F_OK) != 0 && errno == ENOENT) {
        suggest_path(path, err);
    }
    FC_TRY(rc);
    if (how->tp_plan && *how->tp_joined == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: has no rank files with plain tensors that the plan '%s' shards, so --tp-plan does not "
                       "apply; leave it out",
                       path, o->tp_plan);
    }
    if (model && !o->policy && !fc_was_flat(*out)) {
        return fc_fail(err, FC_EUSAGE, "%s: has no flat parameters of FSDP1, so --schema does not apply; leave it out",
                       path);
    }
    return FC_OK;
}

void source_add_note(const cli_call *call, const char *fmt, ...) {
    char *line = NULL;
    va_list args;
    va_start(args, fmt);
    const int length = vasprintf(&line, fmt, args);
    va_end(args);
    if (length >= 0) {
        add_note_once(call->notes, line);
        free(line);
    }
}

fc_code source_take_model(const cli_call *call, fc_checkpoint **checkpoint, fc_error *err) {
    if (!call->options->model_only) {
        return FC_OK;
    }
    fc_model_place place;
    FC_TRY(fc_model_only(checkpoint, call->arena, &place, err));
    if (*place.besides) {
        source_add_note(call, "%s: --model-only left out, besides the optimizer: %s", (*checkpoint)->path,
                        place.besides);
    }
    return FC_OK;
}

fc_selection source_selection(const options *o) {
    return (fc_selection){.include = o->include.items,
                          .exclude = o->exclude.items,
                          .strip_prefix = o->strip_prefix,
                          .rename = o->rename.items};
}

fc_code source_note_selection(const cli_call *call, const fc_checkpoint *source, bool names, fc_error *err) {
    const options *o = call->options;
    const fc_selection selection = {.include = o->include.items, .exclude = o->exclude.items};
    const char *idle = NULL, *left = "";
    FC_TRY(fc_find_idle_exclude(source, o->exclude.items, call->arena, &idle, err));
    if (idle) {
        source_add_note(call, "%s: %s", source->path, idle);
    }
    FC_TRY(names ? fc_list_left_out(source, &selection, call->arena, &left, err) : FC_OK);
    if (*left) {
        source_add_note(call, "%s: --include and --exclude left out, besides the optimizer: %s", source->path, left);
    }
    return FC_OK;
}

fc_code source_open(const cli_call *call, const char *path, bool headers_only, fc_checkpoint **out, fc_error *err) {
    const options *o = call->options;
    fc_open_options how = {.headers_only = headers_only,
                           .follow_external = o->follow_external,
                           .reporter = {source_note},
                           .others = source_others(call),
                           .progress = call->progress,
                           .session = call->session};
    fc_checkpoint *model = NULL;
    size_t joined = 0;
    fc_code rc;
    *out = NULL;
    how.tp_joined = &joined;
    FC_TRY_GOTO(source_model(call, &model, err), rc, out);
    if (o->tp_plan && !o->tp) { /* with --tp, the plan applies to the target */
        FC_TRY_GOTO(fc_tp_plan_load(o->tp_plan, call->arena, &how.tp_plan, err), rc, out);
    }
    rc = open_checked(o, path, &how, model, out, err);
    rc = rc == FC_OK ? source_take_model(call, out, err) : rc;
    if (rc != FC_OK) {
        fc_checkpoint_close(*out);
        *out = NULL;
    }
out:
    fc_checkpoint_close(model);
    return rc;
}

void source_report(const options *o, const fc_checkpoint *source) {
    if (o->verbose) {
        text_report("%s: %s, %zu values in %zu files", source->path, source->format->description, source->ntensors,
                    source->nfiles);
    }
}
