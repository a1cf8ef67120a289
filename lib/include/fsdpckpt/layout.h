/*
 * Layouts: a mesh, and the placements of each tensor on it, from the numbers of ranks and a tensor-parallel plan.
 * Semantics: torch.distributed.tensor.parallel (ColwiseParallel, RowwiseParallel), FSDP2's fully_shard on a 2D mesh,
 * and _chunk_dtensor of torch/distributed/tensor/parallel/fsdp.py.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/mesh.h"

#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** How a rule of a tensor-parallel plan shards the parameters of the modules that it matches. */
typedef enum fc_tp_style {
    FC_TP_NONE,     /**< no rule matches: TP does not apply to the tensor */
    FC_TP_COLWISE,  /**< linear: weight and bias Shard(0), fused experts [e, out, in] Shard(1); embedding: Shard(1) */
    FC_TP_ROWWISE,  /**< linear: weight Shard(1), fused experts Shard(2), bias Replicate; embedding: Shard(0) */
    FC_TP_REPLICATE /**< not sharded: "replicate", "sequence_parallel" */
} fc_tp_style;

typedef struct fc_tp_plan fc_tp_plan;

/**
 * Loads a plan into `arena`. NULL or "auto" is the built-in plan; else it is the path of a JSON file in the spelling of
 * Hugging Face's base_model_tp_plan: {"layers.*.self_attn.q_proj": "colwise", …}, where `*` matches one component.
 * A pattern matches a module or parameter whose FQN equals it or ends with "." and it; the most specific one decides.
 * The built-in plan treats c_attn, c_fc and c_proj as GPT-2's Conv1D, whose weight is [in, out], so colwise shards
 * dimension 1 and rowwise 0. A plan file always means nn.Linear.
 * @return FC_EUSAGE for a malformed plan, an unknown style or a missing file; FC_EUNSUPPORTED for a style that does not
 * give boxes ("packed_colwise"); each with file, pattern and style. FC_EIO if the file cannot be read.
 */
fc_code fc_tp_plan_load(const char *name_or_path, fc_arena *arena, const fc_tp_plan **out, fc_error *err);

/**
 * Returns the dimension along which the plan shards the tensor `fqn` of `ndim` dimensions, or -1 if it does not.
 * Optimizer state follows its parameter: "optim.state.<fqn>.exp_avg", nested or flat, is looked up as <fqn>. A 0-dim
 * state such as "step" is not sharded.
 * @param style receives the style of the matching rule, or FC_TP_NONE.
 */
int fc_tp_plan_dim(const fc_tp_plan *plan, const char *fqn, int ndim, fc_tp_style *style);

/** Returns the number of rules, so that a caller can report rules that match no tensor. */
size_t fc_tp_plan_rules(const fc_tp_plan *plan);

/** The mesh of a target: replicas × dp × tp ranks. A dimension of 0 is not part of the mesh. */
typedef struct fc_layout_spec {
    int64_t replicas; /**< HSDP replicas */
    int64_t dp;       /**< FSDP ranks */
    int64_t tp;       /**< tensor-parallel ranks */
} fc_layout_spec;

/**
 * Makes the mesh of `spec`. Its dimensions are those of "replicate", "dp" and "tp" that are not 0, in this order; a
 * size of 1 is a dimension. @return FC_EUSAGE for no dimension, a negative size, or more than 2^20 ranks.
 */
fc_code fc_layout_mesh(const fc_layout_spec *spec, fc_mesh *mesh, fc_error *err);

/**
 * Computes the placements (mesh->ndim entries) of a tensor on a mesh made by fc_layout_mesh. "replicate" is Replicate.
 * "dp" is Shard(0), or _StridedShard(0, tp) if TP shards dimension 0. "tp" is Shard(tp_dim), or Replicate if tp_dim is
 * -1. A 0-dim tensor is replicated everywhere, because fully_shard does not shard it.
 */
void fc_layout_placements(const fc_mesh *mesh, int ndim, int tp_dim, fc_placement *placements);

FC_END_DECLS
