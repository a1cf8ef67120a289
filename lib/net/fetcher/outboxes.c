/*
 * Outboxes: answers, sent as fast as each reader takes its own. The fetcher never waits for one of them, because all
 * others would wait, too. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LEAST_OUTBOX = 4096 };

static outbox *outbox_of(const fetcher *f, int socket) {
    outbox *box = f->outboxes;
    while (box && box->socket != socket) {
        box = box->next;
    }
    return box;
}

bool outbox_has(const fetcher *f, int socket) {
    return outbox_of(f, socket) != NULL;
}

/* Sends what the other end takes now. @return bytes; negative: it has gone */
static ssize_t send_now(int socket, struct iovec *parts, size_t count) {
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    ssize_t n;
    do {
        n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n < 0 && errno == EAGAIN ? 0 : n;
}

/* Keeps bytes. @return false: out of memory */
static bool keep(fetcher *f, outbox *box, int socket, const void *bytes, size_t size) {
    if (!box) {
        box = calloc(1, sizeof *box);
        if (!box) {
            return false;
        }
        *box = (outbox){.next = f->outboxes, .socket = socket};
        f->outboxes = box;
    }
    if (size > box->capacity - box->size) {
        const size_t capacity = 2 * box->size + size + LEAST_OUTBOX;
        unsigned char *more = realloc(box->bytes, capacity);
        if (!more) {
            return false;
        }
        box->bytes = more;
        box->capacity = capacity;
    }
    memcpy(box->bytes + box->size, bytes, size);
    box->size += size;
    return true;
}

bool fetcher_send(fetcher *f, int socket, fc_net_answer head, const void *bytes, size_t size) {
    struct iovec parts[] = {{&head, sizeof head}, {(void *)(uintptr_t)bytes, size}};
    outbox *box = outbox_of(f, socket);
    const ssize_t n = box ? 0 : send_now(socket, parts, size > 0 ? 2 : 1);
    if (n < 0) {
        return false;
    }
    size_t skip = (size_t)n;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const size_t taken = skip < parts[i].iov_len ? skip : parts[i].iov_len;
        skip -= taken;
        if (parts[i].iov_len > taken &&
            !keep(f, outbox_of(f, socket), socket, (const char *)parts[i].iov_base + taken, parts[i].iov_len - taken)) {
            shutdown(socket, SHUT_RDWR); /* half an answer is none */
            return false;
        }
    }
    return true;
}

void fetcher_send_error(fetcher *f, int socket, const fc_error *error) {
    const size_t n = strnlen(error->message, FC_NET_MOST_TEXT);
    fetcher_send(f, socket, (fc_net_answer){.kind = FC_NET_ERROR, .code = (uint32_t)error->code, .text = (uint32_t)n},
                 error->message, n);
}

void fetcher_close(fetcher *f, int socket) {
    outbox *box = outbox_of(f, socket);
    if (box) {
        box->ends = true;
    } else {
        close(socket);
    }
}

/* Removes the first one of a list. */
static void end_first(outbox **at) {
    outbox *box = *at;
    *at = box->next;
    if (box->ends) {
        close(box->socket);
    }
    free(box->bytes);
    free(box);
}

/* Sends more of what is kept. @return whether nothing is left of it: it is sent, or the caller has gone */
static bool send_more(outbox *box) {
    struct iovec rest = {box->bytes + box->sent, box->size - box->sent};
    const ssize_t n = send_now(box->socket, &rest, 1);
    box->sent += n > 0 ? (size_t)n : 0;
    return n < 0 || box->sent == box->size;
}

void outboxes_send(fetcher *f) {
    outbox **at = &f->outboxes, *empty = NULL;
    while (*at) {
        outbox *box = *at;
        if (send_more(box)) {
            *at = box->next;
            box->next = empty;
            empty = box;
        } else {
            at = &box->next;
        }
    }
    while (empty) { /* a transfer that goes on may make another one */
        if (!empty->ends) {
            transfers_go_on(f, empty->socket);
        }
        end_first(&empty);
    }
}
