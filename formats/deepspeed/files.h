/*
 * The files of a DeepSpeed checkpoint, from their names (files.c, universal.c).
 */
#pragma once

#include "fsdpckpt/format.h"
#include "torch/file/file.h"

/** A file of a universal checkpoint, which holds one value of one parameter. */
typedef struct fc_ds_value {
    const char *param, *key; /**< The key of the master is "fp32". */
    uint32_t file;           /**< Index of fc_checkpoint.files. */
} fc_ds_value;

/** The files of one checkpoint, in the arena. File numbers are indexes of fc_checkpoint.files. */
typedef struct fc_ds_files {
    const char *directory; /**< The directory of the step. */
    fc_file *files;
    size_t nfiles;
    uint32_t *models; /**< The model's files: one (up to ZeRO-2), or one per rank (ZeRO-3). */
    size_t nmodels;
    uint32_t *optims; /**< The optimizer's files: one per rank; none without ZeRO or if `universal`. */
    size_t noptims;
    bool universal;            /**< ds_to_universal.py wrote the checkpoint. The members below are set only then. */
    size_t model_parallel;     /**< Number of model-parallel ranks; only the first rank's file is read. */
    uint32_t optimizer;        /**< The file optimizer_state.pt. */
    const fc_ds_value *values; /**< Sorted by parameter and key. */
    size_t nvalues;
} fc_ds_files;

/** fc_format_reader.list: the directory is a step, or has a folder for each step. */
fc_code fc_ds_list_steps(const char *directory, fc_listing *out, fc_error *err);

/** Returns whether the directory is that of a universal checkpoint. */
bool fc_ds_is_universal(const char *directory, fc_error *err);

/** Adds the files of a universal checkpoint other than those of the model. (universal.c) */
fc_code fc_ds_find_universal(fc_arena *arena, fc_ds_files *files, fc_error *err);

/** Returns whether the parameter `name` has files. */
bool fc_ds_has_universal(const fc_ds_files *files, const char *name);

/** Finds the files of the checkpoint at `path`. (files.c) */
fc_code fc_ds_find_files(fc_arena *arena, const char *path, fc_ds_files *out, fc_error *err);
