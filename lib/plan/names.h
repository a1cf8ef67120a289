/*
 * The names of a checkpoint for a comparison with another one (check and diff): selected by globs, stripped of a
 * prefix, and renamed. (The names of a conversion are in fc_target.)
 */
#pragma once

#include "base/name_table.h"
#include "plan/rename.h"

typedef struct fc_named {
    const char *name; /**< the name to compare, after changes */
    const fc_tensor *tensor;
} fc_named;

typedef struct fc_names {
    fc_named *items; /**< in the order of the source */
    size_t count;
    size_t left_out; /**< names that include and exclude left out */
    fc_name_table *table;
    bool *includes, *excludes; /**< per glob of the selection: whether it matches a name */
} fc_names;

/**
 * Lists the names of `checkpoint`. Globs match a name before or after it is changed, so that they mean the same on both
 * sides. fc_names_check_globs looks for globs that match nothing.
 * @param selection NULL selects everything. Only include, exclude and strip_prefix are used.
 * @param rename    changes the names; NULL keeps them.
 * @return FC_EUSAGE when two names become equal or a name becomes empty.
 */
fc_code fc_names_make(const fc_checkpoint *checkpoint, const fc_selection *selection, fc_rename *rename,
                      fc_arena *arena, fc_names *out, fc_error *err);

/**
 * Looks for globs that match no name of any side.
 * @param names the sides; `source` is one of their checkpoints, for the message.
 * @param idle  receives a line about the first such glob of exclude, in `arena`; NULL: there is none.
 * @return FC_EUSAGE for such a glob of include.
 */
fc_code fc_names_check_globs(const fc_selection *selection, const fc_names *const *names, size_t count,
                             const fc_checkpoint *source, fc_arena *arena, const char **idle, fc_error *err);

enum { FC_TIED_NAMES = 2 };

/**
 * Lets fc_names_find find the embedding by the name of the head, if `checkpoint` is a folder of transformers that
 * stores only one of the two: its config.json is that of a language model and does not set tie_word_embeddings to
 * false.
 */
fc_code fc_names_add_tied_head(fc_names *names, const fc_checkpoint *checkpoint, fc_arena *arena, fc_error *err);

/** Whether transformers calls the embedding of a language model so, or its head; in any module. */
bool fc_is_embedding_name(const char *name);
bool fc_is_head_name(const char *name);

/** Whether a class of transformers with this name has a language model's head. */
bool fc_class_has_head(const char *name);

/** @return the index of `name`, or FC_NO_NAME. */
size_t fc_names_find(const fc_names *names, const char *name);
