/*
 * export: writes the model of a training checkpoint as a directory that transformers and vLLM load.
 */
#include "fsdpckpt/order.h"
#include "job.h"
#include "kept.h"
#include "options/hint.h"
#include "recipe.h"
#include "source.h"
#include "target.h"

#include "fsdpckpt/export.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The default of huggingface_hub for the size of one file. */
static const uint64_t hub_file_bytes = UINT64_C(5000000000);

/* How many differences from the reference are shown. */
enum { MOST_SHOWN = 20 };

/* One export: its options, its reference and what was done. */
typedef struct exported {
    const options *given;
    options o; /* for the conversion */
    fc_arena *arena;
    fc_checkpoint *weights; /* of the reference */
    fc_export_reference reference;
    const char *const *side_files;
    fc_reporter others;
    fc_session *session;
    fc_export_report report;
    const char *found_adapter; /* adapter_config.json next to the source; NULL: none, or it was named */
    bool found;                /* the reference was found next to the source, and its weights are not used */
    bool unquantized;          /* what config.json says of quantization was removed */
    const char *reason;        /* why this recipe, for people; NULL: it was named, or there is none */
} exported;

/* ---- the reference ---- */

/* Whether a name is a URL: a web server does not list its folders. */
static bool is_url(const char *path) {
    return strncmp(path, "https://", 8) == 0 || strncmp(path, "http://", 7) == 0;
}

/* Finds a file in the folder SRC, or in its model/, as of verl's actor/ with Megatron's checkpoint, whose own folder is
   dist_ckpt/ next to the file. On a server, SRC is listed first, which is one request, and ".." means nothing. */
static fc_code find_beside(const exported *x, const char *name, const char **out, fc_error *err) {
    const char *source = x->o.noperands == 1 ? x->o.operands[0] : "", *snapshot = NULL;
    struct stat st;
    *out = NULL;
    FC_TRY(fc_hub_snapshot(source, x->arena, &snapshot, err));
    source = snapshot ? snapshot : source;
    size_t len = strlen(source);
    while (len > 1 && source[len - 1] == '/') {
        len--;
    }
    const bool megatron = len >= 9 && strncmp(source + len - 9, "dist_ckpt", 9) == 0, remote = strstr(source, "://");
    const char *const places[] = {megatron && !remote ? "../" : "", "model/"};
    if (is_url(source) || fc_stat(source, &st) != 0 || !S_ISDIR(st.st_mode)) {
        return FC_OK;
    }
    len -= megatron && remote ? sizeof "/dist_ckpt" - 1 : 0;
    for (size_t i = 0; !*out && i < sizeof places / sizeof *places; i++) {
        const char *path = fc_arena_printf(x->arena, "%.*s/%s%s", (int)len, source, places[i], name);
        FC_NEED(path, err, NULL);
        *out = fc_access(path, F_OK) == 0 ? path : NULL;
    }
    return FC_OK;
}

/* verl saves the configuration and the tokenizer in huggingface/, and the configuration of LoRA in lora_adapter/, next
   to the files of ranks. */
static fc_code find_reference(exported *x, fc_error *err) {
    const char *config = NULL;
    FC_TRY(x->o.like || option_given(x->given, OPT_QUANTIZE) ? FC_OK
                                                             : find_beside(x, "huggingface/config.json", &config, err));
    if (config) {
        x->o.like = config;
        x->found = true;
    }
    return x->o.adapter_config ? FC_OK : find_beside(x, "lora_adapter/adapter_config.json", &x->found_adapter, err);
}

/* If the weights of the reference are quantized, the result is compared with what they stand for. */
static fc_code dequantize_reference(exported *x, const char *config, bool *dequantized, fc_error *err) {
    fc_checkpoint *made = NULL;
    fc_error own = {0};
    const fc_code rc = fc_dequantize(x->weights, x->o.dequantize, config, &made, &own);
    *dequantized = rc == FC_OK;
    x->weights = made ? made : x->weights;
    return rc == FC_OK || rc == FC_EUSAGE ? FC_OK : fc_fail(err, rc, "--like: %s", own.message);
}

/* Makes x->o.like the folder that is meant. */
static fc_code find_like(exported *x, fc_error *err) {
    const char *path = x->o.like, *snapshot = NULL;
    size_t len = strlen(path);
    while (strstr(path, "://") && len > 0 && path[len - 1] == '/') { /* completion adds one to a folder */
        len--;
    }
    path = fc_arena_strndup(x->arena, path, len);
    FC_NEED(path, err, NULL);
    const char *slash = strrchr(path, '/');
    if (slash && strcmp(slash, "/config.json") == 0) {
        path = fc_arena_strndup(x->arena, path, (size_t)(slash - path) + (slash == path));
        FC_NEED(path, err, NULL);
    }
    if (is_url(path)) {
        return fc_fail(err, FC_EUSAGE,
                       "--like %s: a web server does not list its files, so the tokenizer would be left out: download "
                       "the model first, or name it as hf://owner/model or s3://bucket/folder",
                       path);
    }
    const bool of_hub = slash && strchr(path, '/') == slash && slash > path && slash[1] && *path != '.';
    if (of_hub && access(path, F_OK) != 0) {
        return fc_fail(err, FC_EUSAGE, "--like %s: there is no such directory; a model of the hub is hf://%s", path,
                       path);
    }
    FC_TRY(fc_hub_snapshot(path, x->arena, &snapshot, err));
    x->o.like = snapshot ? snapshot : path;
    return FC_OK;
}

static fc_code open_reference(exported *x, fc_error *err) {
    FC_TRY(find_like(x, err));
    const char *path = x->o.like;
    const fc_open_options how = {
        .follow_external = x->o.follow_external, .reporter = {source_note}, .others = x->others, .session = x->session};
    char *config = fc_arena_printf(x->arena, "%s/config.json", path);
    bool has_weights = false;
    FC_NEED(config, err, path);
    if (fc_access(config, F_OK) != 0) {
        if (errno == EIO) { /* says why */
            FC_TRY_CONTEXT(fc_has_weights(path, &has_weights, err), err, "--like");
        }
        return fc_fail(err, FC_EUSAGE, "--like %s: has no config.json; name the directory of a model of transformers",
                       path);
    }
    FC_TRY(x->found ? FC_OK : fc_has_weights(path, &has_weights, err));
    if (has_weights) {
        FC_TRY_CONTEXT(fc_checkpoint_open(path, &how, &x->weights, err), err,
                       "--like compares with the weights next to config.json");
    }
    bool dequantized = option_given(x->given, OPT_DEQUANTIZE);
    FC_TRY(dequantized && x->weights ? dequantize_reference(x, config, &dequantized, err) : FC_OK);
    FC_TRY(fc_side_files(path, x->o.follow_external, dequantized, x->arena, &x->side_files, err));
    x->reference = (fc_export_reference){.weights = x->weights,
                                         .config = config,
                                         .dequantized = dequantized,
                                         .other_files = dequantized || option_given(x->given, OPT_MAX_SHARD_SIZE),
                                         .setting_names = hint_settings};
    return FC_OK;
}

static fc_code copy_side_files(void *context, const char *staging, fc_error *err) {
    exported *x = context;
    FC_TRY(fc_side_files_copy(x->o.like, x->side_files, staging, err));
    return x->reference.dequantized ? fc_side_config_dequantize(staging, x->o.dequantize, &x->unquantized, err) : FC_OK;
}

/* Reports what is different from the reference, and fails if anything is. */
static fc_code refuse_differences(const exported *x, fc_error *err) {
    const fc_export_fit_report *fit = &x->report.fit;
    if (fit->ndifferences == 0) {
        return FC_OK;
    }
    if (fit->ndifferences == 1) {
        return fc_fail(err, FC_EUSAGE, "the model does not fit %s: %s", x->o.like, fit->differences[0]);
    }
    for (size_t i = 0; i < fit->ndifferences && i < MOST_SHOWN; i++) {
        text_report("%s", fit->differences[i]);
    }
    return fc_fail(err, FC_EUSAGE, "the model does not fit %s: %zu differences%s", x->o.like, fit->ndifferences,
                   fit->ndifferences > MOST_SHOWN ? "; these are the first" : "");
}

/* ---- the conversion ---- */

static fc_code change_source(void *context, fc_checkpoint **source, fc_convert_options *how, size_t *left_out,
                             fc_error *err) {
    exported *x = context;
    fc_selection *s = &how->selection;
    const fc_selection chosen = *s;
    fc_export_options export = {.selection = &chosen,
                                .recipe = x->o.recipe,
                                .reverse = x->o.reverse,
                                .config = x->o.config,
                                .reference = x->o.like ? &x->reference : NULL,
                                .adapter_config = x->o.adapter_config ? x->o.adapter_config : x->found_adapter,
                                .adapter_optional = x->found_adapter != NULL};
    if (!export.config && x->o.like) {
        export.config = x->reference.config;
    }
    if (!export.config) {
        FC_TRY(source_config(&x->o, *source, x->arena, &export.config, err));
    }
    FC_TRY(fc_export_open(source, &export, x->arena, &x->report, err));
    if (x->report.found.count > 0) {
        x->reason = recipe_reason(&x->report.found, x->arena);
        FC_NEED(x->reason, err, NULL);
    }
    FC_TRY(refuse_differences(x, err));
    s->include = s->exclude = s->rename = NULL;
    s->strip_prefix = NULL;
    *left_out = x->report.place.left_out;
    if (x->weights) {
        s->arrange = fc_export_arrange;
        s->arrange_context = &x->reference;
    }
    if (x->o.like) {
        how->add_files = copy_side_files;
        how->add_context = x;
        how->added = x->side_files;
    }
    return FC_OK;
}

/* ---- the summary ---- */

static void print_changes(text_out *out, const char *title, const fc_export_change *changes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        text_puts(out, title);
        text_name(out, changes[i].name);
        if (changes[i].other) {
            text_puts(out, " is ");
            text_name(out, changes[i].other);
        } else {
            text_printf(out, " from %" PRId64 " to %" PRId64 " rows", changes[i].from, changes[i].to);
        }
        text_puts(out, "\n");
    }
}

static void print_side_files(const exported *x, const char *const *kept, text_out *out) {
    if (!x->o.like && fc_has_text(kept, "config.json")) {
        return;
    }
    if (!x->o.like) {
        text_puts(out, "missing:  config.json and the tokenizer; --like copies them from a directory of the model\n");
        return;
    }
    text_puts(out, "copied:   ");
    for (const char *const *name = x->side_files; *name; name++) {
        text_puts(out, name == x->side_files ? "" : ", ");
        text_name(out, *name);
    }
    if (x->found) {
        text_puts(out, ", from ");
        text_name(out, x->o.like);
    }
    text_puts(out, x->unquantized ? "\nconfig:   without what config.json said of quantization\n" : "\n");
}

/* Says what the model was compared with, where --like has no weights. */
static void print_checked(const exported *x, text_out *out) {
    const fc_export_fit_report *fit = &x->report.fit;
    if (!x->o.like || x->weights) {
        return;
    }
    text_puts(out, "checked:  ");
    for (size_t i = 0; i < fit->nchecked; i++) {
        text_printf(out, "%s%s", i > 0 ? ", " : "", fit->checked[i]);
    }
    text_printf(out, "%s of config.json; %s no weights to compare names and shapes with\n",
                fit->nchecked > 0 ? "" : "nothing", x->found ? "there are" : "--like has");
}

static void print_export(const void *context, const char *const *kept, text_out *out) {
    const exported *x = context;
    const fc_export_report *r = &x->report;
    text_puts(out, "model:    ");
    text_name(out, *r->place.branch ? r->place.branch : "all tensors");
    if (*r->place.others) {
        text_printf(out, "; %zu other values left out: ", r->place.left_out);
        text_name(out, r->place.others);
    }
    text_puts(out, "\nnames:    ");
    text_name(out, r->recipe ? r->recipe : "no recipe");
    if (x->reason) {
        text_puts(out, ", ");
        text_name(out, x->reason);
    }
    if (*r->place.wrappers || *r->prefix) {
        text_puts(out, "; removed: ");
        text_name(out, r->place.wrappers);
        text_puts(out, *r->place.wrappers && *r->prefix ? ", " : "");
        text_name(out, r->prefix);
    }
    text_puts(out, "\n");
    if (r->merged > 0) {
        text_printf(out, "merged:   the adapter, into %zu weights", r->merged);
        text_puts(out, x->found_adapter ? "; its configuration is " : "");
        text_name(out, x->found_adapter ? x->found_adapter : "");
        text_puts(out, "\n");
    }
    print_changes(out, "tied:     ", r->fit.tied, r->fit.ntied);
    print_changes(out, "tied:     ", r->fit.copied, r->fit.ncopied);
    print_changes(out, "trimmed:  ", r->fit.trimmed, r->fit.ntrimmed);
    print_checked(x, out);
    if (r->fit.cast > 0) {
        text_printf(out, "dtypes:   %zu tensors were converted\n", r->fit.cast);
    }
    print_side_files(x, kept, out);
}

static void json_changes(json_out *j, const char *key, const fc_export_change *changes, size_t count) {
    jw_member_open(j, key, '[');
    for (size_t i = 0; i < count; i++) {
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", changes[i].name);
        if (changes[i].other) {
            JSON_MEMBER(j, string, "same_as", changes[i].other);
        } else {
            JSON_MEMBER(j, int, "from", changes[i].from);
            JSON_MEMBER(j, int, "to", changes[i].to);
        }
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

/* Says which tensor, or which key of config.json, decided on the recipe. */
static void json_reason(json_out *j, const fc_export_report *r) {
    const fc_recipe_matches *found = &r->found;
    jw_key(j, "recipe_reason");
    if (!r->recipe) {
        jw_string(j, NULL);
        return;
    }
    jw_open(j, '{');
    JSON_MEMBER(j, string, "by", found->count == 0 ? "option" : found->model ? "config" : "names");
    if (found->model) {
        JSON_MEMBER(j, string, "key", found->model_key);
        JSON_MEMBER(j, string, "value", found->model);
    } else if (found->count > 0) {
        JSON_MEMBER(j, string, "tensor", found->tensor);
    }
    jw_close(j, '}');
}

static void print_export_json(const void *context, json_out *j) {
    const exported *x = context;
    const fc_export_report *r = &x->report;
    jw_member_open(j, "model", '{');
    JSON_MEMBER(j, string, "branch", r->place.branch);
    JSON_MEMBER(j, string, "wrappers", r->place.wrappers);
    JSON_MEMBER(j, string, "prefix", r->prefix);
    JSON_MEMBER(j, string, "recipe", r->recipe);
    json_reason(j, r);
    json_changes(j, "tied", r->fit.tied, r->fit.ntied);
    json_changes(j, "copied", r->fit.copied, r->fit.ncopied);
    json_changes(j, "trimmed", r->fit.trimmed, r->fit.ntrimmed);
    JSON_UINTS(j, {"cast", r->fit.cast}, {"merged", r->merged});
    jw_member_strings(j, "checked", r->fit.checked, r->fit.nchecked);
    jw_member_strings(j, "side_files", x->side_files, x->side_files ? SIZE_MAX : 0);
    jw_close(j, '}');
}

/* ---- the command ---- */

static fc_code prepare_export(exported *x, fc_error *err) {
    x->o = *x->given;
    x->o.to = "safetensors";
    if (x->o.output && target_named_format(x->o.output) && !target_is_directory(x->o.output)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: names a file, but export writes a directory; use 'fsdpckpt consolidate --model-only', or "
                       "name a directory",
                       x->o.output);
    }
    FC_TRY(find_reference(x, err));
    if (x->o.like && option_given(x->given, OPT_QUANTIZE)) {
        return fc_fail(err, FC_EUSAGE, "export: --quantize cannot be combined with --like; export in two steps");
    }
    FC_TRY(x->o.like ? open_reference(x, err) : FC_OK);
    if (x->weights && (option_given(x->given, OPT_DTYPE) || x->o.dtype_for.count)) {
        return fc_fail(err, FC_EUSAGE, "export: the weights of --like decide on dtypes; omit --%s",
                       option_given(x->given, OPT_DTYPE) ? "dtype" : "dtype-for");
    }
    if (!x->o.max_shard_size) { /* with the weights of a reference, its files decide */
        x->o.max_shard_size = x->weights && !x->reference.dequantized ? INT64_MAX : hub_file_bytes;
    }
    return FC_OK;
}

static fc_code run_export(cli_call *call, fc_error *err) {
    exported x = {
        .given = call->options, .others = source_others(call), .session = call->session, .arena = call->arena};
    cli_call with = *call;
    const job_steps steps = {
        .change = change_source, .print = print_export, .print_json = print_export_json, .context = &x};
    fc_code rc;
    FC_TRY_GOTO(prepare_export(&x, err), rc, out);
    with.options = &x.o;
    rc = job_run_steps(&with, NULL, &steps, err);
out:
    fc_checkpoint_close(x.weights);
    return rc;
}

static const option_help helps[] = {
    {OPT_OUTPUT, "write the model to the directory DST, which must not exist unless --force is given"},
    {OPT_RECIPE,
     "the names and layouts of the result: the name of a shipped recipe (see 'fsdpckpt recipes'), a JSON file, "
     "'none', or 'auto', the only shipped one that fits (default: like auto, but if none fits, names and "
     "layouts stay)"},
    {OPT_CONFIG, "config.json of the model, or its folder, from which the recipe takes sizes such as "
                 "num_attention_heads (default: that of --like, or the one next to SRC)"},
    {OPT_MAX_SHARD_SIZE,
     "write files of at most SIZE (default: the files of --like, or 5GB). A tensor is never split. If one "
     "file is enough, it is model.safetensors without an index"},
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {OPT_COMM,
     "share the work with other processes: mpi, none, or auto (the default: mpi when started by mpirun with more "
     "than one rank)"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt export ckpt/ -o model/ --like Llama-3.1-8B/",
    "a directory for transformers and vLLM, with the tokenizer and the configuration of Llama-3.1-8B/",
    "fsdpckpt export ckpt/ -o model/ --recipe torchtitan-llama3 --config Llama-3.1-8B/config.json --dtype bf16",
    "only the weights, under the names of transformers",
    "fsdpckpt export ckpt/ -o model/ --like Llama-3.1-8B/ --dry-run",
    "does it fit?",
    NULL,
};

const command command_export = {
    .name = "export",
    .operands = "SRC",
    .summary = "write the model of a training checkpoint as transformers and vLLM load it",
    .description =
        "Takes the model out of SRC and leaves the optimizer, counters and other objects behind; removes what FSDP, "
        "DDP, "
        "torch.compile and trainers add to names; applies the recipe that fits; and writes a directory of safetensors "
        "with the index of Hugging Face.\n\nWith --like, the result is compared with that model before anything is "
        "written. Tied weights are stored as many times as in that model, and rows that pad the vocabulary are left "
        "out. A name or a shape that differs otherwise is an error. If the directory has no weights, the result is "
        "compared with its config.json: the vocabulary, the number of layers, whether the head is tied. Its other "
        "files, such as the configuration and the tokenizer, are copied.\n\nWith --force, files of an existing DST "
        "that are not weights are kept. DST appears "
        "under its name only when it is complete and on disk.",
    .helps = helps,
    .examples = examples,
    .synopsis = "-o DST",
    .takes = TAKES_COMMON | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_ADAPTER_CONFIG) | TAKES(OPT_OUTPUT) |
             TAKES(OPT_LIKE) | TAKES(OPT_MAX_SHARD_SIZE) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) | TAKES(OPT_DTYPE) | TAKES(OPT_DTYPE_FOR) | TAKES(OPT_FORCE) |
             TAKES(OPT_RESUME) | TAKES(OPT_DRY_RUN) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES(OPT_COMM) |
             TAKES_EXTERNAL | TAKES(OPT_SCHEMA) | TAKES(OPT_TP_PLAN) | TAKES(OPT_JSON),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_LIKE) | TAKES(OPT_DTYPE) | TAKES(OPT_QUANTIZE) | TAKES(OPT_DEQUANTIZE) |
             TAKES(OPT_ADAPTER) | TAKES(OPT_RECIPE) | TAKES(OPT_MAX_SHARD_SIZE) | TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_export,
};
