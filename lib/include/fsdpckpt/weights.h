/*
 * Weights that must be computed: a derived checkpoint has them in place of what they are computed from. They are
 * computed block by block while they are read, so they need no memory, and fc_convert writes them like any checkpoint.
 *
 * A source belongs to the new checkpoint after success, and is closed with it; after a failure it remains the caller's.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

FC_BEGIN_DECLS

/**
 * Turns quantized weights, which are stored as codes and scales, into numbers of `dtype`: (code - zero point) × scale
 * in float32, rounded once. Scales of activations are left out.
 * @param config the model's config.json, or its folder, which has the size of the blocks if they do not divide a
 *               weight evenly and are not 128 × 128, and of packed integers where several fit; NULL: none.
 * @return FC_EUSAGE if the source has no quantized weights; FC_EUNSUPPORTED for layouts that are not known.
 */
fc_code fc_dequantize(fc_checkpoint *source, fc_dtype dtype, const char *config, fc_checkpoint **out, fc_error *err);

/**
 * Turns the floating-point matrices whose names match a glob into float8_e4m3fn codes and scales: one float32 for each
 * block of 128 × 128 of the last two dimensions, the largest magnitude / 448, in the tensor NAME_scale_inv.
 * @param globs over FQNs, NULL-terminated.
 * @return FC_EUSAGE if none matches. Infinite values and NaN are FC_EUNSUPPORTED when they are read.
 */
fc_code fc_quantize(fc_checkpoint *source, const char *const *globs, fc_checkpoint **out, fc_error *err);

/** A LoRA adapter. */
typedef struct fc_adapter {
    const char
        *path;     /**< the folder with adapter_config.json and adapter_model.safetensors or .bin, as PEFT writes it */
    double weight; /**< multiplies what it adds; usually 1 */
} fc_adapter;

/**
 * Merges LoRA adapters: to each weight that has factors, weight × scale × B × A of each adapter is added, in float32
 * and in the order of the adapters, and rounded once to the weight's dtype. What an adapter stores as a whole
 * (modules_to_save) replaces the source's.
 * @param merged receives the number of weights that were changed.
 * @return FC_EUSAGE if an adapter does not fit the source; FC_EUNSUPPORTED for kinds of adapters that are not LoRA.
 */
fc_code fc_merge_adapters(fc_checkpoint *source, const fc_adapter *adapters, size_t count, fc_checkpoint **out,
                          size_t *merged, fc_error *err);

FC_END_DECLS
