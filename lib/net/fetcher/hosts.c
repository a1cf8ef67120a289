/*
 * Where servers are: the host of a URL, and its address, which the fetcher cannot look up and asks for. See fetcher.h.
 */
#include "net/fetcher/crowds.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* A name such as 127.example.com is no address. */
static bool is_loopback(const char *host) {
    struct in_addr address;
    return strcmp(host, "localhost") == 0 || strcmp(host, "[::1]") == 0 ||
           (inet_pton(AF_INET, host, &address) == 1 && ntohl(address.s_addr) >> 24 == 127);
}

const char *host_find(const transfer *t, char *where, size_t size) {
    char *scheme = NULL, *host = NULL, *port = NULL;
    const char *wrong = "its URL cannot be understood";
    CURLU *url = curl_url();
    if (url && curl_url_set(url, CURLUPART_URL, t->url, CURLU_DISALLOW_USER) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_SCHEME, &scheme, 0) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_HOST, &host, 0) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) == CURLUE_OK) {
        const bool https = strcmp(scheme, "https") == 0, http = strcmp(scheme, "http") == 0;
        snprintf(where, size, "%s:%s", host, port);
        wrong = https                                        ? NULL
                : http && t->plain_http && is_loopback(host) ? NULL
                : http && t->plain_http && t->redirects == 0
                    ? "http:// is only for servers on this machine, because others on the network could change the "
                      "data: use https://"
                    : "the server redirects to another scheme than https";
    }
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_url_cleanup(url);
    return wrong;
}

/* @return the socket of process `index` of those that wait for the transfer and can be asked for an address, or -1 */
static int asker(const transfer *t, size_t index) {
    const waiter *lists[] = {t->object ? t->object->waiters : NULL, t->folder ? t->folder->waiters : NULL};
    const int own = t->out && t->out->clearing ? t->out->clearing->answer : t->reply;
    if (own >= 0) {
        return index == 0 ? own : -1;
    }
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        for (const waiter *w = lists[i]; w; w = w->next) {
            if (index-- == 0) {
                return w->answer;
            }
        }
    }
    return -1;
}

void host_ask(fetcher *f, transfer *t, const char *where) {
    const uint32_t n = (uint32_t)strlen(where);
    int socket;
    for (size_t i = 0; t->progress != NEEDS_HOST && (socket = asker(t, i)) >= 0; i++) {
        if (fetcher_send(f, socket, (fc_net_answer){.kind = FC_NET_WHERE, .text = n}, where, n)) {
            t->progress = NEEDS_HOST;
            t->asked = socket;
            t->wake = fetcher_now() + ASK_AGAIN_MS;
        }
    }
}

bool host_is_asked_in_vain(const transfer *t) {
    char unused;
    int socket;
    for (size_t i = 0; (socket = asker(t, i)) >= 0; i++) {
        if (socket == t->asked) {
            return recv(socket, &unused, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
        }
    }
    return true;
}

const char *host_known(const fetcher *f, const char *where) {
    const size_t n = strlen(where);
    const host_line *h = crowd_find(f, where);
    return h ? h->line + (h->line[n] == '\0' ? n : 0) : NULL;
}

bool host_has_address(const char *line) {
    const char *end = strchr(line, ']'); /* of an IPv6 address as host */
    const char *port = strchr(end ? end : line, ':');
    return port && strchr(port + 1, ':');
}

bool host_find_peer(fetcher *f, transfer *t, const char *where, char *peer, size_t size) {
    const fc_net_setup *s = &f->setup;
    t->proxied = strncmp(t->url, "https:", 6) == 0 && proxy_is_used(f, where);
    snprintf(peer, size, "%s", where);
    if (t->proxied && s->wrong_proxy[0]) {
        transfer_fail(f, t, s->proxy_unsupported ? FC_EUNSUPPORTED : FC_EUSAGE, s->wrong_proxy);
        return false;
    }
    if (t->proxied && !proxy_where(f, peer, size)) {
        transfer_fail(f, t, FC_EUSAGE, "the URL of the proxy (https_proxy) cannot be understood");
        return false;
    }
    return true;
}

/* The known server of "host:port:addresses", which may have others now. */
static host_line *find_again(const fetcher *f, const char *line) {
    char where[512];
    const char *end = strchr(line, ']'); /* of an IPv6 address as host */
    const char *port = strchr(end ? end : line, ':');
    if (!port) {
        return NULL;
    }
    snprintf(where, sizeof where, "%.*s", (int)((size_t)(port - line) + 1 + strcspn(port + 1, ":")), line);
    return crowd_find(f, where);
}

void transfers_host_known(fetcher *f, const char *line) {
    host_line *h = find_again(f, line);
    char *copy = strdup(line);
    if (copy && !h && (h = calloc(1, sizeof *h)) != NULL) {
        h->next = f->hosts;
        f->hosts = h;
    }
    if (!copy || !h) {
        free(copy);
        return;
    }
    free(h->line);
    h->line = copy;
    for (transfer *t = f->transfers; t; t = t->next) {
        if (t->progress == NEEDS_HOST) {
            t->progress = WAITS;
            t->wake = 0;
        }
    }
}

/* ---- what came of them ---- */

/* Waits, longer each time, and not as long as others that began to wait at the same time. */
