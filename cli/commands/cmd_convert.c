/*
 * convert: writes a checkpoint in another format with the same layout.
 */
#include "job.h"
#include "source.h"

static const char *const examples[] = {
    "fsdpckpt convert shards/ -o dcp/ --to dcp",
    "HDF5 shards as a PyTorch distributed checkpoint with the same ranks",
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
    .summary = "write a checkpoint in another format, with the same layout",
    .description = "Writes DST with the layout of SRC: a full checkpoint stays full, and what each rank of a sharded "
                   "SRC stored goes into the file of the same rank. Where SRC does not record its mesh (DCP), the mesh "
                   "(replicate x dp x tp) and the placements are derived from the chunks. Chunks that match no mesh "
                   "are an error; 'reshard' and 'consolidate' can convert such a checkpoint, because they define the "
                   "layout of DST.\n\n--include and --exclude match the names in SRC; then --strip-prefix and each "
                   "--rename change them, in this order. Two values with the same name are an error.",
    .examples = examples,
    .synopsis = "-o DST --to FORMAT",
    .helps = helps,
    .takes = TAKES_CONVERSION | TAKES_COMPUTED | TAKES_DELTA | TAKES(OPT_TP_PLAN),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_DTYPE) | TAKES(OPT_COMPRESS) | TAKES(OPT_RECIPE) | TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN),
    .needs = TAKES(OPT_OUTPUT),
    .run = job_keep_layout,
};
