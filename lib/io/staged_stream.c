/*
 * Files in buckets whose header is known last: see staged_stream.h.
 *
 * The data is in memory with holes in place of what was sent. There is room for the header before it, so the header and
 * the data after it are one piece, the first part, wherever the header begins.
 */
#include "io/staged_stream.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/staged_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct fc_staged_stream {
    char *path;        /* with FC_STAGED */
    int fd;            /* memfd */
    fc_upload *upload; /* NULL: nothing was sent */
    uint64_t head;     /* where the data begins in the memfd */
    uint64_t begin;    /* bytes of data before the current part */
    uint64_t end;      /* bytes of data */
    unsigned part;     /* number of the current part, from 1 */
};

static uint64_t part_size(unsigned part) {
    enum { EQUAL = 4000, DOUBLED = 1000 }; /* parts of FC_STREAM_PART bytes; parts after which the size doubles */
    return (uint64_t)FC_STREAM_PART << (part < EQUAL ? 0 : 1 + (part - EQUAL) / DOUBLED);
}

fc_code fc_staged_stream_new(const char *path, uint64_t most_header, fc_staged_stream **out, fc_error *err) {
    fc_staged_stream *s = *out = calloc(1, sizeof *s);
    FC_NEED(s, err, fc_staged_final_name(path));
    *s = (fc_staged_stream){.path = strdup(path), .head = most_header, .part = 1};
    s->fd = memfd_create("fsdpckpt-stream", MFD_CLOEXEC);
    FC_NEED(s->path, err, fc_staged_final_name(path));
    return s->fd < 0 ? fc_fail_errno(err, errno, "%s: memory cannot be reserved", fc_staged_final_name(path)) : FC_OK;
}

void fc_staged_stream_free(fc_staged_stream *s) {
    int patience = FC_UPLOAD_PATIENCE;
    if (s) {
        fc_upload_abort(s->upload, &patience);
        if (s->fd >= 0) {
            close(s->fd);
        }
        free(s->path);
        free(s);
    }
}

static fc_code begin_upload(fc_staged_stream *s, fc_error *err) {
    fc_staged_target *target;
    (void)fc_staged_find_file(s->path, &target);
    return fc_upload_begin(fc_staged_final_name(s->path), target->run, NULL, &s->upload, err);
}

/* Sends the current part, which is not the first one, and frees its memory. */
static fc_code send_part(fc_staged_stream *s, fc_error *err) {
    const uint64_t from = s->head + s->begin, size = s->end - s->begin;
    if (s->part > FC_UPLOAD_MOST_PARTS) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: it is too large for an object in a bucket: write it on this machine",
                       fc_staged_final_name(s->path));
    }
    FC_TRY(s->upload ? FC_OK : begin_upload(s, err));
    FC_TRY(fc_upload_part(s->upload, s->fd, from, size, s->part, err));
    return fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)size) == 0
               ? FC_OK
               : fc_fail_errno(err, errno, "%s: memory cannot be freed", fc_staged_final_name(s->path));
}

fc_code fc_staged_stream_add(fc_staged_stream *s, const unsigned char *bytes, size_t size, fc_error *err) {
    while (size > 0) {
        const uint64_t room = s->begin + part_size(s->part) - s->end;
        const size_t some = size < room ? size : (size_t)room;
        FC_TRY(fc_pwrite_full(s->fd, bytes, some, s->head + s->end, fc_staged_final_name(s->path), err));
        s->end += some;
        if (some == room) {
            FC_TRY(s->part > 1 ? send_part(s, err) : FC_OK);
            s->begin = s->end;
            s->part++;
        }
        bytes += some;
        size -= some;
    }
    return FC_OK;
}

/* Copies a file of which nothing was sent: it is sent as a whole. */
static fc_code copy_whole(const fc_staged_stream *s, int to, uint64_t from, fc_error *err) {
    enum { BLOCK = 256 << 10 };
    unsigned char *buffer = malloc(BLOCK);
    fc_code rc = FC_OK;
    FC_NEED(buffer, err, fc_staged_final_name(s->path));
    for (uint64_t at = from, end = s->head + s->end; at < end && rc == FC_OK;) {
        const size_t some = end - at < BLOCK ? (size_t)(end - at) : BLOCK;
        rc = fc_pread_full(s->fd, buffer, some, at, fc_staged_final_name(s->path), err);
        rc = rc == FC_OK ? fc_pwrite_full(to, buffer, some, at - from, fc_staged_final_name(s->path), err) : rc;
        at += some;
    }
    free(buffer);
    return rc;
}

/* Sends the last part and the first one, and gives the upload to the file. */
static fc_code send_rest(fc_staged_stream *s, fc_staged_file *file, uint64_t from, fc_error *err) {
    const unsigned count = s->part - (s->begin == s->end);
    FC_TRY(s->begin < s->end ? send_part(s, err) : FC_OK);
    FC_TRY(fc_upload_part(s->upload, s->fd, from, s->head + FC_STREAM_PART - from, 1, err));
    file->nparts = count;
    file->upload = s->upload;
    s->upload = NULL;
    return FC_OK;
}

fc_code fc_staged_stream_finish(fc_staged_stream *s, const char *header, size_t size, fc_error *err) {
    fc_staged_target *target;
    fc_code rc;
    if (size > s->head) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: its header is too large", fc_staged_final_name(s->path));
    }
    FC_TRY(fc_pwrite_full(s->fd, header, size, s->head - size, fc_staged_final_name(s->path), err));
    const int fd = fc_open(s->path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be created", fc_staged_final_name(s->path));
    }
    fc_staged_file *file = fc_staged_find_file(s->path, &target);
    file->engine = true;
    rc = s->upload ? send_rest(s, file, s->head - size, err) : copy_whole(s, fd, s->head - size, err);
    return fc_close_written(fd, rc, s->path, err);
}
