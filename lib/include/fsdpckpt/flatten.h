/*
 * The inverse of unflatten.h: makes a checkpoint as FSDP1's LOCAL_STATE_DICT has it, with one flat parameter for each
 * unit of a wrap policy. Semantics: _local_post_state_dict_hook in torch/distributed/fsdp/_state_dict_utils.py, and
 * FlatParamHandle in _flat_param.py.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/wrap_policy.h"

FC_BEGIN_DECLS

/**
 * Makes a checkpoint in which one one-dimensional tensor "<module>._flat_param" replaces the parameters of each unit,
 * in the order of the model and without padding (use_orig_params=False). It is computed chunk by chunk while it is
 * read. Optimizer state becomes that of optimizer.state_dict() of the wrapped model: numbered in the order of its
 * parameters ("optim.state.3.exp_avg"), one-dimensional, and padded at the end so that all ranks have shards of equal
 * size. A parameter without state gets zeros if others of its unit have state, as in FSDP.optim_state_dict_to_load. All
 * other values are unchanged and have their names in the target.
 * @param source belongs to the new checkpoint after success, otherwise to the caller.
 * @param target made from `source`; its tensors are in the order of the model, its mesh and dtypes are ignored. It,
 *               `tree` and `units` need not outlive the call.
 * @param ranks  the number of ranks that the flat parameters will be sharded over: chunks end where shards do.
 * @param out    closed by fc_checkpoint_close, which closes `source`; NULL after a failure.
 * @return FC_EUSAGE for a unit that FSDP cannot flatten (see fc_flat_layout_new), and for optimizer state that cannot
 * be flattened (a shape other than its parameter's, steps that differ within a unit, groups that divide a unit);
 * FC_EUNSUPPORTED for units that share a parameter; the errors of fc_coverage_new for a parameter with holes;
 * FC_ENOMEM.
 */
fc_code fc_flatten(fc_checkpoint *source, const fc_target *target, const fc_module_tree *tree, const fc_units *units,
                   int64_t ranks, fc_checkpoint **out, fc_error *err);

/** Returns whether fc_flatten made the tensor. Only such tensors are sharded over the ranks of the target. */
bool fc_is_flattened(const fc_checkpoint *checkpoint, const fc_tensor *tensor);

/** fc_object.encoding of a value that does not come from a file. Its bytes are JSON. */
#define FC_OBJECT_VALUE "fsdpckpt.value"

FC_END_DECLS
