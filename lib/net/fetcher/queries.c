/*
 * The queries of URLs, which may be secrets: presigned URLs of S3 and Google, SAS of Azure. All else knows such a URL
 * by a name that has "?..." in place of the query, so nothing can show it. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdlib.h>
#include <string.h>

static hidden_query *query_find(const fetcher *f, const char *name) {
    hidden_query *q = f->queries;
    while (q && strcmp(q->name, name) != 0) {
        q = q->next;
    }
    return q;
}

bool query_is_lost(const fetcher *f, const char *name) {
    return name_provider(name) == PROVIDER_HTTP && strchr(name, '?') && !query_find(f, name);
}

bool query_add(const fetcher *f, const char *name, char url[MOST_URL]) {
    const hidden_query *q = query_find(f, name);
    return !q || url_add(url, q->query);
}

uint64_t query_keep(fetcher *f, const char *url) {
    char name[FC_NET_MOST_NAME + 1];
    const char *query = strchr(url, '?');
    hidden_query *q = NULL;
    uint64_t number = 0;
    do {
        if (!query || !fc_net_hidden_name(url, ++number, name)) {
            return 0;
        }
        q = query_find(f, name);
    } while (q && strcmp(q->query, query) != 0);
    if (q) {
        return number;
    }
    q = calloc(1, sizeof *q);
    char *name_copy = strdup(name), *query_copy = strdup(query);
    if (!q || !name_copy || !query_copy) {
        free(q);
        free(name_copy);
        free(query_copy);
        return 0;
    }
    *q = (hidden_query){f->queries, name_copy, query_copy};
    f->queries = q;
    return number;
}
