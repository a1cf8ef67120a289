/*
 * What the names of objects mean, and their URLs: see fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCHEME = 5 /* of s3://, gs:// and hf:// */, MOST_BUCKET = 256 };

provider name_provider(const char *name) {
    return strncmp(name, "s3://", SCHEME) == 0   ? PROVIDER_S3
           : strncmp(name, "gs://", SCHEME) == 0 ? PROVIDER_GS
           : strncmp(name, "hf://", SCHEME) == 0 ? PROVIDER_HUB
                                                 : PROVIDER_HTTP;
}

static bool ends_with_any(const char *name, const char *const *ends, size_t count) {
    const size_t size = strlen(name);
    bool does = false;
    for (size_t i = 0; i < count && !does; i++) {
        const size_t n = strlen(ends[i]);
        does = size > n && strcmp(name + size - n, ends[i]) == 0;
    }
    return does;
}

bool name_has_data(const char *name) {
    static const char *const ends[] = {".safetensors", ".bin",  ".pt",    ".pth",     ".ckpt", ".distcp",
                                       ".h5",          ".hdf5", ".keras", ".msgpack", ".tar"};
    return ends_with_any(name, ends, sizeof ends / sizeof *ends);
}

bool name_is_file(const char *name) {
    static const char *const ends[] = {".json", "/.metadata", ".txt", ".crc64"};
    return name_has_data(name) || ends_with_any(name, ends, sizeof ends / sizeof *ends) ||
           (name_provider(name) == PROVIDER_HTTP && strchr(name, '?'));
}

/* Characters that a path of a URL has as they are. A name that was typed with %XX keeps that. */
static bool is_plain(unsigned char c) {
    return c > 0x20 && c < 0x7f && !strchr("\"<>\\^`{|}?#", c);
}

/* Those that a signature has as they are. */
static bool is_unreserved(unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c && strchr("-_.~", c));
}

bool url_add(char url[MOST_URL], const char *text) {
    const size_t used = strlen(url), n = strlen(text);
    if (used + n >= MOST_URL) {
        return false;
    }
    memcpy(url + used, text, n + 1);
    return true;
}

static bool add_encoded(char url[MOST_URL], const char *text, size_t n, bool (*as_it_is)(unsigned char), bool slash) {
    static const char digits[] = "0123456789ABCDEF";
    size_t at = strlen(url);
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (at + 4 > MOST_URL) {
            return false;
        }
        if (as_it_is(c) || (slash && c == '/')) {
            url[at++] = (char)c;
        } else {
            url[at++] = '%';
            url[at++] = digits[c >> 4];
            url[at++] = digits[c & 15];
        }
    }
    url[at] = '\0';
    return true;
}

bool url_add_value(char url[MOST_URL], const char *text) {
    return add_encoded(url, text, strlen(text), is_unreserved, false);
}

/* @return the length of "s3://bucket" */
static size_t bucket_size(const char *name) {
    return SCHEME + strcspn(name + SCHEME, "/");
}

const char *name_region(const fetcher *f, const char *name) {
    const size_t n = bucket_size(name);
    for (const bucket_place *p = f->places; p; p = p->next) {
        if (strncmp(p->bucket, name, n) == 0 && p->bucket[n] == '\0') {
            return p->region;
        }
    }
    return name_provider(name) == PROVIDER_GS ? "auto" : f->setup.region;
}

bool name_region_keep(fetcher *f, const char *name, const char *region) {
    const size_t n = strlen(region);
    bucket_place *p = calloc(1, sizeof *p);
    char *bucket = strndup(name, bucket_size(name));
    /* It becomes a part of the name of a host. */
    if (!p || !bucket || n == 0 || n >= sizeof p->region ||
        strspn(region, "abcdefghijklmnopqrstuvwxyz0123456789-") != n) {
        free(p);
        free(bucket);
        return false;
    }
    *p = (bucket_place){.next = f->places, .bucket = bucket};
    memcpy(p->region, region, n + 1);
    f->places = p; /* before what was known */
    return true;
}

bool name_bucket_url(const fetcher *f, const char *name, char url[MOST_URL], const char **key) {
    char bucket[MOST_BUCKET];
    const char *at = name + SCHEME, *slash = strchr(at, '/');
    const char *endpoint = name_provider(name) == PROVIDER_GS ? "https://storage.googleapis.com" : f->setup.endpoint;
    const size_t n = slash ? (size_t)(slash - at) : strlen(at);
    *key = slash ? slash + 1 : "";
    if (n >= sizeof bucket) {
        return false;
    }
    memcpy(bucket, at, n);
    bucket[n] = '\0';
    url[0] = '\0';
    if (endpoint[0]) {
        return url_add(url, endpoint) && url_add(url, "/") && url_add_value(url, bucket);
    }
    if (strchr(bucket, '.')) { /* certificates are for names without further dots */
        return url_add(url, "https://s3.") && url_add(url, name_region(f, name)) && url_add(url, ".amazonaws.com/") &&
               url_add_value(url, bucket);
    }
    return url_add(url, "https://") && url_add_value(url, bucket) && url_add(url, ".s3.") &&
           url_add(url, name_region(f, name)) && url_add(url, ".amazonaws.com");
}

bool name_hub_url(const fetcher *f, const char *name, bool list, char url[MOST_URL], const char **path) {
    const char *owner = name + SCHEME, *model = strchr(owner, '/');
    if (!model) {
        return false;
    }
    const char *end = model + 1 + strcspn(model + 1, "@/");
    const char *revision = *end == '@' ? end + 1 : "main";
    const size_t size = strcspn(revision, "/");
    const char *rest = *end == '@' ? revision + size : end;
    *path = rest + (*rest == '/');
    url[0] = '\0';
    return url_add(url, f->setup.hub) && url_add(url, list ? "/api/models/" : "/") &&
           add_encoded(url, owner, (size_t)(end - owner), is_unreserved, true) &&
           url_add(url, list ? "/tree/" : "/resolve/") && add_encoded(url, revision, size, is_unreserved, false);
}

size_t name_root(const char *name) {
    if (name_provider(name) != PROVIDER_HUB) {
        return strlen(name);
    }
    const size_t owner = SCHEME + strcspn(name + SCHEME, "/");
    return name[owner] ? owner + 1 + strcspn(name + owner + 1, "/") : owner;
}

bool name_url(const fetcher *f, const char *name, char url[MOST_URL]) {
    const char *rest = "";
    switch (name_provider(name)) {
    case PROVIDER_S3:
    case PROVIDER_GS:
        return name_bucket_url(f, name, url, &rest) && url_add(url, "/") &&
               add_encoded(url, rest, strlen(rest), is_unreserved, true);
    case PROVIDER_HUB:
        return name_hub_url(f, name, false, url, &rest) && url_add(url, "/") &&
               add_encoded(url, rest, strlen(rest), is_unreserved, true);
    default:
        url[0] = '\0';
        return add_encoded(url, name, strcspn(name, "?"), is_plain, true) && query_add(f, name, url);
    }
}
