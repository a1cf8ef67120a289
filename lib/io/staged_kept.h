/*
 * What an unfinished target in a bucket leaves for a run that goes on: uploads that are not completed, and a tile
 * journal next to the target, ".NAME.fsdpckpt-resume", which says what they have (move/tile_journal.h). Without it, the
 * next run aborts them.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>

/** @param out receives the name of the tile journal, which the caller frees; NULL: a whole bucket has none */
fc_code fc_staged_journal_name(const char *target, char **out, fc_error *err);

/** Finds out whether there is a journal. @param journal may be NULL */
fc_code fc_staged_journal_find(const char *journal, bool *found, fc_error *err);

/** The target is complete, or given up: deletes the journal, as far as the server can be reached.
 * @param journal may be NULL @param others whether to abort uploads that are left of earlier runs */
void fc_staged_journal_end(const char *journal, const char *target, bool is_folder, bool others);
