/*
 * Staging directories: ".NAME.fsdpckpt-XXXXXX" next to a target, in which it is made. What lies in one says how far its
 * owner came, so that the next run can finish or undo what a dead one began:
 *
 *     lock      locked by the owner as long as it lives; the kernel drops the lock when it dies, however it dies
 *     new/NAME  the new target, until it is in place
 *     old/NAME  the old target, where the file system cannot exchange two names. The directory old is made when the new
 *               target is complete and synced, right before the old one moves into it
 */
#ifndef FSDPCKPT_IO_STAGING_H
#define FSDPCKPT_IO_STAGING_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/io.h"

typedef struct fc_staging {
    char *path;     /* of the directory; NULL: there is none */
    char *new_path; /* new/NAME, which does not exist yet */
    char *old_path; /* old/NAME */
    int fd;         /* of the directory */
    int lock;       /* descriptor; -1: the file system has no locks */
} fc_staging;

/** What has not been made yet. */
#define FC_NO_STAGING ((fc_staging){.fd = -1, .lock = -1})

/** Makes a staging directory for the target `name` in `parent` and locks it. */
fc_code fc_staging_make(const char *parent, const char *name, fc_staging *out, fc_error *err);

/** Makes the directory old, durably: from now on a dead run is finished by the next one instead of undone. */
fc_code fc_staging_promise(const fc_staging *staging, fc_error *err);

/** Removes it with all that it holds, and frees it. FC_NO_STAGING is allowed. */
void fc_staging_remove(fc_staging *staging);

/** Frees it and leaves the directory to the next run, which finds no lock. */
void fc_staging_leave(fc_staging *staging);

/**
 * Finishes or undoes what dead runs left for the target `name` in `parent`, and removes their staging directories.
 * @param busy out, may be NULL: a live run is about to put the target in place, right now.
 */
fc_code fc_staging_clear(const char *parent, const char *name, const fc_teller *teller, bool *busy, fc_error *err);

#endif
