/*
 * The parts of a file in a bucket: which bytes are final, which parts are in memory, and how they are sent. See
 * staged_objects.h.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/staged_private.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t part_size(const fc_staged_file *file, unsigned part) {
    const uint64_t at = (uint64_t)part * file->part;
    return file->size - at < file->part ? file->size - at : file->part;
}

/* @return where the bytes from `at` to `end` leave the part that has the first of them */
static uint64_t end_in_part(const fc_staged_file *file, uint64_t at, uint64_t end) {
    const uint64_t next = (at / file->part + 1) * file->part;
    return next < end ? next : end;
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
            return fc_fail_errno(err, errno, "%s: memory cannot be freed", fc_staged_final_name(file->path));
        }
    }
    return FC_OK;
}

static fc_code fail_twice(const fc_staged_file *file, unsigned number, fc_error *err) {
    return fc_fail(err, FC_EIO, "%s: bytes of part %u were written twice", fc_staged_final_name(file->path),
                   number + 1);
}

/* Counts a part as in memory, or no longer. The caller holds the lock. */
static void set_open(fc_staged_file *file, staged_part *part, bool open) {
    file->open += open && !part->open;
    file->open -= !open && part->open;
    part->open = open;
    pthread_cond_broadcast(&file->target->changed);
}

static void find_first(fc_staged_file *file) {
    while (file->first < file->nparts && file->parts[file->first].engine == 0) {
        file->first++;
    }
}

/* A part is complete. The caller holds the lock, and sees to it that the part is sent. */
static void list_full(fc_staged_file *file, unsigned number) {
    staged_part *part = &file->parts[number];
    part->sent = true;
    part->next = file->full;
    file->full = number + 1;
    file->sending++;
    set_open(file, part, true);
}

/* Sends a part. The caller holds the lock, which is released meanwhile. */
static fc_code send_part(fc_staged_file *file, unsigned number, fc_error *err) {
    staged_part *part = &file->parts[number];
    pthread_mutex_unlock(&file->target->lock);
    fc_code rc =
        fc_upload_part(file->upload, file->fd, (uint64_t)number * file->part, part_size(file, number), number + 1, err);
    rc = rc == FC_OK ? punch_part(file, number, err) : rc;
    pthread_mutex_lock(&file->target->lock);
    file->sending--;
    part->done = rc == FC_OK;
    set_open(file, part, false);
    return rc;
}

/* Sends the parts that are complete and that no other thread sends. The caller holds the lock, as for send_part. */
static fc_code send_full(fc_staged_file *file, fc_error *err) {
    fc_code rc = FC_OK;
    while (file->full > 0 && rc == FC_OK) {
        const unsigned number = file->full - 1;
        file->full = file->parts[number].next;
        rc = send_part(file, number, err);
    }
    return rc;
}

static fc_code need_parts(fc_staged_file *file, fc_error *err) {
    file->parts = file->parts ? file->parts : calloc(file->nparts + 1, sizeof *file->parts);
    FC_NEED(file->parts, err, fc_staged_final_name(file->path));
    return FC_OK;
}

static fc_code begin_upload(fc_staged_file *file, fc_error *err) {
    return fc_upload_begin(fc_staged_final_name(file->path), file->run, file->target->stays ? &file->id : NULL,
                           &file->upload, err);
}

/* Counts, for each part, the bytes that the engine moves and those that are not final. */
static void count_bytes(fc_staged_file *file) {
    for (unsigned i = 0; i < file->nparts; i++) {
        const uint64_t size = part_size(file, i), at = (uint64_t)i * file->part;
        file->parts[i].missing = file->gaps >= at + size ? size : file->gaps > at ? file->gaps - at : 0;
    }
    for (size_t i = 0; i < file->count; i++) {
        const fc_staged_data *d = &file->data[i];
        for (uint64_t at = d->offset, end = d->offset + d->size; at < end;) {
            staged_part *part = &file->parts[at / file->part];
            const uint64_t to = end_in_part(file, at, end);
            part->engine += to - at;
            part->missing += at >= file->gaps ? to - at : to > file->gaps ? to - file->gaps : 0;
            at = to;
        }
    }
    for (unsigned i = 0; i < file->nparts; i++) {
        if (file->parts[i].known) {
            file->parts[i].missing = file->parts[i].engine = 0;
        }
    }
}

/* Subtracts what was final before. A part that is complete by that is sent at the end of the file. */
static fc_code count_finals(fc_staged_file *file, fc_error *err) {
    for (size_t i = 0; i < file->nfinals; i++) {
        const fc_staged_data *d = &file->finals[i];
        for (uint64_t at = d->offset, end = d->offset + d->size; at < end;) {
            const uint64_t to = end_in_part(file, at, end);
            staged_part *part = at / file->part < file->nparts ? &file->parts[at / file->part] : NULL;
            if (!part || (!part->known && to - at > part->missing)) {
                return fail_twice(file, (unsigned)(at / file->part), err);
            }
            part->missing -= part->known ? 0 : to - at;
            at = to;
        }
    }
    return FC_OK;
}

static fc_code begin_parts(fc_staged_file *file, fc_error *err) {
    FC_TRY(need_parts(file, err));
    count_bytes(file);
    FC_TRY(count_finals(file, err));
    find_first(file);
    return file->upload ? FC_OK : begin_upload(file, err);
}

/* Whether all data is within the file. */
static bool fits(uint64_t size, const fc_staged_data *data, size_t count) {
    bool good = true;
    for (size_t i = 0; i < count && good; i++) {
        good = data[i].offset <= size && data[i].size <= size - data[i].offset;
    }
    return good;
}

/* @return how long the file is now */
static fc_code measure_file(const fc_staged_file *file, uint64_t *size, fc_error *err) {
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", fc_staged_final_name(file->path));
    }
    *size = (uint64_t)st.st_size;
    return FC_OK;
}

static void count_parts(fc_staged_file *file) {
    file->nparts = (unsigned)((file->size + file->part - 1) / file->part);
}

/* @param grows the most bytes that may be appended */
static fc_code measure_parts(fc_staged_file *file, uint64_t grows, fc_error *err) {
    enum { MIB = 1 << 20 };
    uint64_t size = 0;
    FC_TRY(measure_file(file, &size, err));
    if (!fc_add_u64(size, grows, &file->size) || file->size > INT64_MAX) {
        return fc_fail(err, FC_ECORRUPT, "%s: its data is too large for a file", fc_staged_final_name(file->path));
    }
    file->engine = true;
    file->grows = grows > 0;
    file->part = FC_STAGED_PART;
    if (file->size / FC_STAGED_MOST_PARTS >= file->part) {
        file->part = (file->size / FC_STAGED_MOST_PARTS / MIB + 1) * MIB;
    }
    count_parts(file);
    return FC_OK;
}

/* How many parts may be in memory at once. */
static void limit_open(fc_staged_file *file, uint64_t memory) {
    enum { LEAST_OPEN = 2 };
    const uint64_t open = memory / file->part;
    file->most_open = open < LEAST_OPEN             ? LEAST_OPEN
                      : open < FC_STAGED_MOST_PARTS ? (unsigned)open
                                                    : FC_STAGED_MOST_PARTS;
}

/* Copies what the engine moves. What it appends is one more piece of data, the last one. */
static fc_code copy_data(fc_staged_file *file, const fc_staged_data *data, size_t count, uint64_t grows,
                         fc_error *err) {
    file->data = calloc(count + 1, sizeof *file->data);
    FC_NEED(file->data, err, fc_staged_final_name(file->path));
    if (count > 0) {
        memcpy(file->data, data, count * sizeof *data);
    }
    file->data[count] = (fc_staged_data){file->size - grows, grows};
    file->count = count + file->grows;
    return FC_OK;
}

fc_code fc_staged_divide(const char *path, const fc_staged_data *data, size_t count, uint64_t grows, uint64_t memory,
                         fc_error *err) {
    fc_staged_target *target;
    fc_staged_file *file = fc_staged_find_file(path, &target);
    if (!file) {
        return fc_fail(err, FC_EIO, "%s: is missing", fc_staged_final_name(path));
    }
    FC_TRY(measure_parts(file, grows, err));
    limit_open(file, memory);
    if (!fits(file->size - grows, data, count)) {
        return fc_fail(err, FC_EIO, "%s: its data ends after the file", fc_staged_final_name(path));
    }
    if (file->size <= FC_STAGED_WHOLE) {
        return FC_OK;
    }
    FC_TRY(copy_data(file, data, count, grows, err));
    file->divided = true;
    return begin_parts(file, err);
}

uint64_t fc_staged_held(const fc_staged_file *file) {
    return file ? (file->most_open < file->nparts ? file->most_open : file->nparts) * file->part : 0;
}

/* ---- what an earlier run has sent ---- */

/* Finds the parts with bytes of `done`. @return false if the server lacks one of them */
static bool find_known(fc_staged_file *file, const uint64_t *sizes, const fc_staged_data *done, size_t count) {
    for (size_t i = 0; i < count; i++) {
        for (uint64_t at = done[i].offset, end = at + done[i].size; at < end;) {
            const unsigned part = (unsigned)(at / file->part);
            if (part >= file->nparts || sizes[part] != part_size(file, part)) {
                return false;
            }
            file->parts[part].known = file->parts[part].sent = file->parts[part].done = true;
            at = end_in_part(file, at, end);
        }
    }
    return true;
}

/* Leaves file->upload NULL if it does not have these bytes. */
static fc_code continue_upload(fc_staged_file *file, const char *id, const fc_staged_data *done, size_t count,
                               fc_error *err) {
    uint64_t *sizes = calloc(file->nparts + 1, sizeof *sizes);
    FC_NEED(sizes, err, fc_staged_final_name(file->path));
    fc_code rc;
    FC_TRY_GOTO(need_parts(file, err), rc, out);
    FC_TRY_GOTO(
        fc_upload_continue(fc_staged_final_name(file->path), file->run, id, sizes, file->nparts, &file->upload, err),
        rc, out);
    if (file->upload && !find_known(file, sizes, done, count)) {
        int patience = FC_UPLOAD_PATIENCE;
        fc_upload_abort(file->upload, &patience);
        file->upload = NULL;
    }
    if (!file->upload) {
        memset(file->parts, 0, file->nparts * sizeof *file->parts);
    }
out:
    free(sizes);
    return rc;
}

uint64_t fc_staged_keep_run(const char *path, uint64_t run) {
    fc_staged_target *target;
    fc_staged_file *file = fc_staged_find_file(path, &target);
    if (file && run != 0) {
        file->run = run;
    }
    return file ? file->run : 0;
}

fc_code fc_staged_take_up(const char *path, const char *then, const fc_staged_data *done, size_t count, const char **id,
                          fc_error *err) {
    fc_staged_target *target;
    fc_staged_file *file = fc_staged_find_file(path, &target);
    *id = NULL;
    if (!file) {
        return fc_fail(err, FC_EIO, "%s: is missing", fc_staged_final_name(path));
    }
    FC_TRY(measure_parts(file, 0, err));
    if (file->size <= FC_STAGED_WHOLE) {
        return FC_OK;
    }
    if (then) {
        file->id = strdup(then);
        FC_NEED(file->id, err, fc_staged_final_name(path));
        FC_TRY(continue_upload(file, then, done, count, err));
    } else {
        FC_TRY(begin_upload(file, err));
    }
    if (!file->upload) {
        free(file->id);
        file->id = NULL;
    }
    *id = file->id;
    return FC_OK;
}

bool fc_staged_has_sent(fc_staged_file *file, uint64_t offset, uint64_t size) {
    bool all = file->divided;
    pthread_mutex_lock(&file->target->lock);
    for (uint64_t at = offset; all && at < offset + size; at = end_in_part(file, at, offset + size)) {
        all = file->parts[at / file->part].done;
    }
    pthread_mutex_unlock(&file->target->lock);
    return all;
}

fc_staged_file *fc_staged_find(const char *path) {
    fc_staged_target *target;
    fc_staged_file *file = fc_is_staged(path) ? fc_staged_find_file(path, &target) : NULL;
    return file && file->divided ? file : NULL;
}

/* Whether too many parts are in memory to begin this one. The first one may be begun once none of the others is on its
 * way out: data comes in ascending order, so all bytes of the first part are written or in the hands of other threads,
 * none of which waits for long. */
static bool must_wait(const fc_staged_file *file, unsigned number) {
    return !file->parts[number].open && file->open >= file->most_open && !file->stopped &&
           !(number == file->first && file->sending == 0);
}

/* Waits until a part may be begun, and sends complete ones meanwhile: the threads that completed them may wait, too. */
static fc_code enter_part(fc_staged_file *file, unsigned number, fc_error *err) {
    fc_code rc = FC_OK;
    pthread_mutex_lock(&file->target->lock);
    while (rc == FC_OK && must_wait(file, number)) {
        if (file->full > 0) {
            rc = send_full(file, err);
        } else {
            pthread_cond_wait(&file->target->changed, &file->target->lock);
        }
    }
    set_open(file, &file->parts[number], true);
    if (rc == FC_OK && file->stopped) {
        rc = fc_fail(err, FC_EIO, "%s: another thread could not write its part", fc_staged_final_name(file->path));
    }
    pthread_mutex_unlock(&file->target->lock);
    return rc;
}

/* Bytes of a part are final. */
static fc_code leave_part(fc_staged_file *file, unsigned number, uint64_t size, bool engine, fc_error *err) {
    staged_part *part = &file->parts[number];
    fc_code rc = FC_OK;
    if (part->known) {
        return FC_OK;
    }
    pthread_mutex_lock(&file->target->lock);
    if (size > part->missing || (engine && size > part->engine)) {
        rc = fail_twice(file, number, err);
    } else {
        part->missing -= size;
        part->engine -= engine ? size : 0;
        find_first(file);
        if (part->missing == 0) {
            list_full(file, number);
        } else if (part->engine == 0) {
            set_open(file, part, false); /* it only lacks headers */
        }
    }
    pthread_mutex_unlock(&file->target->lock);
    return rc;
}

static fc_code fail_after(const fc_staged_file *file, fc_error *err) {
    return fc_fail(err, FC_EIO, "%s: what is written ends after the file", fc_staged_final_name(file->path));
}

/* Bytes, of any number of parts, are final. */
static fc_code leave_parts(fc_staged_file *file, uint64_t offset, uint64_t size, bool engine, fc_error *err) {
    while (size > 0) {
        const unsigned number = (unsigned)(offset / file->part);
        const uint64_t some = end_in_part(file, offset, offset + size) - offset;
        FC_TRY(number < file->nparts ? leave_part(file, number, some, engine, err) : fail_after(file, err));
        offset += some;
        size -= some;
    }
    return FC_OK;
}

fc_code fc_staged_write(fc_staged_file *file, int fd, const unsigned char *bytes, size_t size, uint64_t offset,
                        fc_error *err) {
    while (size > 0) {
        const unsigned number = (unsigned)(offset / file->part);
        const size_t some = (size_t)(end_in_part(file, offset, offset + size) - offset);
        const bool known = number < file->nparts && file->parts[number].known;
        if (!known) {
            FC_TRY(number < file->nparts ? enter_part(file, number, err) : fail_after(file, err));
            FC_TRY(fc_pwrite_full(fd, bytes, some, offset, fc_staged_final_name(file->path), err));
        }
        FC_TRY(leave_part(file, number, some, true, err));
        bytes += some;
        offset += some;
        size -= some;
    }
    return FC_OK;
}

fc_code fc_staged_skip(fc_staged_file *file, uint64_t offset, uint64_t size, fc_error *err) {
    return leave_parts(file, offset, size, true, err);
}

fc_code fc_staged_send(fc_staged_file *file, fc_error *err) {
    pthread_mutex_lock(&file->target->lock);
    const fc_code rc = send_full(file, err);
    pthread_mutex_unlock(&file->target->lock);
    return rc;
}

void fc_staged_stop(fc_staged_file *file) {
    pthread_mutex_lock(&file->target->lock);
    file->stopped = true;
    pthread_cond_broadcast(&file->target->changed);
    pthread_mutex_unlock(&file->target->lock);
}

/* Before a file is divided, it is known only to one thread. */
static fc_code keep_final(fc_staged_file *file, uint64_t offset, uint64_t size, fc_error *err) {
    FC_NEED(fc_grow(&file->finals, &file->capacity, file->nfinals + 1, sizeof *file->finals), err,
            fc_staged_final_name(file->path));
    file->finals[file->nfinals++] = (fc_staged_data){offset, size};
    return FC_OK;
}

fc_code fc_staged_final(const char *path, uint64_t offset, uint64_t size, fc_error *err) {
    fc_staged_target *target;
    fc_staged_file *file = fc_is_staged(path) ? fc_staged_find_file(path, &target) : NULL;
    if (file && !file->divided) {
        return keep_final(file, offset, size, err);
    }
    FC_TRY(file ? leave_parts(file, offset, size, false, err) : FC_OK);
    return file ? fc_staged_send(file, err) : FC_OK;
}

void fc_staged_final_from(const char *path, uint64_t offset) {
    fc_staged_target *target;
    fc_staged_file *file = fc_is_staged(path) ? fc_staged_find_file(path, &target) : NULL;
    if (file) {
        file->gaps = offset;
    }
}

/* A file that grew has its length now. No part of it may end later. */
static fc_code end_growth(fc_staged_file *file, fc_error *err) {
    uint64_t size = 0;
    FC_TRY(measure_file(file, &size, err));
    bool good = size <= file->size;
    for (unsigned part = 0; part < file->nparts && good; part++) {
        good = !file->parts[part].sent || (uint64_t)part * file->part + part_size(file, part) <= size;
    }
    if (!good) {
        return fc_fail(err, FC_EIO, "%s: its length does not agree with its data", fc_staged_final_name(file->path));
    }
    file->size = size;
    file->grows = false;
    count_parts(file);
    return FC_OK;
}

fc_code fc_staged_end(const char *path, fc_error *err) {
    fc_staged_file *file = fc_staged_find(path);
    if (!file) {
        return FC_OK;
    }
    pthread_mutex_lock(&file->target->lock);
    fc_code rc = file->grows ? end_growth(file, err) : FC_OK;
    for (unsigned part = 0; part < file->nparts && rc == FC_OK; part++) {
        if (!file->parts[part].sent) {
            list_full(file, part);
            rc = send_full(file, err);
        }
    }
    pthread_mutex_unlock(&file->target->lock);
    return rc;
}
