/*
 * A library for LD_PRELOAD. The DYING_AT-th pwrite of rank DYING_RANK kills the process, or fails if DYING_HOW is
 * "eio".
 */
#undef _FILE_OFFSET_BITS

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* Returns whether this call is the one that fails. */
static bool is_due(void) {
    static atomic_long calls;
    const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *dying = getenv("DYING_RANK"), *at = getenv("DYING_AT");
    return rank && dying && at && strcmp(rank, dying) == 0 && atomic_fetch_add(&calls, 1) + 1 >= atol(at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset);

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (is_due()) {
        const char *how = getenv("DYING_HOW");
        if (!how || strcmp(how, "eio") != 0) {
            kill(getpid(), SIGKILL);
        }
        errno = EIO;
        return -1;
    }
    if (!real) {
        real = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    }
    return real(fd, bytes, size, offset);
}
