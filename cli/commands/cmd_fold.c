/*
 * fold: makes one delta of a chain of them.
 */
#include "output/json_out.h"
#include "progress_view.h"
#include "signals.h"
#include "source.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"

static void print_fold_json(const options *o, const fc_fold_report *r, double seconds, text_out *out) {
    json_out json;
    jw_document(&json, out, 1, "fold");
    JSON_MEMBER(&json, string, "target", o->output);
    JSON_UINTS(&json, {"version", (uint64_t)r->number}, {"base_version", (uint64_t)r->base});
    JSON_MEMBER(&json, string, "delta_encoding", fc_delta_encoding_name(r->encoding));
    JSON_MEMBER(&json, string, "checksum_format", fc_delta_checksum_name(r->checksum));
    JSON_UINTS(&json, {"deltas", r->deltas}, {"tensors", r->tensors}, {"changed", r->changed},
               {"changed_bytes", r->changed_bytes}, {"source_bytes", r->source_bytes},
               {"stored_bytes", r->stored_bytes});
    JSON_MEMBER(&json, number, "seconds", seconds);
    jw_end_document(&json);
}

static void print_fold_text(const options *o, const fc_fold_report *r, double seconds, text_out *out) {
    char before[TEXT_SIZE_MAX], after[TEXT_SIZE_MAX];
    text_name(out, o->output);
    text_printf(out, ": version %lld on %lld, %zu %s folded, %zu %s changed; %s with %s, before %s, %.2f s\n",
                (long long)r->number, (long long)r->base, r->deltas, r->deltas == 1 ? "delta" : "deltas", r->changed,
                r->changed == 1 ? "tensor" : "tensors", text_bytes(after, r->stored_bytes),
                fc_delta_encoding_name(r->encoding), text_bytes(before, r->source_bytes), seconds);
    if (r->changed < r->tensors) {
        text_printf(out, "%zu %s the same in version %lld as in version %lld\n", r->tensors - r->changed,
                    r->tensors - r->changed == 1 ? "tensor is" : "tensors are", (long long)r->number,
                    (long long)r->base);
    }
}

static fc_code run_fold(cli_call *call, fc_error *err) {
    const options *o = call->options;
    const fc_fold_options how = {.level = (int)o->level,
                                 .force = o->force,
                                 .reporter = {.report = source_note},
                                 .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress}};
    fc_fold_report report;
    signals_cancel(call->progress);
    const fc_code rc = fc_delta_fold((const char *const *)o->operands, o->noperands, o->output, &how, &report, err);
    signals_cancel(NULL);
    FC_TRY(rc);
    if (!options_silent(o)) {
        (o->json ? print_fold_json : print_fold_text)(o, &report, progress_now() - call->started, call->out);
    }
    return FC_OK;
}

static const option_help helps[] = {
    {OPT_OUTPUT, "write the delta to the directory DST, such as folded/weight_v000010; --force replaces a version"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt fold updates/weight_v00000[3-9] updates/weight_v000010 -o folded/weight_v000010",
    "one delta from version 2 to version 10",
    "fsdpckpt fold updates/ -o folded/weight_v000010",
    "the deltas that lead to version 10, back to the last full version or to the first one",
    NULL,
};

const command command_fold = {
    .name = "fold",
    .operands = "DELTA...",
    .summary = "make one delta of a chain of deltas",
    .description =
        "Writes one delta that does what several do one after the other, for an engine that has missed some versions, "
        "or for an archive. The model is not needed. The versions are folders of a chain, in any order, or "
        "one directory of versions. Then those are folded that lead to the version that the name of DST says, else to "
        "the newest one; the first is the one that follows a full version, or whose base is not there.\n\nThe delta "
        "has the base of the first version, the number, the checksums and the encoding of the last one. All versions "
        "must have the same encoding, because only the model tells what two encodings make together. A tensor of "
        "'xor' that has its old bytes again is left out. Frames are folded piece by piece: memory use grows with the "
        "number of versions, not with the size of tensors.",
    .examples = examples,
    .helps = helps,
    .synopsis = "-o DST",
    .takes = TAKES_COMMON | TAKES(OPT_OUTPUT) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES(OPT_FORCE) |
             TAKES(OPT_JSON) | TAKES(OPT_LEVEL),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_FORCE) | TAKES(OPT_JSON),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_fold,
};
