/*
 * Names of an optimizer's values: which parameter or group a value belongs to, in every spelling of torch's state
 * dicts, and in Megatron-Core's.
 */
#pragma once

#include "fsdpckpt/target.h"

typedef enum fc_optim_kind {
    FC_OPTIM_NONE,
    FC_OPTIM_STATE, /**< "state", parameter, key */
    FC_OPTIM_GROUP  /**< "param_groups", group number, key; or flattened: "param_groups.<parameter>.<key>" */
} fc_optim_kind;

/** The parts of the path of an optimizer's value. */
typedef struct fc_optim_name {
    fc_optim_kind kind;
    size_t levels;    /**< path elements before the optimizer's own */
    size_t extra;     /**< in names without nesting: bytes of the next element before the optimizer's own part */
    const char *text; /**< the parameter, or the group's number; `len` bytes */
    size_t len;
    bool is_number;  /**< whether `text` is a number */
    bool key_first;  /**< the key is before the parameter, as in Megatron's "optimizer.state.exp_avg.<parameter>" */
    const char *key; /**< "exp_avg", "lr"; NULL: nested deeper */
} fc_optim_name;

/** Splits the path of a target value. */
fc_optim_name fc_optim_name_of(const fc_target_tensor *w);

/** Returns whether a value of a group is its list of parameters. */
bool fc_optim_is_list(const fc_optim_name *n);
