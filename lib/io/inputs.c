/*
 * Finds out whether a target that is about to be replaced is, or contains, one of its sources. Links, bind mounts and
 * file systems that ignore case give a file several names, so this compares device and inode.
 */
#include "fsdpckpt/io.h"

#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct identity {
    dev_t device;
    ino_t inode;
} identity;

/* A target and its direct entries, sorted. */
typedef struct place {
    identity self;
    identity *entries;
    size_t count, capacity;
} place;

static int compare_identities(const void *a, const void *b) {
    const identity *x = a, *y = b;
    return x->device != y->device ? (x->device > y->device) - (x->device < y->device)
                                  : (x->inode > y->inode) - (x->inode < y->inode);
}

static bool add_identity(place *p, const struct stat *st) {
    if (!fc_grow(&p->entries, &p->capacity, p->count + 1, sizeof *p->entries)) {
        return false;
    }
    p->entries[p->count++] = (identity){st->st_dev, st->st_ino};
    return true;
}

static fc_code list(place *p, const char *path, fc_error *err) {
    fc_dir dir;
    struct stat st;
    fc_code rc = fc_dir_open(&dir, path, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        if (fstatat(dirfd(dir.dir), name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            rc = errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s/%s: cannot be examined", path, name);
        } else if (!add_identity(p, &st)) {
            rc = fc_no_memory(err, NULL);
        }
    }
    rc = fc_dir_close(&dir, rc, err);
    fc_sort_items(p->entries, p->count, sizeof *p->entries, compare_identities);
    return rc;
}

/* Whether the target is a parent directory of `path`. */
static bool is_above(const place *p, const char *path) {
    char real[PATH_MAX];
    struct stat st;
    bool found = false;
    if (!realpath(path, real)) {
        return false;
    }
    for (char *slash; !found && (slash = strrchr(real, '/')) != NULL;) {
        *slash = '\0';
        found = stat(*real ? real : "/", &st) == 0 && st.st_dev == p->self.device && st.st_ino == p->self.inode;
    }
    return found;
}

/* Sets `*held` to whether the target is `path`, or contains it. */
static fc_code find_input(const place *p, const char *path, bool *held, fc_error *err) {
    struct stat st;
    *held = false;
    if (stat(path, &st) != 0) {
        return errno == ENOENT || errno == ENOTDIR ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    const identity id = {st.st_dev, st.st_ino};
    *held = compare_identities(&id, &p->self) == 0 ||
            (p->count > 0 && fc_find_item(&id, p->entries, p->count, sizeof *p->entries, compare_identities)) ||
            is_above(p, path);
    return FC_OK;
}

/* The length of a name without the slashes at its end. */
static size_t length_of(const char *name) {
    size_t n = strlen(name);
    while (n > 1 && name[n - 1] == '/') {
        n--;
    }
    return n;
}

/* Names on servers are compared as text. */
static fc_code check_remote(const char *target, const char *const *inputs, fc_error *err) {
    const size_t length = length_of(target);
    for (; *inputs; inputs++) {
        const size_t other = length_of(*inputs), common = length < other ? length : other;
        if (strncmp(target, *inputs, common) == 0 && (common == length || target[common] == '/') &&
            (common == other || (*inputs)[common] == '/')) {
            return fc_fail(err, FC_EUSAGE, "%s: is, contains or is in %s, which is read: name another target", target,
                           *inputs);
        }
    }
    return FC_OK;
}

fc_code fc_check_inputs(const char *target, const char *const *inputs, const char *what, fc_error *err) {
    struct stat st;
    if (fc_is_remote(target)) {
        return check_remote(target, inputs, err);
    }
    if (stat(target, &st) != 0) {
        return FC_OK; /* nothing is replaced; the commit reports other errors */
    }
    place p = {.self = {st.st_dev, st.st_ino}};
    fc_code rc;
    FC_TRY_GOTO(S_ISDIR(st.st_mode) ? list(&p, target, err) : FC_OK, rc, out);
    for (const char *const *input = inputs; *input; input++) {
        bool held;
        FC_TRY_GOTO(find_input(&p, *input, &held, err), rc, out);
        if (held) {
            FC_TRY_GOTO(S_ISDIR(st.st_mode)
                            ? fc_fail(err, FC_EUSAGE, "%s: is or contains %s, which is read: name another target",
                                      target, *input)
                            : fc_fail(err, FC_EUSAGE, "%s: is %s that is read: name another target", target, what),
                        rc, out);
        }
    }
out:
    free(p.entries);
    return rc;
}
