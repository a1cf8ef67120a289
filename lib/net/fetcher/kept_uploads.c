/*
 * Uploads that outlive the process that began them, so that another one can go on: see uploads.h.
 */
#include "net/fetcher/uploads.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* @return whether a text is a number of at least 1, and of at most `most` */
static bool take_number(const char *text, uint64_t most, uint64_t *out) {
    char *end;
    errno = 0;
    *out = text && *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : 0;
    return *out >= 1 && *out <= most && errno == 0 && *end == '\0';
}

/* Keeps one part of the list. @return false: it is none */
static bool take_one(transfer *t, const char *at) {
    const char *number_at = at, *size_at = at, *etag_at = at;
    char *number = xml_next_text(&number_at, "<PartNumber>", "</PartNumber>");
    char *size = xml_next_text(&size_at, "<Size>", "</Size>");
    char *etag = xml_next_text(&etag_at, "<ETag>", "</ETag>");
    uint64_t part = 0, bytes = 0;
    const bool good = take_number(number, MOST_PARTS, &part) && take_number(size, INT64_MAX, &bytes) && etag &&
                      strlen(etag) < MOST_ETAG;
    free(number);
    free(size);
    if (!good) {
        free(etag);
        return false;
    }
    if (!upload_keep_part(t->out->upload, (unsigned)part, etag, bytes)) {
        (void)fc_no_memory(&t->error, t->out->name);
    }
    return true;
}

/* @param more receives whether other parts follow */
static bool take_page(transfer *t, bool *more) {
    const char *text = t->body ? (const char *)t->body : "", *at = text;
    bool good = xml_find(text, "<ListParts") && xml_find(text, "</ListParts"); /* ...Result, or ...Response */
    while (good && t->error.code == FC_OK && (at = xml_find(at, "<Part>")) != NULL) {
        good = take_one(t, at++);
    }
    *more = strstr(text, "<IsTruncated>true<") != NULL;
    if (good && *more) {
        uint64_t last = 0;
        const char *next_at = text;
        char *next = xml_next_text(&next_at, "<NextPartNumberMarker>", "</NextPartNumberMarker>");
        good = take_number(next, MOST_PARTS, &last) && last > t->out->after;
        t->out->after = (unsigned)last;
        free(next);
    }
    return good;
}

void upload_take_parts(fetcher *f, transfer *t) {
    bool more = false;
    if (!take_page(t, &more)) {
        transfer_fail(f, t, FC_ECORRUPT, "the server's list of parts cannot be understood");
    } else if (t->error.code != FC_OK || !more || !upload_turn(f, t, FOR_PARTS)) {
        transfer_end(f, t);
    }
}

bool upload_tell(fetcher *f, const transfer *t) {
    const upload *u = t->out->upload;
    if (t->purpose == FOR_BEGIN) {
        const size_t size = strlen(u->id);
        return fetcher_send(f, t->reply, (fc_net_answer){.kind = FC_NET_DATA, .size = size}, u->id, size);
    }
    const size_t count = t->out->part < MOST_PARTS ? t->out->part : MOST_PARTS;
    uint64_t *sizes = calloc(count + 1, sizeof *sizes);
    for (size_t i = 0; sizes && i < count && i < u->capacity; i++) {
        sizes[i] = u->parts[i].etag ? u->parts[i].size : 0;
    }
    const size_t bytes = count * sizeof *sizes;
    const bool sent =
        sizes && fetcher_send(f, t->reply, (fc_net_answer){.kind = FC_NET_DATA, .size = bytes}, sizes, bytes);
    free(sizes);
    return sent;
}
