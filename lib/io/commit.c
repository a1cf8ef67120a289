/*
 * The commit: a target is written in a staging directory beside it, made durable, and renamed into place. What a
 * reader finds under the target's name is the old one or the complete new one, never something between.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/progress.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

struct fc_commit {
    char *target;          /* resolved: no trailing slash, no symbolic link */
    char *parent;          /* directory of the target */
    char *staging;         /* beside the target */
    char *path;            /* staging + "/" + name of the target */
    fc_progress *progress; /* may be NULL */
    bool is_directory;
    bool force;
};

/* Whether `name` is what this program gives to files in a directory it writes. --force deletes nothing else. */
static bool is_own_name(const char *name) {
    for (const fc_format *const *format = fc_formats(); *format; format++) {
        for (const char *const *glob = (*format)->writer.file_names; glob && *glob; glob++) {
            if (fnmatch(*glob, name, 0) == 0) {
                return true;
            }
        }
    }
    return false;
}

static void commit_free(fc_commit *commit) {
    if (commit) {
        free(commit->target);
        free(commit->parent);
        free(commit->staging);
        free(commit->path);
        free(commit);
    }
}

/* Fills `target` and `parent`. */
static fc_code resolve(fc_commit *commit, const char *target, fc_error *err) {
    size_t len = strlen(target);
    while (len > 1 && target[len - 1] == '/') {
        len--;
    }
    if (len == 0) {
        return fc_fail(err, FC_EUSAGE, "the target's name is empty");
    }
    if (target[len] == '/' && !commit->is_directory) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: the target is one file, and this is the name of a directory: name a file in it", target);
    }
    commit->target = strndup(target, len);
    if (!commit->target) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    char *real = realpath(commit->target, NULL);
    if (real) {
        free(commit->target);
        commit->target = real;
    }
    const char *slash = strrchr(commit->target, '/');
    const char *name = slash ? slash + 1 : commit->target;
    if (*name == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: cannot be a target: name a new file or directory", target);
    }
    commit->parent =
        !slash ? strdup(".") : strndup(commit->target, slash == commit->target ? 1 : (size_t)(slash - commit->target));
    return commit->parent ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory");
}

static fc_code check_directory_content(const char *path, fc_error *err) {
    fc_code rc = FC_OK;
    DIR *dir = opendir(path);
    if (!dir) {
        return fc_fail_errno(err, errno, "%s: cannot be listed", path);
    }
    for (struct dirent *e; rc == FC_OK && (e = readdir(dir));) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && !is_own_name(e->d_name)) {
            rc = fc_fail(err, FC_EUSAGE,
                         "%s: --force would delete '%s', which this program did not write: move it away first", path,
                         e->d_name);
        }
    }
    closedir(dir);
    return rc;
}

static bool is_empty_directory(const char *path) {
    DIR *dir = opendir(path);
    size_t entries = 0;
    while (dir && entries < 3 && readdir(dir)) {
        entries++; /* "." and ".." are the first two */
    }
    if (dir) {
        closedir(dir);
    }
    return dir && entries < 3;
}

static fc_code check_existing(const fc_commit *commit, fc_error *err) {
    struct stat st;
    if (lstat(commit->target, &st) != 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", commit->target);
    }
    if (S_ISDIR(st.st_mode) && !commit->is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: is a directory, and the target is one file: name a file in it",
                       commit->target);
    }
    if (!S_ISDIR(st.st_mode) && commit->is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: is not a directory: name a new directory for the target", commit->target);
    }
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
        return fc_fail(err, FC_EUSAGE, "%s: is not a regular file", commit->target);
    }
    if (commit->is_directory && is_empty_directory(commit->target)) {
        return FC_OK; /* made for this: the target takes its place */
    }
    if (!commit->force) {
        return fc_fail(err, FC_EUSAGE, "%s: exists: --force replaces it", commit->target);
    }
    return commit->is_directory ? check_directory_content(commit->target, err) : FC_OK;
}

static fc_code check_space(const fc_commit *commit, uint64_t bytes, fc_error *err) {
    struct statvfs fs;
    if (statvfs(commit->parent, &fs) != 0) {
        return errno == ENOENT || errno == ENOTDIR
                   ? fc_fail(err, FC_EUSAGE, "%s: the directory of the target does not exist: make it first",
                             commit->parent)
                   : fc_fail_errno(err, errno, "%s: cannot be examined", commit->parent);
    }
    if (bytes == 0 && fs.f_bavail == 0) { /* how much is needed is not known */
        return fc_fail(err, FC_EIO, "%s: no space: the file system is full", commit->target);
    }
    if (bytes / fs.f_frsize >= fs.f_bavail) {
        return fc_fail(err, FC_EIO, "%s: no space: %" PRIu64 " bytes are needed, %" PRIu64 " are free", commit->target,
                       bytes, (uint64_t)fs.f_bavail * fs.f_frsize);
    }
    if (access(commit->parent, W_OK | X_OK) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be written to", commit->parent);
    }
    return FC_OK;
}

static fc_code prepare(const char *target, bool is_directory, bool force, uint64_t bytes, fc_commit **out,
                       fc_error *err) {
    fc_commit *commit = calloc(1, sizeof *commit);
    if (!commit) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    commit->is_directory = is_directory;
    commit->force = force;
    fc_code rc = resolve(commit, target, err);
    if (rc == FC_OK) {
        rc = check_existing(commit, err);
    }
    if (rc == FC_OK) {
        rc = check_space(commit, bytes, err);
    }
    if (rc != FC_OK) {
        commit_free(commit);
        return rc;
    }
    *out = commit;
    return FC_OK;
}

fc_code fc_commit_check(const char *target, bool is_directory, bool force, uint64_t bytes, fc_error *err) {
    fc_commit *commit = NULL;
    fc_code rc = prepare(target, is_directory, force, bytes, &commit, err);
    commit_free(commit);
    return rc;
}

/* Removes a file or a tree. Errors are ignored: it is called when there is already one to report, or after success. */
static void remove_tree(int parent, const char *name) {
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) {
        return;
    }
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    for (struct dirent *e; (e = readdir(dir));) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            remove_tree(fd, e->d_name);
        }
    }
    closedir(dir);
    unlinkat(parent, name, AT_REMOVEDIR);
}

void fc_commit_abort(fc_commit *commit) {
    if (commit) {
        remove_tree(AT_FDCWD, commit->staging);
        commit_free(commit);
    }
}

fc_code fc_commit_begin(const char *target, bool is_directory, bool force, uint64_t bytes, fc_commit **out,
                        fc_error *err) {
    fc_commit *commit = NULL;
    *out = NULL;
    fc_code rc = prepare(target, is_directory, force, bytes, &commit, err);
    if (rc != FC_OK) {
        return rc;
    }
    const char *slash = strrchr(commit->target, '/');
    const char *name = slash ? slash + 1 : commit->target;
    /* The name is cut so that the suffix still fits into NAME_MAX. */
    if (asprintf(&commit->staging, "%s/.%.200s.fsdpckpt-XXXXXX", commit->parent, name) < 0) {
        commit->staging = NULL;
        commit_free(commit);
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    if (!mkdtemp(commit->staging)) {
        rc = fc_fail_errno(err, errno, "%s: cannot make a temporary directory", commit->parent);
        commit_free(commit);
        return rc;
    }
    if (asprintf(&commit->path, "%s/%s", commit->staging, name) < 0) {
        commit->path = NULL;
        fc_commit_abort(commit);
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    /* mkdtemp's mode is private; the target itself gets the mode that the umask gives. */
    if (is_directory && mkdir(commit->path, 0777) != 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be made", commit->path);
        fc_commit_abort(commit);
        return rc;
    }
    *out = commit;
    return FC_OK;
}

const char *fc_commit_path(const fc_commit *commit) {
    return commit->path;
}

static fc_code sync_path(int parent, const char *name, const char *shown, fc_error *err) {
    int fd = openat(parent, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be opened to sync it", shown);
    }
    fc_code rc = FC_OK;
    if (fsync(fd) != 0) {
        rc = fc_fail_errno(err, errno, "%s: fsync", shown);
    }
    if (close(fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: close", shown);
    }
    return rc;
}

/* The files of a directory whose turn it is to be synced, shared by the threads that do it. */
typedef struct sync_job {
    pthread_mutex_t lock; /* guards what follows */
    DIR *dir;
    fc_progress *progress; /* may be NULL */
    fc_code code;
    fc_error error;
} sync_job;

/* How many there will be; for people, so errors are left to those who sync. */
static uint64_t count_files(const char *path) {
    uint64_t count = 0;
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

/* The next file's name. @return false when there is none, or after an error. */
static bool next_file(sync_job *job, char name[NAME_MAX + 1]) {
    bool found = false;
    pthread_mutex_lock(&job->lock);
    for (struct dirent *e; job->code == FC_OK && !found && (e = readdir(job->dir));) {
        found = strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
        if (found) {
            snprintf(name, NAME_MAX + 1, "%s", e->d_name);
        }
    }
    pthread_mutex_unlock(&job->lock);
    return found;
}

static void *sync_files(void *context) {
    sync_job *job = context;
    char name[NAME_MAX + 1];
    while (next_file(job, name)) {
        fc_error err;
        fc_code rc = sync_path(dirfd(job->dir), name, name, &err);
        rc = rc == FC_OK ? fc_progress_count(job->progress, 1, &err) : rc;
        pthread_mutex_lock(&job->lock);
        if (rc != FC_OK && job->code == FC_OK) {
            job->code = rc;
            job->error = err;
        }
        pthread_mutex_unlock(&job->lock);
    }
    return NULL;
}

/* A target directory is flat: files, no directories below it. Several are synced at once, since a file system's journal
   takes as long for one as for all that wait for it. */
static fc_code sync_directory(const char *path, fc_progress *progress, fc_error *err) {
    enum { THREADS = 8 };
    pthread_t threads[THREADS - 1];
    int started = 0;
    sync_job job = {.dir = opendir(path), .progress = progress};
    if (!job.dir) {
        return fc_fail_errno(err, errno, "%s: cannot be listed", path);
    }
    pthread_mutex_init(&job.lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's: the new threads inherit the mask */
    while (started < THREADS - 1 && pthread_create(&threads[started], NULL, sync_files, &job) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    sync_files(&job);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&job.lock);
    closedir(job.dir);
    if (job.code != FC_OK && err) {
        *err = job.error;
    }
    return job.code == FC_OK ? sync_path(AT_FDCWD, path, path, err) : job.code;
}

/* Some file systems (NFS, some FUSE) know no flags of renameat2. */
static bool flag_unknown(int errnum) {
    return errnum == EINVAL || errnum == ENOSYS || errnum == ENOTSUP;
}

static fc_code publish_new(const fc_commit *commit, fc_error *err) {
    if (renameat2(AT_FDCWD, commit->path, AT_FDCWD, commit->target, RENAME_NOREPLACE) == 0) {
        return FC_OK;
    }
    /* rename() puts a directory in the place of an empty one, and of nothing else. */
    if ((errno == EEXIST || flag_unknown(errno)) && commit->is_directory && rename(commit->path, commit->target) == 0) {
        return FC_OK;
    }
    if (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR) {
        return fc_fail(err, FC_EUSAGE, "%s: appeared while it was being made: --force replaces it", commit->target);
    }
    if (flag_unknown(errno) && access(commit->target, F_OK) != 0 && rename(commit->path, commit->target) == 0) {
        return FC_OK;
    }
    return fc_fail_errno(err, errno, "%s: rename into place", commit->target);
}

/* Swaps the new directory with the old one, which then lies in the staging directory and goes with it. */
static fc_code publish_directory(const fc_commit *commit, fc_error *err) {
    if (renameat2(AT_FDCWD, commit->path, AT_FDCWD, commit->target, RENAME_EXCHANGE) == 0) {
        return FC_OK;
    }
    if (!flag_unknown(errno)) {
        return fc_fail_errno(err, errno, "%s: rename into place", commit->target);
    }
    char *old = NULL;
    if (asprintf(&old, "%s/old", commit->staging) < 0) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    fc_code rc = FC_OK;
    if (rename(commit->target, old) != 0) {
        rc = fc_fail_errno(err, errno, "%s: rename out of the way", commit->target);
    } else if (rename(commit->path, commit->target) != 0) {
        rc = fc_fail_errno(err, errno, "%s: rename into place", commit->target);
        if (rename(old, commit->target) != 0) {
            fc_fail_errno(err, errno, "%s: the old directory could not be put back, it is %s", commit->target, old);
            /* Then the staging directory must stay: it holds the only copy. */
            commit->staging[0] = '\0';
        }
    }
    free(old);
    return rc;
}

static fc_code publish(const fc_commit *commit, fc_error *err) {
    fc_code rc = check_existing(commit, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (access(commit->target, F_OK) != 0 || !commit->force) {
        return publish_new(commit, err);
    }
    if (commit->is_directory) {
        return publish_directory(commit, err);
    }
    return rename(commit->path, commit->target) == 0
               ? FC_OK
               : fc_fail_errno(err, errno, "%s: rename into place", commit->target);
}

void fc_commit_count(fc_commit *commit, fc_progress *progress) {
    commit->progress = progress;
}

fc_code fc_commit_finish(fc_commit *commit, fc_error *err) {
    fc_code rc;
    if (commit->is_directory) {
        fc_progress_begin(commit->progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, count_files(commit->path));
        rc = sync_directory(commit->path, commit->progress, err);
    } else {
        fc_progress_begin(commit->progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, 1);
        rc = sync_path(AT_FDCWD, commit->path, commit->path, err);
        rc = rc == FC_OK ? fc_progress_count(commit->progress, 1, err) : rc;
    }
    if (rc == FC_OK) {
        rc = publish(commit, err);
    }
    if (rc == FC_OK) {
        rc = sync_path(AT_FDCWD, commit->parent, commit->parent, err);
    }
    fc_commit_abort(commit);
    return rc;
}
