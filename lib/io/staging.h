/*
 * Staging directories: ".NAME.fsdpckpt-XXXXXX" next to a target, in which the target is made. The content shows how far
 * the owner got, so that the next run can finish or undo the work of a dead one:
 *
 *     lock      locked while the owner lives; the kernel drops the lock when it dies in any way
 *     new/NAME  the new target, until it is renamed into place
 *     old/NAME  the old target, if the file system cannot exchange two names. The directory `old` is made when the new
 *               target is complete and synced, just before the old target moves into it
 *
 * A conversion that can be resumed has ".NAME.fsdpckpt-resume" instead, which the next run finds again, with
 *
 *     journal   what of the target is written (move/resume.h)
 *     tiles/N   second names of the files that it is written to; `new` is made anew by each run
 *     complete  made when the new target is complete and synced, before it is renamed into place; complete/N has the
 *               number of its inode, so that a run that died after an exchange of the names is known
 */
#pragma once

#include "fsdpckpt/io.h"

typedef struct fc_staging {
    char *path;     /* path of the directory; NULL when there is none */
    char *new_path; /* new/NAME, which does not exist yet */
    char *old_path; /* old/NAME */
    int fd;         /* descriptor of the directory */
    int lock;       /* descriptor of the lock; -1 if the file system has no locks */
} fc_staging;

/** The names in the staging directory of a conversion that can be resumed. */
#define FC_STAGED_JOURNAL "journal"
#define FC_STAGED_TILES "tiles"

/** A staging directory that has not been made. */
#define FC_NO_STAGING ((fc_staging){.fd = -1, .lock = -1})

/** Makes a staging directory for the target `name` in `parent` and locks it. */
fc_code fc_staging_make(const char *parent, const char *name, fc_staging *out, fc_error *err);

/**
 * Makes the staging directory of a conversion that can be resumed, or finds the one of a dead run, and locks it.
 * @param found whether there was one with a journal. What it has in `new` is removed.
 * @return FC_EUSAGE if another run has it, FC_EUNSUPPORTED if the file system has no locks.
 */
fc_code fc_staging_resume(const char *parent, const char *name, fc_staging *out, bool *found, fc_error *err);

/** Returns the bytes that the tiles of a conversion that can be resumed have on the disk. */
uint64_t fc_staging_stored(const char *parent, const char *name);

/** Says durably that the new target of a conversion that can be resumed is complete. */
fc_code fc_staging_complete(const fc_staging *staging, fc_error *err);

/** Makes the directory `old` durably. From then on, the next run finishes a dead run instead of undoing it. */
fc_code fc_staging_promise(const fc_staging *staging, fc_error *err);

/** Removes the directory with its content and frees `staging`. FC_NO_STAGING is allowed. */
void fc_staging_remove(fc_staging *staging);

/** Frees `staging` and leaves the directory to the next run, which finds it unlocked. */
void fc_staging_leave(fc_staging *staging);

/**
 * Finishes or undoes dead runs on the target `name` in `parent`, and removes their staging directories. A conversion
 * that can be resumed stays, and is reported unless `resumes`: the caller goes on with it.
 * @param busy may be NULL; receives whether a live run is renaming the target right now.
 */
fc_code fc_staging_clear(const char *parent, const char *name, const fc_reporter *reporter, bool resumes, bool *busy,
                         fc_error *err);
