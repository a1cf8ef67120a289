/*
 * In the reader process: reads files as their descriptors arrive. See server.h.
 */
#include "hdf5/reader_process/scan.h"
#include "hdf5/reader_process/server.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* @return the descriptor of the next file; -1 if there is none. */
static int receive_file(int socket, fc_h5_file_request *request) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec bytes = {request, sizeof *request};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n;
    int fd = -1;
    do {
        n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    const struct cmsghdr *head = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (head && head->cmsg_len == CMSG_LEN(sizeof fd)) {
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    }
    request->path[sizeof request->path - 1] = '\0';
    return fd;
}

int fc_h5_serve_run(void *context, int out, fc_h5_shared *shared) {
    const fc_h5_scan *scan = context;
    fc_h5_sink sink = {.fd = out};
    fc_h5_file_request request = {.path = ""};
    int fd;
    /* Without the filter, the limit of descriptors alone keeps libhdf5 from opening files, and it cannot be 0 here. */
    if (atomic_load(&shared->missing) & FC_H5_NO_SECCOMP) {
        return 1;
    }
    while ((fd = receive_file(scan->requests, &request)) >= 0) {
        const fc_h5_input input = {
            .path = request.path, .fd = fd, .lent = request.lent, .st = request.st, .span = request.span};
        const bool ok = fc_h5_scan_file(scan, &input, &sink, shared);
        fc_h5_flush(&sink);
        close(fd);
        if (!ok || sink.failed) {
            return sink.failed;
        }
        H5garbage_collect();
    }
    return 0;
}
