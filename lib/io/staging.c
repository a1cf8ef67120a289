/*
 * Makes, locks and removes staging directories. See staging.h; staging_clear.c clears those of dead runs.
 */
#include "io/staging.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/staging_private.h"
#include "io/sync.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char resumed[] = "resume"; /* in place of the random letters */

/* ---- making one ---- */

static fc_lock_state why_not_locked(int errnum) {
    return errnum == EWOULDBLOCK                                                              ? FC_LOCK_BUSY
           : errnum == ENOSYS || errnum == EOPNOTSUPP || errnum == ENOLCK || errnum == EINVAL ? FC_LOCK_UNKNOWN
                                                                                              : FC_LOCK_FAILED;
}

fc_lock_state fc_staging_lock(int directory, int flags, int *fd) {
    struct stat st;
    *fd = openat(directory, "lock", O_RDWR | flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*fd < 0) {
        return errno == ENOENT ? FC_LOCK_GONE : FC_LOCK_FAILED;
    }
    fc_lock_state state = flock(*fd, LOCK_EX | LOCK_NB) == 0 ? FC_LOCK_HELD : why_not_locked(errno);
    if (state == FC_LOCK_HELD && (fstat(*fd, &st) != 0 || st.st_nlink == 0)) {
        state = FC_LOCK_GONE; /* its last owner unlinked it before we had the lock */
    }
    if (state != FC_LOCK_HELD) {
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
    FC_NEED(asprintf(&path, "%s/.%.*s%sXXXXXX", parent, FC_STAGED_MOST_NAME, name, FC_STAGING_SUFFIX) >= 0, err, NULL);
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
static fc_lock_state lock_new(fc_staging *s) {
    fc_lock_state state = s->fd < 0 ? FC_LOCK_GONE : fc_staging_lock(s->fd, O_CREAT, &s->lock);
    if (state == FC_LOCK_HELD && fsync(s->fd) != 0) {
        return FC_LOCK_FAILED;
    }
    if (state == FC_LOCK_UNKNOWN && unlinkat(s->fd, "lock", 0) != 0) {
        state = FC_LOCK_FAILED;
    }
    return state == FC_LOCK_UNKNOWN ? FC_LOCK_HELD : state;
}

/* Makes a directory and takes its lock. If another run removes it before it is locked, makes the next one. */
static fc_code make_locked(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    for (int i = 0; i < FC_STAGING_TRIES; i++) {
        FC_TRY(make_directory(parent, name, s, err));
        fc_lock_state state = lock_new(s);
        if (state == FC_LOCK_HELD) {
            return FC_OK;
        }
        if (state == FC_LOCK_FAILED) {
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
    FC_NEED(asprintf(&s->path, "%s/.%.*s%s%s", parent, FC_STAGED_MOST_NAME, name, FC_STAGING_SUFFIX, resumed) >= 0, err,
            NULL);
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

static fc_code fail_locked(const fc_staging *s, fc_lock_state state, fc_error *err) {
    if (state == FC_LOCK_BUSY) {
        return fc_fail(err, FC_EUSAGE, "%s: another run is writing this target: wait until it ends", s->path);
    }
    if (state == FC_LOCK_UNKNOWN) {
        (void)unlinkat(s->fd, "lock", 0);
        (void)rmdir(s->path);
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: the file system has no locks, so a conversion there cannot be resumed", s->path);
    }
    return fc_fail_errno(err, errno, "%s: cannot be locked", s->path);
}

/* If another run removes the directory before it is locked, makes the next one. */
static fc_code lock_resumed(const char *parent, const char *name, fc_staging *s, fc_error *err) {
    for (int i = 0; i < FC_STAGING_TRIES; i++) {
        FC_TRY(open_resumed(parent, name, s, err));
        fc_lock_state state = s->fd < 0 ? FC_LOCK_GONE : fc_staging_lock(s->fd, O_CREAT, &s->lock);
        if (state == FC_LOCK_HELD) {
            return fsync(s->fd) == 0 ? fc_sync_path(AT_FDCWD, parent, parent, err)
                                     : fail_locked(s, FC_LOCK_FAILED, err);
        }
        if (state != FC_LOCK_GONE) {
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
    if (unlinkat(out->fd, "old", AT_REMOVEDIR) != 0 && fstatat(out->fd, "old", &st, AT_SYMLINK_NOFOLLOW) == 0) {
        *found = true;
        rc = fc_fail(err, FC_EUSAGE, "%s/old: what an earlier run replaced is still there: move it away or remove it",
                     out->path);
        goto out;
    }
    fc_remove_tree(out->fd, "complete");
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
    if (asprintf(&path, "%s/.%.*s%s%s/" FC_STAGED_TILES, parent, FC_STAGED_MOST_NAME, name, FC_STAGING_SUFFIX,
                 resumed) < 0) {
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

void fc_staging_name_inode(const struct stat *st, char name[FC_INODE_NAME]) {
    snprintf(name, FC_INODE_NAME, "complete/%" PRIu64, (uint64_t)st->st_ino);
}

fc_code fc_staging_complete(const fc_staging *s, fc_error *err) {
    char name[FC_INODE_NAME];
    struct stat st;
    FC_TRY(fc_sync_path(s->fd, "new", s->path, err));
    if (lstat(s->new_path, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", s->new_path);
    }
    fc_staging_name_inode(&st, name);
    if (mkdirat(s->fd, "complete", 0700) != 0 || mkdirat(s->fd, name, 0700) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be completed", s->path);
    }
    FC_TRY(fc_sync_path(s->fd, "complete", s->path, err));
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

/* Without the journal, the next run can remove the rest. */
void fc_staging_empty(int directory) {
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
        fc_staging_empty(s->fd);
        (void)rmdir(s->path);
    }
    fc_staging_leave(s);
}
