/*
 * What the files of train_mlp share: what was asked for, and a rank of the training.
 */
#ifndef EXAMPLES_TRAIN_H
#define EXAMPLES_TRAIN_H

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/train/fsdp.h"
#include "mlp.h"

#include <stdio.h>

typedef struct train_options {
    const char *comm; /* local, mpi, nccl */
    int ranks;        /* local only */
    int steps, accumulate, replicas;
    fc_fsdp_unit_options unit;
    fc_fsdp_options fsdp;
    const char *save, *resume, *dump;
} train_options;

/* A Linear under FSDP, with its optimizer state: shards as those of its parameters. */
typedef struct train_layer {
    fc_fsdp_unit *unit;
    fc_fsdp_handle *handle;
    fc_array exp_avg, exp_avg_sq;
} train_layer;

typedef struct trainer {
    const train_options *options;
    fc_comm *world, *host;      /* all ranks: on the device, and on the host, where files are written; may be one */
    fc_comm *shard, *replicate; /* of the mesh; replicate is NULL without replicas */
    fc_mesh mesh;               /* (dp) or (replicate, dp) */
    fc_fsdp *fsdp;
    train_layer layers[MLP_LAYERS];
    int64_t step; /* optimizer steps so far, of earlier runs, too */
    FILE *dump;
} trainer;

/* device.c: a device array as float32 on the host, and back. */
fc_code train_fetch(const fc_array *array, float *out, fc_error *err);
fc_code train_store(const fc_array *array, const float *values, fc_error *err);

/* checkpoint.c */
/* Reads parameter `kind` (0 weight, 1 bias) of a layer, or an optimizer state of it ("exp_avg"), as a new array. */
fc_code train_load_param(const fc_checkpoint *from, const mlp_layer *layer, int kind, const char *state,
                         fc_device *device, fc_array *out, fc_error *err);
fc_code train_load_step(const fc_checkpoint *from, int64_t *step, fc_error *err);
/* Writes the sharded checkpoint `path`, each rank its own file. */
fc_code train_save(trainer *t, const char *path, fc_error *err);

/* train_mlp.c: "layers.0.weight" of kind 0, "layers.0.bias" of kind 1; static. */
void train_name(const mlp_layer *layer, int kind, char *out, size_t size);

#endif
