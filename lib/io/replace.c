/*
 * Decides what --force may replace: only files that the caller accepts (fc_commit_options.is_own_file). Also gives the
 * new target the permissions and the owner of the old one. See replace.h.
 */
#include "io/replace.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/path.h"
#include "io/staged_publish.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the old target ---- */

static fc_code check_file(const fc_commit_options *how, const char *path, fc_error *err) {
    bool own = false;
    FC_TRY(how->is_own_file ? how->is_own_file(path, NULL, &own, err) : FC_OK);
    return own ? FC_OK
               : fc_fail(err, FC_EUSAGE,
                         "%s: replacing it would delete a file that is not a checkpoint of a format that is written "
                         "here: remove it yourself or name another target",
                         path);
}

bool fc_is_target_name(const fc_own_file *files, const char *name) {
    const fc_own_file *file = files;
    while (file && file->glob && fnmatch(file->glob, name, FNM_PATHNAME) != 0) {
        file++;
    }
    return file && file->glob;
}

/* The rest of a directory is kept, but not under a name that a file of the target has. */
static fc_code check_kept(const fc_commit_options *how, const char *path, const char *name, fc_error *err) {
    return fc_is_target_name(how->names, name)
               ? fc_fail(err, FC_EUSAGE,
                         "%s/%s: replacing it would delete a file that this program did not write: move it away first",
                         path, name)
               : FC_OK;
}

/* What keeps a directory from being replaced. */
static fc_code refuse_entry(const char *path, const char *name, fc_error *err) {
    return fc_fail(err, FC_EUSAGE,
                   "%s: replacing it would delete '%s', which this program does not write: move it away first", path,
                   name);
}

static fc_code refuse_existing(const char *path, fc_error *err) {
    return fc_advise(err, fc_fail(err, FC_EUSAGE, "%s: exists", path), FC_HINT_FORCE, NULL);
}

/* @param name relative to the target, as in own_files. @param entry the same in `directory`. */
static fc_code check_entry(const fc_commit_options *how, const char *path, const fc_dir *directory, const char *entry,
                           const char *name, fc_error *err) {
    struct stat st;
    bool own = false;
    FC_TRY(fc_dir_stat(directory, entry, &st, err));
    if (S_ISREG(st.st_mode) && fc_has_text(how->also, name)) {
        return FC_OK;
    }
    char *full = NULL;
    FC_NEED(asprintf(&full, "%s/%s", path, name) >= 0, err, path);
    fc_code rc = S_ISREG(st.st_mode) && how->is_own_file ? how->is_own_file(full, name, &own, err) : FC_OK;
    free(full);
    FC_TRY(rc);
    if (own && !how->force) {
        return refuse_existing(path, err);
    }
    if (own) {
        return FC_OK;
    }
    return how->keep_others ? check_kept(how, path, name, err) : refuse_entry(path, name, err);
}

/* Opens a folder of an open directory for a walk. */
static fc_code open_folder(fc_dir *dir, int directory, const char *name, fc_error *err) {
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be opened", name) : fc_dir_open_at(dir, fd, name, err);
}

/* A folder in the target: targets have no deeper ones. */
static fc_code check_folder(const fc_commit_options *how, const char *path, const fc_dir *directory, const char *folder,
                            fc_error *err) {
    char name[2 * NAME_MAX + 2], full[PATH_MAX];
    fc_dir dir = {0};
    size_t count = 0;
    fc_code rc;
    snprintf(full, sizeof full, "%s/%s", path, folder);
    FC_TRY_GOTO(directory->dir ? open_folder(&dir, dirfd(directory->dir), folder, err) : fc_dir_open(&dir, full, err),
                rc, out);
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL; count++) {
        snprintf(name, sizeof name, "%s/%s", folder, entry);
        FC_TRY_GOTO(check_entry(how, path, &dir, entry, name, err), rc, out);
    }
out:
    FC_TRY(fc_dir_close(&dir, rc, err));
    return count > 0 || how->keep_others ? FC_OK : refuse_entry(path, folder, err);
}

static fc_code check_child(const fc_commit_options *how, const char *path, const fc_dir *dir, const char *name,
                           fc_error *err) {
    if (fc_is_remote(path) && strcmp(name, FC_STAGED_MARK) == 0) {
        return FC_OK; /* of this run, or one that nobody could delete */
    }
    if (!how->force && !how->keep_others) {
        return refuse_existing(path, err);
    }
    bool folder;
    FC_TRY(fc_dir_is_folder(dir, name, &folder, err));
    FC_TRY(folder && how->keep_others ? check_kept(how, path, name, err) : FC_OK);
    return folder ? check_folder(how, path, dir, name, err) : check_entry(how, path, dir, name, name, err);
}

/* An empty directory was made for the target, so replacing it does not need `force`. */
static fc_code check_directory(const fc_commit_options *how, const char *path, fc_error *err) {
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        FC_TRY_GOTO(check_child(how, path, &dir, name, err), rc, out);
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* A mount point cannot be renamed, which would fail only after all the work. */
static fc_code check_mount(const char *path, fc_error *err) {
    struct statx st;
    if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &st) == 0 &&
        (st.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) && (st.stx_attributes & STATX_ATTR_MOUNT_ROOT)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: a file system is mounted there, so it cannot be replaced: name a new target in it", path);
    }
    return FC_OK;
}

fc_code fc_check_replaced(const fc_commit_options *how, const char *path, fc_error *err) {
    struct stat st;
    bool found = true;
    if (fc_is_remote(path)) {
        FC_TRY(fc_stat_path(path, &st, &found, err));
    } else if (lstat(path, &st) != 0) {
        found = false;
        FC_TRY(errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", path));
    }
    if (!found) {
        return FC_OK;
    }
    if (S_ISDIR(st.st_mode) && !how->is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: is a directory, and the target is one file: name a file in it", path);
    }
    if (!S_ISDIR(st.st_mode) && how->is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: is not a directory: name a new directory for the target", path);
    }
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
        return fc_fail(err, FC_EUSAGE, "%s: is not a regular file", path);
    }
    if (!how->force && !how->is_directory) {
        return refuse_existing(path, err);
    }
    FC_TRY(check_mount(path, err));
    if (how->is_directory) {
        FC_TRY(check_directory(how, path, err));
    } else if (!how->any_content) {
        FC_TRY(check_file(how, path, err));
    }
    return FC_OK;
}

/* ---- permissions and owner ---- */

/* The permissions and the owner of a file. */
typedef struct permissions {
    mode_t mode;
    uid_t owner;
    gid_t group;
} permissions;

/* If the group cannot be kept, it gets no more permissions than everybody. */
static fc_code apply(int parent, const char *name, const permissions *p, fc_error *err) {
    struct stat st;
    mode_t mode = p->mode;
    int fd = openat(parent, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    bool ok = fd >= 0 && fstat(fd, &st) == 0;
    if (ok && (st.st_uid != p->owner || st.st_gid != p->group) && fchown(fd, p->owner, p->group) != 0 &&
        fchown(fd, (uid_t)-1, p->group) != 0 && st.st_gid != p->group) {
        mode = (mode & ~(mode_t)S_IRWXG) | ((mode & S_IRWXO) << 3);
    }
    ok = ok && fchmod(fd, mode) == 0;
    fc_code rc = ok ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be given the permissions of the old target", name);
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}

/* The permissions that the files of a directory have in common, and those of it and its folders. */
typedef struct content_permissions {
    permissions file, folder;
    size_t files;
} content_permissions;

static void add_permissions(permissions *p, const struct stat *st) {
    *p = (permissions){p->mode & st->st_mode, st->st_uid, st->st_gid};
}

static fc_code common_permissions(int parent, const char *path, content_permissions *p, fc_error *err) {
    fc_dir dir = {0};
    struct stat st;
    fc_code rc;
    FC_TRY_GOTO(open_folder(&dir, parent, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        if (fstatat(dirfd(dir.dir), name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            rc = fc_fail_errno(err, errno, "%s/%s: cannot be examined", path, name);
            goto out;
        }
        if (S_ISDIR(st.st_mode)) {
            add_permissions(&p->folder, &st);
            FC_TRY_GOTO(common_permissions(dirfd(dir.dir), name, p, err), rc, out);
        } else {
            add_permissions(&p->file, &st);
            p->files++;
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* Gives new files what the old ones have in common, and new folders likewise. The content of a folder comes before the
   folder, which may get another owner. */
static fc_code apply_to_content(int parent, const char *path, const content_permissions *p, fc_error *err) {
    fc_dir dir = {0};
    fc_code rc;
    FC_TRY_GOTO(open_folder(&dir, parent, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        bool folder;
        FC_TRY_GOTO(fc_dir_is_folder(&dir, name, &folder, err), rc, out);
        if (folder) {
            FC_TRY_GOTO(apply_to_content(dirfd(dir.dir), name, p, err), rc, out);
            FC_TRY_GOTO(apply(dirfd(dir.dir), name, &p->folder, err), rc, out);
        } else if (p->files > 0) {
            FC_TRY_GOTO(apply(dirfd(dir.dir), name, &p->file, err), rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* The same for a target whose other files are kept: what its own files have in common. They are in no folder. */
static fc_code own_permissions(const fc_commit_options *how, const char *path, content_permissions *p, fc_error *err) {
    fc_dir dir = {0};
    struct stat st;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        char full[PATH_MAX];
        bool own = false;
        if (snprintf(full, sizeof full, "%s/%s", path, name) < PATH_MAX && lstat(full, &st) == 0 &&
            S_ISREG(st.st_mode) && how->is_own_file) {
            FC_TRY_GOTO(how->is_own_file(full, name, &own, err), rc, out);
        }
        if (own) {
            add_permissions(&p->file, &st);
            p->files++;
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_keep_permissions(const fc_commit_options *how, const char *old, const char *made, fc_error *err) {
    struct stat st;
    if (lstat(old, &st) != 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", old);
    }
    const permissions own = {st.st_mode & 07777, st.st_uid, st.st_gid};
    if (S_ISDIR(st.st_mode)) {
        content_permissions content = {.file.mode = 0777, .folder = own};
        FC_TRY(how->keep_others ? own_permissions(how, old, &content, err)
                                : common_permissions(AT_FDCWD, old, &content, err));
        FC_TRY(apply_to_content(AT_FDCWD, made, &content, err));
    }
    return apply(AT_FDCWD, made, &own, err);
}

static fc_code limit_one(int parent, const char *name, const struct stat *st, mode_t forbidden, fc_error *err) {
    const mode_t mode = st->st_mode & 07777;
    if ((mode & forbidden) == 0 || fchmodat(parent, name, mode & ~forbidden, 0) == 0) {
        return FC_OK;
    }
    return fc_fail_errno(err, errno, "%s: cannot be given the permissions of the source", name);
}

static fc_code limit(int parent, const char *path, unsigned forbidden, fc_error *err) {
    const mode_t folder = (forbidden & S_IRGRP ? S_IRWXG : 0U) | (forbidden & S_IROTH ? S_IRWXO : 0U);
    struct stat st;
    fc_dir dir = {0};
    fc_code rc;
    if (fstatat(parent, path, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    if (S_ISREG(st.st_mode)) {
        return limit_one(parent, path, &st, forbidden, err);
    }
    if (!S_ISDIR(st.st_mode)) {
        return FC_OK;
    }
    FC_TRY_GOTO(open_folder(&dir, parent, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        FC_TRY_GOTO(limit(dirfd(dir.dir), name, forbidden, err), rc, out);
    }
    rc = limit_one(parent, path, &st, folder, err);
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_limit_permissions(const char *path, unsigned forbidden, fc_error *err) {
    return forbidden ? limit(AT_FDCWD, path, forbidden, err) : FC_OK;
}
