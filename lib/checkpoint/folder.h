/*
 * A directory may have several checkpoints. Lists them, and decides which one is read. docs/FOLDERS.md has the rule.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Appends to a list of names for people in `size` bytes; truncates what does not fit. */
void fc_append_name(char *text, size_t size, const char *separator, const char *name);

/** Reads up to `*size` bytes of the file at `path`, and sets `*size` to their number. */
fc_code fc_read_head(const char *path, unsigned char *head, size_t *size, fc_error *err);

/** @return the format that recognises the first bytes of a file, or NULL. */
const fc_format *fc_recognise_file(const char *path, const unsigned char *head, size_t size);

/** Lists the checkpoints in `directory`. @param only the format that is asked; NULL: all. @param out has an arena.
 *  @param err never NULL */
fc_code fc_folder_list(const char *directory, const fc_format *only, fc_listing *out, fc_error *err);

/**
 * Chooses the checkpoint that is read. Fails (FC_EUSAGE) and names them if there are several without a rule.
 * @param wanted its name; NULL: the directory was given.
 * @param out    receives NULL if the directory has none.
 */
fc_code fc_folder_choose(const char *directory, const fc_listing *listing, const char *wanted, const fc_listed **out,
                         fc_error *err);

/** Reports which checkpoints of `directory` were not read, besides `chosen`, which was opened as `checkpoint`. */
fc_code fc_folder_report(const fc_checkpoint *checkpoint, const char *directory, const fc_listing *listing,
                         const fc_listed *chosen, const fc_reporter *reporter, fc_error *err);

enum { FC_MOST_INNER = 9 };

/** Checkpoints below a directory that is none itself: trainers put the model and the optimizer in folders of their own.
 */
typedef struct fc_inner {
    const char *paths[FC_MOST_INNER]; /**< the first of them */
    const char *model;                /**< the first that has a model, by its name; NULL: none */
    const char *adapter;              /**< the first adapter with a model of its name next to it; NULL: none */
    size_t count, models, links;      /**< how many there are, have a model, and are links */
    bool all;                         /**< whether everything was looked at */
} fc_inner;

/** Looks for checkpoints below `directory`. `arena` owns the paths. */
fc_code fc_folder_look_below(const char *directory, fc_arena *arena, fc_inner *out, fc_error *err);

/** Adds a checkpoint of the asked format. One name is one checkpoint: that of the first format. */
fc_code fc_listing_add(fc_listing *listing, const char *name, const char *file, fc_listed_role role, fc_error *err);
