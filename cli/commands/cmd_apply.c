/*
 * apply: brings a model on a local disk to another version, in place.
 */
#include "job.h"
#include "progress_view.h"
#include "signals.h"
#include "source.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"

/* A version that may not be there. */
static void put_version(json_out *json, const char *key, int64_t version) {
    jw_key(json, key);
    if (version == FC_DELTA_NO_NUMBER) {
        jw_string(json, NULL);
    } else {
        jw_int(json, version);
    }
}

static void print_apply_json(const options *o, const fc_delta_apply_report *r, double seconds, text_out *out) {
    json_out json;
    jw_document(&json, out, 1, "apply");
    JSON_MEMBER(&json, string, "model", o->operands[1]);
    JSON_MEMBER(&json, bool, "dry_run", o->dry_run);
    JSON_UINTS(&json, {"from_version", (uint64_t)r->from}, {"version", (uint64_t)r->to});
    put_version(&json, "replayed_version", r->replayed);
    put_version(&json, "full_version", r->full);
    JSON_UINTS(&json, {"deltas", r->deltas}, {"changed", r->tensors}, {"stored_bytes", r->stored_bytes},
               {"bytes", r->bytes});
    if (!o->dry_run) {
        JSON_UINTS(&json, {"changed_bytes", r->changed_bytes});
    }
    JSON_MEMBER(&json, number, "seconds", seconds);
    jw_end_document(&json);
}

static void print_applied(const options *o, const fc_delta_apply_report *r, double seconds, text_out *out) {
    char stored[TEXT_SIZE_MAX], bytes[TEXT_SIZE_MAX];
    text_printf(out, ": %s version %lld to version %lld, ", o->dry_run ? "would go from" : "from", (long long)r->from,
                (long long)r->to);
    if (r->full != FC_DELTA_NO_NUMBER) {
        text_printf(out, "with the full version %lld and ", (long long)r->full);
    }
    text_printf(out, "%zu %s of %s; %zu %s of %s %s", r->deltas, r->deltas == 1 ? "delta" : "deltas",
                text_bytes(stored, r->stored_bytes), r->tensors, r->tensors == 1 ? "tensor" : "tensors",
                text_bytes(bytes, r->bytes), o->dry_run ? "would be read and checked" : "changed");
    if (!o->dry_run) {
        text_printf(out, ", %.2f s", seconds);
    }
    text_printf(out, "\n");
}

static void print_apply_text(const options *o, const fc_delta_apply_report *r, double seconds, text_out *out) {
    if (r->replayed != FC_DELTA_NO_NUMBER) {
        text_name(out, o->operands[1]);
        text_printf(out,
                    o->dry_run ? ": an earlier run has checked version %lld, and the next one completes it\n"
                               : ": completed version %lld, which an earlier run had checked\n",
                    (long long)r->replayed);
    }
    text_name(out, o->operands[1]);
    if (r->from == r->to) {
        text_printf(out, ": it has version %lld, and there is nothing to do\n", (long long)r->to);
    } else {
        print_applied(o, r, seconds, out);
    }
}

static fc_code run_apply(cli_call *call, fc_error *err) {
    const options *o = call->options;
    const fc_delta_apply_options how = {
        .up_to = option_given(o, OPT_UP_TO) ? o->up_to : FC_DELTA_NO_NUMBER,
        .base = option_given(o, OPT_BASE) ? o->base : FC_DELTA_NO_NUMBER,
        .dry_run = o->dry_run,
        .reporter = {.report = source_note},
        .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress}};
    fc_delta_apply_report report;
    signals_cancel(call->progress);
    const fc_code rc = fc_delta_apply(o->operands[0], o->operands[1], &how, &report, err);
    signals_cancel(NULL);
    if (rc == FC_OK && !options_silent(o)) {
        (o->json ? print_apply_json : print_apply_text)(o, &report, progress_now() - call->started, call->out);
    }
    return rc;
}

static const option_help helps[] = {
    {OPT_UP_TO, "the version that MODEL gets (default: the newest)"},
    {OPT_BASE, "the version of a MODEL that has no .weight_sync/state.json (default: 0, the base of the run)"},
    {OPT_DRY_RUN, "read headers only, and print which versions would be applied and how much would be read; write "
                  "nothing"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt apply updates/ model/",
    "bring the model to the newest version",
    "fsdpckpt apply updates/ model/ --up-to 7 --dry-run",
    "what version 7 would take",
    NULL,
};

const command command_apply = {
    .name = "apply",
    .operands = "UPDATES MODEL",
    .summary = "bring a model to another version, in place",
    .description =
        "Changes the safetensors files in the folder MODEL with the deltas in the directory UPDATES, which has "
        "weight_v000001/, weight_v000002/ and so on, as slime, miles, SGLang and 'fsdpckpt delta' write them. The "
        "version that MODEL has is in its .weight_sync/state.json, where SGLang keeps it too, and both take the lock "
        "next to it. If a full version lies between, it replaces the files of MODEL.\n\nEvery frame is decoded and "
        "every checksum compared before the first byte of MODEL is written, and the new bytes are on the disk in a "
        "journal. So a version that is damaged, is missing or belongs to another run changes nothing; and after a "
        "run that was killed, or a power failure, the next run completes the version or finds MODEL as it was. "
        "Memory use does not depend on the size of tensors.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES(OPT_UP_TO) | TAKES(OPT_BASE) | TAKES(OPT_DRY_RUN) | TAKES(OPT_JOBS) |
             TAKES(OPT_MEMORY) | TAKES(OPT_JSON),
    .usual = TAKES(OPT_UP_TO) | TAKES(OPT_BASE) | TAKES(OPT_DRY_RUN) | TAKES(OPT_JSON),
    .run = run_apply,
};
