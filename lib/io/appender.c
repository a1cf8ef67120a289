/*
 * A file that is written from its first byte to its last one: on this machine, or in a bucket, where it is sent
 * meanwhile. See fsdpckpt/io.h.
 */
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/staged_objects.h"
#include "io/staged_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

struct fc_appender {
    char *path;
    int fd;                   /* -1: it is in a bucket */
    fc_staged_stream *stream; /* NULL: it is on this machine */
    uint64_t end;
};

fc_code fc_appender_new(const char *path, fc_appender **out, fc_error *err) {
    fc_appender *a = *out = calloc(1, sizeof *a);
    FC_NEED(a, err, path);
    a->fd = -1;
    a->path = strdup(path);
    FC_NEED(a->path, err, path);
    if (fc_is_staged(path)) {
        return fc_staged_stream_new(path, 0, &a->stream, err);
    }
    a->fd = fc_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    return a->fd < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be created", path) : FC_OK;
}

fc_code fc_appender_add(fc_appender *a, const void *bytes, size_t size, fc_error *err) {
    FC_TRY(a->stream ? fc_staged_stream_add(a->stream, bytes, size, err)
                     : fc_pwrite_full(a->fd, bytes, size, a->end, a->path, err));
    a->end += size;
    return FC_OK;
}

fc_code fc_appender_finish(fc_appender *a, fc_error *err) {
    const int fd = a->fd;
    a->fd = -1;
    return a->stream ? fc_staged_stream_finish(a->stream, "", 0, err) : fc_close_written(fd, FC_OK, a->path, err);
}

void fc_appender_free(fc_appender *a) {
    if (a) {
        (void)fc_close_written(a->fd, FC_OK, a->path, NULL);
        fc_staged_stream_free(a->stream);
        free(a->path);
        free(a);
    }
}
