/*
 * FSDP1's LOCAL_STATE_DICT: what torch.distributed.fsdp's FullyShardedDataParallel leaves of its units when it saves
 * its own flat parameters, "layers.0._flat_param": one dimension, cut over the ranks without regard to what lies in it.
 * The files do not say that; the names, shapes and order of the model's parameters do. Semantics:
 * _local_post_state_dict_hook in torch/distributed/fsdp/_state_dict_utils.py, FlatParamHandle in _flat_param.py.
 */
#ifndef FSDPCKPT_UNFLATTEN_H
#define FSDPCKPT_UNFLATTEN_H

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/select.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Whether a tensor is called as FSDP1 calls flat parameters, and has one dimension. */
bool fc_is_flat_parameter(const fc_tensor *tensor);

/** The first flat parameter of a checkpoint, or NULL. @param count receives how many there are; may be NULL. */
const fc_tensor *fc_flat_parameter(const fc_checkpoint *checkpoint, size_t *count);

/**
 * Whether the tensors come in the order in which the model registers its parameters, that of its state_dict(). Flat
 * parameters depend on it, and nothing in them would tell a wrong one. It is known where the format keeps the order of
 * a dict, one process (or the first of several) had all tensors, and a program has not put them in alphabetical order
 * before; or where a schema says so.
 * @param why receives the reason, for people, where it is not known; may be NULL.
 */
bool fc_knows_model_order(const fc_checkpoint *checkpoint, const char **why);

/**
 * Puts the tensors of `wanted` in the order of `model`, where they may have any name of tied ones. What is no parameter
 * comes behind.
 * @param arena gets the new order, which `wanted` points to.
 * @return FC_EUSAGE where the order of `model` is not known, or one of the two has a tensor that the other has not.
 */
fc_code fc_order_like(const fc_checkpoint *model, fc_arena *arena, fc_target *target, fc_error *err);

/** Whether the checkpoint is one that fc_unflatten made. */
bool fc_was_flat(const fc_checkpoint *checkpoint);

/**
 * Makes a checkpoint of `source` in which the parameters of `model` stand for the flat ones. Each flat parameter has
 * the parameters below its module that no deeper one has, without what the source has under its own name (buffers,
 * ignored parameters), with or without the padding of use_orig_params. Parameters get the dtype of their flat one.
 * @param source belongs to the new checkpoint if there is one, else to the caller. Has flat parameters.
 * @param model  need not outlive the call.
 * @param out    closed by fc_checkpoint_close, which closes `source`; NULL after a failure.
 * @return FC_EUSAGE where the order of `model` is not known, or it does not fit: a unit has another number of elements,
 *         a parameter is nowhere; FC_EUNSUPPORTED where it fits in more than one way; FC_ENOMEM.
 */
fc_code fc_unflatten(fc_checkpoint *source, const fc_checkpoint *model, fc_checkpoint **out, fc_error *err);

/**
 * Opens a checkpoint as fc_checkpoint_open does. Its flat parameters, if it has any, become those of `model`.
 * @param model need not outlive the call. NULL: flat parameters stay, and fc_checkpoint.note reports them.
 * @return as fc_checkpoint_open, then as fc_unflatten.
 */
fc_code fc_checkpoint_open_model(const char *path, const fc_open_options *options, const fc_checkpoint *model,
                                 fc_checkpoint **out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
