/*
 * The table of all findings and their messages. Members of the finding replace {name} … {count}; {src} and {ref} are
 * the paths; {count:tensor:tensors} is a number with its noun; {setting:model} is the name of a setting.
 * docs/CHECK_MESSAGES.md shows every message.
 */
#include "check/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const fc_finding_info table[FC_FOUND_KINDS] = {
    [FC_FOUND_UNREADABLE] = {"unreadable", FC_SEVERITY_ERROR, "{detail}", NULL},
    [FC_FOUND_FILE_MISSING] = {"file-missing", FC_SEVERITY_ERROR, "{name}: the file is missing; it holds {detail}",
                               "copy it again, or save again"},
    [FC_FOUND_FILE_TRUNCATED] = {"file-truncated", FC_SEVERITY_ERROR,
                                 "{name}: truncated: it has {found} bytes and needs {expected}, for {other}",
                                 "copy it again, or save again"},
    [FC_FOUND_FILE_DAMAGED] = {"file-damaged", FC_SEVERITY_ERROR, "{detail}", NULL},
    [FC_FOUND_COVERAGE] = {"coverage", FC_SEVERITY_ERROR, "{detail}", NULL},
    [FC_FOUND_UNSUPPORTED] = {"unsupported", FC_SEVERITY_WARNING, "{name}: {detail}", "leave it out with {option}"},
    [FC_FOUND_RUNS] = {"object-runs", FC_SEVERITY_ERROR, "{name}: {detail}", "leave it out with {option}"},
    [FC_FOUND_FILE_RUNS] = {"file-runs", FC_SEVERITY_ERROR, "{detail}", "a conversion leaves this call behind"},
    [FC_FOUND_UNKNOWN_CLASS] = {"object-unknown", FC_SEVERITY_WARNING, "{name}: {detail}",
                                "leave it out with {option}"},
    [FC_FOUND_OBJECT_DAMAGED] = {"object-damaged", FC_SEVERITY_ERROR, "{detail}", NULL},
    [FC_FOUND_NOTE] = {"note", FC_SEVERITY_WARNING, "{src}: {detail}", NULL},
    [FC_FOUND_EMPTY] = {"empty", FC_SEVERITY_WARNING, "{src}: holds no tensor and no object", NULL},
    [FC_FOUND_WRAPPED_PREFIX] = {"wrapped-prefix", FC_SEVERITY_WARNING,
                                 "{count:name begins:names begin} with '{detail}' ({expected}), e.g. {name}: the plain "
                                 "model does not load them",
                                 "convert with {option}"},
    [FC_FOUND_WRAPPED_NAMES] =
        {"wrapped-names", FC_SEVERITY_WARNING,
         "{count:name contains:names contain} '{detail}' ({expected}), e.g. {name}: the plain model does not load them",
         "convert with {option}"},
    [FC_FOUND_FLAT_PARAMETERS] =
        {"flat-parameters", FC_SEVERITY_WARNING,
         "{count:tensor is a flat parameter:tensors are flat parameters} of FSDP1, e.g. {name}: no header records "
         "which weights they hold",
         "convert with {setting:model} FILE (a schema or a checkpoint of the model), or save with "
         "StateDictType.SHARDED_STATE_DICT"},
    [FC_FOUND_STATE_ORPHAN] =
        {"state-orphan", FC_SEVERITY_ERROR,
         "{name}: optimizer state ({detail}) of {other}, which is missing: the parameter is lost or has another name",
         "to drop the state, exclude it with {option}"},
    [FC_FOUND_STATE_SHAPE] = {"state-shape", FC_SEVERITY_ERROR,
                              "{name}: {found}, but its parameter {other} is {expected}: the optimizer cannot use it",
                              NULL},
    [FC_FOUND_STATE_INCOMPLETE] = {"state-incomplete", FC_SEVERITY_WARNING,
                                   "{name}: its optimizer state lacks {detail}, which {count:other parameter "
                                   "has:other parameters have}",
                                   NULL},
    [FC_FOUND_GROUP_ORPHAN] = {"group-orphan", FC_SEVERITY_ERROR,
                               "{name}: lists {count:parameter:parameters} missing from {src}, e.g. {other}", NULL},
    [FC_FOUND_GROUP_STATE] = {"group-state", FC_SEVERITY_WARNING,
                              "{name}: has optimizer state, but param_groups does not list it (see {other})", NULL},
    [FC_FOUND_VERSION_DAMAGED] = {"version-damaged", FC_SEVERITY_ERROR, "{detail}", NULL},
    [FC_FOUND_VERSION_GAP] = {"version-gap", FC_SEVERITY_ERROR, "{detail}", "publish it, or a full version above it"},
    [FC_FOUND_VERSION_FORK] = {"version-fork", FC_SEVERITY_ERROR, "{detail}", "keep the versions of one run"},
    [FC_FOUND_MISSING] = {"missing", FC_SEVERITY_ERROR, "{name}: missing: {ref} has it as {expected}", NULL},
    [FC_FOUND_MISSING_OBJECT] = {"missing-object", FC_SEVERITY_ERROR, "{name}: missing: {ref} has it as an object",
                                 NULL},
    [FC_FOUND_UNEXPECTED] = {"unexpected", FC_SEVERITY_ERROR, "{name}: unexpected: {found}, not in {ref}", NULL},
    [FC_FOUND_UNEXPECTED_OBJECT] = {"unexpected-object", FC_SEVERITY_ERROR,
                                    "{name}: unexpected: an object, not in {ref}", NULL},
    [FC_FOUND_TIED] = {"tied", FC_SEVERITY_WARNING,
                       "{name}: one side ties it to {other}; diff compares the data of the two", NULL},
    [FC_FOUND_PREFIX_EXTRA] =
        {"prefix-extra", FC_SEVERITY_ERROR,
         "{count:name has:names have} the prefix '{detail}'{expected}, e.g. {name}; {ref} has no such prefix",
         "convert with {option}"},
    [FC_FOUND_PREFIX_LACKING] =
        {"prefix-lacking", FC_SEVERITY_ERROR,
         "{count:name lacks:names lack} the prefix '{detail}'{expected}, e.g. {name}; {ref} has it",
         "convert with {option}"},
    [FC_FOUND_WRAPPER_EXTRA] =
        {"wrapper-extra", FC_SEVERITY_ERROR,
         "{count:name contains:names contain} '{detail}'{expected}, e.g. {name}; {ref} has plain names",
         "convert with {option}"},
    [FC_FOUND_WRAPPER_LACKING] =
        {"wrapper-lacking", FC_SEVERITY_ERROR,
         "{ref} has {count:name:names} with '{detail}'{expected}, e.g. {other}, which is {name} here",
         "make the reference from the unwrapped model, or load into the wrapped one"},
    [FC_FOUND_RENAMED] = {"renamed", FC_SEVERITY_ERROR,
                          "{name}: renamed: {ref} has the same {found}, bit for bit, as {other}",
                          "convert with {option}"},
    [FC_FOUND_RENAMED_PERHAPS] =
        {"renamed-perhaps", FC_SEVERITY_ERROR,
         "{name}: possibly renamed: it is not in {ref}, and {other}, also {found}, is missing here",
         "if they are the same, convert with {option}"},
    [FC_FOUND_RENAMED_COMPONENT] =
        {"renamed-component", FC_SEVERITY_ERROR,
         "{count:name differs:names differ} in one component: '{found}' here is '{expected}' in "
         "{ref}, e.g. {name} is {other}{detail}",
         "convert with {option}"},
    [FC_FOUND_SHAPE] = {"shape", FC_SEVERITY_ERROR, "{name}: shape {found}, but {expected} in {ref}", NULL},
    [FC_FOUND_SHAPE_TRANSPOSED] = {"shape-transposed", FC_SEVERITY_ERROR,
                                   "{name}: shape {found}, but {expected} in {ref}: transposed (perhaps a Conv1D of "
                                   "GPT-2 instead of an nn.Linear)",
                                   NULL},
    [FC_FOUND_SHAPE_RESHAPED] = {"shape-reshaped", FC_SEVERITY_ERROR,
                                 "{name}: shape {found}, but {expected} in {ref}: same number of elements, reshaped",
                                 NULL},
    [FC_FOUND_SHAPE_SHARD] = {"shape-shard", FC_SEVERITY_ERROR,
                              "{name}: shape {found}, but {expected} in {ref}: 1/{count} of dimension {detail}; was "
                              "one rank's shard saved as the whole tensor?",
                              NULL},
    [FC_FOUND_SHAPE_DIMENSION] =
        {"shape-dimension", FC_SEVERITY_ERROR,
         "{name}: shape {found}, but {expected} in {ref}: dimension {detail}; padded or resized?", NULL},
    [FC_FOUND_DTYPE] = {"dtype", FC_SEVERITY_ERROR, "{name}{other}: {found}, but {expected} in {ref}",
                        "convert with {option}"},
    [FC_FOUND_DTYPE_MIXED] =
        {"dtype-mixed", FC_SEVERITY_ERROR,
         "{name}{other}: {found}, but {expected} in {ref}; casting would change the other tensors too",
         "save again with the dtypes of {ref}"},
    [FC_FOUND_DTYPE_OTHER] = {"dtype-other", FC_SEVERITY_ERROR, "{name}{other}: {found}, but {expected} in {ref}",
                              NULL},
    [FC_FOUND_NOT_A_TENSOR] = {"not-a-tensor", FC_SEVERITY_ERROR,
                               "{name}: an object, but a tensor ({expected}) in {ref}", NULL},
    [FC_FOUND_NOT_AN_OBJECT] = {"not-an-object", FC_SEVERITY_ERROR,
                                "{name}: a tensor ({found}), but an object in {ref}", NULL},
    [FC_FOUND_NESTING] = {"nesting", FC_SEVERITY_WARNING,
                          "{name}: the state dict has it at {found}, but that of {ref} at {expected}", NULL},
    [FC_FOUND_IDLE_ALLOW_MISSING] = {"idle-allow-missing", FC_SEVERITY_WARNING,
                                     "{setting:allow_missing} '{detail}' matches no missing name", "remove it"},
    [FC_FOUND_IDLE_ALLOW_UNEXPECTED] = {"idle-allow-unexpected", FC_SEVERITY_WARNING,
                                        "{setting:allow_unexpected} '{detail}' matches no unexpected name",
                                        "remove it"},
    [FC_FOUND_UNEVEN] = {"uneven", FC_SEVERITY_WARNING,
                         "{name}{other}: {found}: dimension 0 does not divide evenly by {detail}: {expected}", NULL},
    [FC_FOUND_EMPTY_SHARDS] = {"empty-shards", FC_SEVERITY_WARNING,
                               "{name}{other}: {found}: dimension 0 is shorter than {detail}: {expected}", NULL},
    [FC_FOUND_TP_UNEVEN] =
        {"tp-uneven", FC_SEVERITY_WARNING,
         "{name}{other}: {found}: {detail}: {expected}; kernels for tensor parallelism need equal shards", NULL},
    [FC_FOUND_TP_EMPTY_SHARDS] = {"tp-empty-shards", FC_SEVERITY_WARNING,
                                  "{name}{other}: {found}: {detail}: {expected}", NULL},
    [FC_FOUND_TP_NO_RULE] =
        {"tp-no-rule", FC_SEVERITY_WARNING,
         "{name}{other}: {found}: no rule of the TP plan '{detail}' covers it, so every tp rank holds all of it",
         "to shard it, add a rule to a {setting:tp_plan}"},
    [FC_FOUND_TP_SHARDS_NONE] = {"tp-shards-none", FC_SEVERITY_ERROR,
                                 "{src}: the TP plan '{detail}' shards none of its {count:tensor:tensors}",
                                 "give a {setting:tp_plan} that names their modules"},
    [FC_FOUND_TP_IDLE_RULE] = {"tp-idle-rule", FC_SEVERITY_WARNING, "{name}: the rule '{detail}' covers no tensor",
                               "correct or remove it"},
};

const fc_finding_info *fc_finding_info_get(fc_finding_kind kind) {
    static const fc_finding_info unknown = {"unknown", FC_SEVERITY_ERROR, "", NULL};
    return (unsigned)kind < FC_FOUND_KINDS ? &table[kind] : &unknown;
}

/* A message under construction: first measured, then written. */
typedef struct message_buffer {
    char *out; /* NULL: only measures */
    size_t used;
} message_buffer;

static void put(message_buffer *w, const char *text, size_t len) {
    if (w->out) {
        memcpy(w->out + w->used, text, len);
    }
    w->used += len;
}

static bool is_member(const char *key, size_t len, const char *name) {
    return strlen(name) == len && memcmp(key, name, len) == 0;
}

static const char *member(const fc_check_run *c, const fc_finding *f, const char *key, size_t len) {
    const struct {
        const char *name, *value;
    } members[] = {{"setting:model", fc_check_setting(c, FC_SETTING_MODEL)},
                   {"setting:tp_plan", fc_check_setting(c, FC_SETTING_TP_PLAN)},
                   {"setting:allow_missing", fc_check_setting(c, FC_SETTING_ALLOW_MISSING)},
                   {"setting:allow_unexpected", fc_check_setting(c, FC_SETTING_ALLOW_UNEXPECTED)},
                   {"name", f->name},
                   {"other", f->other},
                   {"found", f->found},
                   {"expected", f->expected},
                   {"detail", f->detail},
                   {"option", f->option},
                   {"src", c->path},
                   {"ref", c->options->reference ? c->options->reference->path : NULL}};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        if (is_member(key, len, members[i].name)) {
            return members[i].value ? members[i].value : "";
        }
    }
    return "";
}

/* Replaces "{count:tensor:tensors}", with `len` characters between the braces. */
static void put_count(message_buffer *w, const fc_finding *f, const char *key, size_t len) {
    char number[24];
    int n = snprintf(number, sizeof number, "%" PRIu64, f->count);
    put(w, number, (size_t)n);
    const char *one = memchr(key, ':', len), *many = one ? memchr(one + 1, ':', len - (size_t)(one + 1 - key)) : NULL;
    if (many) {
        put(w, " ", 1);
        put(w, f->count == 1 ? one + 1 : many + 1,
            f->count == 1 ? (size_t)(many - one - 1) : len - (size_t)(many + 1 - key));
    }
}

static void put_text(message_buffer *w, const fc_check_run *c, const fc_finding *f, const char *text) {
    while (*text) {
        size_t plain = strcspn(text, "{");
        put(w, text, plain);
        text += plain;
        const char *end = strchr(text, '}');
        if (!end) {
            put(w, text, strlen(text));
            return;
        }
        size_t len = (size_t)(end - text - 1);
        if (len >= 5 && memcmp(text + 1, "count", 5) == 0) {
            put_count(w, f, text + 1, len);
        } else {
            const char *value = member(c, f, text + 1, len);
            put(w, value, strlen(value));
        }
        text = end + 1;
    }
}

static void put_message(message_buffer *w, const fc_check_run *c, const fc_finding *f) {
    const fc_finding_info *info = fc_finding_info_get(f->kind);
    put_text(w, c, f, info->text);
    if (info->fix) {
        put(w, "; ", 2);
        put_text(w, c, f, info->fix);
    }
    put(w, "", 1);
}

const char *fc_finding_message(const fc_check_run *c, const fc_finding *f) {
    message_buffer w = {NULL, 0};
    put_message(&w, c, f);
    w.out = fc_arena_alloc(c->arena, w.used);
    w.used = 0;
    if (w.out) {
        put_message(&w, c, f);
    }
    return w.out;
}
