/*
 * convert: another format, the same layout.
 */
#include "job.h"
#include "source.h"

static const char *const examples[] = {
    "fsdpckpt convert shards/ -o dcp/ --to dcp",
    "HDF5 shards as a PyTorch distributed checkpoint of the same ranks",
    "fsdpckpt convert ckpt/ -o renamed/ --to dcp --rename 's/(_orig_mod|module)\\.//g'",
    "the same shards under other names",
    NULL,
};

static const option_help helps[] = {
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {.help = NULL},
};

const command command_convert = {
    .name = "convert",
    .operands = "SRC",
    .min_operands = 1,
    .max_operands = 1,
    .summary = "write a checkpoint in another format, cut as it is",
    .description =
        "Writes DST with the layout of SRC: full stays full, and what each rank of a sharded SRC stored goes into the "
        "file of the same rank. Where SRC does not record its mesh (DCP), the mesh (replicate x dp x tp) and the "
        "placements are found from the pieces; pieces that follow no mesh are an error, as then only 'reshard' and "
        "'consolidate' can say what DST should look like.\n\n"
        "Names are matched by --include and --exclude as they are in SRC, then --strip-prefix and each --rename change "
        "them, in this order. Two values of one name are an error.",
    .examples = examples,
    .synopsis = "-o DST --to FORMAT",
    .helps = helps,
    .takes = TAKES_CONVERSION | TAKES(OPT_TP_PLAN),
    .needs = TAKES(OPT_OUTPUT),
    .run = job_keep_layout,
};
