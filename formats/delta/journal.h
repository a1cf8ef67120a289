/*
 * The journal of a model that is brought to another version in place: `.weight_sync/journal` has the new bytes of each
 * place that changes, and which files get another name. Nothing of the model is written before the journal is complete
 * and on the disk. It has new bytes, not differences, so it can be replayed any number of times, over a model of which
 * a part is new already. A journal that is not complete is worth nothing, because the model is as it was.
 *
 * What is made durable, and in which order:
 *   1. the records, the names of the journal and of the folder of staged files; then the last record, which has a
 *      digest of all others;
 *   2. the changed files of the model, their names, and the names in the model;
 *   3. `state.json` under another name, then its name;
 *   4. the removal of the journal.
 */
#pragma once

#include "fsdpckpt/error.h"
#include "fsdpckpt/progress.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SYNC_FOLDER ".weight_sync"
#define SYNC_STATE SYNC_FOLDER "/state.json"
#define SYNC_LOCK SYNC_FOLDER "/lock"
#define SYNC_JOURNAL SYNC_FOLDER "/journal"
#define SYNC_STAGED SYNC_FOLDER "/new" /**< the files of a full version, before they replace those of the model */

enum { FC_JOURNAL_BLOCK = 64 << 10 }; /**< the most bytes of one fc_journal_changes */

typedef struct fc_journal fc_journal;

/** Starts a journal of the model in the folder `model`, which has none. @param out receives it, also on failure. */
fc_code fc_journal_new(const char *model, fc_journal **out, fc_error *err);

/** Closes the journal, and removes it unless it was committed. NULL is allowed. */
void fc_journal_free(fc_journal *journal);

/** Adds a file of the model, whose bytes will change, before anything else is added. @param number receives its number
 * in the journal. */
fc_code fc_journal_file(fc_journal *journal, const char *name, uint32_t *number, fc_error *err);

/**
 * Adds the bytes of a place of a file that differ. Several threads may call it.
 * @param size at most FC_JOURNAL_BLOCK.
 */
fc_code fc_journal_changes(fc_journal *journal, uint32_t file, uint64_t offset, const unsigned char *old,
                           const unsigned char *made, size_t size, fc_error *err);

/** Adds that the file `name` in SYNC_STAGED replaces the one in the model. */
fc_code fc_journal_replaces(fc_journal *journal, const char *name, fc_error *err);

/** Adds that the file `name` of the model is removed. */
fc_code fc_journal_removes(fc_journal *journal, const char *name, fc_error *err);

/** Returns how many bytes differ in what was added. */
uint64_t fc_journal_changed(const fc_journal *journal);

/** Returns whether the journal is complete; NULL is not. */
bool fc_journal_is_committed(const fc_journal *journal);

/** Completes the journal, durably. @param version the one that the model has after the replay. */
fc_code fc_journal_commit(fc_journal *journal, int64_t version, fc_error *err);

/** Sets `*version` to what a complete journal leads to; FC_DELTA_NO_NUMBER if there is none. Changes nothing. */
fc_code fc_journal_look(const char *model, int64_t *version, fc_error *err);

/** Replays the journal, if there is a complete one, and sets the state. Removes it, complete or not. */
fc_code fc_journal_replay(const char *model, int64_t *version, fc_progress *progress, fc_error *err);
