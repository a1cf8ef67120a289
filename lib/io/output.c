/*
 * Writes past the page cache: turns runs of any length and offset into direct writes of whole blocks, and writes the
 * rest at both ends through the page cache. If direct writes are refused, everything goes through the page cache.
 */
#include "io/output.h"
#include "io/file.h"
#include "io/path.h"
#include "io/staged_objects.h"

#include "fsdpckpt/try.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOT_OPENED = -1, REFUSED = -2 };

fc_code fc_output_open(fc_output *output, const char *path, bool cached, fc_error *err) {
    long page = sysconf(_SC_PAGESIZE);
    output->path = path;
    output->cached = cached;
    output->block = page > FC_OUTPUT_BLOCK ? (size_t)page : FC_OUTPUT_BLOCK;
    output->staged = fc_staged_find(path);
    output->direct = fc_is_staged(path) ? REFUSED : NOT_OPENED;
    output->fd = fc_open(path, O_WRONLY, 0);
    return output->fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be written", path) : FC_OK;
}

fc_code fc_output_close(fc_output *output, fc_code rc, fc_error *err) {
    int errnum = 0;
    if (output->fd >= 0 && close(output->fd) != 0) {
        errnum = errno;
    }
    if (output->direct >= 0 && close(output->direct) != 0) {
        errnum = errno;
    }
    output->fd = output->direct = NOT_OPENED;
    return rc == FC_OK && errnum ? fc_fail_errno(err, errnum, "%s: writing", output->path) : rc;
}

/* tmpfs, some network and some FUSE file systems refuse O_DIRECT at open, or only at the first write. */
static bool refuses_direct(int errnum) {
    return errnum == EINVAL || errnum == EOPNOTSUPP || errnum == ENOSYS;
}

static fc_code open_direct(fc_output *output, fc_error *err) {
    output->direct = open(output->path, O_WRONLY | O_CLOEXEC | O_DIRECT);
    if (output->direct >= 0) {
        return FC_OK;
    }
    if (!refuses_direct(errno)) {
        return fc_fail_errno(err, errno, "%s: cannot be written", output->path);
    }
    output->direct = REFUSED;
    return FC_OK;
}

/* Writes whole blocks. @return FC_OK with *done < size if the file system refuses direct writes. */
static fc_code write_direct(fc_output *output, const unsigned char *bytes, size_t size, uint64_t offset, size_t *done,
                            fc_error *err) {
    *done = 0;
    while (*done < size) {
        ssize_t n = pwrite(output->direct, bytes + *done, size - *done, (off_t)(offset + *done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && refuses_direct(errno)) {
            close(output->direct);
            output->direct = REFUSED;
            return FC_OK;
        }
        if (n <= 0) {
            return fc_fail_errno(err, n < 0 ? errno : EIO, "%s: writing at offset %" PRIu64, output->path,
                                 offset + *done);
        }
        *done += (size_t)n;
        if (*done < size && *done % output->block != 0) {
            return FC_OK; /* an almost full disk; writing the rest through the cache works or reports it */
        }
    }
    return FC_OK;
}

/* The request to begin with the disk is only a hint: file systems without it write at the fsync. */
static fc_code write_cached(const fc_output *output, const unsigned char *bytes, size_t size, uint64_t offset,
                            fc_error *err) {
    FC_TRY(fc_pwrite_full(output->fd, bytes, size, offset, output->path, err));
    if (size >= FC_OUTPUT_DIRECT_LEAST) {
        (void)sync_file_range(output->fd, (off_t)offset, (off_t)size, SYNC_FILE_RANGE_WRITE);
    }
    return FC_OK;
}

fc_code fc_output_write(fc_output *output, const unsigned char *bytes, size_t size, uint64_t offset, fc_error *err) {
    if (output->staged) {
        FC_TRY(fc_staged_write(output->staged, output->fd, bytes, size, offset, err));
        return fc_staged_send(output->staged, err);
    }
    if (output->cached) {
        return write_cached(output, bytes, size, offset, err);
    }
    size_t block = output->block;
    size_t head = (size_t)(-offset % block);
    bool aligned = (uintptr_t)bytes % block == offset % block;
    if (!aligned || output->direct == REFUSED || size < head ||
        (size - head) / block * block < FC_OUTPUT_DIRECT_LEAST) {
        return fc_pwrite_full(output->fd, bytes, size, offset, output->path, err);
    }
    if (output->direct == NOT_OPENED) {
        FC_TRY(open_direct(output, err));
    }
    if (head > 0) {
        FC_TRY(fc_pwrite_full(output->fd, bytes, head, offset, output->path, err));
    }
    size_t body = (size - head) / block * block, done = 0;
    if (output->direct >= 0) {
        FC_TRY(write_direct(output, bytes + head, body, offset + head, &done, err));
    }
    size_t written = head + done;
    return written == size
               ? FC_OK
               : fc_pwrite_full(output->fd, bytes + written, size - written, offset + written, output->path, err);
}

fc_code fc_output_allocate(const char *path, fc_error *err) {
    struct stat st;
    if (fc_is_staged(path)) {
        return FC_OK; /* its memory is that of its parts, one after another */
    }
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be written", path);
    }
    fc_code rc = FC_OK;
    if (fstat(fd, &st) != 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be examined", path);
    } else if (st.st_size > 0 && fallocate(fd, 0, 0, st.st_size) != 0 && !refuses_direct(errno) && errno != EINTR) {
        rc = fc_fail_errno(err, errno, "%s: reserving %" PRIu64 " bytes", path, (uint64_t)st.st_size);
    }
    return fc_close_written(fd, rc, path, err);
}
