/*
 * What fitting to the weights of a reference (fit.c) and to its configuration alone (fit_config.c) share.
 */
#pragma once

#include "export/export.h"
#include "recipe/recipe.h"

/** What a config.json says of the model. */
typedef struct fc_fit_facts {
    int64_t vocabulary;   /**< rows of the embedding; 0: it does not say */
    int64_t layers;       /**< of the language model; 0: it does not say */
    int64_t extra_layers; /**< layers after them that predict more tokens, which a checkpoint may have */
    int64_t embd;         /**< width of GPT-2; 0: it does not say, or is another model */
    bool tied, untied;    /**< whether it says that the head is the embedding, or that it is not */
    bool has_head;        /**< its class has a language model's head */
    bool quantized;       /**< it says how weights are quantized */
} fc_fit_facts;

/** A fit in progress. */
typedef struct fc_fit {
    fc_checkpoint *model;
    const fc_export_reference *reference;
    fc_arena *arena;
    fc_export_fit_report *report;
    const fc_name_table *here, *there; /**< names of both sides */
    fc_fit_facts facts;
    fc_recipe_rule *rules; /**< with room for two per tensor of the model, and one of the reference */
    size_t nrules;
    const char **lines, **checked; /**< of a fit to a configuration: report->differences and report->checked */
    fc_error *err;
} fc_fit;

/**
 * A tensor that only one side has may repeat one of `shapes`. If it does, adds a rule that drops it (`drop`), or that
 * makes the model's copy of it.
 */
fc_code fc_fit_twin(fc_fit *fit, const fc_export_shapes *shapes, const fc_tensor *tensor, bool drop);

/** Adds a rule that keeps the first `rows` rows of a tensor. */
fc_code fc_fit_rows(fc_fit *fit, const fc_tensor *tensor, int64_t rows);

/** Reads the configuration of the reference into fit->facts. (fit_config.c) */
fc_code fc_fit_read_config(fc_fit *fit);

/** Adds the rules with which the model fits the configuration, and what remains different. (fit_config.c) */
fc_code fc_fit_config(fc_fit *fit);
