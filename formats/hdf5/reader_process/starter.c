/*
 * Starts processes for requests over a socket: see starter.h. They are children of the process that asks
 * (CLONE_PARENT), which waits for them and kills them like those that it forked itself.
 */
#include "hdf5/reader_process/starter.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INPUT, OUT, SHARED, DESCRIPTORS };

/* The control data of a message, with aligned room for the descriptors. */
typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
} control;

/* ---- in the starter ---- */

/* @return false if the parent has exited. */
static bool receive(int fd, fc_h5_request *request, int *descriptors) {
    control c;
    struct iovec bytes = {request, sizeof *request};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = c.bytes, .msg_controllen = sizeof c.bytes};
    ssize_t n;
    do {
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    const struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (n != sizeof *request || !head || head->cmsg_len != CMSG_LEN(DESCRIPTORS * sizeof(int))) {
        return false;
    }
    memcpy(descriptors, CMSG_DATA(head), DESCRIPTORS * sizeof *descriptors);
    return true;
}

static void __attribute__((noreturn)) serve(int fd, fc_h5_make_job *make_job, void *context) {
    fc_h5_request request;
    int descriptors[DESCRIPTORS];
    const fc_h5_job nothing = {.keep = NULL};
    if (!fc_h5_child_close_others(&nothing, fd)) {
        _exit(1);
    }
    while (receive(fd, &request, descriptors)) {
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_PARENT | SIGCHLD, NULL, NULL, NULL, NULL);
        if (pid == 0) {
            fc_h5_job job = {.keep = NULL};
            make_job(context, &request, descriptors[INPUT], &job);
            fc_h5_child_become(&job, descriptors[OUT], descriptors[SHARED], 0);
        }
        int64_t answer = pid < 0 ? -errno : pid;
        for (int i = 0; i < DESCRIPTORS; i++) {
            close(descriptors[i]);
        }
        if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) {
            break;
        }
    }
    _exit(0);
}

/* ---- in the parent ---- */

fc_code fc_h5_starter_start(fc_h5_starter *starter, fc_h5_make_job *make_job, void *context, fc_error *err) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "the HDF5 reader process cannot be started");
    }
    pid_t pid = fork();
    if (pid == 0) {
        serve(ends[1], make_job, context);
    }
    int saved = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return fc_fail_errno(err, saved, "the HDF5 reader process cannot be started");
    }
    starter->pid = pid;
    starter->owner = getpid();
    starter->fd = ends[0];
    pthread_mutex_init(&starter->lock, NULL);
    return FC_OK;
}

void fc_h5_starter_stop(fc_h5_starter *starter) {
    if (starter->pid == 0) {
        return;
    }
    if (starter->owner == getpid()) {
        shutdown(starter->fd, SHUT_RDWR); /* forked processes may hold copies of the descriptor for long */
        while (waitpid(starter->pid, NULL, 0) < 0 && errno == EINTR) {
        }
        pthread_mutex_destroy(&starter->lock);
    }
    close(starter->fd);
    starter->pid = 0;
}

static bool ask(const fc_h5_starter *starter, const fc_h5_request *request, const int *descriptors, int64_t *answer) {
    control c = {.bytes = {0}};
    struct iovec bytes = {(void *)(uintptr_t)request, sizeof *request};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = c.bytes, .msg_controllen = sizeof c.bytes};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(DESCRIPTORS * sizeof(int));
    memcpy(CMSG_DATA(head), descriptors, DESCRIPTORS * sizeof *descriptors);
    ssize_t n;
    do {
        n = sendmsg(starter->fd, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n != sizeof *request) {
        return false;
    }
    do {
        n = recv(starter->fd, answer, sizeof *answer, 0);
    } while (n < 0 && errno == EINTR);
    if (n >= 0 && n != sizeof *answer) {
        errno = ESRCH;
    }
    return n == sizeof *answer;
}

fc_code fc_h5_child_start_by(fc_h5_starter *starter, fc_h5_child *child, const fc_h5_request *request, int input,
                             const fc_h5_job *like, fc_error *err) {
    int out, shared;
    FC_TRY(fc_h5_child_prepare(child, like, &out, &shared, err));
    const int descriptors[DESCRIPTORS] = {input, out, shared};
    int64_t answer = 0;
    pthread_mutex_lock(&starter->lock);
    bool asked = ask(starter, request, descriptors, &answer);
    int saved = asked && answer < 0 ? (int)-answer : errno;
    pthread_mutex_unlock(&starter->lock);
    close(out);
    close(shared);
    if (!asked || answer <= 0) {
        fc_h5_child_unprepare(child);
        return fc_fail_errno(err, saved, "the HDF5 reader process cannot be started");
    }
    child->pid = (pid_t)answer;
    return FC_OK;
}
