/*
 * Reads DeepSpeed checkpoints. The manifest holds the weights that deepspeed's zero_to_fp32.py computes, and the state
 * of the optimizer. Each rank has one file with flat partitions of the fp32 masters and their Adam state.
 *
 * files.c finds the files. model.c reads the model's file: shapes, buffers, frozen and shared parameters. optimizer.c
 * reads the partitions of the ranks, and universal.c what ds_to_universal.py derived from them. others.c reads
 * everything else in the optimizer's files. build.c builds the tensors. devices.c detects files that were renamed.
 * deepspeed.c holds the format table.
 */
#pragma once

#include "deepspeed/build.h"

/** Reads the ZeRO stage and the number of ranks from the first file of the optimizer. (optimizer.c) */
fc_code fc_ds_read_stage(fc_ds_builder *b);

/** Reads the whole checkpoint, beginning with the model's files. (model.c) */
fc_code fc_ds_read_model(fc_ds_builder *b);

/** Adds shared parameters under their other names. All tensors must be known. @param shared `shared_params`. (shared.c)
 */
fc_code fc_ds_add_shared_names(fc_ds_builder *b, const torch_file *f, fc_pv shared);

/** Reads the optimizer's files of all ranks. (optimizer.c) */
fc_code fc_ds_read_optimizer(fc_ds_builder *b);

/** Sorts the parameters by group and name, for fc_ds_check_mapping. (mapping.c) */
fc_code fc_ds_sort_params(fc_ds_builder *b);

/**
 * ZeRO-1 and 2: fails if the file of `rank` was renamed. By its name, its partition has elements [start, start + count)
 * of the group. (mapping.c)
 */
fc_code fc_ds_check_mapping(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, size_t rank, size_t group,
                            int64_t start, int64_t count);

/** Adds the hyperparameters of the groups, and the rest of `state_dict` and of its file. (others.c) */
fc_code fc_ds_add_others(fc_ds_builder *b, const torch_file *f, fc_pv state_dict, fc_pv groups);

/** Reads the stage and the number of ranks. */
fc_code fc_ds_read_universal_stage(fc_ds_builder *b);

/** Adds the master and the state of the parameter `name`. @param param NULL if only its file records its shape. */
fc_code fc_ds_add_universal(fc_ds_builder *b, const char *name, const fc_ds_param *param);

/** Reads the state that all parameters share. */
fc_code fc_ds_read_universal_state(fc_ds_builder *b);

/** Returns the number in a location such as "cuda:3", or -1. */
int64_t fc_ds_device(const torch_file *f, const fc_torch_tensor *t);

/** Finds the first rank whose device suggests that files were renamed. @return false if there is none. */
bool fc_ds_devices_disorder(const int64_t *devices, size_t ranks, size_t *rank);
