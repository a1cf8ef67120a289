/*
 * What makes a target durable. A commit syncs in this order, and each step is on the disk before the next begins:
 *
 *   1. staging.c, lock_new: the name of the lock in the staging directory, before anything is made next to it;
 *   2. the new target: one file, or with fc_sync_tree the files of a directory and then the directory, folders first;
 *   3. keep.c: the folders into which files of others were linked, only with fc_commit_options.keep_others;
 *   4. staging.c, fc_staging_complete: only with fc_commit_options.resumable. Before that, lib/move/tile_journal.c
 * syncs the files of finished tiles, and then the records of these;
 *   5. fc_staging_promise: the staging directory, only where the names of two directories cannot be exchanged;
 *   6. commit.c, sync_parent: after the rename, the directory of the target;
 *   7. staging.c, fc_staging_empty: the removal of all else in the staging directory, before that of the lock. A
 * failure of this one is not reported: the next run clears what is left.
 */
#include "io/sync.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/staged_objects.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

fc_code fc_sync_path(int parent, const char *name, const char *shown, fc_error *err) {
    if (fc_is_staged(name)) {
        return FC_OK; /* in memory */
    }
    int fd = openat(parent, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be opened to sync it", shown);
    }
    fc_code rc = FC_OK;
    if (fsync(fd) != 0) {
        rc = fc_fail_errno(err, errno, "%s: fsync", shown);
    }
    return fc_close_written(fd, rc, shown, err);
}

/* The files of a directory that remain to be synced, shared by the syncing threads. */
typedef struct sync_job {
    pthread_mutex_t lock; /* guards the following fields */
    fc_dir dir;
    fc_progress *progress; /* may be NULL */
    fc_code code;
    fc_error error;
} sync_job;

/* Errors are reported when the files are synced. */
uint64_t fc_sync_count(const char *path) {
    uint64_t count = 0;
    char below[PATH_MAX];
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, path, NULL);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        bool folder;
        bool walk = fc_dir_is_folder(&dir, name, &folder, NULL) == FC_OK && folder &&
                    snprintf(below, sizeof below, "%s/%s", path, name) < PATH_MAX;
        count += 1 + (walk ? fc_sync_count(below) : 0);
    }
    (void)fc_dir_close(&dir, rc, NULL);
    return count;
}

/* Takes the name of the next file. @return false when there is none, or after an error. */
static bool next_file(sync_job *job, char name[NAME_MAX + 1]) {
    pthread_mutex_lock(&job->lock);
    const char *next = job->code == FC_OK ? fc_dir_next(&job->dir) : NULL;
    if (next) {
        snprintf(name, NAME_MAX + 1, "%s", next);
    }
    pthread_mutex_unlock(&job->lock);
    return next != NULL;
}

static fc_code sync_one(sync_job *job, const char *name, fc_error *err) {
    FC_TRY(fc_sync_path(dirfd(job->dir.dir), name, name, err));
    return fc_progress_count(job->progress, 1, err);
}

/* Keeps the first error of all workers. */
static void note_error(sync_job *job, fc_code code, const fc_error *err) {
    pthread_mutex_lock(&job->lock);
    if (job->code == FC_OK) {
        job->code = code;
        job->error = *err;
    }
    pthread_mutex_unlock(&job->lock);
}

static void *sync_files(void *context) {
    sync_job *job = context;
    char name[NAME_MAX + 1];
    while (next_file(job, name)) {
        fc_error err;
        fc_code rc = sync_one(job, name, &err);
        if (rc != FC_OK) {
            note_error(job, rc, &err);
        }
    }
    return NULL;
}

/* Syncs a directory and its files; of a folder in it, only the list of its files. Several files are synced at once,
   because the file system's journal commits many as fast as one. */
static fc_code sync_directory(const char *path, fc_progress *progress, fc_error *err) {
    enum { THREADS = 8 };
    pthread_t threads[THREADS - 1];
    int started = 0;
    sync_job job = {.progress = progress};
    FC_TRY(fc_dir_open(&job.dir, path, err));
    pthread_mutex_init(&job.lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the new threads inherit the mask, so the caller gets all signals */
    while (started < THREADS - 1 && pthread_create(&threads[started], NULL, sync_files, &job) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    sync_files(&job);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&job.lock);
    if (job.code != FC_OK && err) {
        *err = job.error;
    }
    FC_TRY(fc_dir_close(&job.dir, job.code, err));
    return fc_sync_path(AT_FDCWD, path, path, err);
}

fc_code fc_sync_tree(const char *path, fc_progress *progress, fc_error *err) {
    char below[PATH_MAX];
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        bool folder;
        FC_TRY_GOTO(fc_dir_is_folder(&dir, name, &folder, err), rc, out);
        if (!folder) {
            continue;
        }
        if (snprintf(below, sizeof below, "%s/%s", path, name) >= PATH_MAX) {
            rc = fc_fail(err, FC_EUNSUPPORTED, "%s/%s: the path is too long", path, name);
            goto out;
        }
        FC_TRY_GOTO(fc_sync_tree(below, progress, err), rc, out);
    }
out:
    FC_TRY(fc_dir_close(&dir, rc, err));
    return sync_directory(path, progress, err);
}
