/*
 * Which servers are asked through the proxy of the environment, as curl and Python's requests decide it. Its URL may
 * have a password, and is never shown. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <arpa/inet.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { MOST_HOST = 512, PORT = 1080 /* libcurl's */, ADDRESS = sizeof(struct in6_addr) };

/* Copies the host of "host:port" without the brackets of an IPv6 address. @return the port, or NULL if there is none */
static const char *split(const char *where, size_t size, char host[MOST_HOST]) {
    const char *end = where[0] == '[' ? memchr(where, ']', size) : NULL;
    const char *first = where + (end ? 1 : 0);
    const char *colon = memchr(end ? end : where, ':', size - (size_t)((end ? end : where) - where));
    if (!end && colon && memchr(colon + 1, ':', size - (size_t)(colon + 1 - where))) {
        colon = NULL; /* an IPv6 address without brackets */
    }
    const size_t n = end ? (size_t)(end - first) : colon ? (size_t)(colon - first) : size;
    snprintf(host, MOST_HOST, "%.*s", (int)(n < MOST_HOST ? n : MOST_HOST - 1), first);
    return colon ? colon + 1 : NULL;
}

/* Whether an address is in "network/bits", or is the one without bits. */
static bool is_in_network(const char *host, const char *network) {
    unsigned char a[ADDRESS] = {0}, b[ADDRESS] = {0};
    char text[MOST_HOST];
    const char *slash = strchr(network, '/');
    snprintf(text, sizeof text, "%.*s", (int)(slash ? slash - network : (ptrdiff_t)strlen(network)), network);
    const int family = strchr(host, ':') ? AF_INET6 : AF_INET;
    const long most = family == AF_INET ? 32 : 128;
    if (inet_pton(family, host, a) != 1 || inet_pton(family, text, b) != 1) {
        return false;
    }
    const long bits = slash ? strtol(slash + 1, NULL, 10) : most;
    if (bits < 0 || bits > most) {
        return false;
    }
    const size_t whole = (size_t)bits / 8;
    const unsigned mask = 0xff00U >> (bits % 8) & 0xff;
    return memcmp(a, b, whole) == 0 && (bits % 8 == 0 || ((a[whole] ^ b[whole]) & mask) == 0);
}

/* Whether an entry of NO_PROXY names the host: itself, a domain that it is in, a network, or "*". */
static bool names_host(const char *named, size_t size, const char *host, const char *port) {
    char name[MOST_HOST], whole[MOST_HOST];
    snprintf(whole, sizeof whole, "%.*s", (int)(size < MOST_HOST ? size : MOST_HOST - 1), named);
    const char *own_port = split(whole, strlen(whole), name);
    if (strcmp(whole, "*") == 0) {
        return true;
    }
    if (own_port && strcmp(own_port, port) != 0) {
        return false;
    }
    const char *domain = name + strspn(name, ".");
    const size_t n = strlen(domain), length = strlen(host);
    if (is_in_network(host, name)) {
        return true;
    }
    return n > 0 && length >= n && strcasecmp(host + length - n, domain) == 0 &&
           (length == n || host[length - n - 1] == '.');
}

bool proxy_is_used(const fetcher *f, const char *where) {
    char host[MOST_HOST];
    const char *port = split(where, strlen(where), host);
    bool used = f->setup.proxy[0] || f->setup.wrong_proxy[0];
    const size_t length = strlen(host);
    if (length > 0 && host[length - 1] == '.') {
        host[length - 1] = '\0';
    }
    for (const char *at = f->setup.no_proxy; *at && used;) {
        const size_t n = strcspn(at, ", \t");
        used = n == 0 || !names_host(at, n, host, port ? port : "");
        at += n + (at[n] != '\0');
    }
    return used;
}

bool proxy_where(const fetcher *f, char *where, size_t size) {
    char *scheme = NULL, *host = NULL, *port = NULL;
    CURLU *url = curl_url();
    bool good = url && curl_url_set(url, CURLUPART_URL, f->setup.proxy, 0) == CURLUE_OK &&
                curl_url_get(url, CURLUPART_SCHEME, &scheme, 0) == CURLUE_OK &&
                curl_url_get(url, CURLUPART_HOST, &host, 0) == CURLUE_OK;
    if (good && curl_url_get(url, CURLUPART_PORT, &port, 0) == CURLUE_OK) {
        snprintf(where, size, "%s:%s", host, port);
    } else if (good) {
        snprintf(where, size, "%s:%d", host, strcmp(scheme, "https") == 0 ? 443 : PORT);
    }
    curl_free(scheme);
    curl_free(host);
    curl_free(port);
    curl_url_cleanup(url);
    return good;
}

bool proxy_set(const fetcher *f, const transfer *t) {
    int rc = 0;
    rc |= curl_easy_setopt(t->easy, CURLOPT_PROXY, t->proxied ? f->setup.proxy : "");
    rc |= curl_easy_setopt(t->easy, CURLOPT_NOPROXY, "");
    rc |= curl_easy_setopt(t->easy, CURLOPT_HEADEROPT, (long)CURLHEADER_SEPARATE); /* tokens are for the server */
    rc |= curl_easy_setopt(t->easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    return rc == 0;
}
