/*
 * Where ranks of several processes meet: a file that rank 0 makes. The ranks exchange their first bytes through it. As
 * long as they run, it tells them when another rank has failed or died.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fc_meeting fc_meeting;

/**
 * Comes to the meeting at `path`. Rank 0 makes the file; the others wait for it, at most `seconds`. A file that a
 * killed rank 0 has left is replaced. Free the meeting with fc_meeting_leave.
 */
fc_code fc_meeting_come(const char *path, int rank, int size, int seconds, fc_meeting **out, fc_error *err);

/** Gives the `bytes` bytes of `data` on rank 0 to all (at most FC_MEETING_SHARED). The others wait for them. */
fc_code fc_meeting_share(fc_meeting *m, void *data, size_t bytes, fc_error *err);
enum { FC_MEETING_SHARED = 256 };

/** Rank 0 removes the name of the file: all have come. */
void fc_meeting_close(fc_meeting *m);

/** Tells the other ranks that this one has failed. Only the first call counts. */
void fc_meeting_fail(fc_meeting *m, const char *message);

/**
 * Returns an error that names the rank if another one has failed, its process has ended, or it has left after fewer
 * than `calls` calls that all ranks make. It never waits. Looks at the file every few milliseconds only, and at a few
 * ranks each time.
 */
fc_code fc_meeting_check(fc_meeting *m, uint64_t calls, fc_error *err);

/** Leaves after `calls` calls, and frees the meeting. If the file still has its name, rank 0 first waits until all have
 *  come, so that they learn that it has failed, but no longer than the `seconds` of fc_meeting_come. */
void fc_meeting_leave(fc_meeting *m, uint64_t calls);
