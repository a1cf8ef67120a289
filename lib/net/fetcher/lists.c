/*
 * Lists of buckets (ListObjectsV2, XML) and of models on the hub (JSON): see fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include "fsdpckpt/order.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The parameters of a query are in the order in which they are signed. */
static bool bucket_url(const fetcher *f, const char *name, const char *mark, char url[MOST_URL]) {
    const char *key = "";
    return name_bucket_url(f, name, url, &key) && url_add(url, "/?") &&
           (!*mark || (url_add(url, "continuation-token=") && url_add_value(url, mark) && url_add(url, "&"))) &&
           url_add(url, "list-type=2&prefix=") && (!*key || (url_add_value(url, key) && url_add_value(url, "/")));
}

bool list_url(const fetcher *f, const folder *d, char url[MOST_URL]) {
    return bucket_url(f, d->name, "", url);
}

bool list_ask(fetcher *f, folder *d, const char *mark) {
    char url[MOST_URL] = "";
    const char *path = "", *first = f->setup.hub;
    bool good;
    if (name_provider(d->name) != PROVIDER_HUB) {
        good = bucket_url(f, d->name, mark, url);
        first = url;
    } else if (*mark) {
        good = url_add(url, mark);
    } else {
        good = name_hub_url(f, d->name, true, url, &path) && url_add(url, "?recursive=true");
    }
    transfer *t = good && d->pages++ < MOST_PAGES ? transfer_new(f, FOR_PAGE, url) : NULL;
    if (t) {
        t->folder = d;
        t->plain_http = strncmp(first, "http://", 7) == 0; /* what the server names is like a redirect */
    }
    return t != NULL;
}

/* Leaves out names that nothing can be asked about. */
static bool add_name(folder *d, const char *name) {
    return strlen(d->name) + 1 + strlen(name) > FC_NET_MOST_NAME || folder_add(d, name);
}

static bool is_full(const folder *d) {
    return d->count >= MOST_ENTRIES || d->bytes >= MOST_NAMES;
}

/* Adds a key of the bucket, without the prefix of the folder. */
static bool add_key(folder *d, const char *prefix, const char *key) {
    const size_t n = strlen(prefix), size = strlen(key);
    if (n > 0 && (strncmp(key, prefix, n) != 0 || key[n] != '/')) {
        return true;
    }
    const char *name = key + (n > 0 ? n + 1 : 0);
    return *name == '\0' || key[size - 1] == '/' || add_name(d, name); /* "folder/" is a mark of consoles */
}

static bool take_bucket(fetcher *f, folder *d, const char *text, char **mark) {
    char url[MOST_URL];
    const char *prefix = "", *at = text;
    bool good = name_bucket_url(f, d->name, url, &prefix) && strstr(text, "<ListBucketResult") != NULL &&
                strstr(text, "</ListBucketResult>") != NULL;
    for (char *key; good && (key = xml_next_text(&at, "<Key>", "</Key>")) != NULL;) {
        good = !is_full(d) && add_key(d, prefix, key);
        free(key);
    }
    at = text;
    if (strstr(text, "<IsTruncated>true<")) {
        *mark = xml_next_text(&at, "<NextContinuationToken>", "</NextContinuationToken>");
        good = good && *mark;
    }
    return good;
}

static bool take_hub(folder *d, const transfer *t, char **mark) {
    json_error_t ignored;
    json_t *list = json_loadb((const char *)t->body, (size_t)t->done, 0, &ignored), *item;
    size_t i;
    bool good = json_is_array(list);
    json_array_foreach(list, i, item) {
        const char *type = json_string_value(json_object_get(item, "type"));
        const char *path = json_string_value(json_object_get(item, "path"));
        if (good && type && path && strcmp(type, "file") == 0) {
            good = !is_full(d) && add_name(d, path);
        }
    }
    json_decref(list);
    *mark = t->answer.next[0] ? strdup(t->answer.next) : NULL;
    return good;
}

static int compare_entries(const void *a, const void *b) {
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

/* Opens the files whose headers are probably read next. */
static void open_ahead(fetcher *f, const folder *d) {
    static const char *const ends[] = {".safetensors", ".json", ".metadata"};
    char whole[FC_NET_MOST_NAME + 1];
    size_t asked = 0;
    for (size_t i = 0; i < d->count && asked < MOST_AHEAD; i++) {
        const char *name = d->entries[i].name, *end = strrchr(name, '.');
        bool wanted = false;
        for (size_t e = 0; end && e < sizeof ends / sizeof *ends; e++) {
            wanted = wanted || strcmp(end, ends[e]) == 0;
        }
        if (wanted && !strchr(name, '/') && snprintf(whole, sizeof whole, "%s/%s", d->name, name) < (int)sizeof whole) {
            object *o = object_get(f, whole);
            if (o && o->state == STATE_NEW) {
                object_open(f, o, NULL, -1);
                asked++;
            }
        }
    }
}

bool list_take(fetcher *f, folder *d, transfer *t, fc_error *error) {
    char *mark = NULL;
    const char *text = t->body ? (const char *)t->body : "";
    const bool hub = name_provider(d->name) == PROVIDER_HUB;
    const bool none = d->pages == 1 && (t->answer.status == 404 || t->answer.status == 410);
    const bool good = none || (hub ? t->body && take_hub(d, t, &mark) : take_bucket(f, d, text, &mark));
    const bool more = good && mark && list_ask(f, d, mark);
    if (!good || (mark && !more)) {
        free(mark);
        (void)fc_fail(error, is_full(d) ? FC_EUNSUPPORTED : FC_ECORRUPT, "%s: the server's list of files %s", d->name,
                      is_full(d) ? "is too long: give the name of a folder below" : "cannot be understood");
        return false;
    }
    free(mark);
    if (!more) {
        fc_sort_items(d->entries, d->count, sizeof *d->entries, compare_entries);
        open_ahead(f, d);
        folder_end(f, d, NULL);
    }
    return true;
}
