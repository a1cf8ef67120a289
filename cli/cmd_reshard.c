/*
 * reshard: any layout into one file a rank of another mesh.
 */
#include "job.h"
#include "target.h"

#include <string.h>

/* Flat parameters are cut over one dimension of ranks, in the files of one format. */
static fc_code check_policy(const options *o, fc_error *err) {
    if (o->tp || o->replicas || !o->dp) {
        return fc_fail(err, FC_EUSAGE,
                       "reshard: --policy makes flat parameters, which FSDP1 cuts over --dp N ranks alone%s",
                       o->dp ? ", without --tp and --replicas" : "");
    }
    const fc_format *format;
    fc_code rc = target_format(o, true, &format, err);
    if (rc == FC_OK && strcmp(format->name, "pt") != 0) {
        return fc_fail(err, FC_EUSAGE,
                       "reshard: --policy makes the flat parameters of FSDP1's LOCAL_STATE_DICT, which "
                       "are torch.save files: say --to pt");
    }
    return rc == FC_OK && o->local ? fc_fail(err, FC_EUSAGE, "reshard: --policy does not go with --local") : rc;
}

static fc_code run(cli_call *call, fc_error *err) {
    const options *o = call->options;
    fc_layout_spec spec = {.replicas = o->replicas, .dp = o->dp, .tp = o->tp};
    if (o->tp_plan && !o->tp) {
        return fc_fail(err, FC_EUSAGE,
                       "reshard: --tp-plan says how to cut over tensor-parallel ranks; say how many with "
                       "--tp N");
    }
    if (option_given(o, OPT_RANK) && !o->dry_run) {
        return fc_fail(err, FC_EUSAGE, "reshard: --rank shows a part of the plan; say --dry-run, too");
    }
    fc_code rc = option_given(o, OPT_POLICY) ? check_policy(o, err) : FC_OK;
    return rc == FC_OK ? job_run(call, &spec, err) : rc;
}

static const char *const examples[] = {
    "fsdpckpt reshard ckpt/ -o out/ --dp 8",
    "FSDP over 8 ranks",
    "fsdpckpt reshard ckpt/ -o out/ --dp 4 --tp 2",
    "2D: FSDP over 4 x tensor parallel over 2",
    "fsdpckpt reshard ckpt/ -o out/ --replicas 2 --dp 4 --tp 2 --tp-plan plan.json",
    "HSDP with tensor parallel, cut as plan.json says",
    "fsdpckpt reshard model.pt -o out/ --dp 8 --to pt --policy blocks",
    "flat parameters, as FSDP1 loads them with LOCAL_STATE_DICT",
    "fsdpckpt reshard model.json --dp 2048 --tp 8 --dry-run --rank 12345",
    "what one rank of 16,384 would hold of a model known by its schema alone",
    NULL,
};

const command command_reshard = {
    .name = "reshard",
    .operands = "SRC",
    .min_operands = 1,
    .max_operands = 1,
    .summary = "cut a checkpoint of any layout for another mesh of ranks",
    .description =
        "Writes the directory DST with one file a rank and, in HDF5, index.h5, in which stock HDF5 tools see every "
        "tensor whole. The mesh is replicas x dp x tp, ranks row-major as in init_device_mesh; each tensor is cut as "
        "PyTorch's "
        "fully_shard and parallelize_module cut it. Replicated data is stored once.\n\n"
        "With --tp, a plan says which tensors tensor parallelism cuts and how; optimizer state follows its parameter. "
        "A plan that cuts no tensor is an error.\n\n"
        "With --policy and --to pt, the files are those of FSDP1's LOCAL_STATE_DICT: a flat parameter for each unit "
        "that "
        "the policy makes (see 'fsdpckpt units'), without the padding of use_orig_params. The order of SRC must be the "
        "model's; --schema gives it where SRC does not keep it. Optimizer state is numbered and cut as the optimizer "
        "of "
        "such a model has it; a unit has one step, and is in one of its groups.\n\n"
        "With --dry-run nothing is written: -o may be left out, and SRC may be a schema (see 'fsdpckpt schema'), which "
        "has no data. --rank R then shows the part of one rank.",
    .examples = examples,
    .synopsis = "-o DST --dp N [--tp N]",
    .takes = TAKES_CONVERSION | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) | TAKES(OPT_TP_PLAN) |
             TAKES(OPT_RANK) | TAKES(OPT_POLICY) | TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE),
    .needs = TAKES(OPT_OUTPUT),
    .run = run,
};
