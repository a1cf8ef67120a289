/*
 * The little of XML that answers of S3 need: the texts of elements. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
const char *xml_find(const char *text, const char *tag) {
    const size_t n = strlen(tag);
    while ((text = strchr(text, '<')) != NULL && strncmp(text, tag, n) != 0) {
        text++;
    }
    return text;
}

char *xml_next_text(const char **at, const char *open, const char *close) {
    const char *text = *at ? xml_find(*at, open) : NULL;
    const char *end = text ? xml_find(text + strlen(open), close) : NULL;
    *at = end ? end + strlen(close) : NULL;
    return end ? copy_text(text + strlen(open), end) : NULL;
}
