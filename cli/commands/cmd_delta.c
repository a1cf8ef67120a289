/*
 * delta: writes what changed between two versions of a model.
 */
#include "job.h"
#include "progress_view.h"
#include "recipe.h"
#include "signals.h"
#include "source.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>

static void print_delta_json(const options *o, const fc_delta_report *r, double seconds, text_out *out) {
    json_out json;
    jw_document(&json, out, 1, "delta");
    JSON_MEMBER(&json, string, "target", o->output);
    JSON_UINTS(&json, {"version", (uint64_t)r->number}, {"base_version", (uint64_t)r->base});
    JSON_MEMBER(&json, string, "delta_encoding", fc_delta_encoding_name(r->encoding));
    JSON_MEMBER(&json, string, "checksum_format", fc_delta_checksum_name((fc_delta_checksum)o->checksum));
    JSON_UINTS(&json, {"tensors", r->tensors}, {"changed", r->changed}, {"same_digest", r->by_digest},
               {"objects", r->objects}, {"only_old", r->only_old}, {"bytes", r->bytes},
               {"changed_bytes", r->changed_bytes}, {"stored_bytes", r->stored_bytes});
    JSON_MEMBER(&json, number, "seconds", seconds);
    jw_end_document(&json);
}

static double percent(uint64_t part, uint64_t whole) {
    return whole > 0 ? 100 * (double)part / (double)whole : 0;
}

static void print_delta_text(const options *o, const fc_delta_report *r, double seconds, text_out *out) {
    char stored[TEXT_SIZE_MAX];
    text_name(out, o->output);
    text_printf(
        out, ": version %lld on %lld, %zu of %zu tensors changed, %.2f %% of the bytes; %s with %s, %.2f %%, %.2f s\n",
        (long long)r->number, (long long)r->base, r->changed, r->tensors, percent(r->changed_bytes, r->bytes),
        text_bytes(stored, r->stored_bytes), fc_delta_encoding_name(r->encoding), percent(r->stored_bytes, r->bytes),
        seconds);
    if (r->only_old > 0) {
        text_printf(out, "%zu %s as in OLD: NEW has no tensor of %s\n", r->only_old,
                    r->only_old == 1 ? "tensor stays" : "tensors stay", r->only_old == 1 ? "this name" : "these names");
    }
}

/* OLD is taken as it is: the options are about NEW. */
static fc_code open_old(const cli_call *call, fc_checkpoint **out, fc_error *err) {
    options plain = *call->options;
    cli_call old = *call;
    plain.model_only = false;
    plain.schema = plain.tp_plan = NULL;
    old.options = &plain;
    return source_open(&old, plain.operands[0], false, out, err);
}

static fc_code write_delta(const cli_call *call, const fc_checkpoint *old, const fc_checkpoint *changed,
                           fc_delta_report *report, fc_error *err) {
    const options *o = call->options;
    fc_delta_options how = {.selection = source_selection(o),
                            .encoding = (fc_delta_encoding)o->encoding,
                            .checksum = (fc_delta_checksum)o->checksum,
                            .level = (int)o->level,
                            .number = option_given(o, OPT_NUMBER) ? o->number : FC_DELTA_NO_NUMBER,
                            .base = option_given(o, OPT_BASE) ? o->base : FC_DELTA_NO_NUMBER,
                            .force = o->force,
                            .reporter = {.report = source_note},
                            .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress}};
    FC_TRY(job_choose_dtypes(call, &how.selection, err));
    how.inputs = source_inputs(o, true);
    FC_NEED(how.inputs, err, NULL);
    signals_cancel(call->progress);
    const fc_code rc = fc_delta_write(old, changed, o->output, &how, report, err);
    signals_cancel(NULL);
    free((void *)how.inputs);
    return rc;
}

static fc_code run_delta(cli_call *call, fc_error *err) {
    fc_checkpoint *old = NULL, *changed = NULL;
    fc_delta_report report;
    options rest;
    fc_code rc;
    FC_TRY_GOTO(open_old(call, &old, err), rc, out);
    FC_TRY_GOTO(recipe_open(call, &rest, call->options->operands[1], false, &changed, err), rc, out);
    FC_TRY_GOTO(source_note_selection(call, changed, true, err), rc, out);
    FC_TRY_GOTO(write_delta(call, old, changed, &report, err), rc, out);
    const options *o = call->options;
    if (!options_silent(o)) {
        (o->json ? print_delta_json : print_delta_text)(o, &report, progress_now() - call->started, call->out);
    }
out:
    fc_checkpoint_close(old);
    fc_checkpoint_close(changed);
    return rc;
}

static const option_help helps[] = {
    {OPT_OUTPUT, "write the delta to the directory DST, such as updates/weight_v000007; --force replaces a version"},
    {OPT_CONFIG, RECIPE_CONFIG_HELP},
    {OPT_DELTA, "read NEW with deltas applied: DIR is a version (repeatable), or a directory of versions. With OLD as "
                "NEW this makes "
                "one delta of a chain, whatever its encodings"},
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {OPT_RECIPE,
     "give the tensors of NEW the names and layouts of OLD: the name of a shipped recipe (see 'fsdpckpt recipes'), a "
     "JSON file, or auto"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt delta hub-6/ hub-7/ -o updates/weight_v000007",
    "what changed since version 6, for rollout engines that have it",
    "fsdpckpt delta hub/ step-100/ -o updates/weight_v000001 --model-only --recipe auto --dtype bf16",
    "from a trainer's shards to the model that the engines loaded, without a gathered copy",
    "fsdpckpt delta a/ b/ -o updates/weight_v000012 --base 10 --encoding auto",
    "a delta that skips a version, in the smaller encoding",
    NULL,
};

const command command_delta = {
    .name = "delta",
    .operands = "OLD NEW",
    .summary = "write what changed between two versions of a model",
    .description =
        "Writes the changes that turn the weights of OLD into those of NEW, in the form that slime, miles and SGLang "
        "exchange: each changed tensor is one zstd frame in a safetensors file, and the index names the version and "
        "its "
        "base. OLD and NEW may have any formats and layouts. OLD is taken as it is; the options for names, recipes, "
        "dtypes and quantization apply to NEW. Each tensor of NEW must then be in OLD with the same dtype and shape. "
        "Tensors that only OLD has stay as they are. A delta has no objects.\n\nTensors are compared and compressed "
        "piece by piece, several at once, so memory use does not depend on their size; the number of threads does not "
        "change the result. Where both sides record the same digest, a tensor is not read.",
    .examples = examples,
    .helps = helps,
    .synopsis = "-o DST",
    .takes = TAKES_COMMON | TAKES(OPT_OUTPUT) | TAKES_NAMES | TAKES(OPT_DTYPE) | TAKES(OPT_DTYPE_FOR) | TAKES_COMPUTED |
             TAKES_DELTA | TAKES(OPT_TP_PLAN) | TAKES(OPT_SCHEMA) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) |
             TAKES(OPT_FORCE) | TAKES_EXTERNAL | TAKES(OPT_JSON) | TAKES(OPT_ENCODING) | TAKES(OPT_CHECKSUM) |
             TAKES(OPT_LEVEL) | TAKES(OPT_NUMBER) | TAKES(OPT_BASE),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_RECIPE) | TAKES(OPT_DTYPE) | TAKES(OPT_ENCODING) |
             TAKES(OPT_CHECKSUM) | TAKES(OPT_BASE) | TAKES(OPT_FORCE) | TAKES(OPT_JSON),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_delta,
};
