/*
 * Inside of a tensor-parallel plan: its rules, made by tp_plan.c from JSON or by tp_auto.c from its table.
 */
#ifndef FSDPCKPT_SHARDING_TP_PLAN_H
#define FSDPCKPT_SHARDING_TP_PLAN_H

#include "fsdpckpt/layout.h"

/** What kind of module a rule speaks of, because the dimension to cut depends on it. */
typedef enum fc_tp_module {
    FC_TP_BY_NAME,   /**< an embedding where the name says so, else a linear layer */
    FC_TP_LINEAR,    /**< weight [out, in]; fused experts [experts, out, in] */
    FC_TP_EMBEDDING, /**< weight [tokens, features] */
    FC_TP_CONV1D,    /**< GPT-2's Conv1D: weight [in, out] */
    FC_TP_EXPERTS    /**< cut between experts: dimension 0 of every parameter */
} fc_tp_module;

typedef struct fc_tp_rule {
    const char *pattern;
    fc_tp_style style;
    fc_tp_module module;
} fc_tp_rule;

struct fc_tp_plan {
    const char *name; /* the file's path, or "auto" */
    const fc_tp_rule *rules;
    size_t count;
};

/** The built-in plan. */
extern const fc_tp_plan fc_tp_auto;

#endif
