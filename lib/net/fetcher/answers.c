/*
 * Judges what a server answers: see fetcher.h. What it says must be what was asked for, byte by byte.
 */
#include "net/fetcher/fetcher.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

bool answer_is_busy(long status) {
    return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 || status == 504;
}

bool answer_is_redirect(long status) {
    return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

/* @return the value of a header line if it has this name; else NULL */
static const char *value_of(const char *line, const char *name) {
    const size_t n = strlen(name);
    if (strncasecmp(line, name, n) != 0 || line[n] != ':') {
        return NULL;
    }
    line += n + 1;
    while (*line == ' ' || *line == '\t') {
        line++;
    }
    return line;
}

static bool take_number(const char **at, uint64_t *out) {
    char *end = NULL;
    if (!isdigit((unsigned char)**at)) {
        return false;
    }
    *out = strtoull(*at, &end, 10);
    *at = end;
    return *out < UINT64_MAX / 2;
}

/* "bytes 0-99/1000", or "bytes" and a star for the range of an empty file. */
static bool parse_range(response *a, const char *text) {
    if (strncasecmp(text, "bytes ", 6) != 0) {
        return false;
    }
    text += 6;
    if (*text == '*') {
        text++;
        a->first = 1;
        a->last = 0;
        return *text++ == '/' && take_number(&text, &a->total);
    }
    return take_number(&text, &a->first) && *text++ == '-' && take_number(&text, &a->last) && *text++ == '/' &&
           take_number(&text, &a->total) && *text == '\0' && a->first <= a->last && a->last < a->total;
}

static void fail(transfer *t, fc_code code, const char *what) {
    if (t->error.code == FC_OK) {
        fc_fail(&t->error, code, "%s: %s", transfer_name(t), what);
    }
}

/* Link: <https://host/next>; rel="next" */
static void take_link(response *a, const char *value) {
    const char *open = strchr(value, '<'), *close = open ? strchr(open, '>') : NULL;
    if (close && strstr(close, "rel=\"next\"") && (size_t)(close - open) < sizeof a->next) {
        snprintf(a->next, sizeof a->next, "%.*s", (int)(close - open) - 1, open + 1);
    }
}

/* Keeps the value of a header if it is short, and can be sent back in another one. */
static void keep(char *out, size_t size, const char *value) {
    bool good = strlen(value) < size;
    for (const char *c = value; *c && good; c++) {
        good = !iscntrl((unsigned char)*c);
    }
    snprintf(out, size, "%s", good ? value : "");
}

size_t answer_refuse_more(transfer *t) {
    fail(t, FC_ECORRUPT, "the server sent more bytes than it was asked for");
    return 0;
}

/* A copy of the line that is a string without its end. Status lines begin the headers of another answer. */
size_t answer_take_header(char *line, size_t size, size_t count, void *context) {
    transfer *t = context;
    response *a = &t->answer;
    char text[MOST_URL];
    size_t n = size * count;
    a->bytes += n;
    if (a->bytes > MOST_HEADER_BYTES) {
        fail(t, FC_ECORRUPT, "the server sent more than 64 KiB of headers");
        return 0;
    }
    const size_t taken = n;
    if (n >= sizeof text) {
        return taken; /* the beginning of an address is another address */
    }
    memcpy(text, line, n);
    while (n > 0 && isspace((unsigned char)text[n - 1])) {
        n--;
    }
    text[n] = '\0';
    const char *value;
    if (strncmp(text, "HTTP/", 5) == 0) {
        *a = (response){.bytes = a->bytes};
        const char *status = strchr(text, ' ');
        a->status = status ? strtol(status, NULL, 10) : 0;
    } else if ((value = value_of(text, "content-range")) != NULL) {
        a->has_range = parse_range(a, value);
    } else if ((value = value_of(text, "content-encoding")) != NULL) {
        a->encoded = strcasecmp(value, "identity") != 0;
    } else if ((value = value_of(text, "content-length")) != NULL) {
        a->length = take_number(&value, &a->length) ? a->length : 0;
    } else if ((value = value_of(text, "etag")) != NULL) {
        keep(a->etag, sizeof a->etag, value);
    } else if ((value = value_of(text, "last-modified")) != NULL) {
        keep(a->modified, sizeof a->modified, value);
    } else if ((value = value_of(text, "x-amz-bucket-region")) != NULL) {
        keep(a->region, sizeof a->region, value);
    } else if ((value = value_of(text, "x-amz-meta-" RUN_HEADER)) != NULL ||
               (value = value_of(text, "x-goog-meta-" RUN_HEADER)) != NULL) {
        a->run = strlen(value) == RUN_DIGITS ? strtoull(value, NULL, 16) : 0;
    } else if ((value = value_of(text, "link")) != NULL) {
        take_link(a, value);
    } else if ((value = value_of(text, "location")) != NULL) {
        keep(a->location, sizeof a->location, value);
    }
    return taken;
}

/* Copies the text of an element if it is a word. */
static void take_word(const char *bytes, size_t size, const char *open, char *out, size_t room) {
    const size_t tag = strlen(open);
    const char *at = memmem(bytes, size, open, tag);
    if (!at) {
        return;
    }
    const char *end = bytes + size, *text = at + tag;
    size_t n = 0;
    while (text + n < end && (isalnum((unsigned char)text[n]) || text[n] == '-')) {
        n++;
    }
    if (n < room && text + n < end && text[n] == '<') {
        memcpy(out, text, n);
        out[n] = '\0';
    }
}

void answer_take_page(response *a, const char *bytes, size_t size) {
    take_word(bytes, size, "<Code>", a->code, sizeof a->code);
    if (!a->region[0]) {
        take_word(bytes, size, "<Region>", a->region, sizeof a->region);
    }
}

static bool is_same_version(const transfer *t) {
    const version *v = &t->object->version;
    const response *a = &t->answer;
    if (a->total != v->size) {
        return false;
    }
    return v->etag[0] ? strcmp(v->etag, a->etag) == 0 : strcmp(v->modified, a->modified) == 0;
}

static bool refuse(transfer *t, fc_code code, const char *what) {
    fail(t, code, what);
    return false;
}

static bool check_range(transfer *t) {
    const response *a = &t->answer;
    const uint64_t first = t->offset + t->done, last = t->offset + t->length - 1;
    if (a->status == 200) {
        return refuse(t, FC_ECORRUPT,
                      "the server sent the whole file when it was asked for a part, so it does not support "
                      "ranges: download the file first");
    }
    if (!a->has_range) {
        return refuse(t, FC_ECORRUPT, "the server did not say which part of the file it sent (Content-Range)");
    }
    if (a->first != first || (a->last != last && !(t->purpose == FOR_HEAD && a->last + 1 == a->total))) {
        return refuse(t, FC_ECORRUPT, "the server sent another part of the file than it was asked for");
    }
    if (t->purpose == FOR_RANGE || t->done > 0) {
        return is_same_version(t) ||
               refuse(t, FC_ECORRUPT, "was changed while it was read: start again when nothing writes to it");
    }
    t->length = a->last + 1 - t->offset; /* the file may be shorter than the head */
    version *v = &t->object->version;
    v->size = a->total;
    memcpy(v->etag, a->etag, sizeof v->etag);
    memcpy(v->modified, a->modified, sizeof v->modified);
    return true;
}

bool answer_check(transfer *t) {
    if (t->answer.checked) {
        return true;
    }
    t->answer.checked = true;
    if (t->answer.encoded) {
        return refuse(t, FC_ECORRUPT,
                      "the server compressed the bytes, although it was not asked to (Content-Encoding)");
    }
    return t->purpose == FOR_PAGE || check_range(t);
}
