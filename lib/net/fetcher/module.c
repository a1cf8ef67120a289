/*
 * The table of the module `net`, and what the fetcher does before it is confined. See net/module.h.
 */
#include "net/fetcher/ahead.h"

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { MOST_CONNECTIONS = MOST_UNREAD + 64, MOST_TO_HOST = MOST_UNREAD + 32 };

/* ---- in the caller's process ---- */

static void find_addresses(const char *where, char *out, size_t size) {
    const struct addrinfo like = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char host[512], address[64];
    const char *colon = strrchr(where, ':');
    snprintf(out, size, "%s", where);
    if (!colon || (size_t)(colon - where) >= sizeof host) {
        return;
    }
    const bool bracketed = where[0] == '['; /* an IPv6 address */
    snprintf(host, sizeof host, "%.*s", (int)(colon - where) - 2 * bracketed, where + bracketed);
    if (getaddrinfo(host, colon + 1, &like, &found) != 0) {
        return;
    }
    for (const struct addrinfo *a = found; a; a = a->ai_next) {
        const size_t used = strlen(out);
        if (getnameinfo(a->ai_addr, a->ai_addrlen, address, sizeof address, NULL, 0, NI_NUMERICHOST) == 0 &&
            used + sizeof address + 4 < size) {
            const char *open = a->ai_family == AF_INET6 ? "[" : "", *close = a->ai_family == AF_INET6 ? "]" : "";
            snprintf(out + used, size - used, "%s%s%s%s", a == found ? ":" : ",", open, address, close);
        }
    }
    freeaddrinfo(found);
}

/* ---- in the fetcher ---- */

static void *prepare(const fc_net_setup *setup, int requests) {
    fetcher *f = calloc(1, sizeof *f);
    struct timespec t;
    if (!f) {
        return NULL;
    }
    f->setup = *setup;
    f->requests = requests;
    clock_gettime(CLOCK_REALTIME, &t);
    f->random = (uint64_t)t.tv_nsec * 2 + 1;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != 0 || (f->multi = curl_multi_init()) == NULL) {
        free(f);
        return NULL;
    }
    curl_multi_setopt(f->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)MOST_CONNECTIONS);
    curl_multi_setopt(f->multi, CURLMOPT_MAX_HOST_CONNECTIONS, (long)MOST_TO_HOST);
    trust_read(f);
    return f;
}

__attribute__((visibility("default"))) const fc_net_module FC_NET_SYMBOL = {.abi = FC_NET_ABI,
                                                                            .version = FSDPCKPT_VERSION,
                                                                            .find_addresses = find_addresses,
                                                                            .prepare = prepare,
                                                                            .serve = fetcher_serve};
