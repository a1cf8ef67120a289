/*
 * Inside of a tensor-parallel plan: its rules, made by tp_plan.c from JSON or by tp_auto.c from its table.
 */
#ifndef FSDPCKPT_SHARDING_TP_PLAN_H
#define FSDPCKPT_SHARDING_TP_PLAN_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/layout.h"

#include "sharding/fqn.h"

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

/** A rule made ready for look-ups. */
typedef struct fc_tp_pattern {
    const fc_fqn_part *parts;
    int count;
    size_t literals; /**< characters other than '*' */
    uint32_t next;   /**< number + 1 of the next rule in the same bucket; 0: none */
} fc_tp_pattern;

struct fc_tp_plan {
    const char *name; /* the file's path, or "auto" */
    const fc_tp_rule *rules;
    size_t count;
    const fc_tp_pattern *patterns; /**< one a rule */
    int longest;                   /**< components of the longest pattern */
    const uint32_t *buckets;       /**< number + 1 of the first rule whose last component hashes there; 0: none */
    size_t nbuckets;               /**< a power of two */
    uint32_t wild;                 /**< likewise, of those whose last component has a '*' */
};

/** The rules of the built-in plan. */
extern const fc_tp_rule fc_tp_auto_rules[];
extern const size_t fc_tp_auto_count;

/**
 * Makes a plan of rules that live as long as `arena`; the name is copied.
 * @return NULL when out of memory.
 */
const fc_tp_plan *fc_tp_plan_make(const char *name, const fc_tp_rule *rules, size_t count, fc_arena *arena);

#endif
