/*
 * Takes over a staged file: see resume_file.h. A writer has made the file anew, with its headers and without data. All
 * bytes between the items are copied from it to the file of the earlier run, which has data and perhaps digests in its
 * headers. Then that file gets the name of the new one.
 */
#include "move/resume_file.h"

#include "base/crc.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "io/staged_objects.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COPIED = 1 << 20 };

/* Bytes [offset, end) of an item. */
typedef struct range {
    uint64_t offset, end;
} range;

static int compare_ranges(const void *a, const void *b) {
    const range *x = a, *y = b;
    FC_ORDER_BY(x->offset, y->offset);
    return FC_ORDER(x->end, y->end);
}

static uint64_t moved_bytes(const fc_target *target, const fc_target_item *item) {
    return item->owned && !item->chunk ? fc_target_item_bytes(target, item) : 0;
}

uint64_t fc_staged_layout(const fc_target *target, const fc_target_file *file) {
    uint64_t crc = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        const uint64_t bytes = moved_bytes(target, item);
        const uint64_t numbers[] = {item->tensor, item->owner, item->owned, bytes, bytes ? item->offset : 0};
        crc = fc_crc64(crc, numbers, sizeof numbers);
        crc = fc_crc64(crc, item->dims, 2 * (size_t)target->tensors[item->tensor].source->ndim * sizeof *item->dims);
    }
    return crc;
}

void fc_staged_name_of(uint64_t number, char name[FC_STAGED_NAME]) {
    snprintf(name, FC_STAGED_NAME, "%" PRIu64, number);
}

static fc_code copy_range(int from, int to, const range *gap, unsigned char *buffer, const char *path, fc_error *err) {
    for (uint64_t at = gap->offset; at < gap->end;) {
        const size_t size = gap->end - at < COPIED ? (size_t)(gap->end - at) : COPIED;
        FC_TRY(fc_pread_full(from, buffer, size, at, path, err));
        FC_TRY(fc_pwrite_full(to, buffer, size, at, path, err));
        at += size;
    }
    return FC_OK;
}

/* Copies all bytes that are not of items that the engine moves. */
static fc_code copy_headers(const fc_target *target, const fc_target_file *file, uint64_t size, int from, int to,
                            fc_error *err) {
    range *items = calloc(file->nitems + 1, sizeof *items);
    unsigned char *buffer = malloc(COPIED);
    size_t count = 0;
    uint64_t at = 0;
    fc_code rc = items && buffer ? FC_OK : fc_no_memory(err, file->path);
    for (size_t i = 0; i < file->nitems && rc == FC_OK; i++) {
        const uint64_t bytes = moved_bytes(target, &file->items[i]);
        if (bytes > 0) {
            items[count++] = (range){file->items[i].offset, file->items[i].offset + bytes};
        }
    }
    if (rc == FC_OK) {
        fc_sort_items(items, count, sizeof *items, compare_ranges);
        items[count++] = (range){size, size};
    }
    for (size_t i = 0; i < count && rc == FC_OK; i++) {
        const range gap = {at, items[i].offset};
        rc = gap.offset < gap.end ? copy_range(from, to, &gap, buffer, file->path, err) : FC_OK;
        at = items[i].end > at ? items[i].end : at;
    }
    free(items);
    free(buffer);
    return rc;
}

/* Whether the open file is the one that the journal means, and has no name but that in `tiles`: it is written to in
 * place, and whoever has another name of it, such as a target that is in place, must not see that. */
static bool is_staged(const struct stat *was, const struct stat *made, const fc_written_file *then) {
    return S_ISREG(was->st_mode) && was->st_nlink == 1 && was->st_uid == geteuid() && was->st_dev == made->st_dev &&
           was->st_ino == then->inode && (uint64_t)was->st_size == then->size;
}

/* A run that dies in between has lost nothing: the next one makes all names in `new` again. */
static fc_code exchange_name(const fc_target_file *file, int tiles, const char *name, fc_error *err) {
    if (unlink(file->path) != 0 || linkat(tiles, name, AT_FDCWD, file->path, 0) != 0) {
        return fc_fail_errno(err, errno, "%s: the file of the earlier run cannot be given this name", file->path);
    }
    return FC_OK;
}

static fc_code take_open(const fc_target *target, const fc_target_file *file, int tiles, const char *name, int made,
                         const struct stat *st, int old, fc_error *err) {
    if (fchmod(old, st->st_mode & 07777) != 0) {
        return fc_fail_errno(err, errno, "%s: its permissions cannot be set", file->path);
    }
    FC_TRY(copy_headers(target, file, (uint64_t)st->st_size, made, old, err));
    return exchange_name(file, tiles, name, err);
}

fc_code fc_staged_take(const fc_target *target, const fc_target_file *file, int tiles, uint64_t number,
                       const fc_written_file *then, fc_written_file *now, bool *taken, fc_error *err) {
    char name[FC_STAGED_NAME];
    struct stat st, was;
    fc_code rc = FC_OK;
    *taken = false;
    fc_staged_name_of(number, name);
    int made = open(file->path, O_RDONLY | O_CLOEXEC), old = -1;
    if (made < 0 || fstat(made, &st) != 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be examined", file->path);
        goto out;
    }
    old = openat(tiles, name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); /* waits for no reader of a pipe */
    *now = (fc_written_file){st.st_ino, (uint64_t)st.st_size, fc_staged_layout(target, file), NULL};
    *taken = then && old >= 0 && fstat(old, &was) == 0 && is_staged(&was, &st, then) && then->size == now->size &&
             then->layout == now->layout;
    rc = *taken ? take_open(target, file, tiles, name, made, &st, old, err) : FC_OK;
out:
    if (made >= 0) {
        close(made);
    }
    return old >= 0 ? fc_close_written(old, rc, file->path, err) : rc;
}

fc_code fc_staged_name(const fc_target_file *file, int tiles, uint64_t number, fc_error *err) {
    char name[FC_STAGED_NAME];
    fc_staged_name_of(number, name);
    if (unlinkat(tiles, name, 0) != 0 && errno != ENOENT) {
        return fc_fail_errno(err, errno, "%s: the file of the earlier run cannot be removed", file->path);
    }
    if (linkat(AT_FDCWD, file->path, tiles, name, 0) == 0) {
        return FC_OK;
    }
    return errno == EPERM || errno == ENOTSUP || errno == ENOSYS || errno == EMLINK
               ? fc_fail(err, FC_EUNSUPPORTED,
                         "%s: the file system gives no file a second name, so a conversion there cannot be resumed",
                         file->path)
               : fc_fail_errno(err, errno, "%s: cannot be given a second name", file->path);
}

/* ---- in a bucket ---- */

/* @return the bytes of finished tiles, which the caller frees; NULL: out of memory */
static fc_staged_data *list_ranges(const fc_target *target, const fc_target_file *file, const fc_done_tiles *done,
                                   size_t count) {
    fc_staged_data *ranges = calloc(count + 1, sizeof *ranges);
    for (size_t i = 0; ranges && i < count; i++) {
        const fc_target_item *item = &file->items[done[i].item];
        const uint32_t size = fc_dtype_size(target->tensors[item->tensor].dtype);
        ranges[i] = (fc_staged_data){item->offset + (uint64_t)done[i].start * size, done[i].bytes};
    }
    return ranges;
}

fc_code fc_staged_take_upload(const fc_target *target, const fc_target_file *file, const fc_written_file *then,
                              const fc_done_tiles *done, size_t count, fc_written_file *now, bool *taken,
                              fc_error *err) {
    struct stat st;
    const char *id = NULL;
    fc_staged_data *ranges = list_ranges(target, file, done, count);
    fc_code rc = ranges ? FC_OK : fc_no_memory(err, file->path);
    *taken = false;
    if (rc == FC_OK && fc_stat(file->path, &st) != 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be examined", file->path);
    }
    FC_TRY_GOTO(rc, rc, out);
    const uint64_t run = fc_staged_keep_run(file->path, then ? then->inode : 0);
    *now = (fc_written_file){run, (uint64_t)st.st_size, fc_staged_layout(target, file), NULL};
    if (then && then->upload && then->size == now->size && then->layout == now->layout) {
        FC_TRY_GOTO(fc_staged_take_up(file->path, then->upload, ranges, count, &id, err), rc, out);
        *taken = id != NULL;
    }
    if (!id) {
        FC_TRY_GOTO(fc_staged_take_up(file->path, NULL, NULL, 0, &id, err), rc, out);
    }
    now->upload = (char *)(uintptr_t)id; /* only read */
out:
    free(ranges);
    return rc;
}
