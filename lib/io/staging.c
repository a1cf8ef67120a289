/*
 * Makes and locks staging directories, and clears those of dead runs. See staging.h.
 */
#include "io/staging.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/sync.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Bytes of the target's name that are kept, so that the suffix still fits into NAME_MAX. */
enum { MOST_NAME = 200, RANDOM = 6, TRIES = 16 };

static const char suffix[] = ".fsdpckpt-";
static const char resumed[] = "resume"; /* in place of the random letters */

/* ---- making one ---- */

/* The result of locking a staging directory. LOCK_GONE: another run is removing or has removed the directory.
   LOCK_UNKNOWN: the file system has no locks. LOCK_FAILED: errno has the reason. */
typedef enum lock_state { LOCK_HELD, LOCK_BUSY, LOCK_GONE, LOCK_UNKNOWN, LOCK_FAILED } lock_state;

static lock_state why_not_locked(int errnum) {
    return errnum == EWOULDBLOCK                                                              ? LOCK_BUSY
           : errnum == ENOSYS || errnum == EOPNOTSUPP || errnum == ENOLCK || errnum == EINVAL ? LOCK_UNKNOWN
                                                                                              : LOCK_FAILED;
}

/* @param flags O_CREAT or 0. @param fd the descriptor that holds the lock, or -1. */
static lock_state take_lock(int directory, int flags, int *fd) {
    struct stat st;
    *fd = openat(directory, "lock", O_RDWR | flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*fd < 0) {
        return errno == ENOENT ? LOCK_GONE : LOCK_FAILED;
    }
    lock_state state = flock(*fd, LOCK_EX | LOCK_NB) == 0 ? LOCK_HELD : why_not_locked(errno);
    if (state == LOCK_HELD && (fstat(*fd, &st) != 0 || st.st_nlink == 0)) {
        state = LOCK_GONE; /* its last owner unlinked it before we had the lock */
    }
    if (state != LOCK_HELD) {
        int saved = errno;
        close(*fd);
        errno = saved;
        *fd = -1;
    }
    return state;
}

/* Makes the directory and opens it. */
static fc_code make_directory(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    char *path = NULL;
    FC_NEED(asprintf(&path, "%s/.%.*s%sXXXXXX", parent, MOST_NAME, name, suffix) >= 0, err, NULL);
    if (!mkdtemp(path)) {
        fc_code rc = fc_fail_errno(err, errno, "%s: cannot create a temporary directory", parent);
        free(path);
        return rc;
    }
    s->path = path;
    s->fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (s->fd < 0 && errno != ENOENT) {
        fc_code rc = fc_fail_errno(err, errno, "%s: cannot be opened", path);
        rmdir(path);
        return rc;
    }
    return FC_OK;
}

/* Without locks, the lock file must not exist either, or the next run would take this run for dead. With them, its name
 * is synced before anything is made next to it, or a power failure could leave files that nobody removes. */
static lock_state lock_new(fc_staging *s) {
    lock_state state = s->fd < 0 ? LOCK_GONE : take_lock(s->fd, O_CREAT, &s->lock);
    if (state == LOCK_HELD && fsync(s->fd) != 0) {
        return LOCK_FAILED;
    }
    if (state == LOCK_UNKNOWN && unlinkat(s->fd, "lock", 0) != 0) {
        state = LOCK_FAILED;
    }
    return state == LOCK_UNKNOWN ? LOCK_HELD : state;
}

/* Makes a directory and takes its lock. If another run removes it before it is locked, makes the next one. */
static fc_code make_locked(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    for (int i = 0; i < TRIES; i++) {
        FC_TRY(make_directory(parent, name, s, err));
        lock_state state = lock_new(s);
        if (state == LOCK_HELD) {
            return FC_OK;
        }
        if (state == LOCK_FAILED) {
            return fc_fail_errno(err, errno, "%s: cannot be locked", s->path);
        }
        fc_staging_leave(s);
    }
    return fc_fail(err, FC_EIO, "%s: other runs keep removing the directories that this run creates", parent);
}

static fc_code make_new(const char *name, fc_staging *s, fc_error *err) {
    char *directory = NULL;
    bool made = asprintf(&directory, "%s/new", s->path) >= 0;
    directory = made ? directory : NULL;
    s->new_path = s->old_path = NULL;
    if (!made || asprintf(&s->new_path, "%s/%s", directory, name) < 0 ||
        asprintf(&s->old_path, "%s/old/%s", s->path, name) < 0) {
        free(directory);
        return fc_no_memory(err, NULL);
    }
    fc_code rc = mkdir(directory, 0700) == 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be created", directory);
    free(directory);
    return rc;
}

fc_code fc_staging_make(const char *parent, const char *name, fc_staging *out, fc_error *err) {
    *out = FC_NO_STAGING;
    fc_code rc;
    FC_TRY_GOTO(make_locked(parent, name, out, err), rc, out);
    rc = make_new(name, out, err);
out:
    if (rc != FC_OK) {
        fc_staging_remove(out);
    }
    return rc;
}

/* ---- one that can be resumed ---- */

/* Opens the directory, which must belong to this user, and makes it first if it is missing. */
static fc_code open_resumed(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    struct stat st;
    s->path = NULL;
    FC_NEED(asprintf(&s->path, "%s/.%.*s%s%s", parent, MOST_NAME, name, suffix, resumed) >= 0, err, NULL);
    if (mkdir(s->path, 0700) != 0 && errno != EEXIST) {
        return fc_fail_errno(err, errno, "%s: cannot be created", s->path);
    }
    s->fd = open(s->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (s->fd < 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be opened", s->path);
    }
    return fstat(s->fd, &st) == 0 && st.st_uid == geteuid()
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "%s: belongs to another user: choose another target", s->path);
}

static fc_code fail_locked(const fc_staging *s, lock_state state, fc_error *err) {
    if (state == LOCK_BUSY) {
        return fc_fail(err, FC_EUSAGE, "%s: another run is writing this target: wait until it ends", s->path);
    }
    if (state == LOCK_UNKNOWN) {
        (void)unlinkat(s->fd, "lock", 0);
        (void)rmdir(s->path);
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: the file system has no locks, so a conversion there cannot be resumed", s->path);
    }
    return fc_fail_errno(err, errno, "%s: cannot be locked", s->path);
}

/* If another run removes the directory before it is locked, makes the next one. */
static fc_code lock_resumed(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    for (int i = 0; i < TRIES; i++) {
        FC_TRY(open_resumed(parent, name, s, err));
        lock_state state = s->fd < 0 ? LOCK_GONE : take_lock(s->fd, O_CREAT, &s->lock);
        if (state == LOCK_HELD) {
            return fsync(s->fd) == 0 ? fc_sync_path(AT_FDCWD, parent, parent, err) : fail_locked(s, LOCK_FAILED, err);
        }
        if (state != LOCK_GONE) {
            return fail_locked(s, state, err);
        }
        fc_staging_leave(s);
    }
    return fc_fail(err, FC_EIO, "%s: other runs keep removing the directories that this run creates", parent);
}

fc_code fc_staging_resume(const char *parent, const char *name, fc_staging *out, bool *found, fc_error *err) {
    struct stat st;
    *out = FC_NO_STAGING;
    *found = true; /* what is there stays after a failure */
    fc_code rc;
    FC_TRY_GOTO(lock_resumed(parent, name, out, err), rc, out);
    *found = fstatat(out->fd, FC_STAGED_JOURNAL, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (fstatat(out->fd, "old", &st, AT_SYMLINK_NOFOLLOW) == 0) {
        *found = true;
        rc = fc_fail(err, FC_EUSAGE, "%s/old: what an earlier run replaced is still there: move it away or remove it",
                     out->path);
        goto out;
    }
    (void)unlinkat(out->fd, "complete", AT_REMOVEDIR);
    fc_remove_tree(out->fd, "new");
    if (mkdirat(out->fd, FC_STAGED_TILES, 0700) != 0 && errno != EEXIST) {
        rc = fc_fail_errno(err, errno, "%s: cannot be prepared", out->path);
        goto out;
    }
    rc = make_new(name, out, err);
out:
    if (rc != FC_OK && *found) {
        fc_staging_leave(out);
    } else if (rc != FC_OK) {
        fc_staging_remove(out);
    }
    return rc;
}

uint64_t fc_staging_stored(const char *parent, const char *name) {
    char *path = NULL;
    uint64_t bytes = 0;
    fc_dir dir;
    if (asprintf(&path, "%s/.%.*s%s%s/" FC_STAGED_TILES, parent, MOST_NAME, name, suffix, resumed) < 0) {
        return 0;
    }
    fc_code rc = fc_dir_open(&dir, path, NULL);
    for (const char *entry; rc == FC_OK && (entry = fc_dir_next(&dir)) != NULL;) {
        struct stat st;
        if (fstatat(dirfd(dir.dir), entry, &st, AT_SYMLINK_NOFOLLOW) == 0) {
            bytes += (uint64_t)st.st_blocks * 512;
        }
    }
    (void)fc_dir_close(&dir, rc, NULL);
    free(path);
    return bytes;
}

fc_code fc_staging_complete(const fc_staging *s, fc_error *err) {
    FC_TRY(fc_sync_path(s->fd, "new", s->path, err));
    if (mkdirat(s->fd, "complete", 0700) != 0 && errno != EEXIST) {
        return fc_fail_errno(err, errno, "%s: cannot be completed", s->path);
    }
    return fc_sync_path(s->fd, ".", s->path, err);
}

/* ---- finishing and removing one ---- */

/* After a power failure, the directory must still lead to the new target before the old one is moved into it. */
fc_code fc_staging_promise(const fc_staging *s, fc_error *err) {
    FC_TRY(fc_sync_path(s->fd, "new", s->path, err));
    if (mkdirat(s->fd, "old", 0700) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be prepared for the old target", s->path);
    }
    FC_TRY(fc_sync_path(s->fd, ".", s->path, err));
    return fc_sync_path(s->fd, "..", s->path, err);
}

void fc_staging_leave(fc_staging *s) {
    if (s->lock >= 0) {
        close(s->lock);
    }
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->path);
    free(s->new_path);
    free(s->old_path);
    *s = FC_NO_STAGING;
}

/* Removes the lock last, so that a directory without one is empty, also after a power failure. Without the journal, the
   next run can remove the rest. */
static void remove_content(int directory) {
    (void)unlinkat(directory, FC_STAGED_JOURNAL, 0);
    fc_remove_tree(directory, FC_STAGED_TILES);
    fc_remove_tree(directory, "complete");
    fc_remove_tree(directory, "new");
    fc_remove_tree(directory, "old");
    (void)fsync(directory);
    (void)unlinkat(directory, "lock", 0);
}

void fc_staging_remove(fc_staging *s) {
    if (s->fd >= 0) {
        remove_content(s->fd);
        (void)rmdir(s->path);
    }
    fc_staging_leave(s);
}

/* ---- clearing after dead runs ---- */

/* A staging directory of another run, which may be dead or still at work. */
typedef struct leftover {
    int parent;       /* directory of the target */
    const char *name; /* name of the target */
    const char *shown_parent;
    const char *entry; /* name of the staging directory */
    int fd;
    const fc_reporter *reporter;
    bool resumes; /* the caller goes on with a conversion that can be resumed */
    bool *busy;   /* set to true if a live run is between its two renames */
} leftover;

static void report(const leftover *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Reports one line that begins with the name of the target. */
static void report(const leftover *l, const char *format, ...) {
    char text[512];
    fc_error line; /* makes the line printable */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fc_fail(&line, FC_OK, "%s/%s: %s", l->shown_parent, l->name, text);
    if (l->reporter && l->reporter->report) {
        l->reporter->report(l->reporter->context, line.message);
    }
}

/* Whether `entry` is a name that mkdtemp can make for a staging directory of `name`, or that of one that can be
 * resumed.
 */
static bool is_staging_name(const char *entry, const char *name) {
    char expected[MOST_NAME + sizeof suffix + 2];
    int length = snprintf(expected, sizeof expected, ".%.*s%s", MOST_NAME, name, suffix);
    return strncmp(entry, expected, (size_t)length) == 0 && strlen(entry + length) == RANDOM;
}

/* Sets `*only` to false if the directory has other entries than `names`. */
static fc_code holds_only(int parent, const char *directory, const char *const *names, bool *only, fc_error *err) {
    fc_dir dir;
    int fd = openat(parent, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be opened", directory);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open_at(&dir, fd, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        bool known = false;
        for (const char *const *n = names; *n; n++) {
            known |= strcmp(name, *n) == 0;
        }
        *only &= known;
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* Checks that it is a staging directory of this target and not of one with a longer name. */
static fc_code is_ours(const leftover *l, bool *ours, fc_error *err) {
    static const char *const top[] = {"lock", "new", "old", FC_STAGED_JOURNAL, FC_STAGED_TILES, "complete", NULL};
    const char *const below[] = {l->name, NULL};
    *ours = true;
    FC_TRY(holds_only(l->fd, ".", top, ours, err));
    if (*ours) {
        FC_TRY(holds_only(l->fd, "new", below, ours, err));
    }
    return *ours ? holds_only(l->fd, "old", below, ours, err) : FC_OK;
}

static bool exists_in(int directory, const char *below, const char *name) {
    struct stat st;
    int fd = openat(directory, below, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    bool yes = fd >= 0 && fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return yes;
}

/* Moves new/NAME into place, durably. */
static fc_code finish(const leftover *l, fc_error *err) {
    fc_code rc = FC_OK;
    int from = openat(l->fd, "new", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (from < 0 || renameat(from, l->name, l->parent, l->name) != 0 || fsync(l->parent) != 0) {
        rc = fc_fail_errno(err, errno, "%s/%s: the rename that an interrupted run began cannot be finished",
                           l->shown_parent, l->name);
    }
    if (from >= 0) {
        close(from);
    }
    return rc;
}

/* Finishes or undoes the work of a dead owner. `*keep` is set if the directory has the only copy of something. */
static fc_code settle(const leftover *l, bool *keep, fc_error *err) {
    struct stat st;
    bool has_new = exists_in(l->fd, "new", l->name), has_old = exists_in(l->fd, "old", l->name);
    bool in_place = fstatat(l->parent, l->name, &st, AT_SYMLINK_NOFOLLOW) == 0;
    *keep = false;
    if (!has_old && !has_new) { /* the owner wrote nothing, or is done, or makes another directory if it still lives */
        return FC_OK;
    }
    if (!has_old || (in_place && !has_new)) {
        report(l, "an earlier run died while writing this; its leftover %s is removed", l->entry);
        return FC_OK;
    }
    if (!in_place && has_new) {
        FC_TRY(finish(l, err));
        report(l, "an earlier run died while it replaced this; the replacement, which was complete, is put in place");
        return FC_OK;
    }
    *keep = true;
    report(l,
           "an earlier run died while it replaced this; what it replaced is still in %s/old: move it away or remove it",
           l->entry);
    return FC_OK;
}

/* Settles what a dead run left in a directory whose lock this one holds, and removes it unless it holds an only copy.
 */
static fc_code settle_and_remove(const leftover *l, fc_error *err) {
    bool keep = true;
    FC_TRY(settle(l, &keep, err));
    if (!keep) {
        remove_content(l->fd);
        (void)unlinkat(l->parent, l->entry, AT_REMOVEDIR);
    }
    return FC_OK;
}

/* Whether a dead run left a conversion that can be resumed: a journal, and a target that is not in place yet. */
static bool can_be_resumed(const leftover *l) {
    struct stat st;
    if (fstatat(l->fd, FC_STAGED_JOURNAL, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return false;
    }
    return !exists_in(l->fd, "complete", ".") ||
           (exists_in(l->fd, "new", l->name) && !exists_in(l->fd, "old", l->name));
}

/* A directory without a lock is removed if it is empty. If it is not, its owner has just taken the lock, or the file
   system has no locks. */
static lock_state lock_leftover(const leftover *l, int *lock) {
    for (int i = 0; i < TRIES; i++) {
        lock_state state = take_lock(l->fd, 0, lock);
        if (state != LOCK_GONE || unlinkat(l->parent, l->entry, AT_REMOVEDIR) == 0 || errno == ENOENT) {
            return state;
        }
    }
    return LOCK_UNKNOWN;
}

static fc_code clear_one(const leftover *l, fc_error *err) {
    bool ours = false;
    int lock = -1;
    FC_TRY(is_ours(l, &ours, err));
    if (!ours) {
        return FC_OK;
    }
    lock_state state = lock_leftover(l, &lock);
    if (state == LOCK_UNKNOWN || state == LOCK_FAILED) {
        report(l, "another run left %s behind or is still using it; remove it if no run is active", l->entry);
    }
    if (state != LOCK_HELD) {
        *l->busy |= state == LOCK_BUSY && exists_in(l->fd, "old", ".");
        return FC_OK;
    }
    fc_code rc = FC_OK;
    if (!can_be_resumed(l)) {
        rc = settle_and_remove(l, err);
    } else if (!l->resumes) {
        report(l, "an unfinished conversion to this is kept in %s: resume it, or remove that directory", l->entry);
    }
    close(lock);
    return rc;
}

/* Leaves directories of other users alone. */
static fc_code clear_own(leftover *l, fc_error *err) {
    struct stat st;
    l->fd = openat(l->parent, l->entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (l->fd < 0) {
        return FC_OK;
    }
    fc_code rc = fstat(l->fd, &st) == 0 && st.st_uid == geteuid() ? clear_one(l, err) : FC_OK;
    close(l->fd);
    return rc;
}

fc_code fc_staging_clear(const char *parent, const char *name, const fc_reporter *reporter, bool resumes, bool *busy,
                         fc_error *err) {
    fc_dir dir;
    bool ignored;
    fc_code rc;
    busy = busy ? busy : &ignored;
    *busy = false;
    FC_TRY_GOTO(fc_dir_open(&dir, parent, err), rc, out);
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL;) {
        if (is_staging_name(entry, name)) {
            leftover l = {dirfd(dir.dir), name, parent, entry, -1, reporter, resumes, busy};
            FC_TRY_GOTO(clear_own(&l, err), rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}
