/*
 * Complete reads and writes on descriptors, with errors that name the file and the offset.
 */
#include "io/file.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/hub_cache.h"
#include "io/path.h"
#include "net/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

fc_code fc_open_input(const char *path, int *fd, uint64_t *size, fc_error *err) {
    struct stat st;
    if (fc_is_remote(path)) {
        return fc_remote_open(path, fd, size, err);
    }
    /* With O_NONBLOCK, opening a FIFO without a writer does not hang. It has no effect on regular files. */
    int f = fc_open(path, O_RDONLY | O_NONBLOCK, 0);
    if (f < 0) {
        return errno == ENOENT || errno == ENOTDIR ? fc_fail(err, FC_ECORRUPT, "%s: the file is missing", path)
                                                   : fc_fail_errno(err, errno, "%s: cannot be opened", path);
    }
    if (fstat(f, &st) != 0) {
        int saved = errno;
        close(f);
        return fc_fail_errno(err, saved, "%s: cannot be examined", path);
    }
    if (!S_ISREG(st.st_mode)) {
        close(f);
        return fc_fail(err, FC_ECORRUPT, "%s: not a regular file", path);
    }
    *fd = f;
    *size = (uint64_t)st.st_size;
    return FC_OK;
}

fc_code fc_check_link(const char *path, const char *name, const char *root, fc_error *err) {
    struct stat st;
    char target[PATH_MAX];
    size_t n = strlen(root);
    if (!strchr(name, '/') && fc_lstat(path, &st) == 0 && !S_ISLNK(st.st_mode)) {
        return FC_OK;
    }
    if (!fc_realpath(path, target)) {
        return FC_OK; /* opening the file will report that it is missing */
    }
    if (fc_is_hub_blob(target, root)) {
        return FC_OK;
    }
    if (strncmp(target, root, n) == 0 && (target[n] == '/' || (n == 1 && root[0] == '/'))) {
        return FC_OK;
    }
    return fc_advise(
        err, fc_fail(err, FC_ECORRUPT, "%s: a symbolic link that leads out of the checkpoint, to %s", path, target),
        FC_HINT_FOLLOW_EXTERNAL, NULL);
}

fc_code fc_check_given(const char *path, const char *what, fc_error *err) {
    if (fc_access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR)) { /* opening it reports any other error */
        return FC_OK;
    }
    return fc_fail(err, FC_EUSAGE, "%s: no such file; it should be %s", path, what);
}

fc_code fc_check_named(const char *as, const char *kind, const char *given, const char *known, const char *example,
                       fc_error *err) {
    if (fc_access(given, F_OK) == 0 || errno != ENOENT) { /* opening the file will report any other error */
        return FC_OK;
    }
    return fc_fail(err, FC_EUSAGE, "%s '%s': neither a file nor a known %s; %s; a file is JSON such as %s", as, given,
                   kind, known, example);
}

void fc_pread_expect(int fd, const char *path, uint64_t size, uint64_t offset) {
    if (fc_is_remote(path)) {
        fc_remote_ahead(fd, size, offset);
    }
}

fc_code fc_pread_full(int fd, void *buf, size_t size, uint64_t offset, const char *path, fc_error *err) {
    unsigned char *p = buf;
    while (size > 0) {
        ssize_t n = pread(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == ESPIPE) { /* a socket */
            return fc_remote_read(fd, p, size, offset, path, err);
        }
        if (n < 0) {
            return fc_fail_errno(err, errno, "%s: reading at offset %" PRIu64, path, offset);
        }
        if (n == 0) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: truncated: the file ends at offset %" PRIu64 ", %zu more bytes are expected", path,
                           offset, size);
        }
        p += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return FC_OK;
}

ssize_t fc_pread_some(int fd, void *buf, size_t size, uint64_t offset) {
    struct stat st;
    ssize_t n;
    do {
        n = pread(fd, buf, size, (off_t)offset);
    } while (n < 0 && errno == EINTR);
    if (n >= 0 || errno != ESPIPE) {
        return n;
    }
    if (fc_fstat(fd, &st) != 0) {
        return -1;
    }
    const uint64_t left = offset < (uint64_t)st.st_size ? (uint64_t)st.st_size - offset : 0;
    const size_t some = left < size ? (size_t)left : size;
    return fc_pread_full(fd, buf, some, offset, "a file on a server", NULL) == FC_OK ? (ssize_t)some : -1;
}

static fc_code read_open(int fd, const char *path, size_t size, char **text, fc_error *err) {
    char *bytes = malloc(size + 1);
    FC_NEED(bytes, err, path);
    fc_code rc = fc_pread_full(fd, bytes, size, 0, path, err);
    if (rc != FC_OK) {
        free(bytes);
        return rc;
    }
    *text = bytes;
    return FC_OK;
}

fc_code fc_read_whole(const char *path, const char *what, uint64_t most, char **text, size_t *size, fc_error *err) {
    int fd = -1;
    uint64_t bytes = 0;
    fc_code rc;
    *text = NULL;
    FC_TRY(fc_open_input(path, &fd, &bytes, err));
    if (bytes > most || bytes >= SIZE_MAX) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: has %" PRIu64 " bytes; %s of more than %" PRIu64 " is not read", path,
                     bytes, what, most);
    } else {
        *size = (size_t)bytes;
        rc = read_open(fd, path, *size, text, err);
    }
    close(fd);
    return rc;
}

fc_code fc_close_written(int fd, fc_code rc, const char *path, fc_error *err) {
    if (fd >= 0 && close(fd) != 0 && rc == FC_OK) {
        rc = fc_fail_errno(err, errno, "%s: closing failed", path);
    }
    return rc;
}

fc_code fc_create_zeros(const char *path, uint64_t size, fc_error *err) {
    int fd = fc_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    fc_code rc = FC_OK;
    if (ftruncate(fd, (off_t)size) != 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot have %" PRIu64 " bytes", path, size);
    }
    return fc_close_written(fd, rc, path, err);
}

fc_code fc_pwrite_full(int fd, const void *buf, size_t size, uint64_t offset, const char *path, fc_error *err) {
    const unsigned char *p = buf;
    while (size > 0) {
        ssize_t n = pwrite(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return fc_fail_errno(err, n < 0 ? errno : EIO, "%s: writing at offset %" PRIu64, path, offset);
        }
        p += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return FC_OK;
}

bool fc_path_is_safe(const char *name) {
    if (*name == '\0' || *name == '/') {
        return false;
    }
    for (const char *at = name;;) {
        size_t len = strcspn(at, "/");
        if (len == 0 || (len == 1 && at[0] == '.') || (len == 2 && at[0] == '.' && at[1] == '.')) {
            return false;
        }
        at += len;
        if (*at == '\0') {
            return true;
        }
        at++;
    }
}
