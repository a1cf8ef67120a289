/*
 * How an optimizer's state is numbered once parameters are flat ones: flatten_groups.c finds it, flatten_state.c makes
 * the values.
 */
#ifndef FSDPCKPT_DERIVED_FLATTEN_OPTIM_H
#define FSDPCKPT_DERIVED_FLATTEN_OPTIM_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "base/name_table.h"
#include "derived/flatten_parts.h"

typedef enum fc_optim_kind {
    FC_OPTIM_NONE,
    FC_OPTIM_STATE, /**< "state", parameter, key */
    FC_OPTIM_GROUP  /**< "param_groups", number of the group, key; or flattened: "param_groups.<parameter>.<key>" */
} fc_optim_kind;

/** What the path of a target value says of an optimizer. */
typedef struct fc_optim_name {
    fc_optim_kind kind;
    size_t levels;    /**< elements of the path before the optimizer's */
    size_t extra;     /**< bytes of the next element that also are before it, in names without nesting */
    const char *text; /**< the parameter, or the group's number; `len` bytes */
    size_t len;
    bool is_number;  /**< of it */
    const char *key; /**< "exp_avg", "lr"; NULL: something deeper */
} fc_optim_name;

/** Takes the path of a target value apart. */
fc_optim_name fc_optim_name_of(const fc_target_tensor *w);

/** A parameter of the wrapped model: a flat one, or one that no unit manages. */
typedef struct fc_optim_slot {
    const fc_unit *unit; /**< or NULL */
    uint32_t parameter;  /**< of the tree, without a unit */
    size_t group;        /**< FC_NO_NAME: the optimizer does not have it */
    size_t number;
} fc_optim_slot;

/** An optimizer: all target values whose paths begin alike. */
typedef struct fc_optim {
    const fc_target_tensor *first; /**< one of them, for messages and for where the others lie */
    fc_optim_name prefix;          /**< its levels and extra */
    fc_arena *scratch;
    fc_optim_slot *slots; /**< in the order of the wrapped model's parameters() */
    size_t nslots;
    size_t *slot_of;          /**< one a parameter of the tree: its slot; FC_NO_NAME for buffers */
    fc_name_table *names;     /**< a parameter as state has it, name or number, to the tree's */
    size_t ngroups;           /**< 1 where they are flattened */
    size_t *members;          /**< of each group, how many slots */
    bool numbered, flattened; /**< what state calls parameters; how groups are written */
} fc_optim;

/** Whether a value is of this optimizer. */
bool fc_optim_has(const fc_optim *o, const fc_target_tensor *w, const fc_optim_name *n);

/** Takes the path of a target value apart. @return whether it is of a group of this optimizer. */
bool fc_optim_in_group(const fc_optim *o, const fc_target_tensor *w, fc_optim_name *n);

/** Whether a value of a group is the list of its parameters. */
bool fc_optim_is_list(const fc_optim_name *n);

/** Reads the groups of the optimizer and numbers its slots, group by group. */
fc_code fc_optim_number(const fc_flattener *f, fc_optim *o);

/** The parameter, the first one where it is shared, that a name says; FC_NO_NAME: none. Out of memory, too. */
size_t fc_optim_parameter(const fc_flattener *f, const fc_optim *o, const fc_optim_name *n);

#endif
