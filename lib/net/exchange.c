/*
 * Exchanges with the fetcher: see exchange.h.
 */
#include "net/exchange.h"

#include "base/grow.h"
#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 2, MOST_ADDRESSES = 1024, MOST_NAMES = 1000000, LOOK_MS = 100 };

/* ---- messages ---- */

/* The control data of a message, with aligned room for descriptors. */
typedef union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
} control;

static bool send_request(int fd, const fc_net_request *request, const int *descriptors, size_t count) {
    control c = {.bytes = {0}};
    struct iovec bytes = {(void *)(uintptr_t)request, FC_NET_REQUEST_HEAD + request->name_size};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = c.bytes;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(head), descriptors, count * sizeof(int));
    }
    ssize_t n;
    do {
        n = sendmsg(fd, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n >= 0;
}

/* Whether the job of this thread is cancelled, and waits no longer. */
static bool is_cancelled(const fc_exchange *x) {
    const fc_progress *watched = x->stops && x->patience <= 0 ? fc_progress_watched() : NULL;
    return watched && atomic_load(&watched->cancel);
}

/* Waits for bytes. Servers may be silent for minutes. @return false if the job is cancelled */
static bool wait_for_bytes(fc_exchange *x) {
    struct pollfd end = {.fd = x->answer, .events = POLLIN};
    const fc_progress *watched = x->stops ? fc_progress_watched() : NULL;
    while (!is_cancelled(x) && poll(&end, 1, watched ? LOOK_MS : -1) <= 0) {
        x->patience -= watched && atomic_load(&watched->cancel) ? LOOK_MS : 0;
    }
    return !is_cancelled(x);
}

/* @return false if the fetcher has ended, or the job is cancelled */
static bool receive(fc_exchange *x, void *buf, size_t size) {
    unsigned char *at = buf;
    while (size > 0) {
        const ssize_t n = recv(x->answer, at, size, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            if (wait_for_bytes(x)) {
                continue;
            }
            return false;
        }
        if (n <= 0) {
            return false;
        }
        at += n;
        size -= (size_t)n;
    }
    return true;
}

fc_net_request fc_exchange_request(fc_net_request_kind kind, const char *name) {
    fc_net_request request = {.kind = kind, .name_size = (uint32_t)strnlen(name, FC_NET_MOST_NAME)};
    while (kind != FC_NET_HOST && kind != FC_NET_HIDE && request.name_size > 0 && name[request.name_size - 1] == '/') {
        request.name_size--; /* completion adds one to a folder */
    }
    memcpy(request.name, name, request.name_size);
    return request;
}

/* ---- a request and its answer ---- */

static fc_code fail_ended(const fc_exchange *x, fc_error *err) {
    if (is_cancelled(x)) {
        return fc_fail(err, FC_EINTERRUPTED, "interrupted");
    }
    return fc_fail(err, FC_EIO, "%s: the process that talks to servers has ended", x->name);
}

/* The fetcher is not trusted more than the servers whose answers it reads. */
fc_code fc_exchange_fail_odd(const fc_exchange *x, fc_error *err) {
    return fc_fail(err, FC_EIO, "%s: the process that talks to servers sent what it was not asked for", x->name);
}

/* Only this process may read the files that say where hosts are. */
static fc_code tell_addresses(const fc_exchange *x, const char *where, fc_error *err) {
    char text[MOST_ADDRESSES];
    x->fetcher.module->find_addresses(where, text, sizeof text);
    const fc_net_request request = fc_exchange_request(FC_NET_HOST, text);
    return send_request(x->fetcher.requests, &request, NULL, 0) ? FC_OK : fail_ended(x, err);
}

static fc_code add_name(fc_exchange *x, const char *name, fc_error *err) {
    fc_entry_names *l = x->listed;
    if (!l || !*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
        l->count >= MOST_NAMES) {
        return fc_exchange_fail_odd(x, err);
    }
    FC_NEED(fc_grow(&l->names, &l->capacity, l->count + 1, sizeof *l->names), err, x->name);
    l->names[l->count] = strdup(name);
    FC_NEED(l->names[l->count], err, x->name);
    l->count++;
    return FC_OK;
}

static fc_code take_data(fc_exchange *x, uint64_t size, fc_error *err) {
    if (size > x->size) {
        return fc_exchange_fail_odd(x, err);
    }
    if (!receive(x, x->buffer, (size_t)size)) {
        return fail_ended(x, err);
    }
    x->buffer += size;
    x->size -= (size_t)size;
    return FC_OK;
}

static fc_code take_answers(fc_exchange *x, fc_error *err) {
    char text[FC_NET_MOST_TEXT + 1];
    for (;;) {
        fc_net_answer *a = &x->last;
        if (!receive(x, a, sizeof *a) || a->text > FC_NET_MOST_TEXT || !receive(x, text, a->text)) {
            return fail_ended(x, err);
        }
        text[a->text] = '\0';
        switch (a->kind) {
        case FC_NET_DONE:
        case FC_NET_MISSING:
        case FC_NET_EXISTS:
            return a->size <= INT64_MAX ? FC_OK : fc_exchange_fail_odd(x, err);
        case FC_NET_DATA:
            FC_TRY(take_data(x, a->size, err));
            break;
        case FC_NET_NAME:
            FC_TRY(add_name(x, text, err));
            break;
        case FC_NET_WHERE:
            FC_TRY(tell_addresses(x, text, err));
            break;
        default:
            return fc_fail(err, a->code < FC_EUSAGE || a->code > FC_ENOMEM ? FC_EIO : (fc_code)a->code, "%s", text);
        }
    }
}

void fc_exchange_tell(int to, const fc_net_request *request) {
    (void)send_request(to, request, NULL, 0);
}

fc_code fc_exchange_ask(fc_exchange *x, int to, const fc_net_request *request, int extra, fc_error *err) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "%s: a socket cannot be made", x->name);
    }
    const int descriptors[MOST_DESCRIPTORS] = {ends[1], extra};
    const bool sent = send_request(to, request, descriptors, extra < 0 ? 1 : 2);
    close(ends[1]);
    x->answer = ends[0];
    /* What may change objects is waited for: its outcome must be known. */
    x->stops = x->stops ||
               (request->kind != FC_NET_COMPLETE && request->kind != FC_NET_WHOLE && request->kind != FC_NET_DELETE);
    fc_code rc = sent ? take_answers(x, err) : fail_ended(x, err);
    close(ends[0]);
    return rc;
}
