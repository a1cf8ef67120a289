/*
 * The names of a checkpoint as they are compared with another's: selected by globs, changed by --strip-prefix and
 * --rename. From a manifest to a list that check and diff join. (A conversion's names are fc_target's.)
 */
#ifndef FSDPCKPT_PLAN_NAMES_H
#define FSDPCKPT_PLAN_NAMES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "base/name_table.h"
#include "plan/rename.h"

typedef struct fc_named {
    const char *name; /**< as it is compared */
    const fc_tensor *tensor;
} fc_named;

typedef struct fc_names {
    fc_named *items; /**< in the order of the source */
    size_t count;
    size_t left_out; /**< by include and exclude */
    fc_name_table *table;
} fc_names;

/**
 * Lists the names of `checkpoint`. The globs are over names before or after they are changed, so that they mean the
 * same on both sides. That they match nothing is no error.
 * @param selection NULL: everything. Only include, exclude and strip_prefix are looked at.
 * @param rename    changes the names; NULL: they are compared as they are.
 * @return FC_EUSAGE when two names become equal, or nothing is left of one.
 */
fc_code fc_names_make(const fc_checkpoint *checkpoint, const fc_selection *selection, fc_rename *rename,
                      fc_arena *arena, fc_names *out, fc_error *err);

/** @return the index of `name`, or FC_NO_NAME. */
size_t fc_names_find(const fc_names *names, const char *name);

#endif
