/*
 * Asks the fetcher about names, and for bytes: see remote.h.
 */
#include "net/remote.h"

#include "fsdpckpt/try.h"
#include "net/exchange.h"
#include "net/shared.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *const schemes[] = {"https://", "http://", "s3://", "gs://", "hf://"};

bool fc_is_remote(const char *path) {
    bool is = false;
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes && !is; i++) {
        is = strncasecmp(path, schemes[i], strlen(schemes[i])) == 0;
    }
    return is;
}

/* Returns whether the scheme is one of the list as it is there, which is what the fetcher knows. */
static bool is_spelled_small(const char *name) {
    return strcspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") >= (size_t)(strstr(name, "://") - name);
}

bool fc_remote_is_root(const char *name) {
    const char *host = strstr(name, "://") + 3;
    const char *rest = strchr(host, '/');
    if (rest && strncmp(name, "hf://", 5) == 0) {
        rest = strchr(rest + 1, '/');
    }
    return !rest || rest[1] == '\0';
}

/* The query of a URL; NULL: there is none, or it is hidden already. */
static const char *query_of(const char *name) {
    const char *query = strncasecmp(name, "http", 4) == 0 && fc_is_remote(name) ? strchr(name, '?') : NULL;
    return query && strncmp(query, FC_NET_HIDDEN, strlen(FC_NET_HIDDEN)) != 0 ? query : NULL;
}

bool fc_remote_has_query(const char *path) {
    return query_of(path) != NULL;
}

fc_code fc_remote_check(const char *name, fc_error *err) {
    const char *host = strstr(name, "://") + 3;
    const size_t host_size = strcspn(host, "/"), shown = (size_t)(host - name);
    const bool is_url = strncmp(name, "http", 4) == 0, is_hub = strncmp(name, "hf://", 5) == 0;
    const char *second = host[host_size] ? host + host_size + 1 : "";
    if (!is_spelled_small(name)) {
        return fc_fail(err, FC_EUSAGE, "%.*s...: write this part in small letters", (int)shown, name);
    }
    if (is_url && (memchr(host, '@', host_size) || query_of(name) || strchr(host, '#'))) {
        return fc_fail(err, FC_EUSAGE,
                       "%.*s...: a URL with a user, a fragment or, in this place, a query is refused, because messages "
                       "and reports would show that part: leave it out, or download the file",
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

/* Checks what is sent to the server as it is. */
static fc_code check_query(const char *name, const char *query, fc_error *err) {
    bool good = strlen(query) > 1;
    for (const char *c = query; *c && good; c++) {
        good = *c > ' ' && *c < 0x7f && !strchr("\"<>\\^`{|}#", *c);
    }
    return good ? FC_OK
                : fc_fail(err, FC_EUSAGE,
                          "%s: the query is empty or has a character that a URL cannot have: quote the URL", name);
}

fc_code fc_remote_hide(const char *url, char **name, fc_error *err) {
    char hidden[FC_NET_MOST_NAME + 1];
    fc_exchange x = {.name = hidden};
    *name = NULL;
    if (strlen(url) > FC_NET_MOST_NAME || !fc_net_hidden_name(url, 1, hidden)) {
        return fc_fail(err, FC_EUSAGE, "https://...: a URL of more than %d bytes is refused", FC_NET_MOST_NAME);
    }
    const fc_net_request request = fc_exchange_request(FC_NET_HIDE, url);
    FC_TRY(fc_remote_check(hidden, err));
    FC_TRY(check_query(hidden, query_of(url), err));
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(fc_exchange_ask(&x, x.fetcher.requests, &request, -1, err));
    FC_TRY(fc_net_hidden_name(url, x.last.size, hidden) ? FC_OK : fc_exchange_fail_odd(&x, err));
    *name = strdup(hidden);
    return *name ? FC_OK : fc_no_memory(err, hidden);
}

static fc_remote_info info_of(const fc_net_answer *a) {
    return (fc_remote_info){a->kind == FC_NET_DONE, a->is_folder != 0, a->size, a->identity};
}

fc_code fc_remote_stat(const char *name, bool given, fc_remote_info *out, fc_error *err) {
    fc_exchange x = {.name = name};
    const fc_net_request request = fc_exchange_request(given ? FC_NET_LOOK : FC_NET_STAT, name);
    *out = (fc_remote_info){.found = false};
    FC_TRY(fc_remote_check(name, err));
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(fc_exchange_ask(&x, x.fetcher.requests, &request, -1, err));
    *out = info_of(&x.last);
    return FC_OK;
}

fc_code fc_remote_list(const char *name, fc_entry_names *out, fc_error *err) {
    fc_exchange x = {.name = name, .listed = out};
    const fc_net_request request = fc_exchange_request(FC_NET_LIST, name);
    *out = (fc_entry_names){.names = NULL};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    return fc_exchange_ask(&x, x.fetcher.requests, &request, -1, err);
}

void fc_entry_names_free(fc_entry_names *names) {
    for (size_t i = 0; i < names->count; i++) {
        free(names->names[i]);
    }
    free(names->names);
    *names = (fc_entry_names){.names = NULL};
}

void fc_remote_expect(const char *name) {
    const fc_net_request request = fc_exchange_request(FC_NET_AHEAD, name);
    fc_fetcher fetcher;
    fc_error ignored;
    if (fc_remote_check(name, &ignored) == FC_OK && fc_fetcher_get(&fetcher, &ignored) == FC_OK) {
        fc_exchange_tell(fetcher.requests, &request);
    }
}

fc_code fc_remote_open(const char *name, int *fd, uint64_t *size, fc_error *err) {
    fc_exchange x = {.name = name};
    const fc_net_request request = fc_exchange_request(FC_NET_OPEN, name);
    int ends[2];
    FC_TRY(fc_remote_check(name, err));
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "%s: a socket cannot be made", name);
    }
    fc_code rc = fc_exchange_ask(&x, x.fetcher.requests, &request, ends[1], err);
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
    fc_exchange x = {.name = name, .buffer = buf, .size = size};
    const uint64_t into = fc_shared_offset(buf, size);
    const fc_net_request request = {.kind = FC_NET_READ, .offset = offset, .length = size, .into = into};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    const fc_code rc = fc_exchange_ask(&x, fd, &request, -1, err);
    if (rc != FC_OK && into != FC_NOT_SHARED && x.last.kind != FC_NET_ERROR) {
        fc_shared_lose(buf);
    }
    FC_TRY(rc);
    if (into != FC_NOT_SHARED) {
        FC_TRY(x.last.size <= x.size ? FC_OK : fc_exchange_fail_odd(&x, err));
        x.size -= (size_t)x.last.size;
    }
    return x.size == 0 ? FC_OK
                       : fc_fail(err, FC_ECORRUPT,
                                 "%s: truncated: the file ends at offset %" PRIu64 ", %zu more bytes are expected",
                                 name, offset + size - x.size, x.size);
}

void fc_remote_ahead(int fd, uint64_t size, uint64_t offset) {
    const fc_net_request request = {.kind = FC_NET_AHEAD, .offset = offset, .length = size, .into = FC_NOT_SHARED};
    fc_exchange_tell(fd, &request);
}

fc_code fc_remote_fstat(int fd, fc_remote_info *out, fc_error *err) {
    fc_exchange x = {.name = "a file on a server"};
    const fc_net_request request = {.kind = FC_NET_STAT};
    FC_TRY(fc_fetcher_get(&x.fetcher, err));
    FC_TRY(fc_exchange_ask(&x, fd, &request, -1, err));
    *out = info_of(&x.last);
    return FC_OK;
}
