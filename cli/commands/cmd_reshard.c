/*
 * reshard: writes one file per rank of a new mesh from a checkpoint of any layout.
 */
#include "job.h"
#include "target.h"

#include <string.h>

#include "fsdpckpt/try.h"

/* Flat parameters support one mesh dimension and one format only. */
static fc_code check_policy(const options *o, fc_error *err) {
    if (o->tp || o->replicas || !o->dp) {
        return fc_fail(err, FC_EUSAGE,
                       "reshard: --policy makes flat parameters, which FSDP1 shards over --dp N ranks only%s",
                       o->dp ? ", without --tp and --replicas" : "");
    }
    const fc_format *format;
    FC_TRY(target_format(o, true, &format, err));
    if (strcmp(format->name, "pt") != 0) {
        return fc_fail(err, FC_EUSAGE,
                       "reshard: --policy makes the flat parameters of FSDP1's LOCAL_STATE_DICT, which are torch.save "
                       "files; use --to pt");
    }
    return o->local ? fc_fail(err, FC_EUSAGE, "reshard: --policy cannot be combined with --local") : FC_OK;
}

static fc_code run_reshard(cli_call *call, fc_error *err) {
    const options *o = call->options;
    fc_layout_spec spec = {.replicas = o->replicas, .dp = o->dp, .tp = o->tp};
    if (o->tp_plan && !o->tp) {
        return fc_fail(err, FC_EUSAGE, "reshard: --tp-plan needs --tp N, the number of tensor-parallel ranks");
    }
    if (option_given(o, OPT_RANK) && !o->dry_run) {
        return fc_fail(err, FC_EUSAGE, "reshard: --rank prints the plan of one rank and needs --dry-run");
    }
    FC_TRY(option_given(o, OPT_POLICY) ? check_policy(o, err) : FC_OK);
    return job_run(call, &spec, err);
}

static const char *const examples[] = {
    "fsdpckpt reshard ckpt/ -o out/ --dp 8",
    "FSDP over 8 ranks",
    "fsdpckpt reshard ckpt/ -o out/ --dp 4 --tp 2",
    "2D: FSDP over 4 ranks x tensor parallelism over 2",
    "fsdpckpt reshard ckpt/ -o out/ --replicas 2 --dp 4 --tp 2 --tp-plan plan.json",
    "HSDP with tensor parallelism, sharded as plan.json defines",
    "fsdpckpt reshard model.pt -o out/ --dp 8 --to pt --policy blocks",
    "flat parameters, as FSDP1 loads them with LOCAL_STATE_DICT",
    "fsdpckpt reshard model.json --dp 2048 --tp 8 --dry-run --rank 12345",
    "what one rank of 16,384 would hold; only the model's schema is needed",
    NULL,
};

const command command_reshard = {
    .name = "reshard",
    .operands = "SRC",
    .summary = "reshard a checkpoint of any layout for another mesh of ranks",
    .description =
        "Writes the directory DST with one file per rank. In HDF5 it also writes index.h5, in which stock HDF5 tools "
        "see every tensor whole. The mesh is replicas x dp x tp, with ranks in row-major order as in init_device_mesh. "
        "Each tensor is sharded as PyTorch's fully_shard and parallelize_module shard it. Replicated data is stored "
        "once.\n\nWith --tp, a plan defines which tensors are sharded over the tensor-parallel ranks, and how; "
        "optimizer state follows its parameter. A plan that shards no tensor is an error.\n\nWith --policy and --to "
        "pt, the files are those of FSDP1's LOCAL_STATE_DICT: one flat parameter for each unit of the policy (see "
        "'fsdpckpt units'), without the padding of use_orig_params. The order of SRC must be the order of the model; "
        "--schema supplies it where SRC does not record it. Optimizer state is numbered and sharded as the optimizer "
        "of such a model does it; all parameters of a unit have the same step and are in the same group.\n\nWith "
        "--dry-run nothing is written: -o may be left out, and SRC may be a schema (see 'fsdpckpt schema'), which has "
        "no data. --rank R then shows the plan of one rank.",
    .examples = examples,
    .synopsis = "-o DST --dp N [--tp N]",
    .takes = TAKES_CONVERSION | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) |
             TAKES(OPT_TP_PLAN) | TAKES(OPT_RANK) | TAKES(OPT_POLICY) | TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) |
             TAKES(OPT_TP_PLAN) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_DTYPE) | TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_reshard,
};
