/*
 * average: writes the mean of several checkpoints like any other conversion.
 */
#include "job.h"
#include "source.h"
#include "weights.h"

#include "fsdpckpt/average.h"
#include "fsdpckpt/try.h"

#include <math.h>
#include <stdlib.h>

/* Parses "0.25,0.75" into one number per source. */
static fc_code parse_weights(const options *o, double *weights, fc_error *err) {
    const char *text = o->weights;
    for (size_t i = 0; i < o->noperands; i++) {
        char *end;
        weights[i] = strtod(text, &end);
        bool last = i + 1 == o->noperands;
        if (end == text || !isfinite(weights[i]) || *end != (last ? '\0' : ',')) {
            return fc_fail(err, FC_EUSAGE, "--weights %s: needs %zu numbers separated by commas, one per SRC",
                           o->weights, o->noperands);
        }
        text = end + 1;
    }
    return FC_OK;
}

static fc_code open_sources(const cli_call *call, fc_checkpoint **sources, double *weights, fc_checkpoint **out,
                            fc_error *err) {
    const options *o = call->options;
    const fc_selection selection = {.include = o->include.items, .exclude = o->exclude.items};
    const fc_average_options average = {
        .weights = o->weights ? weights : NULL, .selection = &selection, .take_first = o->take_first};
    FC_TRY(o->weights ? parse_weights(o, weights, err) : FC_OK);
    for (size_t i = 0; i < o->noperands; i++) {
        FC_TRY(source_open(call, o->operands[i], false, &sources[i], err));
        FC_TRY(weights_compute(o, &sources[i], err));
    }
    return fc_average_open(sources, o->noperands, &average, out, err);
}

static fc_code open_average(const cli_call *call, fc_checkpoint **out, fc_error *err) {
    const options *o = call->options;
    fc_checkpoint **sources = calloc(o->noperands, sizeof *sources);
    double *weights = calloc(o->noperands, sizeof *weights);
    fc_code rc = sources && weights ? open_sources(call, sources, weights, out, err) : fc_no_memory(err, NULL);
    for (size_t i = 0; sources && rc != FC_OK && i < o->noperands; i++) {
        fc_checkpoint_close(sources[i]);
    }
    free(sources);
    free(weights);
    return rc;
}

static fc_code run_average(cli_call *call, fc_error *err) {
    const options *o = call->options;
    fc_layout_spec spec = {.replicas = o->replicas, .dp = o->dp, .tp = o->tp};
    bool sharded = o->replicas || o->dp || o->tp;
    if (o->tp_plan && !o->tp) {
        return fc_fail(err, FC_EUSAGE, "average: --tp-plan needs --tp N, the number of tensor-parallel ranks");
    }
    const job_steps steps = {.open = open_average};
    return job_run_steps(call, sharded ? &spec : NULL, &steps, err);
}

static const option_help helps[] = {
    {OPT_COMM,
     "share the work with other processes: mpi, none, or auto (the default: mpi when started by mpirun with more "
     "than one rank)"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt average step-1000/ step-2000/ step-3000/ -o mean.h5 --model-only",
    "the mean of a run's last checkpoints",
    "fsdpckpt average ema.h5 step-4000/ -o new-ema.h5 --weights 0.999,0.001",
    "one step of a moving average",
    "mpirun -n 8 fsdpckpt average a/ b/ -o soup/ --dp 16 --take-first",
    "a soup of two models, sharded for 16 ranks, by 8 processes",
    NULL,
};

const command command_average = {
    .name = "average",
    .operands = "SRC SRC...",
    .summary = "average checkpoints: model soups, last checkpoints, moving averages",
    .description =
        "Writes the mean of several checkpoints with the same names and shapes, in any formats and layouts. With "
        "--weights it writes their weighted mean; the weights are divided by their sum, so 3,1 is 0.75,0.25. "
        "Floating-point and complex tensors are summed in float64 (float64 itself with compensated sums) in the order "
        "of the sources, and rounded once, to the type of the first source. Integers, booleans and objects (such as a "
        "step count) have no "
        "average: they must be equal, unless --take-first uses those of the first source. Quantized weights are "
        "refused "
        "unless --dequantize computes them first.\n\nWithout --dp, --tp and "
        "--replicas the target is one full file, as from consolidate; with them it is sharded, as from reshard. Memory "
        "use does not depend on the size of the checkpoints.",
    .examples = examples,
    .helps = helps,
    .synopsis = "-o DST",
    .takes = (TAKES_CONVERSION & ~TAKES(OPT_LOCAL)) | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) |
             TAKES(OPT_TP_PLAN) | TAKES(OPT_WEIGHTS) | TAKES(OPT_TAKE_FIRST) | TAKES_COMPUTED,
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_MODEL_ONLY) |
             TAKES(OPT_DTYPE) | TAKES(OPT_WEIGHTS) | TAKES(OPT_TAKE_FIRST) | TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_average,
};
