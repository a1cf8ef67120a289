/*
 * Controls how O_DIRECT behaves in a test. The test replaces pread or pwrite, and calls direct_fs_allows first.
 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

static struct {
    int refuse;    /* errno of direct calls, or 0 if they work */
    size_t shorts; /* longest direct call; longer ones return early; 0 for no limit */
    size_t direct; /* bytes moved directly */
} fs;

/* Shortens `size` to the limit. @return false with errno set if a direct call is refused. */
static bool direct_fs_allows(int fd, const void *buf, size_t *size, off_t at) {
    if (!(fcntl(fd, F_GETFL) & O_DIRECT)) {
        return true;
    }
    if (fs.refuse) {
        errno = fs.refuse;
        return false;
    }
    *size = fs.shorts && *size > fs.shorts ? fs.shorts : *size;
    /* Enforces the alignment of O_DIRECT on file systems that do not require it. */
    if ((uintptr_t)buf % 512 != 0 || *size % 512 != 0 || at % 512 != 0) {
        errno = EINVAL;
        return false;
    }
    fs.direct += *size;
    return true;
}
