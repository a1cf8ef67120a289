/*
 * Layouts: the wanted mesh, and for each tensor its placements on it. This is where `--dp --tp --replicas` and a
 * tensor-parallel plan become boxes. Semantics: torch.distributed.tensor.parallel (ColwiseParallel, RowwiseParallel),
 * FSDP2's fully_shard on a 2D mesh, and _chunk_dtensor of torch/distributed/tensor/parallel/fsdp.py.
 */
#ifndef FSDPCKPT_LAYOUT_H
#define FSDPCKPT_LAYOUT_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/mesh.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What a rule of a tensor-parallel plan does to the parameters of the modules it matches. */
typedef enum fc_tp_style {
    FC_TP_NONE,     /**< no rule matched: the tensor is not a DTensor of TP */
    FC_TP_COLWISE,  /**< linear: weight and bias Shard(0), fused experts [e, out, in] Shard(1); embedding: Shard(1) */
    FC_TP_ROWWISE,  /**< linear: weight Shard(1), fused experts Shard(2), bias Replicate; embedding: Shard(0) */
    FC_TP_REPLICATE /**< replicate, sequence_parallel */
} fc_tp_style;

typedef struct fc_tp_plan fc_tp_plan;

/**
 * Loads a plan: NULL or "auto" for the built-in one, else the path of a JSON file in the spelling of
 * Hugging Face's base_model_tp_plan: {"layers.*.self_attn.q_proj": "colwise", …}. `*` matches one path component.
 * A pattern matches a module or parameter whose FQN equals it or ends with "." + it; the most specific one decides.
 * The plan lives in `arena`. The built-in plan takes c_attn, c_fc and c_proj for GPT-2's Conv1D, whose weight is
 * [in, out] (colwise cuts dimension 1, rowwise 0); a plan file speaks of nn.Linear.
 * @return FC_EUSAGE for a malformed plan, an unknown style or a name that is no file, FC_EUNSUPPORTED for a style that
 * makes no boxes
 * ("packed_colwise"), each naming file, pattern and style; FC_EIO when the file cannot be read.
 */
fc_code fc_tp_plan_load(const char *name_or_path, fc_arena *arena, const fc_tp_plan **out, fc_error *err);

/**
 * The tensor dimension that the plan cuts for the tensor `fqn` of `ndim` dimensions.
 * Optimizer state follows its parameter: "optim.state.<fqn>.exp_avg" (nested or flat) is looked up as <fqn>; a
 * 0-dim state such as "step" is replicated.
 * @param style receives the style of the rule that matched, or FC_TP_NONE.
 * @return the dimension, or -1 for Replicate.
 */
int fc_tp_plan_dim(const fc_tp_plan *plan, const char *fqn, int ndim, fc_tp_style *style);

/** What was loaded: the path of the file, or "auto". */
const char *fc_tp_plan_name(const fc_tp_plan *plan);

/** The number of rules, so that a caller can name those that decide no tensor of a checkpoint. */
size_t fc_tp_plan_rules(const fc_tp_plan *plan);

/** The pattern of rule `rule` (0 … fc_tp_plan_rules - 1), as written in the plan. */
const char *fc_tp_plan_pattern(const fc_tp_plan *plan, size_t rule);

/** @return the index of the rule that decides `fqn`, or -1. */
int64_t fc_tp_plan_rule_of(const fc_tp_plan *plan, const char *fqn);

/** The wanted cut. `replicas` × `dp` × `tp` ranks; dimensions of size 1 that were not asked for are 0. */
typedef struct fc_layout_spec {
    int64_t replicas; /**< 0: not given */
    int64_t dp;       /**< 0: not given */
    int64_t tp;       /**< 0: not given */
} fc_layout_spec;

/**
 * The mesh for `spec`: dimensions (replicate, dp, tp) as far as given, in this order, named "replicate", "dp", "tp".
 * A given size of 1 stays a dimension. @return FC_EUSAGE for none given, a size < 1, or more than 2^20 ranks.
 */
fc_code fc_layout_mesh(const fc_layout_spec *spec, fc_mesh *mesh, fc_error *err);

/**
 * The placements of a tensor on a mesh made by fc_layout_mesh (mesh->ndim entries): replicate → Replicate;
 * dp → Shard(0), or _StridedShard(0, tp) when TP cuts dimension 0; tp → Shard(tp_dim), or Replicate for tp_dim -1.
 * A 0-dim tensor is replicated everywhere (fully_shard does not cut it).
 */
void fc_layout_placements(const fc_mesh *mesh, int ndim, int tp_dim, fc_placement *placements);

/**
 * Spreads replicated boxes: deterministic choice, for each of `count` tensors, of which holder of its boxes stores
 * them, so that no rank stores much more than another. Tensors that are replicated along fewer mesh dimensions come
 * first, as their boxes are the larger ones; among equals the order is that of the arguments. Each goes to the holder
 * whose busiest rank stores least so far; the lowest rank wins a tie.
 * O(ranks) for each set of mesh dimensions along which some tensor is replicated, O(log ranks) for each tensor.
 * @param bytes      size of each tensor in bytes.
 * @param placements count × mesh->ndim placements.
 * @param offsets    out: one number a tensor, the index of the holder in rank order.
 */
fc_code fc_layout_spread(const fc_mesh *mesh, size_t count, const uint64_t *bytes, const fc_placement *placements,
                         uint32_t *offsets, fc_error *err);

/**
 * The rank that stores the box held by the rank at `coordinate`: the holder number `owner_offset` (modulo their
 * count) among the ranks that hold the same box, in rank order.
 */
int64_t fc_layout_owner(const fc_mesh *mesh, const fc_placement *placements, const int64_t *coordinate,
                        uint32_t owner_offset);

#ifdef __cplusplus
}
#endif
#endif
