/*
 * The driver of check: opens the checkpoint, lists its names, runs the parts, and counts the findings.
 */
#include "check/check.h"

#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"
#include "io/path.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *fc_check_alloc(fc_check_run *c, size_t count, size_t size) {
    void *room = fc_arena_calloc(c->arena, count ? count : 1, size);
    c->no_memory |= !room;
    return room;
}

const char *fc_check_text(fc_check_run *c, const char *fmt, ...) {
    va_list args;
    char *text = NULL;
    va_start(args, fmt);
    int n = vasprintf(&text, fmt, args);
    va_end(args);
    const char *copy = n < 0 ? NULL : fc_arena_strndup(c->arena, text, (size_t)n);
    if (n >= 0) {
        free(text);
    }
    c->no_memory |= !copy;
    return copy ? copy : "";
}

fc_fix fc_check_fix(fc_check_run *c, fc_setting setting, const char *value) {
    const char **values = fc_check_alloc(c, 1, sizeof *values);
    if (!values) {
        return (fc_fix){FC_SETTING_NONE, NULL, 0};
    }
    values[0] = value;
    return (fc_fix){setting, values, 1};
}

const char *fc_check_setting(const fc_check_run *c, fc_setting setting) {
    static const char *const members[FC_SETTING_COUNT] = {[FC_SETTING_NONE] = "",
                                                          [FC_SETTING_EXCLUDE] = "exclude",
                                                          [FC_SETTING_RENAME] = "rename",
                                                          [FC_SETTING_STRIP_PREFIX] = "strip_prefix",
                                                          [FC_SETTING_DTYPE] = "dtype",
                                                          [FC_SETTING_MODEL] = "model",
                                                          [FC_SETTING_TP_PLAN] = "tp_plan",
                                                          [FC_SETTING_ALLOW_MISSING] = "allow_missing",
                                                          [FC_SETTING_ALLOW_UNEXPECTED] = "allow_unexpected"};
    return c->options->setting_names ? c->options->setting_names[setting] : members[setting];
}

/* Quotes a text for a shell, if necessary. */
static const char *quote(fc_check_run *c, const char *text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:=+,@%";
    if (text[strspn(text, plain)] == '\0' && *text) {
        return text;
    }
    char *quoted = fc_check_alloc(c, 4 * strlen(text) + 3, 1);
    if (!quoted) {
        return "";
    }
    char *to = quoted;
    *to++ = '\'';
    for (; *text; text++) {
        if (*text == '\'') {
            to = stpcpy(to, "'\\''");
        } else {
            *to++ = *text;
        }
    }
    *to = '\'';
    return quoted;
}

/* The fix as text for a shell: the setting once for each value. */
static const char *fix_text(fc_check_run *c, const fc_fix *fix) {
    const char *text = "";
    for (size_t i = 0; i < fix->count; i++) {
        text = fc_check_text(c, "%s%s%s %s", text, i > 0 ? " " : "", fc_check_setting(c, fix->setting),
                             quote(c, fix->values[i]));
    }
    return text;
}

void fc_check_add(fc_check_run *c, const fc_finding *finding) {
    if (c->count == c->capacity) {
        size_t capacity = c->capacity ? 2 * c->capacity : 16;
        fc_finding *grown = fc_check_alloc(c, capacity, sizeof *grown);
        if (!grown) {
            return;
        }
        if (c->count > 0) {
            memcpy(grown, c->findings, c->count * sizeof *grown);
        }
        c->findings = grown;
        c->capacity = capacity;
    }
    fc_finding *f = &c->findings[c->count++];
    *f = *finding;
    f->count = f->count ? f->count : 1;
    f->option = f->fix.count > 0 ? fix_text(c, &f->fix) : NULL;
    f->message = fc_finding_message(c, f);
    c->no_memory |= !f->message;
}

const char *fc_check_shape(fc_check_run *c, const fc_tensor *tensor) {
    char text[FC_MAX_DIMS * 22 + 3] = "[";
    size_t used = 1;
    for (int d = 0; d < tensor->ndim; d++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%" PRId64, d > 0 ? ", " : "", tensor->shape[d]);
    }
    return fc_check_text(c, "%s]", text);
}

const char *fc_check_type(fc_check_run *c, const fc_tensor *tensor) {
    return tensor->object
               ? "object"
               : fc_check_text(c, "%s%s", fc_dtype_get(tensor->dtype)->torch_name, fc_check_shape(c, tensor));
}

const char *fc_check_others(fc_check_run *c, uint64_t count) {
    return count > 1 ? fc_check_text(c, " and %" PRIu64 " more", count - 1) : "";
}

void fc_check_sum_up(const fc_check_run *c, fc_report *out) {
    out->findings = c->findings;
    out->count = c->count;
    out->allowed = c->allowed;
    out->idle_exclude = c->idle_exclude;
    for (size_t i = 0; i < c->count; i++) {
        *(fc_finding_info_get(c->findings[i].kind)->severity == FC_SEVERITY_ERROR ? &out->errors : &out->warnings) += 1;
    }
    for (size_t i = 0; i < c->names.count; i++) {
        *(c->names.items[i].tensor->object ? &out->objects : &out->tensors) += 1;
    }
}

/* Lists the names to check, renamed as a conversion would, and the names of the reference, which are never renamed. */
static fc_code list_names(fc_check_run *c, fc_names *reference, fc_error *err) {
    const fc_check_options *o = c->options;
    static const fc_selection everything;
    fc_rename *rename = NULL;
    fc_code rc;
    FC_TRY_GOTO(fc_rename_new(o->selection ? o->selection : &everything, &rename, err), rc, out);
    FC_TRY_GOTO(fc_names_make(c->checkpoint, o->selection, rename, c->arena, &c->names, err), rc, out);
    FC_TRY_GOTO(
        fc_rename_check_used(rename, c->path, c->checkpoint->ntensors ? c->checkpoint->tensors[0].name : "", err), rc,
        out);
    if (o->reference) {
        FC_TRY_GOTO(fc_names_make(o->reference, o->selection, NULL, c->arena, reference, err), rc, out);
        FC_TRY_GOTO(fc_names_add_tied_head(&c->names, c->checkpoint, c->arena, err), rc, out);
        FC_TRY_GOTO(fc_names_add_tied_head(reference, o->reference, c->arena, err), rc, out);
    }
    const fc_names *const sides[] = {&c->names, reference};
    FC_TRY_GOTO(
        fc_names_check_globs(o->selection, sides, o->reference ? 2 : 1, c->checkpoint, c->arena, &c->idle_exclude, err),
        rc, out);
out:
    fc_rename_free(rename);
    return rc;
}

static fc_code run(fc_check_run *c, fc_report *out, fc_error *err) {
    fc_names reference = {0};
    FC_TRY(list_names(c, &reference, err));
    if (c->options->only_mesh) {
        fc_check_fit(c);
        fc_check_sum_up(c, out);
        return FC_OK;
    }
    bool flat = !c->options->reference && fc_flat_parameter(c->checkpoint, NULL); /* reported as a finding of its own */
    if (c->checkpoint->note && !flat) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_NOTE, .name = c->path, .detail = c->checkpoint->note});
    }
    fc_check_files(c);
    fc_check_coverage(c);
    fc_check_objects(c);
    if (c->options->reference) {
        fc_check_against(c, &reference);
    } else {
        fc_check_wrappers(c);
    }
    fc_check_optimizer(c);
    if (c->options->mesh) {
        fc_check_fit(c);
    }
    fc_check_sum_up(c, out);
    return FC_OK;
}

bool fc_check_failed(fc_check_run *c, fc_code rc, const fc_error *why) {
    bool failed = rc == FC_ENOMEM || rc == FC_EIO;
    if (failed && c->failed == FC_OK) {
        c->failed = rc;
        c->failure = *why;
    }
    return failed;
}

static fc_code finish(const fc_check_run *c, fc_code rc, fc_error *err) {
    if (rc == FC_OK && c->failed != FC_OK) {
        return err ? (*err = c->failure, c->failed) : c->failed;
    }
    return rc == FC_OK && c->no_memory ? fc_no_memory(err, c->path) : rc;
}

fc_code fc_check(const fc_checkpoint *checkpoint, const fc_check_options *options, fc_arena *arena, fc_report *out,
                 fc_error *err) {
    fc_check_run c = {.path = checkpoint->path, .checkpoint = checkpoint, .options = options, .arena = arena};
    *out = (fc_report){0};
    return finish(&c, run(&c, out, err), err);
}

static void add_unreadable(void *context, const char *path, const char *message) {
    fc_check_run *c = context;
    for (size_t i = 0; i < c->count; i++) {
        if (c->findings[i].detail && strstr(message, c->findings[i].detail)) {
            return;
        }
    }
    fc_check_add(c, &(fc_finding){.kind = FC_FOUND_UNREADABLE,
                                  .name = fc_check_text(c, "%s", path),
                                  .detail = fc_check_text(c, "%s", message)});
}

fc_code fc_check_path(const char *path, const fc_check_options *options, fc_arena *arena, fc_checkpoint **checkpoint,
                      fc_report *out, fc_error *err) {
    fc_check_run c = {.path = path, .options = options, .arena = arena};
    fc_open_options how = options->open;
    fc_error why;
    /* Only headers matter here, and missing data files are to be reported all at once. */
    how.headers_only = true;
    how.damaged = add_unreadable;
    how.context = &c;
    *out = (fc_report){0};
    fc_code rc = fc_checkpoint_open_model(path, &how, options->model, checkpoint, &why);
    if (rc == FC_OK) {
        c.checkpoint = *checkpoint;
        fc_progress_begin(how.progress, FC_PHASE_CHECKING, FC_COUNTED_TENSORS, 0);
        return finish(&c, run(&c, out, err), err);
    }
    bool misfit = rc == FC_EUSAGE && options->model; /* the flat parameters do not fit the model */
    if (!misfit && (rc != FC_ECORRUPT || fc_access(path, F_OK) != 0)) {
        return err ? (*err = why, rc) : rc;
    }
    add_unreadable(&c, path, why.message); /* does nothing if it was reported for one of the files */
    fc_check_sum_up(&c, out);
    return finish(&c, FC_OK, err);
}
