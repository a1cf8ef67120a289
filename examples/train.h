/*
 * The options and the state of train_mlp, and the functions that its files share.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/train/state_dict.h"
#include "fsdpckpt/try.h"
#include "mlp.h"

#include <stdio.h>

typedef struct train_options {
    const char *comm; /* "local", "mpi" or "nccl" */
    int ranks;        /* number of threads, for "local" */
    int steps, accumulate, replicas;
    fc_fsdp_unit_options unit;
    fc_fsdp_options fsdp;
    int save_every; /* steps; 0: only at the end */
    const char *save, *resume, *dump;
} train_options;

/* A Linear layer under FSDP. Its optimizer state is sharded like its parameters. */
typedef struct train_layer {
    fc_fsdp_unit *unit;
    fc_fsdp_handle *handle;
    fc_array exp_avg, exp_avg_sq;
} train_layer;

typedef struct trainer {
    const train_options *options;
    fc_comm *world, *host;      /* all ranks, with device and with host memory (to write files); may be the same */
    fc_comm *shard, *replicate; /* along the mesh dimensions; replicate is NULL without replicas */
    fc_mesh mesh;               /* (dp) or (replicate, dp) */
    fc_fsdp *fsdp;
    fc_fsdp_saver *saver; /* NULL if nothing is saved */
    train_layer layers[MLP_LAYERS];
    int64_t step; /* optimizer steps so far, including those of earlier runs */
    FILE *dump;
} trainer;

/* device.c: copies a device array to the host as float32, and back. */
fc_code train_fetch(const fc_array *array, float *out, fc_error *err);
fc_code train_store(const fc_array *array, const float *values, fc_error *err);

/* checkpoint.c */
/* Loads this rank's shards and the number of steps from a checkpoint of any layout and format. */
fc_code train_load(trainer *t, const char *path, fc_error *err);
/* Starts to write the sharded checkpoint `path`, one file per rank, while the training goes on. */
fc_code train_save(trainer *t, const char *path, fc_error *err);

/* train_mlp.c: writes the name of a parameter, "layers.0.weight" for kind 0 or "layers.0.bias" for kind 1. */
void train_name(const mlp_layer *layer, int kind, char *out, size_t size);
