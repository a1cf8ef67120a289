/*
 * Files of all ranks to rank 0, a rank at a time and a piece at a time: from their disks, through a communicator of the
 * two, to rank 0's disk.
 */
#include "fsdpckpt/gather_files.h"

#include "base/try.h"
#include "comm/file_list.h"
#include "fsdpckpt/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE_BYTES = 8 << 20, PATH_BYTES = 4096 };

static fc_code join(char *path, const char *directory, const char *name, fc_error *err) {
    int n = snprintf(path, PATH_BYTES, "%s/%s", directory, name);
    return n > 0 && n < PATH_BYTES ? FC_OK : fc_fail(err, FC_EUSAGE, "%s/%s: the name is too long", directory, name);
}

/* Makes the directories of `name` below `into`. */
static fc_code make_parents(const char *into, const char *name, fc_error *err) {
    char path[PATH_BYTES];
    fc_code rc = join(path, into, name, err);
    for (char *s = path + strlen(into) + 1; rc == FC_OK && (s = strchr(s, '/')); s++) {
        *s = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) {
            rc = fc_fail_errno(err, errno, "%s: cannot be made", path);
        }
        *s = '/';
    }
    return rc;
}

static fc_code create(const char *into, const char *name, char *path, int *fd, fc_error *err) {
    FC_TRY(join(path, into, name, err));
    FC_TRY(make_parents(into, name, err));
    *fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return *fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be made", path) : FC_OK;
}

/* Rank 0's own: a link, or a copy where links do not reach. */
static fc_code take_own(const char *source, const char *into, const fc_sent_file *file, unsigned char *buf,
                        fc_error *err) {
    char from[PATH_BYTES], to[PATH_BYTES];
    int in = -1, out = -1;
    uint64_t size;
    fc_code rc = join(from, source, file->name, err);
    rc = rc == FC_OK ? join(to, into, file->name, err) : rc;
    rc = rc == FC_OK ? make_parents(into, file->name, err) : rc;
    if (rc != FC_OK || linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) == 0) {
        return rc;
    }
    rc = fc_open_input(from, &in, &size, err);
    rc = rc == FC_OK ? create(into, file->name, to, &out, err) : rc;
    for (uint64_t at = 0; rc == FC_OK && at < file->size; at += PIECE_BYTES) {
        size_t some = file->size - at < PIECE_BYTES ? (size_t)(file->size - at) : PIECE_BYTES;
        rc = fc_pread_full(in, buf, some, at, from, err);
        rc = rc == FC_OK ? fc_pwrite_full(out, buf, some, at, to, err) : rc;
    }
    if (in >= 0) {
        close(in);
    }
    if (out >= 0 && close(out) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: writing", to);
    }
    return rc;
}

/* A piece of host memory from rank 1 of a pair to rank 0, by way of the device where that is another. */
static fc_code pass(fc_comm *pair, unsigned char *buf, size_t bytes, void *memory, fc_error *err) {
    fc_device *device = pair->device;
    if (device->is_host) {
        return pair->broadcast(pair, buf, bytes, 1, NULL, err);
    }
    fc_code rc = FC_OK;
    if (pair->rank == 1) {
        rc = device->copy(device, memory, buf, bytes, NULL, err);
    }
    rc = rc == FC_OK ? pair->broadcast(pair, memory, bytes, 1, NULL, err) : rc;
    if (rc == FC_OK && pair->rank == 0) {
        rc = device->copy(device, buf, memory, bytes, NULL, err);
    }
    return rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
}

/* One rank's transfer to rank 0, as both see it. */
typedef struct transfer {
    fc_comm *pair;
    const char *source, *into;
    unsigned char *buf;
    void *memory; /* of the device; NULL on the host */
} transfer;

/* One file. A failure of one side does not stop the other: it goes on with what is in the buffer, and both agree. */
static fc_code transfer_file(const transfer *t, const fc_sent_file *file, fc_error *err) {
    char path[PATH_BYTES];
    int fd = -1;
    uint64_t size;
    bool sends = t->pair->rank == 1;
    fc_code rc = sends ? join(path, t->source, file->name, err) : create(t->into, file->name, path, &fd, err);
    rc = rc == FC_OK && sends ? fc_open_input(path, &fd, &size, err) : rc;
    for (uint64_t at = 0; at < file->size; at += PIECE_BYTES) {
        size_t some = file->size - at < PIECE_BYTES ? (size_t)(file->size - at) : PIECE_BYTES;
        if (rc == FC_OK && sends) {
            rc = fc_pread_full(fd, t->buf, some, at, path, err);
        }
        fc_error why;
        fc_code passed = pass(t->pair, t->buf, some, t->memory, &why);
        if (passed != FC_OK) {
            rc = fc_fail(err, passed, "%s", why.message);
            break;
        }
        if (rc == FC_OK && !sends) {
            rc = fc_pwrite_full(fd, t->buf, some, at, path, err);
        }
    }
    if (fd >= 0 && close(fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: writing", path);
    }
    return rc;
}

static fc_code transfer_files(const transfer *t, const fc_sent_file *files, size_t count, int rank, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        if (files[i].rank == rank && rc == FC_OK) {
            rc = fc_comm_agree(t->pair, transfer_file(t, &files[i], err), err);
        }
    }
    return rc;
}

/* What rank `rank` has and no lower one. The other ranks only take part in the split. */
static fc_code from_rank(fc_comm *data, const char *source, const char *into, const fc_sent_file *files, size_t count,
                         int rank, unsigned char *buf, fc_error *err) {
    bool takes_part = data->rank == 0 || data->rank == rank;
    transfer t = {.source = source, .into = into, .buf = buf};
    fc_code rc = data->split(data, takes_part, &t.pair, err);
    if (rc != FC_OK) {
        return rc;
    }
    if (takes_part) {
        if (!data->device->is_host) {
            rc = data->device->alloc(data->device, PIECE_BYTES, &t.memory, err);
        }
        rc = fc_comm_agree(t.pair, rc, err);
        rc = rc == FC_OK ? transfer_files(&t, files, count, rank, err) : rc;
        data->device->release(data->device, t.memory);
    }
    t.pair->free(t.pair);
    return rc;
}

static bool sends_any(const fc_sent_file *files, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) {
        if (files[i].rank == rank) {
            return true;
        }
    }
    return false;
}

fc_code fc_gather_files(fc_comm *control, fc_comm *data, const char *source, const char *into, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    unsigned char *buf = malloc(PIECE_BYTES);
    fc_sent_file *files = NULL;
    size_t count = 0;
    fc_code rc = arena && buf ? FC_OK : fc_no_memory(err, NULL);
    rc = fc_comm_agree(control, rc, err);
    rc = rc == FC_OK && arena ? fc_list_files(control, source, arena, &files, &count, err) : rc;
    for (int rank = 0; rc == FC_OK && rank < control->size; rank++) {
        for (size_t i = 0; rank == 0 && control->rank == 0 && rc == FC_OK && i < count; i++) {
            rc = files[i].rank == 0 ? take_own(source, into, &files[i], buf, err) : FC_OK;
        }
        if (rank > 0 && sends_any(files, count, rank)) {
            rc = from_rank(data, source, into, files, count, rank, buf, err);
        }
        rc = fc_comm_agree(control, rc, err);
    }
    free(buf);
    fc_arena_free(arena);
    return rc;
}
