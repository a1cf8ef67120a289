/*
 * The parent's side of a reader process that reads one file after another. See server.h; serve.c is its other side.
 */
#include "hdf5/reader_process/server.h"

#include "fsdpckpt/try.h"
#include "hdf5/reader_process/lend.h"
#include "hdf5/reader_process/scan.h"
#include "hdf5/reader_process/take.h"
#include "io/path.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* A process that has read this much is replaced, so that every file has nearly all of the limits of one. */
enum { MOST_FILES = 64, MOST_MS = 1000 };

struct fc_h5_server {
    fc_h5_child child;
    fc_h5_in in;
    int requests; /* our end of the socket */
    bool running;
    bool follow_external; /* what the process may do */
    const char *plugins;  /* a folder; NULL: none */
    bool unavailable;
    size_t files; /* number of files that the process has read */
    pid_t owner;  /* the process that started it, and alone may use it */
};

fc_h5_server *fc_h5_server_new(const char *plugins) {
    fc_h5_server *server = calloc(1, sizeof *server);
    if (server) {
        server->plugins = plugins;
    }
    return server;
}

const char *fc_h5_server_plugins(const fc_h5_server *server) {
    return server ? server->plugins : NULL;
}

/* Forgets a process that has ended. */
static void forget(fc_h5_server *server) {
    close(server->requests);
    server->running = false;
}

static void stop(fc_h5_server *server) {
    if (!server->running) {
        return;
    }
    if (server->owner == getpid()) {
        fc_h5_in_free(&server->in);
        fc_h5_child_abandon(&server->child);
    } else {
        fc_h5_in_free(&server->in);
        fc_h5_child_unprepare(&server->child);
    }
    forget(server);
}

void fc_h5_server_free(fc_h5_server *server) {
    if (server) {
        stop(server);
        free(server);
    }
}

/* @return false if it cannot be started. */
static bool start(fc_h5_server *server, bool follow_external) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return false;
    }
    fc_h5_scan scan = {.follow_external = follow_external, .plugins = server->plugins, .requests = ends[1]};
    const fc_h5_job job = {.prepare = fc_h5_scan_prepare,
                           .run = fc_h5_serve_run,
                           .context = &scan,
                           .keep = &ends[1],
                           .nkeep = 1,
                           .spin_ms = 5000,
                           .may_open = follow_external,
                           .receives = true};
    const fc_code rc = fc_h5_child_start(&server->child, &job, NULL);
    close(ends[1]);
    if (rc != FC_OK) {
        close(ends[0]);
        return false;
    }
    fcntl(server->child.fd, F_SETPIPE_SZ, FC_H5_PIPE_SIZE);
    server->in = (fc_h5_in){.child = &server->child};
    server->requests = ends[0];
    server->running = true;
    server->follow_external = follow_external;
    server->files = 0;
    server->owner = getpid();
    return true;
}

/* Sends a file to the process, as descriptor `fd`. @return false if it has ended. */
static bool send_file(const fc_h5_server *server, const fc_h5_given *given, const fc_h5_loan *loan, int fd) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    fc_h5_file_request request;
    const size_t length = strlen(given->path);
    if (length >= sizeof request.path || fc_fstat(given->fd, &request.st) != 0) {
        return false;
    }
    request.span = given->span;
    request.lent = loan->to >= 0 ? loan->size : 0;
    request.st.st_size = (off_t)given->size;
    memcpy(request.path, given->path, length + 1);
    struct iovec bytes = {&request, offsetof(fc_h5_file_request, path) + length + 1};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    ssize_t n;
    do {
        n = sendmsg(server->requests, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)bytes.iov_len;
}

/* Reads the file in the running process, which is ended after a failure. */
static fc_code read_now(fc_h5_server *server, const fc_h5_given *given, fc_arena *arena, fc_h5_file *file,
                        fc_error *err) {
    bool broken = true;
    fc_h5_loan loan;
    int fd;
    fc_code rc = FC_ECORRUPT;
    FC_TRY(fc_h5_loan_begin(&loan, given->path, given->fd, given->file_size, &fd, err));
    const bool sent = send_file(server, given, &loan, fd);
    fc_h5_loan_given(&loan, fd);
    if (sent) {
        rc = fc_h5_take_file(&server->in, arena, given->path, given->size, &loan, file, &broken, err);
    }
    fc_h5_loan_end(&loan);
    if (rc == FC_OK) {
        server->files++;
        return rc;
    }
    const unsigned missing = (unsigned)atomic_load(&server->child.shared->missing);
    server->unavailable = broken && server->files == 0 && (missing & FC_H5_NO_SECCOMP);
    shutdown(server->requests, SHUT_RDWR); /* ends a process that waits for the next file */
    rc = fc_h5_end_taking(&server->in, given->path, rc, broken, err);
    forget(server);
    return rc;
}

fc_code fc_h5_server_read(fc_h5_server *server, const fc_h5_given *given, fc_arena *arena, fc_h5_file *file,
                          bool *available, fc_error *err) {
    bool alone;
    fc_code rc;
    do {
        if (server->follow_external != given->follow_external || server->owner != getpid()) {
            stop(server);
        }
        *available = !server->unavailable && (server->running || start(server, given->follow_external));
        if (!*available) {
            return FC_OK;
        }
        alone = server->files == 0;
        rc = read_now(server, given, arena, file, err);
    } while (rc != FC_OK && !alone && server->in.unlent.code == FC_OK);
    if (server->unavailable) {
        *available = false;
        return FC_OK;
    }
    if (server->running && (server->files >= MOST_FILES || fc_h5_child_processor_ms(&server->child) >= MOST_MS)) {
        stop(server);
    }
    return rc;
}
