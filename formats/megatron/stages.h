/*
 * Reads Megatron's older `torch` format, which has one torch.save file per model-parallel rank, in these stages.
 *
 * grid.c finds the files of the ranks, and args.c checks them against the arguments of the run. ranks.c reads each file
 * (values.c) and gives its values the names of the whole model (names.c, experts.c, with rules.c). gates.c finds the
 * parameters with a gate. optimizer.c reads the state of the optimizer, distributed.c that of the distributed
 * optimizer. join.c joins the values of all ranks. megatron.c holds the format table.
 */
#pragma once

#include "megatron/reader.h"

/** Fails if the current file's args show that it belongs to another checkpoint than the first file. */
fc_code fc_mg_check_alike(const fc_mg_reader *r, const fc_mg_args *args);

/** Fails if a file i cannot have been written by global rank `wrote[i]`, which its args record. */
fc_code fc_mg_check_writers(const fc_mg_reader *r, const int64_t *wrote);

/** Counts the layer of a leaf among those of the chunk. */
fc_code fc_mg_count_layer(fc_mg_reader *r, const torch_leaf *leaf, size_t chunk);

/** Counts the experts of the current rank; `leaves` are those of a chunk. Fails if other ranks have another number. */
fc_code fc_mg_count_experts(fc_mg_reader *r, const torch_leaves *leaves);

/** Gives a leaf of a chunk its name in the whole model. */
fc_code fc_mg_rename(fc_mg_reader *r, torch_leaf *leaf, size_t chunk);

/** Sets MG_GATED for those of values[first] and later, the values of one file, that hold gates. */
fc_code fc_mg_find_gates(fc_mg_reader *r, size_t first);

/** Returns whether a value of the model is a parameter and not a buffer. */
bool fc_mg_is_parameter(const fc_mg_value *v);

/** Sets name and path of "optim.state.<parameter>.<key>". @return false when out of memory. */
bool fc_mg_name_state(const fc_mg_reader *r, const fc_mg_value *parameter, const char *key, const char **name,
                      fc_path *path);

/** Returns whether the parameter belongs to optimizer `member` of a file with `members` optimizers. */
bool fc_mg_belongs(const fc_mg_reader *r, const fc_mg_value *parameter, size_t member, size_t members);

/** Adds the optimizer of the current file. Its parameters are values[first] to values[end - 1]. */
fc_code fc_mg_read_optimizer(fc_mg_reader *r, fc_pv optimizer, size_t first, size_t end);

/** Adds the distributed optimizer's states of the parameters values[first] to values[end - 1] of the current rank. */
fc_code fc_mg_read_distributed(fc_mg_reader *r, size_t first, size_t end);

/** Gives matrices of several experts a first dimension for the experts. */
fc_code fc_mg_ungroup(fc_mg_reader *r);

/** Builds the tensors of the checkpoint from the values of all files. */
fc_code fc_mg_join(fc_mg_reader *r);

/** Opens a checkpoint in the older format. */
fc_code fc_mg_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);
