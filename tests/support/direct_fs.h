/*
 * A file system whose O_DIRECT a test decides about: included by one test file, which puts direct_fs_allows before its
 * own pread or pwrite.
 */
#ifndef FSDPCKPT_TESTS_DIRECT_FS_H
#define FSDPCKPT_TESTS_DIRECT_FS_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

static struct {
    int refuse;    /* errno of direct calls; 0: they work */
    size_t shorts; /* direct calls for more than this stop there; 0: never */
    size_t direct; /* bytes moved directly */
} fs;

/* Shortens `size` where it must. @return false with errno set when a direct call is refused. */
static bool direct_fs_allows(int fd, const void *buf, size_t *size, off_t at) {
    if (!(fcntl(fd, F_GETFL) & O_DIRECT)) {
        return true;
    }
    if (fs.refuse) {
        errno = fs.refuse;
        return false;
    }
    *size = fs.shorts && *size > fs.shorts ? fs.shorts : *size;
    /* The rules of O_DIRECT, for file systems that do not mind. */
    if ((uintptr_t)buf % 512 != 0 || *size % 512 != 0 || at % 512 != 0) {
        errno = EINVAL;
        return false;
    }
    fs.direct += *size;
    return true;
}

#endif
