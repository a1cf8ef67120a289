/*
 * Targets in buckets while they are made: see staged_objects.h. This file has the table of names and the parts;
 * staged_publish.c makes the files visible.
 */
#include "io/staged_objects.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
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
    pthread_cond_init(&target->sent, NULL);
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
    free(file->parts);
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
    pthread_cond_destroy(&target->sent);
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

/* The part leaves memory, or has all that the engine writes. The caller holds the lock. */
static void close_part(fc_staged_file *file, staged_part *part) {
    if (part->begun) {
        part->begun = false;
        file->open--;
        pthread_cond_broadcast(&file->target->sent);
    }
}

static fc_code send_part(fc_staged_file *file, unsigned part, fc_error *err) {
    FC_TRY(fc_upload_part(file->upload, file->fd, (uint64_t)part * file->part, part_size(file, part), part + 1, err));
    FC_TRY(punch_part(file, part, err));
    pthread_mutex_lock(&file->target->lock);
    close_part(file, &file->parts[part]);
    pthread_mutex_unlock(&file->target->lock);
    return FC_OK;
}

/* Counts the bytes of each part that the engine moves. */
static void count_engine(fc_staged_file *file) {
    for (size_t i = 0; i < file->count; i++) {
        const fc_staged_data *d = &file->data[i];
        for (uint64_t at = d->offset, end = d->offset + d->size; at < end;) {
            const uint64_t next = (at / file->part + 1) * file->part, to = next < end ? next : end;
            file->parts[at / file->part].engine += to - at;
            at = to;
        }
    }
}

static fc_code begin_parts(fc_staged_file *file, fc_error *err) {
    file->parts = calloc(file->nparts, sizeof *file->parts);
    FC_NEED(file->parts, err, file->path);
    for (unsigned part = 0; part < file->nparts; part++) {
        file->parts[part].missing = part_size(file, part);
    }
    count_engine(file);
    return fc_upload_begin(file->path + strlen(FC_STAGED), &file->upload, err);
}

/* Whether all data is within the file. */
static bool fits(uint64_t size, const fc_staged_data *data, size_t count) {
    bool good = true;
    for (size_t i = 0; i < count && good; i++) {
        good = data[i].offset <= size && data[i].size <= size - data[i].offset;
    }
    return good;
}

static fc_code measure_parts(fc_staged_file *file, uint64_t memory, fc_error *err) {
    enum { MIB = 1 << 20, LEAST_OPEN = 2 };
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", file->path);
    }
    file->engine = true;
    file->size = (uint64_t)st.st_size;
    file->part = FC_STAGED_PART;
    if (file->size / FC_STAGED_MOST_PARTS >= file->part) {
        file->part = (file->size / FC_STAGED_MOST_PARTS / MIB + 1) * MIB;
    }
    file->nparts = (unsigned)((file->size + file->part - 1) / file->part);
    const uint64_t open = memory / file->part;
    file->most_open = open < LEAST_OPEN             ? LEAST_OPEN
                      : open < FC_STAGED_MOST_PARTS ? (unsigned)open
                                                    : FC_STAGED_MOST_PARTS;
    return FC_OK;
}

fc_code fc_staged_divide(const char *path, const fc_staged_data *data, size_t count, uint64_t memory, uint64_t *held,
                         fc_error *err) {
    fc_staged_target *target;
    fc_staged_file *file = find_file(path, &target);
    *held = 0;
    if (!file) {
        return fc_fail(err, FC_EIO, "%s: is missing", path);
    }
    FC_TRY(measure_parts(file, memory, err));
    if (!fits(file->size, data, count)) {
        return fc_fail(err, FC_EIO, "%s: its data ends after the file", path);
    }
    if (file->size <= FC_STAGED_WHOLE) {
        return FC_OK;
    }
    file->data = calloc(count + 1, sizeof *file->data);
    FC_NEED(file->data, err, path);
    file->count = count;
    if (count > 0) {
        memcpy(file->data, data, count * sizeof *data);
    }
    *held = (file->most_open < file->nparts ? file->most_open : file->nparts) * file->part;
    return begin_parts(file, err);
}

fc_staged_file *fc_staged_find(const char *path) {
    fc_staged_target *target;
    fc_staged_file *file = fc_is_staged(path) ? find_file(path, &target) : NULL;
    return file && file->upload ? file : NULL;
}

/* Waits until the part may be begun. Parts are begun roughly in order, and the thread that waits here has written all
 * that it had for earlier ones, so these are completed by others. @return false if a thread has failed */
static bool enter_part(fc_staged_file *file, staged_part *part) {
    pthread_mutex_lock(&file->target->lock);
    while (!part->begun && file->open >= file->most_open && !file->stopped) {
        pthread_cond_wait(&file->target->sent, &file->target->lock);
    }
    if (!part->begun) {
        part->begun = true;
        file->open++;
    }
    const bool goes_on = !file->stopped;
    pthread_mutex_unlock(&file->target->lock);
    return goes_on;
}

/* Bytes of a part are final. Sends it if it is complete. */
static fc_code leave_part(fc_staged_file *file, unsigned number, uint64_t size, bool engine, fc_error *err) {
    staged_part *part = &file->parts[number];
    pthread_mutex_lock(&file->target->lock);
    const bool fits = size <= part->missing && (!engine || size <= part->engine);
    part->missing -= fits ? size : 0;
    part->engine -= fits && engine ? size : 0;
    const bool complete = fits && part->missing == 0;
    if (part->engine == 0 && !complete) {
        close_part(file, part);
    }
    pthread_mutex_unlock(&file->target->lock);
    if (!fits) {
        return fc_fail(err, FC_EIO, "%s: bytes of part %u were written twice", file->path, number + 1);
    }
    return complete ? send_part(file, number, err) : FC_OK;
}

fc_code fc_staged_write(fc_staged_file *file, int fd, const unsigned char *bytes, size_t size, uint64_t offset,
                        fc_error *err) {
    while (size > 0) {
        const unsigned number = (unsigned)(offset / file->part);
        const uint64_t left = file->part - offset % file->part;
        const size_t some = size < left ? size : (size_t)left;
        if (number >= file->nparts || !enter_part(file, &file->parts[number])) {
            return fc_fail(err, FC_EIO, "%s: another thread could not write its part", file->path);
        }
        FC_TRY(fc_pwrite_full(fd, bytes, some, offset, file->path, err));
        FC_TRY(leave_part(file, number, some, true, err));
        bytes += some;
        offset += some;
        size -= some;
    }
    return FC_OK;
}

void fc_staged_stop(fc_staged_file *file) {
    pthread_mutex_lock(&file->target->lock);
    file->stopped = true;
    pthread_cond_broadcast(&file->target->sent);
    pthread_mutex_unlock(&file->target->lock);
}

fc_code fc_staged_final(const char *path, uint64_t offset, uint64_t size, fc_error *err) {
    fc_staged_file *file = fc_staged_find(path);
    while (file && size > 0) {
        const unsigned number = (unsigned)(offset / file->part);
        const uint64_t left = file->part - offset % file->part, some = size < left ? size : left;
        if (number >= file->nparts) {
            return fc_fail(err, FC_EIO, "%s: a header ends after the file", path);
        }
        FC_TRY(leave_part(file, number, some, false, err));
        offset += some;
        size -= some;
    }
    return FC_OK;
}

fc_code fc_staged_end(const char *path, fc_error *err) {
    fc_staged_file *file = fc_staged_find(path);
    for (unsigned part = 0; file && part < file->nparts; part++) {
        if (file->parts[part].missing > 0) {
            FC_TRY(send_part(file, part, err));
            file->parts[part] = (staged_part){.missing = 0};
        }
    }
    return FC_OK;
}
