/*
 * Finds the recipe that turns one checkpoint into another one of the same weights, and proves it; or proposes one from
 * names alone (docs/RECIPES.md).
 */
#pragma once

#include "fsdpckpt/read.h"

FC_BEGIN_DECLS

typedef struct fc_infer_options {
    const char *config; /**< the model's config.json, or its folder: sizes get its names; NULL: none */
    fc_work_options work;
} fc_infer_options;

/** A tensor that the recipe does not explain. */
typedef struct fc_unexplained {
    const char *name;
    const fc_tensor *tensor;
    bool in_a;           /**< of A, else of B */
    const char *nearest; /**< the tensor of the other side, of the same shape, whose name is most alike; NULL: none */
    const char *why;     /**< why no rule fits; NULL: unknown */
    bool differs;        /**< whether `first` is the first element at which the two differ */
    uint64_t first;
} fc_unexplained;

typedef struct fc_infer_report {
    const char *recipe; /**< JSON; NULL: these are not the same weights */
    size_t rules;
    size_t tensors;             /**< of B */
    size_t explained;           /**< of these: the recipe makes them bit for bit */
    uint64_t elements, agree;   /**< of B, and of its tensors that have the same values as some of A's, in any order */
    const char *const *dropped; /**< tensors of A that the recipe leaves out */
    size_t ndropped;
    const char *const *guesses; /**< lines about names that are interchangeable */
    size_t nguesses;
    const fc_unexplained *unexplained;
    size_t nunexplained;
    const char *base;  /**< of a proposal: the shipped recipe that fits best */
    const char *also;  /**< others that fit as well, for people; NULL: none */
    const char *model; /**< of the configuration; NULL: it names none */
    bool for_model;    /**< whether `base` is for it */
} fc_infer_report;

/**
 * Finds and proves the recipe that turns `a` into `b`. That there is none is a result, not an error.
 * @param arena owns what `report` points to and what does not belong to the checkpoints.
 */
fc_code fc_recipe_infer(fc_checkpoint *a, const fc_checkpoint *b, const fc_infer_options *options, fc_arena *arena,
                        fc_infer_report *report, fc_error *err);

/**
 * Proposes a recipe for the tensors of `a` from their names and shapes, with the rules of the shipped recipes. Nothing
 * of it is proven. In the report, `tensors` and `explained` count those of `a` without optimizer state.
 * @param config as in fc_infer_options.
 * @return FC_EUSAGE if no shipped recipe has one of the names, or if they are those of the model hub already.
 */
fc_code fc_recipe_propose(fc_checkpoint *a, const char *config, fc_arena *arena, fc_infer_report *report,
                          fc_error *err);

FC_END_DECLS
