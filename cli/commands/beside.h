/*
 * What a training checkpoint has beside its model, such as the optimizer: check and diff print one line for each group
 * of such values that the other checkpoint lacks.
 */
#pragma once

#include "output/text.h"

#include "fsdpckpt/checkpoint.h"

/** Values whose names begin with the same component, or several with names of their own. */
typedef struct beside_group {
    const char *first; /**< the name of one of them */
    size_t len;        /**< of the common component with its dot; 0: there is none */
    size_t tensors, objects;
    bool listed;  /**< each value has a line: the other checkpoint has such names, too, or tensors may be a model's */
    bool printed; /**< for the caller */
} beside_group;

/** A value that --model-only would leave out. */
typedef struct beside_value {
    const char *name;
    size_t group;
    bool object;
} beside_value;

typedef struct beside {
    beside_value *values; /**< sorted by name */
    beside_group *groups;
    beside_group rest; /**< the values that are alone in their groups */
    size_t count;
} beside;

/** Finds what `checkpoint` has beside its model. Without a model, that is nothing. @param arena owns `out`. */
fc_code beside_find(const fc_checkpoint *checkpoint, const fc_checkpoint *other, fc_arena *arena, beside *out,
                    fc_error *err);

/** Counts a value that the other checkpoint lacks. */
void beside_count(beside *b, const char *name, bool object);

/** Returns the group of a value once all are counted. NULL: it is not beside the model, or alone. */
beside_group *beside_group_of(beside *b, const char *name);

/** Prints what a group is called: "optim.*", "step and 3 others". */
void beside_print_name(text_out *out, const beside_group *group);

/** Prints "105 tensors and 2 objects". */
void beside_print_count(text_out *out, const beside_group *group);
