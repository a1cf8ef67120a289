/*
 * Names for people what a selection leaves out.
 */
#pragma once

#include "fsdpckpt/select.h"

/** Characters that a name must not have if it is to become a glob in a list: they end the glob, or have a meaning in
 * it. */
#define FC_NOT_IN_GLOBS "*?[]\\,'\""

/** Names of a checkpoint, borrowed. */
typedef struct fc_name_list {
    const char **names;
    size_t count;
} fc_name_list;

/** Adds a component to a list such as "optimizer, step" in `arena`, unless it is there. @return false: out of memory.
 */
bool fc_add_component(fc_arena *arena, const char **list, const char *name, size_t len);

/**
 * Lists the names of `left` by their first components with which no name of `kept` begins: "optim, step". Single
 * components come first, and * stands for a number. A list of more than 200 bytes ends in "...".
 * @param kept is sorted by this function.
 * @param out  receives the list, in `arena`.
 */
fc_code fc_list_components(fc_name_list *kept, const fc_name_list *left, fc_arena *arena, const char **out,
                           fc_error *err);

/**
 * Makes globs that match all names of `left` and none of `kept`, as few as components allow: "meta.*, step".
 * @param kept is sorted by this function.
 * @param out  receives them, in `arena`, separated by ", "; NULL if a name could be taken for a glob, or for two.
 */
fc_code fc_list_globs(fc_name_list *kept, const fc_name_list *left, fc_arena *arena, const char **out, fc_error *err);
