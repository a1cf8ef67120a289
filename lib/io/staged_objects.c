/*
 * Targets in buckets while they are made: see staged_objects.h. This file has the table of names and the parts;
 * staged_publish.c makes the files visible.
 */
#include "io/staged_objects.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "io/staged_private.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The targets that this process makes. */
static struct {
    pthread_mutex_t lock;
    fc_staged_target *targets;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

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
    if (asprintf(&target->path, FC_STAGED "%s", name) < 0) {
        target->path = NULL;
        fc_staged_free(target);
        return fc_no_memory(err, name);
    }
    pthread_mutex_lock(&all.lock);
    const bool known = find_target(target->path) != NULL;
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

static void free_file(fc_staged_file *file) {
    fc_upload_abort(file->upload);
    if (file->fd >= 0) {
        close(file->fd);
    }
    free(file->path);
    free(file->data);
    free(file->missing);
    free(file);
}

void fc_staged_free(fc_staged_target *target) {
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
        free_file(file);
    }
    pthread_mutex_destroy(&target->lock);
    free(target->path);
    free(target);
}

/* ---- its files, by name ---- */

static fc_staged_file *find_in(const fc_staged_target *target, const char *path) {
    fc_staged_file *file = target->files;
    while (file && strcmp(file->path, path) != 0) {
        file = file->next;
    }
    return file;
}

/* Finds a file, and its target, which may exist without it. Files are freed only with their target. */
static fc_staged_file *find_file(const char *path, fc_staged_target **target) {
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
    file->path = strdup(path);
    file->fd = memfd_create("fsdpckpt-target", MFD_CLOEXEC);
    if (!file->path || file->fd < 0) {
        const int saved = file->path ? errno : ENOMEM;
        free_file(file);
        errno = saved;
        return NULL;
    }
    pthread_mutex_lock(&all.lock);
    fc_staged_file **at = &target->files;
    while (*at) {
        at = &(*at)->next;
    }
    *at = file;
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
    fc_staged_file *file = find_file(path, &target);
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
    const fc_staged_file *file = find_file(path, &target);
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
    (void)find_file(path, &target);
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

/* ---- parts ---- */

static uint64_t part_size(const fc_staged_file *file, unsigned part) {
    const uint64_t at = (uint64_t)part * file->part;
    return file->size - at < file->part ? file->size - at : file->part;
}

/* Frees the memory of what the engine has moved into a part. Headers stay, because the target is read once more. */
static fc_code punch_part(const fc_staged_file *file, unsigned part, fc_error *err) {
    const uint64_t first = (uint64_t)part * file->part, end = first + part_size(file, part);
    size_t i = 0;
    FC_BISECT(i, file->count, middle, file->data[middle].offset + file->data[middle].size <= first);
    for (; i < file->count && file->data[i].offset < end; i++) {
        const fc_staged_data *d = &file->data[i];
        const uint64_t from = d->offset > first ? d->offset : first;
        const uint64_t to = d->offset + d->size < end ? d->offset + d->size : end;
        if (fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)(to - from)) != 0) {
            return fc_fail_errno(err, errno, "%s: freeing memory", file->path);
        }
    }
    return FC_OK;
}

static fc_code send_part(fc_staged_file *file, unsigned part, fc_error *err) {
    FC_TRY(fc_upload_part(file->upload, file->fd, (uint64_t)part * file->part, part_size(file, part), part + 1, err));
    return punch_part(file, part, err);
}

static fc_code begin_parts(fc_staged_file *file, fc_error *err) {
    file->missing = calloc(file->nparts, sizeof *file->missing);
    FC_NEED(file->missing, err, file->path);
    for (unsigned part = 0; part < file->nparts; part++) {
        file->missing[part] = part_size(file, part);
    }
    return fc_upload_begin(file->path + strlen(FC_STAGED), &file->upload, err);
}

fc_code fc_staged_divide(const char *path, const fc_staged_data *data, size_t count, uint64_t *part, fc_error *err) {
    enum { MIB = 1 << 20 };
    fc_staged_target *target;
    fc_staged_file *file = find_file(path, &target);
    struct stat st;
    if (!file || fstat(file->fd, &st) != 0) {
        return fc_fail(err, FC_EIO, "%s: is missing", path);
    }
    file->size = (uint64_t)st.st_size;
    file->part = FC_STAGED_PART;
    if (file->size / FC_STAGED_MOST_PARTS >= file->part) {
        file->part = (file->size / FC_STAGED_MOST_PARTS / MIB + 1) * MIB;
    }
    *part = file->part;
    file->engine = true;
    if (file->size <= FC_STAGED_WHOLE) {
        return FC_OK;
    }
    file->nparts = (unsigned)((file->size + file->part - 1) / file->part);
    file->data = calloc(count + 1, sizeof *file->data);
    FC_NEED(file->data, err, path);
    file->count = count;
    if (count > 0) {
        memcpy(file->data, data, count * sizeof *data);
    }
    return begin_parts(file, err);
}

fc_staged_file *fc_staged_find(const char *path) {
    fc_staged_target *target;
    fc_staged_file *file = fc_is_staged(path) ? find_file(path, &target) : NULL;
    return file && file->upload ? file : NULL;
}

fc_code fc_staged_wrote(fc_staged_file *file, uint64_t offset, uint64_t size, fc_error *err) {
    for (uint64_t at = offset; at < offset + size;) {
        const unsigned part = (unsigned)(at / file->part);
        const uint64_t end = ((uint64_t)part + 1) * file->part;
        const uint64_t next = end < offset + size ? end : offset + size;
        pthread_mutex_lock(&file->target->lock);
        const bool fits = part < file->nparts && next - at <= file->missing[part];
        const bool complete = fits && (file->missing[part] -= next - at) == 0;
        pthread_mutex_unlock(&file->target->lock);
        if (!fits) {
            return fc_fail(err, FC_EIO, "%s: bytes at offset %" PRIu64 " were written twice", file->path, at);
        }
        FC_TRY(complete ? send_part(file, part, err) : FC_OK);
        at = next;
    }
    return FC_OK;
}

fc_code fc_staged_final(const char *path, uint64_t offset, uint64_t size, fc_error *err) {
    fc_staged_file *file = fc_staged_find(path);
    return file ? fc_staged_wrote(file, offset, size, err) : FC_OK;
}

fc_code fc_staged_end(const char *path, fc_error *err) {
    fc_staged_file *file = fc_staged_find(path);
    for (unsigned part = 0; file && part < file->nparts; part++) {
        if (file->missing[part] > 0) {
            FC_TRY(send_part(file, part, err));
            file->missing[part] = 0;
        }
    }
    return FC_OK;
}
