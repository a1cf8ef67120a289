/*
 * The calls about paths, also for names of files on servers: see path.h.
 */
#include "io/path.h"

#include "io/staged_objects.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Servers have no permissions that a copy could keep. */
static void fill(struct stat *st, const fc_remote_info *info) {
    memset(st, 0, sizeof *st);
    st->st_mode = info->is_folder ? S_IFDIR | 0777 : S_IFREG | 0666;
    st->st_size = (off_t)info->size;
    st->st_ino = (ino_t)info->identity;
    st->st_nlink = 1;
}

void fc_expect(const char *path) {
    if (fc_is_remote(path)) {
        fc_remote_expect(path);
    }
}

fc_code fc_stat_path(const char *path, struct stat *st, bool *found, fc_error *err) {
    fc_remote_info info;
    if (!fc_is_remote(path)) {
        *found = fc_stat(path, st) == 0;
        return *found || errno == ENOENT || errno == ENOTDIR
                   ? FC_OK
                   : fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    *found = false;
    const fc_code rc = fc_remote_stat(path, false, &info, err);
    if (rc == FC_OK && info.found) {
        fill(st, &info);
        *found = true;
    }
    return rc;
}

int fc_stat(const char *path, struct stat *st) {
    bool found;
    fc_error unused;
    if (!fc_is_remote(path)) {
        return fc_is_staged(path) ? fc_staged_stat(path, st) : stat(path, st);
    }
    const fc_code rc = fc_stat_path(path, st, &found, &unused);
    errno = rc == FC_OK ? ENOENT : EIO;
    return rc == FC_OK && found ? 0 : -1;
}

int fc_lstat(const char *path, struct stat *st) {
    return fc_is_remote(path) || fc_is_staged(path) ? fc_stat(path, st) : lstat(path, st);
}

int fc_fstat(int fd, struct stat *st) {
    fc_remote_info info;
    if (fstat(fd, st) != 0) {
        return -1;
    }
    if (!S_ISSOCK(st->st_mode)) {
        return 0;
    }
    if (fc_remote_fstat(fd, &info, NULL) != FC_OK) {
        errno = EIO;
        return -1;
    }
    fill(st, &info);
    return 0;
}

int fc_access(const char *path, int mode) {
    struct stat st;
    return fc_is_remote(path) || fc_is_staged(path) ? fc_stat(path, &st) : access(path, mode);
}

char *fc_realpath(const char *path, char out[PATH_MAX]) {
    if (!fc_is_remote(path) && !fc_is_staged(path)) {
        return realpath(path, out);
    }
    return snprintf(out, PATH_MAX, "%s", path) < PATH_MAX ? out : NULL;
}

fc_code fc_hide_query(const char *path, char **name, fc_error *err) {
    *name = NULL;
    return fc_remote_has_query(path) ? fc_remote_hide(path, name, err) : FC_OK;
}

int fc_open(const char *path, int flags, unsigned mode) {
    return fc_is_staged(path) ? fc_staged_open(path, flags) : open(path, flags | O_CLOEXEC, mode);
}

int fc_mkdir(const char *path) {
    return fc_is_staged(path) ? 0 : mkdir(path, 0777);
}
