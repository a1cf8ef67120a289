/*
 * The loop of the fetcher: takes requests, and lets libcurl work. See fetcher.h.
 */
#include "net/fetcher/ahead.h"
#include "net/fetcher/crowds.h"
#include "net/fetcher/uploads.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { DESCRIPTORS = 2, MOST_MESSAGES = 64, LEAVE_MS = 10000 };

int64_t fetcher_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* The control data of a message, with aligned room for descriptors. */
typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
} control;

/* Receives one request without waiting. @return bytes; 0: the other end is closed; negative: there is none */
static ssize_t receive(int socket, fc_net_request *request, int descriptors[DESCRIPTORS]) {
    control c;
    struct iovec bytes = {request, sizeof *request - 1};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = c.bytes, .msg_controllen = sizeof c.bytes};
    const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    descriptors[0] = descriptors[1] = -1;
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR) ? -1 : 0;
    }
    const struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        memcpy(descriptors, CMSG_DATA(head), head->cmsg_len - CMSG_LEN(0));
    }
    ((char *)request)[n] = '\0'; /* after the name */
    return n;
}

static void close_file(fetcher *f, opened_file *file) {
    if (file->socket >= 0) {
        ahead_drop(f, file->socket);
        close(file->socket);
        file->socket = -1;
        if (file->upload) {
            upload_closed(f, file->upload);
        }
    }
}

/* The caller has ended. Nothing more is done, except that its uploads are aborted. */
static void prepare_to_leave(fetcher *f) {
    for (size_t i = 0; f->files && i < f->nfiles; i++) {
        close_file(f, &f->files[i]);
    }
    f->leaves = fetcher_now() + LEAVE_MS;
}

static bool has_uploads(const fetcher *f) {
    bool has = false;
    for (const transfer *t = f->transfers; t && !has; t = t->next) {
        has = t->purpose == FOR_BEGIN || t->purpose == FOR_ABORT;
    }
    return has;
}

static void take_request(fetcher *f, int index) {
    fc_net_request request;
    int descriptors[DESCRIPTORS];
    opened_file *from = index < 0 ? NULL : &f->files[index];
    for (int i = 0; i < MOST_MESSAGES; i++) {
        const ssize_t n = receive(from ? from->socket : f->requests, &request, descriptors);
        if (n < 0) {
            return;
        }
        if (n == 0) {
            if (from) {
                close_file(f, from);
            } else {
                prepare_to_leave(f);
            }
            return;
        }
        if (request.kind == FC_NET_HOST) {
            transfers_host_known(f, request.name);
        } else if (request.kind == FC_NET_AHEAD) {
            if (!from) {
                object_expect(f, request.name);
            } else if (from->object) {
                ahead_begin(f, from, &request);
            }
        } else if (descriptors[0] < 0) {
            return; /* nobody to answer */
        } else if (from && from->upload) {
            upload_request_of(f, from->upload, &request, descriptors[0], descriptors[1]);
        } else if (from && request.kind == FC_NET_READ) {
            object_read(f, from, &request, descriptors[0]);
        } else if (from) {
            object_tell(f, from->object, descriptors[0]);
            fetcher_close(f, descriptors[0]);
        } else if (request.kind == FC_NET_HIDE) {
            const uint64_t number = query_keep(f, request.name);
            fetcher_send(f, descriptors[0], (fc_net_answer){.kind = FC_NET_DONE, .size = number}, NULL, 0);
            fetcher_close(f, descriptors[0]);
        } else if (request.kind >= FC_NET_BEGIN) {
            upload_request(f, &request, descriptors[0], descriptors[1]);
        } else {
            if (request.kind == FC_NET_LOOK) {
                fetcher_forget(f, request.name);
            }
            object_request(f, (fc_net_request_kind)request.kind, request.name, descriptors[0], descriptors[1]);
            from = NULL;
        }
        from = index < 0 ? NULL : &f->files[index]; /* the list may have moved */
    }
}

static void drop_closed(fetcher *f) {
    size_t kept = 0;
    for (size_t i = 0; i < f->nfiles; i++) {
        if (f->files[i].socket >= 0) {
            f->files[kept++] = f->files[i];
        }
    }
    f->nfiles = kept;
}

/* Waits for requests, servers or time. @return false: out of memory */
static bool wait_and_take(fetcher *f) {
    const size_t count = f->leaves ? 0 : f->nfiles + 1;
    size_t all = f->nfiles + 1;
    for (const outbox *box = f->outboxes; box; box = box->next) {
        all++;
    }
    struct curl_waitfd *fds = calloc(all, sizeof *fds);
    int ready = 0;
    if (!fds) {
        return false;
    }
    fds[0] = (struct curl_waitfd){f->requests, CURL_WAIT_POLLIN, 0};
    for (size_t i = 0; i + 1 < count; i++) {
        fds[i + 1] = (struct curl_waitfd){f->files[i].socket, CURL_WAIT_POLLIN, 0};
    }
    all = count;
    for (const outbox *box = f->outboxes; box; box = box->next) {
        fds[all++] = (struct curl_waitfd){box->socket, CURL_WAIT_POLLOUT, 0};
    }
    curl_multi_poll(f->multi, fds, (unsigned)all, transfers_pause(f), &ready);
    outboxes_send(f);
    for (size_t i = count; i-- > 0;) {
        if (fds[i].revents) {
            take_request(f, (int)i - 1);
        }
    }
    free(fds);
    drop_closed(f);
    return true;
}

int fetcher_serve(void *state) {
    fetcher *f = state;
    int running;
    for (;;) {
        bool again = f->multi != NULL;
        while (again) { /* the end of a transfer makes room for others */
            transfers_start(f);
            curl_multi_perform(f->multi, &running);
            again = transfers_finish(f) || crowds_relieve(f);
        }
        if (f->leaves && (!has_uploads(f) || fetcher_now() > f->leaves)) {
            return 0;
        }
        if (!wait_and_take(f)) {
            return 1;
        }
    }
}
