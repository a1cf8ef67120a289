/*
 * Clears the staging directories of dead runs. See staging.h.
 */
#include "io/report.h"
#include "io/staging.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/staging_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fc_report(l->reporter, "%s/%s: %s", l->shown_parent, l->name, text);
}

/* Whether `entry` is a name that mkdtemp can make for a staging directory of `name`, or that of one that can be
 * resumed.
 */
static bool is_staging_name(const char *entry, const char *name) {
    char expected[FC_STAGED_MOST_NAME + sizeof FC_STAGING_SUFFIX + 2];
    int length = snprintf(expected, sizeof expected, ".%.*s%s", FC_STAGED_MOST_NAME, name, FC_STAGING_SUFFIX);
    return strncmp(entry, expected, (size_t)length) == 0 && strlen(entry + length) == FC_STAGING_RANDOM;
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
        fc_staging_empty(l->fd);
        (void)unlinkat(l->parent, l->entry, AT_REMOVEDIR);
    }
    return FC_OK;
}

/* Whether what is in `new` is not the target that was made there: it has been exchanged with the old one. */
static fc_code is_exchanged(const leftover *l, bool *exchanged, fc_error *err) {
    char name[FC_INODE_NAME];
    struct stat st;
    bool only = true;
    int fd = openat(l->fd, "new", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstatat(fd, l->name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        st.st_ino = 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    fc_staging_name_inode(&st, name);
    const char *const made[] = {name + strlen("complete/"), NULL};
    FC_TRY(holds_only(l->fd, "complete", made, &only, err));
    *exchanged = !only;
    return FC_OK;
}

/* Whether a dead run left a conversion that can be resumed: a journal, and a target that is not in place yet. */
static fc_code can_be_resumed(const leftover *l, bool *can, fc_error *err) {
    struct stat st;
    bool exchanged;
    *can = fstatat(l->fd, FC_STAGED_JOURNAL, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (!*can || !exists_in(l->fd, "complete", ".")) {
        return FC_OK;
    }
    FC_TRY(is_exchanged(l, &exchanged, err));
    *can = !exchanged && exists_in(l->fd, "new", l->name) && !exists_in(l->fd, "old", l->name);
    return FC_OK;
}

/* A directory without a lock is removed if it is empty. If it is not, its owner has just taken the lock, or the file
   system has no locks. */
static fc_lock_state lock_leftover(const leftover *l, int *lock) {
    for (int i = 0; i < FC_STAGING_TRIES; i++) {
        fc_lock_state state = fc_staging_lock(l->fd, 0, lock);
        if (state != FC_LOCK_GONE || unlinkat(l->parent, l->entry, AT_REMOVEDIR) == 0 || errno == ENOENT) {
            return state;
        }
    }
    return FC_LOCK_UNKNOWN;
}

static fc_code clear_one(const leftover *l, fc_error *err) {
    bool ours = false, stays = true;
    int lock = -1;
    FC_TRY(is_ours(l, &ours, err));
    if (!ours) {
        return FC_OK;
    }
    fc_lock_state state = lock_leftover(l, &lock);
    if (state == FC_LOCK_UNKNOWN || state == FC_LOCK_FAILED) {
        report(l, "another run left %s behind or is still using it; remove it if no run is active", l->entry);
    }
    if (state != FC_LOCK_HELD) {
        *l->busy |= state == FC_LOCK_BUSY && exists_in(l->fd, "old", ".");
        return FC_OK;
    }
    fc_code rc = can_be_resumed(l, &stays, err);
    if (rc == FC_OK && !stays) {
        rc = settle_and_remove(l, err);
    } else if (rc == FC_OK && !l->resumes) {
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
