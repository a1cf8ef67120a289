/*
 * Finds every value that quantized weights consist of: codes, and what belongs to them. Layouts that no list of names
 * has are found, too: codes have few bits, and a neighbour has the same name but for a word such as "scale".
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/checkpoint.h"

/** What a value is to quantized weights. */
typedef struct fc_quantized_value {
    size_t codes;  /**< index of the codes: those that it belongs to, or its own; FC_NO_NAME: it has no part in any */
    size_t scales; /**< of the codes; FC_NO_NAME: nothing but the configuration says that the weight is quantized */
} fc_quantized_value;

typedef struct fc_quantized_values {
    fc_quantized_value *of; /**< one per value of the source */
    const char *config;     /**< the file next to the source that says that its weights are quantized; NULL: none */
} fc_quantized_values;

/** Finds the values of quantized weights in `source`. `arena` owns what it returns. */
fc_code fc_quantized_values_find(const fc_checkpoint *source, fc_arena *arena, fc_quantized_values *out, fc_error *err);

/**
 * Fails because a command would change quantized weights.
 * @param index a value that has part in one. @param why the end of the sentence, such as "a cast of either would ...".
 * @return FC_EUNSUPPORTED.
 */
fc_code fc_quantized_refuse(const fc_checkpoint *source, const fc_quantized_values *values, size_t index,
                            const char *why, fc_error *err);

/**
 * Like fc_quantized_refuse, and says how the weights can be computed first: a hint if fc_dequantize knows the layouts,
 * else the end of the message.
 */
fc_code fc_quantized_refuse_undequantized(const fc_checkpoint *source, const fc_quantized_values *values, size_t index,
                                          const char *why, fc_arena *arena, fc_error *err);

/** What to do with layouts that fc_dequantize does not know. */
#define FC_DEQUANTIZE_ELSEWHERE "dequantize the weights with the library that quantized them"

/** Whether fc_dequantize knows the layouts of all codes of `source`. @param values those of `source`. */
bool fc_quantized_can_be_computed(const fc_checkpoint *source, const fc_quantized_values *values, fc_arena *arena);
