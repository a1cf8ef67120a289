/*
 * Judges the place of a module, which is code that this process will run. As ssh and sudo do, it looks at every
 * component of the path: whoever can write to one of the directories can put another file there. Each component is
 * opened within the one before, without following links, so that nothing can be exchanged in between.
 */
#include "base/module_place.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool belongs_to_us(const struct stat *st) {
    return st->st_uid == 0 || st->st_uid == geteuid();
}

/* What others can do to an open component. @return NULL: nothing */
static const char *find_fault(const struct stat *st) {
    const bool sticky = S_ISDIR(st->st_mode) && (st->st_mode & S_ISVTX);
    if (!belongs_to_us(st)) {
        return "belongs to another user";
    }
    if (sticky) {
        return NULL; /* what is in it is judged by its own owner */
    }
    return st->st_mode & S_IWOTH   ? "can be written by every user"
           : st->st_mode & S_IWGRP ? "can be written by its group"
                                   : NULL;
}

/* Judges the open file `fd`, whose path is the first `length` characters of `path`. */
static fc_code judge(int fd, const char *path, size_t length, fc_error *err) {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%.*s: cannot be examined", (int)length, path);
    }
    const char *fault = find_fault(&st);
    return fault ? fc_fail(err, FC_EUNSUPPORTED,
                           "%s: is not loaded, because %.*s %s: only this user and root may be able to change a module "
                           "and the directories above it (chmod go-w, chown)",
                           path, (int)length, path, fault)
                 : FC_OK;
}

/* Opens the component `name` of the open directory `*fd`, which it replaces. */
static fc_code enter(int *fd, const char *name, bool last, const char *path, size_t length, fc_error *err) {
    const int kind = last ? O_RDONLY | O_NONBLOCK : O_PATH | O_DIRECTORY;
    const int next = openat(*fd, name, kind | O_NOFOLLOW | O_CLOEXEC);
    const int errnum = errno;
    close(*fd);
    *fd = next;
    return next < 0 ? fc_fail_errno(err, errnum, "%.*s: cannot be opened", (int)length, path)
                    : judge(next, path, length, err);
}

fc_code fc_module_place_check(const char *path, fc_error *err) {
    char name[NAME_MAX + 1];
    int fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    fc_code rc = fd < 0 ? fc_fail_errno(err, errno, "/: cannot be opened") : judge(fd, "/", 1, err);
    for (const char *at = path; rc == FC_OK && *(at += strspn(at, "/"));) {
        const size_t n = strcspn(at, "/");
        if (n >= sizeof name) {
            rc = fc_fail(err, FC_EUNSUPPORTED, "%s: a name in this path is too long", path);
            break;
        }
        memcpy(name, at, n);
        name[n] = '\0';
        at += n;
        rc = enter(&fd, name, at[strspn(at, "/")] == '\0', path, (size_t)(at - path), err);
    }
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}
