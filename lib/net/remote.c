/*
 * Asks the fetcher about names, and for bytes: see remote.h.
 */
#include "net/remote.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "net/start.h"
#include "net/wire.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 2, MOST_ADDRESSES = 1024, MOST_NAMES = 1000000 };

static const char *const schemes[] = {"https://", "http://", "s3://", "gs://", "hf://"};

bool fc_is_remote(const char *path) {
    bool is = false;
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes && !is; i++) {
        is = strncmp(path, schemes[i], strlen(schemes[i])) == 0;
    }
    return is;
}

bool fc_remote_is_root(const char *name) {
    const char *host = strstr(name, "://") + 3;
    const char *rest = strchr(host, '/');
    if (rest && strncmp(name, "hf://", 5) == 0) {
        rest = strchr(rest + 1, '/');
    }
    return !rest || rest[1] == '\0';
}

fc_code fc_remote_check(const char *name, fc_error *err) {
    const char *host = strstr(name, "://") + 3;
    const size_t host_size = strcspn(host, "/"), shown = (size_t)(host - name);
    const bool is_url = strncmp(name, "http", 4) == 0, is_hub = strncmp(name, "hf://", 5) == 0;
    const char *second = host[host_size] ? host + host_size + 1 : "";
    if (is_url && (memchr(host, '@', host_size) || strpbrk(host, "?#"))) {
        return fc_fail(
            err, FC_EUSAGE,
            "%.*s...: a URL with a user, a query or a fragment is refused, because messages and reports would "
            "show that part: leave it out",
            (int)shown, name);
    }
    if (is_hub && (host_size == 0 || strcspn(second, "/@") == 0)) {
        return fc_fail(err, FC_EUSAGE, "%.256s: is not the name of a model on the hub: hf://owner/model[@revision]",
                       name);
    }
    if (host_size == 0 || (is_url && host[host_size] == '\0') || strlen(name) > FC_NET_MOST_NAME) {
        return fc_fail(err, FC_EUSAGE,
                       "%.256s: is not the name of a file or a folder on a server, such as "
                       "https://host/model.safetensors or s3://bucket/folder",
                       name);
    }
    return FC_OK;
}

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

/* @return false if the fetcher has ended */
static bool receive(int fd, void *buf, size_t size) {
    unsigned char *at = buf;
    while (size > 0) {
        const ssize_t n = recv(fd, at, size, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        at += n;
        size -= (size_t)n;
    }
    return true;
}

static fc_net_request named(fc_net_request_kind kind, const char *name) {
    fc_net_request request = {.kind = kind, .name_size = (uint32_t)strnlen(name, FC_NET_MOST_NAME)};
    while (kind != FC_NET_HOST && request.name_size > 0 && name[request.name_size - 1] == '/') {
        request.name_size--; /* completion adds one to a folder */
    }
    memcpy(request.name, name, request.name_size);
    return request;
}

/* ---- a request and its answer ---- */

typedef struct exchange {
    fc_fetcher fetcher;
    const char *name;       /* for messages */
    int answer;             /* our end of the socket for the answer */
    fc_entry_names *listed; /* receives FC_NET_NAME */
    unsigned char *buffer;  /* receives FC_NET_DATA */
    size_t size;            /* bytes that are still expected there */
    fc_net_answer last;     /* FC_NET_DONE or FC_NET_MISSING */
} exchange;

static fc_code fail_ended(const exchange *x, fc_error *err) {
    return fc_fail(err, FC_EIO, "%s: the process that reads from servers has ended", x->name);
}

/* The fetcher is not trusted more than the servers whose answers it reads. */
static fc_code fail_odd(const exchange *x, fc_error *err) {
    return fc_fail(err, FC_EIO, "%s: the process that reads from servers sent what it was not asked for", x->name);
}

/* Only this process may read the files that say where hosts are. */
static fc_code tell_addresses(const exchange *x, const char *where, fc_error *err) {
    char text[MOST_ADDRESSES];
    x->fetcher.module->find_addresses(where, text, sizeof text);
    const fc_net_request request = named(FC_NET_HOST, text);
    return send_request(x->fetcher.requests, &request, NULL, 0) ? FC_OK : fail_ended(x, err);
}

static fc_code add_name(exchange *x, const char *name, fc_error *err) {
    fc_entry_names *l = x->listed;
    if (!l || !*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
        l->count >= MOST_NAMES) {
        return fail_odd(x, err);
    }
    FC_NEED(fc_grow(&l->names, &l->capacity, l->count + 1, sizeof *l->names), err, x->name);
    l->names[l->count] = strdup(name);
    FC_NEED(l->names[l->count], err, x->name);
    l->count++;
    return FC_OK;
}

static fc_code take_data(exchange *x, uint64_t size, fc_error *err) {
    if (size > x->size) {
        return fail_odd(x, err);
    }
    if (!receive(x->answer, x->buffer, (size_t)size)) {
        return fail_ended(x, err);
    }
    x->buffer += size;
    x->size -= (size_t)size;
    return FC_OK;
}

static fc_code take_answers(exchange *x, fc_error *err) {
    char text[FC_NET_MOST_TEXT + 1];
    for (;;) {
        fc_net_answer *a = &x->last;
        if (!receive(x->answer, a, sizeof *a) || a->text > FC_NET_MOST_TEXT || !receive(x->answer, text, a->text)) {
            return fail_ended(x, err);
        }
        text[a->text] = '\0';
        switch (a->kind) {
        case FC_NET_DONE:
        case FC_NET_MISSING:
            return a->size <= INT64_MAX ? FC_OK : fail_odd(x, err);
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

/* Sends a request on `to`, with the end `extra` of a socket unless that is -1, and takes the answers. */
static fc_code ask(exchange *x, int to, const fc_net_request *request, int extra, fc_error *err) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "%s: a socket cannot be made", x->name);
    }
    const int descriptors[MOST_DESCRIPTORS] = {ends[1], extra};
    const bool sent = send_request(to, request, descriptors, extra < 0 ? 1 : 2);
    close(ends[1]);
    x->answer = ends[0];
    fc_code rc = sent ? take_answers(x, err) : fail_ended(x, err);
    close(ends[0]);
    return rc;
}

static fc_remote_info info_of(const fc_net_answer *a) {
    return (fc_remote_info){a->kind == FC_NET_DONE, a->is_folder != 0, a->size, a->identity};
}

fc_code fc_remote_stat(const char *name, bool given, fc_remote_info *out, fc_error *err) {
    exchange x = {.name = name};
    const fc_net_request request = named(given ? FC_NET_LOOK : FC_NET_STAT, name);
    *out = (fc_remote_info){.found = false};
    FC_TRY(fc_remote_check(name, err));
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(ask(&x, x.fetcher.requests, &request, -1, err));
    *out = info_of(&x.last);
    return FC_OK;
}

fc_code fc_remote_list(const char *name, fc_entry_names *out, fc_error *err) {
    exchange x = {.name = name, .listed = out};
    const fc_net_request request = named(FC_NET_LIST, name);
    *out = (fc_entry_names){.names = NULL};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    return ask(&x, x.fetcher.requests, &request, -1, err);
}

void fc_entry_names_free(fc_entry_names *names) {
    for (size_t i = 0; i < names->count; i++) {
        free(names->names[i]);
    }
    free(names->names);
    *names = (fc_entry_names){.names = NULL};
}

fc_code fc_remote_open(const char *name, int *fd, uint64_t *size, fc_error *err) {
    exchange x = {.name = name};
    const fc_net_request request = named(FC_NET_OPEN, name);
    int ends[2];
    FC_TRY(fc_remote_check(name, err));
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "%s: a socket cannot be made", name);
    }
    fc_code rc = ask(&x, x.fetcher.requests, &request, ends[1], err);
    close(ends[1]);
    if (rc == FC_OK && x.last.kind == FC_NET_MISSING) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: the file is missing", name);
    }
    if (rc != FC_OK) {
        close(ends[0]);
        return rc;
    }
    *fd = ends[0];
    *size = x.last.size;
    return FC_OK;
}

fc_code fc_remote_read(int fd, void *buf, size_t size, uint64_t offset, const char *name, fc_error *err) {
    exchange x = {.name = name, .buffer = buf, .size = size};
    const fc_net_request request = {.kind = FC_NET_READ, .offset = offset, .length = size};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(ask(&x, fd, &request, -1, err));
    return x.size == 0 ? FC_OK
                       : fc_fail(err, FC_ECORRUPT,
                                 "%s: truncated: the file ends at offset %" PRIu64 ", %zu more bytes are expected",
                                 name, offset + size - x.size, x.size);
}

fc_code fc_remote_fstat(int fd, fc_remote_info *out, fc_error *err) {
    exchange x = {.name = "a file on a server"};
    const fc_net_request request = {.kind = FC_NET_STAT};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(ask(&x, fd, &request, -1, err));
    *out = info_of(&x.last);
    return FC_OK;
}
