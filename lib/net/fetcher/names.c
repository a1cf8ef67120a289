/*
 * What the names of objects mean: see fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdio.h>
#include <string.h>

provider name_provider(const char *name) {
    (void)name;
    return PROVIDER_HTTP;
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
    return name_has_data(name) || ends_with_any(name, ends, sizeof ends / sizeof *ends);
}

/* Characters that a path of a URL has as they are. A name that was typed with %XX keeps that. */
static bool is_plain(unsigned char c) {
    return c > 0x20 && c < 0x7f && !strchr("\"<>\\^`{|}?#", c);
}

bool name_url(const fetcher *f, const char *name, char url[MOST_URL]) {
    static const char digits[] = "0123456789ABCDEF";
    size_t at = 0;
    (void)f;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        if (at + 4 > MOST_URL) {
            return false;
        }
        if (is_plain(*c)) {
            url[at++] = (char)*c;
        } else {
            url[at++] = '%';
            url[at++] = digits[*c >> 4];
            url[at++] = digits[*c & 15];
        }
    }
    url[at] = '\0';
    return true;
}
