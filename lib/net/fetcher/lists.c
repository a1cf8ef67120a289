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

/* Reads the number of a character, such as "#10;" or "#xA;". @return the length of it; 0: it is none */
static size_t take_character(const char *text, size_t size, char out[4], size_t *used) {
    char copy[12] = "", *end = copy;
    snprintf(copy, sizeof copy, "%.*s", (int)(size < sizeof copy ? size : sizeof copy - 1), text);
    const int base = copy[0] == '#' && copy[1] == 'x' ? 16 : 10;
    const unsigned long c = copy[0] == '#' ? strtoul(copy + (base == 16 ? 2 : 1), &end, base) : 0;
    if (*end != ';' || c == 0 || c > 0x10ffff) {
        return 0;
    }
    *used = 0;
    if (c < 0x80) {
        out[(*used)++] = (char)c;
    } else {
        const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3; /* bytes after the first */
        out[(*used)++] = (char)((0xff00 >> (more + 1) & 0xff) | c >> 6 * more);
        for (int i = more; i-- > 0;) {
            out[(*used)++] = (char)(0x80 | (c >> 6 * i & 0x3f));
        }
    }
    return (size_t)(end - copy) + 1;
}

/* The same of an entity, without its "&". */
static size_t take_entity(const char *text, size_t size, char out[4], size_t *used) {
    static const struct {
        const char *entity;
        char is;
    } entities[] = {{"amp;", '&'}, {"lt;", '<'}, {"gt;", '>'}, {"quot;", '"'}, {"apos;", '\''}};
    for (size_t i = 0; i < sizeof entities / sizeof *entities; i++) {
        const size_t n = strlen(entities[i].entity);
        if (size >= n && memcmp(text, entities[i].entity, n) == 0) {
            out[0] = entities[i].is;
            *used = 1;
            return n;
        }
    }
    return take_character(text, size, out, used);
}

/* Copies the text of an element, which ends before `end`, with its entities as characters, which are shorter. */
static char *copy_text(const char *text, const char *end) {
    char *out = malloc((size_t)(end - text) + 1);
    size_t n = 0;
    while (out && text < end) {
        size_t used = 0;
        const size_t taken = *text == '&' ? take_entity(text + 1, (size_t)(end - text) - 1, out + n, &used) : 0;
        if (taken == 0) {
            out[n] = *text;
            used = 1;
        }
        n += used;
        text += 1 + taken;
    }
    if (out) {
        out[n] = '\0';
    }
    return out;
}

/* Finds a tag, which begins with '<'. AddressSanitizer's strstr measures the whole text at each call. */
static const char *find_tag(const char *text, const char *tag) {
    const size_t n = strlen(tag);
    while ((text = strchr(text, '<')) != NULL && strncmp(text, tag, n) != 0) {
        text++;
    }
    return text;
}

/* @return the text of the next element after `at`, which moves behind it; NULL: there is none */
static char *next_text(const char **at, const char *open, const char *close) {
    const char *text = *at ? find_tag(*at, open) : NULL;
    const char *end = text ? find_tag(text + strlen(open), close) : NULL;
    *at = end ? end + strlen(close) : NULL;
    return end ? copy_text(text + strlen(open), end) : NULL;
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
    for (char *key; good && (key = next_text(&at, "<Key>", "</Key>")) != NULL;) {
        good = !is_full(d) && add_key(d, prefix, key);
        free(key);
    }
    at = text;
    if (strstr(text, "<IsTruncated>true<")) {
        *mark = next_text(&at, "<NextContinuationToken>", "</NextContinuationToken>");
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
