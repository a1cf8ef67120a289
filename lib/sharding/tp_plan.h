/*
 * The internals of a tensor-parallel plan: rules that tp_json.c reads from JSON or tp_model_rules.c lists.
 */
#pragma once

#include "fsdpckpt/layout.h"

#include "sharding/fqn.h"

/** The kind of module that a rule is about. It decides which dimension to shard. */
typedef enum fc_tp_module {
    FC_TP_BY_NAME,   /**< an embedding if the name indicates one, otherwise a linear layer */
    FC_TP_LINEAR,    /**< weight [out, in]; fused experts [experts, out, in] */
    FC_TP_EMBEDDING, /**< weight [tokens, features] */
    FC_TP_CONV1D,    /**< GPT-2's Conv1D: weight [in, out] */
    FC_TP_EXPERTS    /**< sharded by expert: dimension 0 of every parameter */
} fc_tp_module;

typedef struct fc_tp_rule {
    const char *pattern;
    fc_tp_style style;
    fc_tp_module module;
} fc_tp_rule;

/** A pattern that is prepared for look-ups. */
typedef struct fc_tp_pattern {
    const fc_fqn_component *components;
    int count;
    size_t literals; /**< characters other than '*' */
    uint32_t next;   /**< the number of the next rule in the same bucket, plus 1; 0 ends the list */
} fc_tp_pattern;

struct fc_tp_plan {
    const char *name; /**< the path of the file, or "auto" */
    const fc_tp_rule *rules;
    size_t count;
    const fc_tp_pattern *patterns; /**< one per rule */
    int longest;                   /**< components of the longest pattern */
    const uint32_t *buckets;       /**< by the hash of the last component: the number of the first rule plus 1, or 0 */
    size_t nbuckets;               /**< a power of two */
    uint32_t wild;                 /**< the same for patterns whose last component has a '*' */
};

/** The rules of the built-in plan. */
extern const fc_tp_rule fc_tp_auto_rules[];
extern const size_t fc_tp_auto_count;

/**
 * Makes a plan of `rules`, which must live as long as `arena`. The name is copied.
 * @return NULL when out of memory.
 */
const fc_tp_plan *fc_tp_plan_make(const char *name, const fc_tp_rule *rules, size_t count, fc_arena *arena);

/** Returns the path of the plan's file, or "auto". */
const char *fc_tp_plan_name(const fc_tp_plan *plan);

/** Returns the pattern of rule `rule` (0 … fc_tp_plan_rules - 1) as it is written in the plan. */
const char *fc_tp_plan_pattern(const fc_tp_plan *plan, size_t rule);

/** Returns the index of the rule that decides `fqn`, or -1. */
int64_t fc_tp_plan_rule_of(const fc_tp_plan *plan, const char *fqn);
