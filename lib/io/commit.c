/*
 * The commit: a target is written in a staging directory next to it, synced, and renamed into place. The target's name
 * always leads to the old target or to the complete new one. sync.c has the order of all fsyncs. A target in a bucket
 * is made by staged_objects.c instead.
 */
#include "fsdpckpt/io.h"
#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"

#include "io/commit.h"
#include "io/directory.h"
#include "io/replace.h"
#include "io/report.h"
#include "io/staged_kept.h"
#include "io/staged_publish.h"
#include "io/staging.h"
#include "io/sync.h"
#include "net/remote.h"
#include "net/upload.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

struct fc_commit {
    fc_commit_options how;
    char *target; /* resolved: no trailing slash, no symbolic link */
    char *parent; /* directory of the target */
    fc_staging staging;
    bool remote; /* the target is in a bucket: it has `staged` instead of a parent and a staging directory */
    fc_staged_target *staged;
    char *journal;         /* name of the tile journal of `staged`; may be NULL */
    bool has_journal;      /* what is written may be listed there */
    bool was_begun;        /* by an earlier run, which has left the journal */
    bool keeps;            /* an abort keeps the staging directory, or the tile journal and uploads of `staged`, */
    bool says_so;          /* and says so */
    fc_progress *progress; /* may be NULL */
};

static void free_staged(const fc_commit *commit) {
    if (commit->keeps) {
        fc_staged_leave(commit->staged);
        return;
    }
    fc_staged_free(commit->staged);
    if (commit->has_journal) {
        fc_staged_journal_end(commit->journal, commit->target, commit->how.is_directory, commit->was_begun);
    }
}

static void commit_free(fc_commit *commit) {
    if (commit) {
        if (commit->keeps) {
            fc_staging_leave(&commit->staging);
        } else {
            fc_staging_remove(&commit->staging);
        }
        free_staged(commit);
        free(commit->target);
        free(commit->parent);
        free(commit->journal);
        free(commit);
    }
}

static fc_code check_remote(fc_commit *commit, fc_error *err) {
    FC_TRY(fc_upload_check(commit->target, err));
    if (fc_remote_is_root(commit->target) && !commit->how.is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: is a bucket, and the target is one file: name a file in it",
                       commit->target);
    }
    FC_TRY(fc_staged_journal_name(commit->target, &commit->journal, err));
    return commit->how.resumable && !commit->journal
               ? fc_fail(err, FC_EUSAGE,
                         "%s: is a whole bucket, and a conversion that can be resumed needs a place next to its "
                         "target: name a folder in the bucket",
                         commit->target)
               : FC_OK;
}

/* Fills `target` and `parent`. */
static fc_code resolve(fc_commit *commit, fc_error *err) {
    const char *target = commit->how.path;
    size_t len = strlen(target);
    while (len > 1 && target[len - 1] == '/') {
        len--;
    }
    if (len == 0) {
        return fc_fail(err, FC_EUSAGE, "the target's name is empty");
    }
    if (target[len] == '/' && !commit->how.is_directory) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: the target is one file, and this is the name of a directory: name a file in it", target);
    }
    commit->target = strndup(target, len);
    FC_NEED(commit->target, err, NULL);
    if (fc_is_remote(target)) {
        commit->remote = true;
        return check_remote(commit, err);
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
    return commit->parent ? FC_OK : fc_no_memory(err, NULL);
}

/* @return the name of the target in its directory. */
static const char *name_of(const fc_commit *commit) {
    const char *slash = strrchr(commit->target, '/');
    return slash ? slash + 1 : commit->target;
}

static fc_code check_space(const fc_commit *commit, uint64_t bytes, fc_error *err) {
    struct statvfs fs;
    const uint64_t stored = commit->how.resumable ? fc_staging_stored(commit->parent, name_of(commit)) : 0;
    bytes = bytes > stored ? bytes - stored : bytes > 0;
    if (statvfs(commit->parent, &fs) != 0) {
        return errno == ENOENT || errno == ENOTDIR
                   ? fc_fail(err, FC_EUSAGE, "%s: the directory of the target does not exist: create it first",
                             commit->parent)
                   : fc_fail_errno(err, errno, "%s: cannot be examined", commit->parent);
    }
    if (bytes == 0 && fs.f_bavail == 0) { /* the required space is unknown */
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

static fc_code new_commit(const fc_commit_options *how, fc_commit **out, fc_error *err) {
    fc_commit *commit = calloc(1, sizeof *commit);
    *out = commit;
    FC_NEED(commit, err, NULL);
    commit->how = *how;
    commit->staging = FC_NO_STAGING;
    return resolve(commit, err);
}

/* Aborts what dead runs have sent, unless it is kept for a run that goes on. */
static fc_code clear_uploads(fc_commit *commit, fc_error *err) {
    const fc_commit_options *how = &commit->how;
    FC_TRY(fc_staged_journal_find(commit->journal, &commit->was_begun, err));
    if (how->resumable) {
        fc_staged_stay(commit->staged);
        commit->has_journal = true;
        commit->keeps = commit->was_begun;
    } else if (commit->was_begun) {
        fc_report(
            &how->reporter,
            "%s: an unfinished conversion to this is kept in uploads that %s lists: resume it, or remove that object",
            commit->target, commit->journal);
    }
    return commit->was_begun ? FC_OK : fc_staged_clear_uploads(commit->target, how, err);
}

/* Uploads of dead runs are not visible, so they are aborted last: a target that is refused is left alone. */
static fc_code prepare_remote(fc_commit *commit, bool clear, fc_error *err) {
    const fc_commit_options *how = &commit->how;
    if (clear) {
        FC_TRY(fc_staged_begin(commit->target, how->is_directory, &commit->staged, err));
        FC_TRY(how->is_directory ? fc_staged_clear_mark(commit->target, how, err) : FC_OK);
    }
    FC_TRY(fc_check_replaced(how, commit->target, err));
    return clear ? clear_uploads(commit, err) : FC_OK;
}

/* @param clear whether to clean up after dead runs first. */
static fc_code prepare(const fc_commit_options *how, bool clear, fc_commit **out, fc_error *err) {
    fc_commit *commit = NULL;
    fc_code rc;
    FC_TRY_GOTO(new_commit(how, &commit, err), rc, out);
    if (commit->remote) {
        rc = prepare_remote(commit, clear, err);
        goto out;
    }
    if (clear && access(commit->parent, W_OK | X_OK) == 0) {
        FC_TRY_GOTO(fc_staging_clear(commit->parent, name_of(commit), &commit->how.reporter, how->resumable, NULL, err),
                    rc, out);
    }
    FC_TRY_GOTO(fc_check_replaced(&commit->how, commit->target, err), rc, out);
    rc = check_space(commit, how->bytes, err);
out:
    if (rc != FC_OK) {
        commit_free(commit);
        commit = NULL;
    }
    *out = commit;
    return rc;
}

fc_code fc_commit_check(const fc_commit_options *how, fc_error *err) {
    fc_commit *commit = NULL;
    fc_code rc = prepare(how, false, &commit, err);
    commit_free(commit);
    return rc;
}

void fc_commit_abort(fc_commit *commit) {
    if (commit && commit->keeps && commit->says_so && fc_commit_folder(commit)) {
        fc_report(&commit->how.reporter,
                  "%s: what is written is kept in %s%s: repeat the command that wrote it to go on", commit->target,
                  commit->remote ? "uploads listed in " : "", fc_commit_folder(commit));
    }
    commit_free(commit);
}

void fc_commit_keep(fc_commit *commit, bool keeps) {
    commit->keeps = commit->says_so = keeps;
}

const char *fc_commit_folder(const fc_commit *commit) {
    return commit->remote ? commit->journal : commit->staging.path;
}

/* Makes the staging directory and, for a target directory or scratch, the directory in it to write to. */
static fc_code stage(fc_commit *commit, bool is_directory, fc_error *err) {
    if (commit->remote) {
        return FC_OK; /* prepare_remote has begun it */
    }
    if (commit->how.resumable) {
        FC_TRY(fc_staging_resume(commit->parent, name_of(commit), &commit->staging, &commit->keeps, err));
    } else {
        FC_TRY(fc_staging_make(commit->parent, name_of(commit), &commit->staging, err));
    }
    /* The staging directory is private. The target itself gets its mode from the umask. */
    if (is_directory && mkdir(commit->staging.new_path, 0777) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", commit->staging.new_path);
    }
    return FC_OK;
}

fc_code fc_commit_begin(const fc_commit_options *how, fc_commit **out, fc_error *err) {
    fc_code rc;
    FC_TRY_GOTO(prepare(how, true, out, err), rc, out);
    rc = stage(*out, how->is_directory, err);
out:
    if (rc != FC_OK) {
        commit_free(*out);
        *out = NULL;
    }
    return rc;
}

fc_code fc_commit_scratch(const char *target, fc_commit **out, fc_error *err) {
    const fc_commit_options scratch = {.path = target, .is_directory = true};
    fc_code rc;
    FC_TRY_GOTO(new_commit(&scratch, out, err), rc, out);
    FC_TRY_GOTO((*out)->remote ? fc_fail(err, FC_EUNSUPPORTED,
                                         "%s: what needs temporary files cannot be made in a bucket: write it on this "
                                         "machine, and upload it",
                                         target)
                               : FC_OK,
                rc, out);
    rc = stage(*out, true, err);
out:
    if (rc != FC_OK) {
        commit_free(*out);
        *out = NULL;
    }
    return rc;
}

fc_code fc_commit_join(const char *path, fc_commit **out, fc_error *err) {
    fc_staged_target *staged = NULL;
    *out = NULL;
    if (!fc_is_staged(path)) {
        return FC_OK;
    }
    FC_TRY(fc_staged_join(path, &staged, err));
    fc_commit *commit = staged ? calloc(1, sizeof *commit) : NULL;
    if (staged && !commit) {
        fc_staged_free(staged);
        return fc_no_memory(err, path);
    }
    if (commit) {
        *commit = (fc_commit){.staging = FC_NO_STAGING, .remote = true, .staged = staged};
    }
    *out = commit;
    return FC_OK;
}

const char *fc_commit_path(const fc_commit *commit) {
    return commit->remote ? fc_staged_path(commit->staged) : commit->staging.new_path;
}

/* Some file systems (NFS, some FUSE) do not support the flags of renameat2. */
static bool flag_unknown(int errnum) {
    return errnum == EINVAL || errnum == ENOSYS || errnum == ENOTSUP;
}

static fc_code publish_new(const fc_commit *commit, fc_error *err) {
    const char *made = fc_commit_path(commit);
    if (renameat2(AT_FDCWD, made, AT_FDCWD, commit->target, RENAME_NOREPLACE) == 0) {
        return FC_OK;
    }
    /* rename() replaces a directory only if that is empty. */
    if ((errno == EEXIST || flag_unknown(errno)) && commit->how.is_directory && rename(made, commit->target) == 0) {
        return FC_OK;
    }
    if (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR) {
        return fc_advise(
            err, fc_fail(err, FC_EUSAGE, "%s: another program created it while this one wrote it", commit->target),
            FC_HINT_FORCE, NULL);
    }
    if (flag_unknown(errno) && access(commit->target, F_OK) != 0 && errno == ENOENT &&
        rename(made, commit->target) == 0) {
        return FC_OK;
    }
    return fc_fail_errno(err, errno, "%s: cannot be renamed into place", commit->target);
}

/* Renames in two steps, where names cannot be exchanged. Between them there is no target, but the staging directory
   records this and the next run finishes. It also stays if the second rename fails and cannot be undone. */
static fc_code publish_in_two_steps(fc_commit *commit, fc_error *err) {
    const fc_staging *s = &commit->staging;
    FC_TRY(fc_staging_promise(s, err));
    if (rename(commit->target, s->old_path) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be moved out of the way", commit->target);
    }
    if (rename(s->new_path, commit->target) == 0) {
        return FC_OK;
    }
    fc_code rc = fc_fail_errno(err, errno, "%s: cannot be renamed into place", commit->target);
    if (rename(s->old_path, commit->target) != 0) {
        rc = fc_fail_errno(err, errno,
                           "%s: the new directory could not be put in place, and the old one could not be "
                           "restored; the next run tries again; both are in %s",
                           commit->target, s->path);
        fc_staging_leave(&commit->staging);
    }
    return rc;
}

/* Swaps the new directory with the old one, which is then removed with the staging directory. */
static fc_code publish_directory(fc_commit *commit, fc_error *err) {
    if (renameat2(AT_FDCWD, fc_commit_path(commit), AT_FDCWD, commit->target, RENAME_EXCHANGE) == 0) {
        return FC_OK;
    }
    return flag_unknown(errno) ? publish_in_two_steps(commit, err)
                               : fc_fail_errno(err, errno, "%s: cannot be renamed into place", commit->target);
}

/* Does the same, and keeps the files of others. A process that dies has not lost them: until the swap they are in the
   old directory, and from then on in both. */
static fc_code publish_with_others(fc_commit *commit, fc_error *err) {
    const fc_staging *s = &commit->staging;
    FC_TRY(fc_keep_others(&commit->how, commit->target, s->new_path, false, err));
    FC_TRY(publish_directory(commit, err));
    const bool moved = access(s->old_path, F_OK) == 0;
    return fc_keep_others(&commit->how, moved ? s->old_path : s->new_path, commit->target, true, err);
}

static fc_code publish(fc_commit *commit, fc_error *err) {
    fc_error failed = {FC_OK, ""};
    FC_TRY(fc_check_replaced(&commit->how, commit->target, err));
    bool exists = fc_path_exists(commit->target, NULL, &failed);
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    if (exists && commit->how.keep_others) {
        return publish_with_others(commit, err);
    }
    if (!exists || !commit->how.force) {
        return publish_new(commit, err);
    }
    if (commit->how.is_directory) {
        return publish_directory(commit, err);
    }
    return rename(fc_commit_path(commit), commit->target) == 0
               ? FC_OK
               : fc_fail_errno(err, errno, "%s: cannot be renamed into place", commit->target);
}

/* Makes the rename durable. Other processes already see it. */
static fc_code sync_parent(const fc_commit *commit, fc_error *err) {
    fc_code rc = fc_sync_path(AT_FDCWD, commit->parent, commit->parent, err);
    return rc == FC_OK
               ? rc
               : fc_context(err, rc, "%s: the new target is in place, but a power failure could still undo that",
                            commit->target);
}

void fc_commit_count(fc_commit *commit, fc_progress *progress) {
    commit->progress = progress;
}

/* Makes the target visible in its bucket, and then deletes what it replaces. */
static fc_code publish_remote(fc_commit *commit, fc_error *err) {
    FC_TRY(fc_check_replaced(&commit->how, commit->target, err));
    FC_TRY(fc_staged_publish(commit->staged, !commit->how.force, commit->progress, err));
    commit->keeps = false;
    return commit->how.force && commit->how.is_directory ? fc_staged_replace(commit->staged, &commit->how, err) : FC_OK;
}

fc_code fc_commit_finish(fc_commit *commit, fc_error *err) {
    const char *made = fc_commit_path(commit);
    fc_code rc;
    if (commit->remote) {
        rc = publish_remote(commit, err);
        goto out;
    }
    FC_TRY_GOTO(fc_keep_permissions(&commit->how, commit->target, made, err), rc, out);
    FC_TRY_GOTO(fc_limit_permissions(made, commit->how.forbidden, err), rc, out);
    if (commit->how.is_directory) {
        fc_progress_begin(commit->progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, fc_sync_count(made));
        FC_TRY_GOTO(fc_sync_tree(made, commit->progress, err), rc, out);
    } else {
        fc_progress_begin(commit->progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, 1);
        FC_TRY_GOTO(fc_sync_path(AT_FDCWD, made, made, err), rc, out);
        FC_TRY_GOTO(fc_progress_count(commit->progress, 1, err), rc, out);
    }
    FC_TRY_GOTO(commit->how.resumable ? fc_staging_complete(&commit->staging, err) : FC_OK, rc, out);
    FC_TRY_GOTO(publish(commit, err), rc, out);
    commit->keeps = false;
    FC_TRY_GOTO(sync_parent(commit, err), rc, out);
out:
    fc_commit_abort(commit); /* nothing but the staging directory is left to it */
    return rc;
}

/* ---- a target that is missing ---- */

/* Finds the first component of `path` that does not exist, with links resolved. @return false if all exist. */
static bool find_missing(const char *path, char missing[PATH_MAX]) {
    struct stat st;
    return stat(path, &st) != 0 && errno == ENOENT && !realpath(path, missing) && errno == ENOENT;
}

fc_code fc_commit_recover(const char *path, const fc_reporter *reporter, fc_error *err) {
    enum { WAITS = 1000 };
    const struct timespec moment = {0, 10 * 1000000L};
    char missing[PATH_MAX];
    bool busy = true;
    for (int i = 0; busy && i < WAITS && find_missing(path, missing); i++) {
        char *slash = strrchr(missing, '/');
        if (i > 0) {
            nanosleep(&moment, NULL);
        }
        *slash = '\0'; /* realpath returns an absolute path */
        FC_TRY(fc_staging_clear(*missing ? missing : "/", slash + 1, reporter, false, &busy, err));
    }
    return FC_OK;
}
