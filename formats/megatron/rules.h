/*
 * How Megatron shards a parameter and numbers its layers and experts, by its name alone.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** How tensor parallelism shards a parameter. */
typedef enum fc_mg_rule {
    MG_UNKNOWN, /**< The name does not determine it. The parameter is readable only if all ranks have equal values. */
    MG_COPY,    /**< Every rank has the whole parameter. */
    MG_SHARD,   /**< It is sharded along `dim`. */
    MG_GATED    /**< Like MG_SHARD, but each rank has its shard of the gate followed by its shard of the rest. */
} fc_mg_rule;

typedef struct fc_mg_sharding {
    fc_mg_rule rule;
    int dim;
} fc_mg_sharding;

/** Returns the rule for a parameter by the end of its name. Never returns MG_GATED. */
fc_mg_sharding fc_mg_rule_of(const char *name);

/** Returns whether the value is an _extra_state of Transformer Engine, which differs between ranks. */
bool fc_mg_is_extra_state(const char *name);

/** Finds "linear_fc1" or an equivalent in the name of an MLP's first matrix; NULL for other names. `*second` is what
 * the name of the second matrix has there instead. */
const char *fc_mg_first_of_mlp(const char *name, const char **first, const char **second);

/** Splits "decoder.layers.3.mlp…" into the length of "decoder.layers." and the number. @return false if there is none.
 */
bool fc_mg_layer(const char *key, size_t *prefix, int64_t *number, size_t *end);

/** Which experts a parameter belongs to, by its name. */
typedef enum fc_mg_expert {
    MG_NO_EXPERT,
    MG_ONE_EXPERT,  /**< One expert, whose number is in the name. */
    MG_ALL_EXPERTS, /**< All experts of the rank, concatenated in one matrix (GroupedMLP). */
    MG_OTHER_EXPERT /**< Experts, in an unknown form. */
} fc_mg_expert;

/** Finds the expert's number in a name, or in an element of a path: the characters from `*digits` to `*end`. */
fc_mg_expert fc_mg_expert_of(const char *name, size_t *digits, size_t *end, int64_t *number);
