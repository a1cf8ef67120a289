/*
 * FSDP1's LOCAL_STATE_DICT: FullyShardedDataParallel saves its own flat parameters, such as "layers.0._flat_param".
 * They have one dimension and are sharded over the ranks without regard to the parameters in them. The files do not
 * name these parameters; they follow from the names, shapes and order of the model's parameters. Semantics:
 * _local_post_state_dict_hook in torch/distributed/fsdp/_state_dict_utils.py, and FlatParamHandle in _flat_param.py.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

/** Returns the first flat parameter of a checkpoint, or NULL. @param count receives their number; may be NULL. */
const fc_tensor *fc_flat_parameter(const fc_checkpoint *checkpoint, size_t *count);

/**
 * Returns whether the tensors are known to be in the order in which the model registers its parameters, that of its
 * state_dict(). Flat parameters depend on this order, and their data cannot reveal a wrong one. It is known if the
 * format keeps the order of a dict, one process (or the first of several) had all tensors, and the names are not in
 * alphabetical order; or if a schema says so.
 * @param why receives the reason why it is not known, for people; may be NULL.
 */
bool fc_knows_model_order(const fc_checkpoint *checkpoint, const char **why);

/**
 * Puts the tensors of `target` in the order of `model`, which may list any one of several tied names. Values that are
 * not parameters come last.
 * @param arena owns the new order, which `target` points to.
 * @return FC_EUSAGE if the order of `model` is unknown, or if one of the two lacks a tensor of the other.
 */
fc_code fc_order_like(const fc_checkpoint *model, fc_arena *arena, fc_target *target, fc_error *err);

/** Returns whether fc_unflatten made the checkpoint. */
bool fc_was_flat(const fc_checkpoint *checkpoint);

/**
 * Makes a checkpoint of `source` in which the parameters of `model` replace the flat ones. A flat parameter contains
 * the parameters below its module that are in no deeper one, except values that the source has under their own names
 * (buffers, ignored parameters), with or without the padding of use_orig_params. Parameters get the dtype of their flat
 * parameter.
 * @param source has flat parameters; belongs to the new checkpoint after success, otherwise to the caller.
 * @param model  need not outlive the call.
 * @param out    closed by fc_checkpoint_close, which closes `source`; NULL after a failure.
 * @return FC_EUSAGE if the order of `model` is unknown, or if it does not fit: a unit has another number of elements,
 * or a parameter is in no unit; FC_EUNSUPPORTED if it fits in more than one way; FC_ENOMEM.
 */
fc_code fc_unflatten(fc_checkpoint *source, const fc_checkpoint *model, fc_checkpoint **out, fc_error *err);

/**
 * Opens a checkpoint as fc_checkpoint_open does. Its flat parameters, if it has any, become those of `model`.
 * @param model need not outlive the call. NULL: flat parameters stay, and fc_checkpoint.note reports them.
 * @return as fc_checkpoint_open, then as fc_unflatten.
 */
fc_code fc_checkpoint_open_model(const char *path, const fc_open_options *options, const fc_checkpoint *model,
                                 fc_checkpoint **out, fc_error *err);

FC_END_DECLS
