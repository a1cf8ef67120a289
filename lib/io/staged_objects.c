/*
 * Targets in buckets while they are made: see staged_objects.h. This file has the table of names,
 * staged_parts.c sends parts, and staged_publish.c makes the files visible.
 */
#include "io/staged_objects.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "io/staged_private.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

/* The targets that this process makes. */
static struct {
    pthread_mutex_t lock;
    fc_staged_target *targets;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A process that another thread forks meanwhile would inherit the lock, and could never take it. */
static pthread_once_t watched = PTHREAD_ONCE_INIT;

static void before_fork(void) {
    pthread_mutex_lock(&all.lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&all.lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, after_fork);
}

bool fc_is_staged(const char *path) {
    return strncmp(path, FC_STAGED, strlen(FC_STAGED)) == 0 && fc_is_remote(path + strlen(FC_STAGED));
}

/* ---- the target ---- */

/* The rest of `path` below `folder`: "" for itself. NULL: it is not there. */
static const char *rest_of(const char *folder, const char *path) {
    const size_t length = strlen(folder);
    if (strncmp(path, folder, length) != 0 || (path[length] != '\0' && path[length] != '/')) {
        return NULL;
    }
    path += length;
    while (*path == '/') {
        path++;
    }
    return path;
}

/* The target that a path belongs to. The caller holds the lock. */
static fc_staged_target *find_target(const char *path) {
    fc_staged_target *target = all.targets;
    while (target && !rest_of(target->path, path)) {
        target = target->next;
    }
    return target;
}

fc_code fc_staged_begin(const char *name, bool is_folder, fc_staged_target **out, fc_error *err) {
    fc_staged_target *target = calloc(1, sizeof *target);
    *out = NULL;
    FC_NEED(target, err, name);
    target->is_folder = is_folder;
    pthread_mutex_init(&target->lock, NULL);
    pthread_cond_init(&target->changed, NULL);
    if (asprintf(&target->path, FC_STAGED "%s", name) < 0) {
        target->path = NULL;
        fc_staged_free(target);
        return fc_no_memory(err, name);
    }
    while (target->run == 0) { /* this many bytes come at once */
        if (getrandom(&target->run, sizeof target->run, 0) != (ssize_t)sizeof target->run && errno != EINTR) {
            fc_staged_free(target);
            return fc_fail_errno(err, errno, "%s: no random number can be made", name);
        }
    }
    pthread_once(&watched, watch_forks);
    pthread_mutex_lock(&all.lock);
    bool known = find_target(target->path) != NULL;
    for (const fc_staged_target *other = all.targets; other; other = other->next) {
        known |= rest_of(target->path, other->path) != NULL;
    }
    if (!known) {
        target->next = all.targets;
        all.targets = target;
    }
    pthread_mutex_unlock(&all.lock);
    if (known) {
        fc_staged_free(target);
        return fc_fail(err, FC_EUSAGE, "%s: this process is writing it already", name);
    }
    *out = target;
    return FC_OK;
}

const char *fc_staged_path(const fc_staged_target *target) {
    return target->path;
}

size_t fc_staged_count(const fc_staged_target *target) {
    size_t count = 0;
    for (const fc_staged_file *f = target->files; f; f = f->next) {
        count++;
    }
    return count;
}

/* @param stays whether an upload that can outlive this process does @param patience for fc_upload_abort */
static void free_file(fc_staged_file *file, bool stays, int *patience) {
    if (stays && file->id) {
        fc_upload_leave(file->upload);
    } else {
        fc_upload_abort(file->upload, patience);
    }
    free(file->id);
    if (file->fd >= 0) {
        close(file->fd);
    }
    free(file->path);
    free(file->data);
    free(file->finals);
    free(file->parts);
    free(file);
}

static void free_target(fc_staged_target *target, bool stays) {
    int patience = FC_UPLOAD_PATIENCE;
    if (!target) {
        return;
    }
    pthread_mutex_lock(&all.lock);
    for (fc_staged_target **at = &all.targets; *at; at = &(*at)->next) {
        if (*at == target) {
            *at = target->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    for (fc_staged_file *next, *file = target->files; file; file = next) {
        next = file->next;
        free_file(file, stays, &patience);
    }
    pthread_mutex_destroy(&target->lock);
    pthread_cond_destroy(&target->changed);
    free(target->path);
    free(target);
}

void fc_staged_free(fc_staged_target *target) {
    free_target(target, false);
}

void fc_staged_leave(fc_staged_target *target) {
    free_target(target, true);
}

void fc_staged_stay(fc_staged_target *target) {
    target->stays = true;
}

/* ---- its files, by name ---- */

static fc_staged_file *find_in(const fc_staged_target *target, const char *path) {
    if (target->newest && strcmp(target->newest->path, path) == 0) {
        return target->newest;
    }
    fc_staged_file *file = target->files;
    while (file && strcmp(file->path, path) != 0) {
        file = file->next;
    }
    return file;
}

fc_staged_file *fc_staged_find_file(const char *path, fc_staged_target **target) {
    pthread_mutex_lock(&all.lock);
    *target = find_target(path);
    fc_staged_file *file = *target ? find_in(*target, path) : NULL;
    pthread_mutex_unlock(&all.lock);
    return file;
}

bool fc_staged_has(const fc_staged_target *target, const char *name) {
    const fc_staged_file *file = target->files;
    for (; file; file = file->next) {
        if (strcmp(rest_of(target->path, file->path), name) == 0) {
            return true;
        }
    }
    return false;
}

/* Creates a file at the end of the list. @return NULL with errno */
static fc_staged_file *create_file(fc_staged_target *target, const char *path) {
    fc_staged_file *file = calloc(1, sizeof *file);
    if (!file) {
        return NULL;
    }
    file->target = target;
    file->run = target->run;
    file->path = strdup(path);
    file->gaps = UINT64_MAX;
    file->fd = memfd_create("fsdpckpt-target", MFD_CLOEXEC);
    if (!file->path || file->fd < 0) {
        const int saved = file->path ? errno : ENOMEM;
        int unused = 0; /* nothing is sent yet */
        free_file(file, false, &unused);
        errno = saved;
        return NULL;
    }
    pthread_mutex_lock(&all.lock);
    fc_staged_file **at = &target->files;
    while (*at) {
        at = &(*at)->next;
    }
    *at = target->newest = file;
    pthread_mutex_unlock(&all.lock);
    return file;
}

/* A descriptor with a position of its own where /proc is mounted. All who use this one use offsets. */
static int reopen(const fc_staged_file *file, int flags) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file->fd);
    const int fd = open(name, (flags & ~(O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT)) | O_CLOEXEC);
    return fd < 0 && errno == ENOENT ? fcntl(file->fd, F_DUPFD_CLOEXEC, 0) : fd;
}

int fc_staged_open(const char *path, int flags) {
    fc_staged_target *target;
    fc_staged_file *file = fc_staged_find_file(path, &target);
    if (file && (flags & O_CREAT) && (flags & O_EXCL)) {
        errno = EEXIST;
        return -1;
    }
    if (!file && (!target || !(flags & O_CREAT))) {
        errno = ENOENT;
        return -1;
    }
    file = file ? file : create_file(target, path);
    return file ? reopen(file, flags) : -1;
}

int fc_staged_stat(const char *path, struct stat *st) {
    fc_staged_target *target;
    const fc_staged_file *file = fc_staged_find_file(path, &target);
    if (file) {
        return fstat(file->fd, st);
    }
    bool folder = target && target->is_folder && strcmp(path, target->path) == 0;
    for (file = target ? target->files : NULL; file && !folder; file = file->next) {
        folder = rest_of(path, file->path) != NULL;
    }
    memset(st, 0, sizeof *st);
    st->st_mode = S_IFDIR | 0777;
    errno = ENOENT;
    return folder ? 0 : -1;
}

static bool has_name(const fc_entry_names *l, const char *name, size_t length) {
    for (size_t i = 0; i < l->count; i++) {
        if (strlen(l->names[i]) == length && memcmp(l->names[i], name, length) == 0) {
            return true;
        }
    }
    return false;
}

fc_code fc_staged_list(const char *path, fc_entry_names *out, fc_error *err) {
    fc_staged_target *target;
    (void)fc_staged_find_file(path, &target);
    *out = (fc_entry_names){.names = NULL};
    for (const fc_staged_file *file = target ? target->files : NULL; file; file = file->next) {
        const char *rest = rest_of(path, file->path);
        const size_t length = rest ? strcspn(rest, "/") : 0;
        const bool is_folder = length > 0 && rest[length] == '/';
        if (length == 0 || (is_folder && has_name(out, rest, length))) {
            continue;
        }
        FC_NEED(fc_grow(&out->names, &out->capacity, out->count + 1, sizeof *out->names), err, path);
        out->names[out->count] = strndup(rest, length);
        FC_NEED(out->names[out->count], err, path);
        out->count++;
    }
    return FC_OK;
}
