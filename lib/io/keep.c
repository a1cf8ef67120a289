/*
 * Keeps the files of a replaced directory that are not files of a checkpoint. See replace.h.
 *
 * They get a second name in the new directory before the two directories are exchanged, so whichever of them the
 * target's name leads to has them all. What other programs have put into the old directory meanwhile is moved after
 * that.
 */
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/replace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct keeper {
    const fc_commit_options *how;
    bool late; /* the new directory is in place: move what it lacks */
} keeper;

static fc_code is_replaced(const keeper *k, const char *path, const char *name, bool *own, fc_error *err) {
    *own = false;
    return k->how->is_own_file ? k->how->is_own_file(path, name, own, err) : FC_OK;
}

static bool is_later(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec != b->tv_sec ? a->tv_sec > b->tv_sec : a->tv_nsec > b->tv_nsec;
}

/* Gives a file its name in the new directory. `old` is the file in the old one. */
static fc_code keep_file(const keeper *k, int from, int to, const char *entry, const struct stat *old, const char *path,
                         fc_error *err) {
    struct stat now;
    const bool exists = fstatat(to, entry, &now, AT_SYMLINK_NOFOLLOW) == 0;
    if (k->late && exists &&
        ((now.st_dev == old->st_dev && now.st_ino == old->st_ino) || !is_later(&old->st_ctim, &now.st_ctim))) {
        return FC_OK;
    }
    if (!k->late && exists) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: replacing it would delete a file that this program did not write: move it away first",
                       path);
    }
    if (k->late ? renameat(from, entry, to, entry) != 0 : linkat(from, entry, to, entry, 0) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be kept next to the new checkpoint: move it away first", path);
    }
    return FC_OK;
}

/* A new folder is like the old one. */
static bool copy_traits(int folder, const struct stat *old) {
    const struct timespec times[2] = {old->st_atim, old->st_mtim};
    struct stat now;
    const bool known = fstat(folder, &now) == 0;
    const bool owned = known && ((now.st_uid == old->st_uid && now.st_gid == old->st_gid) ||
                                 fchown(folder, old->st_uid, old->st_gid) == 0);
    return owned && fchmod(folder, old->st_mode & 07777) == 0 && futimens(folder, times) == 0;
}

static fc_code keep_content(const keeper *k, int from, int to, const char *path, const char *prefix, int depth,
                            size_t *seen, fc_error *err);

/* Keeps a folder, unless all that is in it is replaced. */
static fc_code keep_folder(const keeper *k, int from, int to, const char *entry, const struct stat *old,
                           const char *path, const char *name, int depth, fc_error *err) {
    const bool made = mkdirat(to, entry, 0700) == 0;
    fc_code rc = FC_OK;
    size_t seen = 0;
    if (!made && errno != EEXIST) {
        return fc_fail_errno(err, errno, "%s: cannot be kept next to the new checkpoint", path);
    }
    const int below = openat(from, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const int target = openat(to, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (below < 0 || target < 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be opened", path);
        goto out;
    }
    FC_TRY_GOTO(keep_content(k, below, target, path, name, depth + 1, &seen, err), rc, out);
    if (fsync(target) != 0 || (made && !copy_traits(target, old))) {
        rc = fc_fail_errno(err, errno, "%s: cannot be kept next to the new checkpoint", path);
    }
out:
    if (made && seen > 0) {
        unlinkat(to, entry, AT_REMOVEDIR); /* fails if something was kept in it */
    }
    if (below >= 0) {
        close(below);
    }
    if (target >= 0) {
        close(target);
    }
    return rc;
}

/* @param entry in the open directory `from`. @param name relative to the target. */
static fc_code keep_entry(const keeper *k, int from, int to, const char *entry, const char *path, const char *name,
                          int depth, fc_error *err) {
    struct stat st;
    bool own = false;
    if (fstatat(from, entry, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return k->late || errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    if (S_ISDIR(st.st_mode)) {
        return keep_folder(k, from, to, entry, &st, path, name, depth, err);
    }
    FC_TRY(S_ISREG(st.st_mode) && depth <= 1 ? is_replaced(k, path, name, &own, err) : FC_OK);
    return own ? FC_OK : keep_file(k, from, to, entry, &st, path, err);
}

static fc_code keep_content(const keeper *k, int from, int to, const char *path, const char *prefix, int depth,
                            size_t *seen, fc_error *err) {
    fc_dir dir = {0};
    fc_code rc;
    const int copy = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (copy < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be opened", path);
    }
    FC_TRY_GOTO(fc_dir_open_at(&dir, copy, path, err), rc, out);
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL; (*seen)++) {
        char *full = NULL, *name = NULL;
        const bool good = asprintf(&full, "%s/%s", path, entry) >= 0 &&
                          asprintf(&name, "%s%s%s", prefix, *prefix ? "/" : "", entry) >= 0;
        rc = good ? keep_entry(k, from, to, entry, full, name, depth, err) : fc_no_memory(err, path);
        free(full);
        free(name);
        FC_TRY_GOTO(rc, rc, out);
    }
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_keep_others(const fc_commit_options *how, const char *old, const char *made, bool late, fc_error *err) {
    const keeper k = {how, late};
    size_t seen = 0;
    fc_code rc;
    const int from = open(old, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int to = open(made, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0 || to < 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be opened", from < 0 ? old : made);
        goto out;
    }
    FC_TRY_GOTO(keep_content(&k, from, to, old, "", 0, &seen, err), rc, out);
    rc = fsync(to) == 0 ? FC_OK : fc_fail_errno(err, errno, "%s: fsync", made);
out:
    if (from >= 0) {
        close(from);
    }
    if (to >= 0) {
        close(to);
    }
    return rc;
}
