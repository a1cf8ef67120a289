/*
 * consolidate: merges a checkpoint of any layout into one full file.
 */
#include "job.h"
#include "source.h"

static fc_code run_consolidate(cli_call *call, fc_error *err) {
    return job_run(call, NULL, err);
}

static const char *const examples[] = {
    "fsdpckpt consolidate ckpt/ -o model.h5",
    "the shards of ckpt/ as one HDF5 file",
    "fsdpckpt consolidate ckpt/ -o model.h5 --model-only",
    "the model without its optimizer",
    "fsdpckpt consolidate ckpt/ -o model.h5 --dtype bf16 --dry-run",
    "what a conversion to bfloat16 would write",
    "fsdpckpt consolidate ckpt/ -o model/ --to safetensors",
    "a directory that transformers loads: files of at most 5 GB and their index",
    "fsdpckpt consolidate ranks/ -o model.safetensors --tp-plan plan.json",
    "files of tensor-parallel ranks that do not record how they were sharded",
    NULL,
};

static const option_help helps[] = {
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {.help = NULL},
};

const command command_consolidate = {
    .name = "consolidate",
    .operands = "SRC",
    .summary = "merge a checkpoint of any layout into one full file",
    .description = "Gathers the shards of SRC into one file DST. Every element is copied once, bit for bit, unless "
                   "--dtype converts it. A gap between chunks, an overlap or a damaged file is an error, and then "
                   "nothing is written. DST appears under its name only when it is complete and on disk.",
    .helps = helps,
    .examples = examples,
    .synopsis = "-o DST",
    .takes = TAKES_CONVERSION | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_MAX_SHARD_SIZE) | TAKES(OPT_TP_PLAN),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_DTYPE) | TAKES(OPT_MAX_SHARD_SIZE) | TAKES(OPT_ADAPTER) | TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_consolidate,
};
