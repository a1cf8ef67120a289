/*
 * A library for LD_PRELOAD that logs the calls which change the file system, for power.py. TRACE_LOG names the log.
 * Each record is a line: the name of the call, its numbers, and its paths, which are absolute; then the bytes of a
 * pwrite. An inode number identifies a file. Only calls that succeeded are logged, in the order in which they
 * took place.
 */
/* This file defines both names of each call, such as open and open64. */
#undef _FILE_OFFSET_BITS

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held during a call and its record */

#define REAL(ret, name, params)                                                                                        \
    static ret(*real) params; /* NOLINT(bugprone-macro-parentheses) */                                                 \
    if (!real)                                                                                                         \
    real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void start(void) {
    REAL(int, open64, (const char *, int, ...));
    const char *path = getenv("TRACE_LOG");
    log_fd = path ? real(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

static void record(const void *data, size_t size, const char *format, ...) {
    char line[3 * PATH_MAX];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    const int saved = errno;
    if (log_fd >= 0 && (write(log_fd, line, (size_t)n) != n || write(log_fd, data, size) != (ssize_t)size)) {
        abort();
    }
    errno = saved;
}

/* @return the absolute path of `path` below the open directory `dir`. */
static const char *absolute(int dir, const char *path, char out[2 * PATH_MAX]) {
    char link[64], base[PATH_MAX] = "";
    if (*path == '/') {
        return path;
    }
    if (dir == AT_FDCWD) {
        (void)!getcwd(base, sizeof base);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        const ssize_t n = readlink(link, base, sizeof base - 1);
        base[n > 0 ? n : 0] = '\0';
    }
    snprintf(out, 2 * PATH_MAX, "%s/%s", base, path);
    return out;
}

/* @return the inode of an open file, or 0 if it is not a file or a directory. */
static unsigned long inode(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) ? st.st_ino : 0;
}

static void record_made(const char *name, int dir, const char *path) {
    char full[2 * PATH_MAX];
    struct stat st;
    if (fstatat(dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        record("", 0, "%s %lu %s\n", name, (unsigned long)st.st_ino, absolute(dir, path, full));
    }
}

static int record_open(int fd, int dir, const char *path, int flags) {
    if (fd >= 0 && flags & O_CREAT) {
        record_made(flags & O_TRUNC ? "creat" : "open", dir, path);
    }
    return fd;
}

#define OPEN(name, params, dir, ...)                                                                                   \
    int name params {                                                                                                  \
        REAL(int, name, params);                                                                                       \
        va_list args;                                                                                                  \
        va_start(args, flags);                                                                                         \
        const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;                                                \
        va_end(args);                                                                                                  \
        pthread_mutex_lock(&lock);                                                                                     \
        const int fd = record_open(real(__VA_ARGS__, flags, mode), dir, path, flags);                                  \
        pthread_mutex_unlock(&lock);                                                                                   \
        return fd;                                                                                                     \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int dir, const char *path, int flags, ...), dir, dir, path)
OPEN(openat64, (int dir, const char *path, int flags, ...), dir, dir, path)

/* `done` is what to do after a call that succeeded. */
#define LOGGED(ret, name, params, call, done)                                                                          \
    ret name params;                                                                                                   \
    ret name params { /* NOLINT(bugprone-macro-parentheses) */                                                         \
        REAL(ret, name, params);                                                                                       \
        char a[2 * PATH_MAX], b[2 * PATH_MAX];                                                                         \
        (void)a, (void)b;                                                                                              \
        pthread_mutex_lock(&lock);                                                                                     \
        const ret result = real call;                                                                                  \
        if (result >= 0) {                                                                                             \
            done;                                                                                                      \
        }                                                                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }

LOGGED(ssize_t, pwrite, (int fd, const void *buf, size_t n, off_t at), (fd, buf, n, at),
       record(buf, (size_t)result, "pwrite %lu %lld %zd\n", inode(fd), (long long)at, result))
LOGGED(ssize_t, pwrite64, (int fd, const void *buf, size_t n, off64_t at), (fd, buf, n, at),
       record(buf, (size_t)result, "pwrite %lu %lld %zd\n", inode(fd), (long long)at, result))
LOGGED(int, ftruncate64, (int fd, off64_t size), (fd, size),
       record("", 0, "truncate %lu %lld\n", inode(fd), (long long)size))
LOGGED(int, fsync, (int fd), (fd), record("", 0, "fsync %lu\n", inode(fd)))
LOGGED(int, fdatasync, (int fd), (fd), record("", 0, "fsync %lu\n", inode(fd)))
LOGGED(int, linkat, (int fromdir, const char *from, int todir, const char *to, int flags),
       (fromdir, from, todir, to, flags),
       record("", 0, "link 0 %s %s\n", absolute(fromdir, from, a), absolute(todir, to, b)))
LOGGED(int, mkdir, (const char *path, mode_t mode), (path, mode), record_made("mkdir", AT_FDCWD, path))
LOGGED(int, mkdirat, (int dir, const char *path, mode_t mode), (dir, path, mode), record_made("mkdir", dir, path))
LOGGED(int, rename, (const char *from, const char *to), (from, to),
       record("", 0, "rename 0 %s %s\n", absolute(AT_FDCWD, from, a), absolute(AT_FDCWD, to, b)))
LOGGED(int, renameat, (int fromdir, const char *from, int todir, const char *to), (fromdir, from, todir, to),
       record("", 0, "rename 0 %s %s\n", absolute(fromdir, from, a), absolute(todir, to, b)))
LOGGED(int, unlink, (const char *path), (path), record("", 0, "unlink 0 %s\n", absolute(AT_FDCWD, path, a)))
LOGGED(int, unlinkat, (int dir, const char *path, int flags), (dir, path, flags),
       record("", 0, "unlink 0 %s\n", absolute(dir, path, a)))
LOGGED(int, rmdir, (const char *path), (path), record("", 0, "unlink 0 %s\n", absolute(AT_FDCWD, path, a)))

int renameat2(int fromdir, const char *from, int todir, const char *to, unsigned flags) {
    REAL(int, renameat2, (int, const char *, int, const char *, unsigned));
    char a[2 * PATH_MAX], b[2 * PATH_MAX];
    if (flags != 0 && getenv("TRACE_NO_EXCHANGE")) { /* as on NFS */
        errno = EINVAL;
        return -1;
    }
    pthread_mutex_lock(&lock);
    const int result = real(fromdir, from, todir, to, flags);
    if (result == 0) {
        record("", 0, "%s 0 %s %s\n", flags & RENAME_EXCHANGE ? "exchange" : "rename", absolute(fromdir, from, a),
               absolute(todir, to, b));
    }
    pthread_mutex_unlock(&lock);
    return result;
}

char *mkdtemp(char *template) {
    REAL(char *, mkdtemp, (char *));
    pthread_mutex_lock(&lock);
    char *result = real(template);
    if (result) {
        record_made("mkdir", AT_FDCWD, result);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
