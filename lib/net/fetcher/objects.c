/*
 * Objects: what is known of each file, its first bytes, and the requests that wait for it. See fetcher.h.
 */
#include "net/fetcher/ahead.h"
#include "net/shared.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

object *object_get(fetcher *f, const char *name) {
    for (object *o = f->objects; o; o = o->next) {
        if (!o->forgotten && strcmp(o->name, name) == 0) {
            return o;
        }
    }
    object *o = calloc(1, sizeof *o);
    char *copy = strdup(name);
    if (!o || !copy) {
        free(o);
        free(copy);
        return NULL;
    }
    o->name = copy;
    o->next = f->objects;
    f->objects = o;
    return o;
}

/* Whether an object exists that its folder does not list. */
static bool object_is_known(const fetcher *f, const char *name) {
    bool is = false;
    for (const object *o = f->objects; o && !is; o = o->next) {
        is = !o->forgotten && o->state == STATE_READY && strcmp(o->name, name) == 0;
    }
    return is;
}

static uint64_t hash(uint64_t h, const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        h = (h ^ *c) * UINT64_C(1099511628211);
    }
    return h;
}

uint64_t object_identity(const object *o) {
    const uint64_t h = hash(hash(hash(UINT64_C(14695981039346656037), o->name), o->version.etag), o->version.modified);
    return h & INT64_MAX;
}

/* ---- heads ---- */

/* Forgets most of a head: all of it if it is short, or if memory for the rest is lacking. */
static void shrink_head(fetcher *f, object *o) {
    unsigned char *less = o->head_size > SHORT_HEAD ? realloc(o->head, SHORT_HEAD) : NULL;
    f->heads -= o->head_size;
    if (less) {
        o->head = less;
        o->head_size = SHORT_HEAD;
        f->heads += SHORT_HEAD;
    } else {
        free(o->head);
        o->head = NULL;
        o->head_size = 0;
    }
}

/* Shrinks the heads that were not used for the longest time: long ones before short ones. */
static void forget_heads(fetcher *f) {
    while (f->heads > MOST_HEADS) {
        object *oldest = NULL;
        for (object *o = f->objects; o; o = o->next) {
            const bool is_long = o->head_size > SHORT_HEAD, than = oldest && oldest->head_size > SHORT_HEAD;
            if (o->head && (!oldest || (is_long == than ? o->used < oldest->used : is_long))) {
                oldest = o;
            }
        }
        if (!oldest) {
            return;
        }
        shrink_head(f, oldest);
    }
}

void object_open(fetcher *f, object *o, folder *wanted_by, int reply) {
    char url[MOST_URL];
    (void)reply;
    transfer *t = name_url(f, o->name, url) ? transfer_new(f, FOR_HEAD, url) : NULL;
    if (!t) {
        o->state = STATE_FAILED;
        (void)fc_fail(&o->error, FC_EUNSUPPORTED, "%s: the name is too long", o->name);
        object_opened(f, o, wanted_by);
        return;
    }
    o->state = STATE_ASKED;
    t->object = o;
    t->folder = wanted_by;
    t->length = HEAD_BYTES;
}

void object_opened(fetcher *f, object *o, folder *wanted_by) {
    o->known_since = fetcher_now();
    if (o->head) {
        o->used = ++f->clock;
        f->heads += o->head_size;
        forget_heads(f);
    }
    if (wanted_by) {
        folder_object_known(f, wanted_by, o);
    }
    waiter *first = o->waiters;
    o->waiters = NULL;
    waiters_retry(f, first);
}

/* ---- requests ---- */

static void send_missing(fetcher *f, int answer) {
    fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_MISSING}, NULL, 0);
}

void object_tell(fetcher *f, const object *o, int answer) {
    fetcher_send(f, answer,
                 (fc_net_answer){.kind = FC_NET_DONE, .size = o->version.size, .identity = object_identity(o)}, NULL,
                 0);
}

bool fetcher_add_file(fetcher *f, opened_file file) {
    if (f->nfiles == f->capacity) {
        const size_t capacity = f->capacity ? 2 * f->capacity : 16;
        opened_file *more = realloc(f->files, capacity * sizeof *more);
        if (!more) {
            return false;
        }
        f->files = more;
        f->capacity = capacity;
    }
    f->files[f->nfiles++] = file;
    return true;
}

static void wait_for(fetcher *f, waiter **list, fc_net_request_kind kind, const char *name, int answer, int socket) {
    waiter *w = calloc(1, sizeof *w);
    char *copy = strdup(name);
    if (!w || !copy) {
        fc_error error;
        (void)fc_no_memory(&error, name);
        fetcher_send_error(f, answer, &error);
        fetcher_close(f, answer);
        if (socket >= 0) {
            close(socket);
        }
        free(w);
        free(copy);
        return;
    }
    *w = (waiter){*list, copy, (int)kind, answer, socket};
    *list = w;
}

void waiters_retry(fetcher *f, waiter *first) {
    while (first) {
        waiter *w = first;
        first = w->next;
        object_request(f, (fc_net_request_kind)w->kind, w->name, w->answer, w->file);
        free(w->name);
        free(w);
    }
}

/* Answers a request for an object that is known. @return whether the socket of the file is in use */
static bool answer_known(fetcher *f, fc_net_request_kind kind, object *o, int answer, int socket) {
    if (o->state == STATE_FAILED) {
        fetcher_send_error(f, answer, &o->error);
        return false;
    }
    if (o->state == STATE_MISSING) {
        send_missing(f, answer);
        return false;
    }
    const bool opened = kind == FC_NET_OPEN && socket >= 0 && fetcher_add_file(f, (opened_file){socket, o, NULL});
    object_tell(f, o, answer);
    return opened;
}

static void send_folder(fetcher *f, const folder *d, fc_net_request_kind kind, const char *below, int answer) {
    fc_error error;
    if (d->state == STATE_FAILED) {
        fetcher_send_error(f, answer, &d->error);
    } else if (kind == FC_NET_LIST) {
        folder_send(f, d, below, answer);
    } else if (kind != FC_NET_OPEN) {
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE, .is_folder = 1}, NULL, 0);
    } else {
        (void)fc_fail(&error, FC_ECORRUPT, "%s: is a folder", d->name);
        fetcher_send_error(f, answer, &error);
    }
}

static void close_both(fetcher *f, int answer, int socket) {
    fetcher_close(f, answer);
    if (socket >= 0) {
        close(socket);
    }
}

/* A file of an open checkpoint, which no person names again, whose server may be there again. */
static object *object_now(fetcher *f, const char *name) {
    object *o = object_get(f, name);
    if (o && o->state == STATE_FAILED && fetcher_now() - o->known_since > FRESH_MS) {
        o->state = STATE_NEW;
    }
    return o;
}

/* The name as an object; it is no folder, or not known to be one. */
static void request_object(fetcher *f, fc_net_request_kind kind, const char *name, int answer, int socket) {
    object *o = object_now(f, name);
    if (!o) {
        close_both(f, answer, socket);
        return;
    }
    if (o->state == STATE_NEW || o->state == STATE_ASKED) {
        wait_for(f, &o->waiters, kind, name, answer, socket);
        if (o->state == STATE_NEW) {
            object_open(f, o, NULL, answer);
        }
        return;
    }
    const bool kept = answer_known(f, kind, o, answer, socket);
    close_both(f, answer, kept ? -1 : socket);
}

/* The name is a folder, or in one that is known. @return false if it is an object, or may be one */
static bool request_in_folder(fetcher *f, folder *d, const char *name, const char *rest, fc_net_request_kind kind,
                              int answer, int socket) {
    bool is_folder = false;
    const knowledge found = d->state == STATE_READY ? folder_find(d, rest, &is_folder) : STATE_FAILED;
    if (d->state == STATE_FAILED || (found == STATE_READY && is_folder)) {
        send_folder(f, d, kind, rest, answer);
    } else if (found == STATE_MISSING && kind != FC_NET_LOOK && !object_is_known(f, name)) {
        send_missing(f, answer);
    } else {
        return false;
    }
    close_both(f, answer, socket);
    return true;
}

bool name_is_refused(const fetcher *f, const char *name, fc_error *error) {
    const provider p = name_provider(name);
    const char *wrong = p == PROVIDER_HUB ? f->setup.wrong_hub : p == PROVIDER_HTTP ? "" : f->setup.wrong_bucket;
    *error = f->failed;
    return *wrong ? fc_fail(error, FC_EUSAGE, "%s: %s", name, wrong) != FC_OK : f->failed.code != FC_OK;
}

/* Whether the name is that of a bucket, which is never an object. */
static bool is_bucket(const char *name) {
    const provider p = name_provider(name);
    return (p == PROVIDER_S3 || p == PROVIDER_GS) && !strchr(strstr(name, "://") + 3, '/');
}

void object_request(fetcher *f, fc_net_request_kind kind, const char *name, int answer, int socket) {
    const char *rest = "";
    folder *d = folder_of(f, name, &rest);
    fc_error error;
    if (name_is_refused(f, name, &error)) {
        fetcher_send_error(f, answer, &error);
        close_both(f, answer, socket);
        return;
    }
    if (query_is_lost(f, name)) {
        send_missing(f, answer);
        close_both(f, answer, socket);
        return;
    }
    if (d && d->state == STATE_ASKED) {
        wait_for(f, &d->waiters, kind, name, answer, socket);
    } else if (d && d->state != STATE_MISSING && request_in_folder(f, d, name, rest, kind, answer, socket)) {
        return;
    } else if (d && is_bucket(name)) { /* it is empty */
        send_missing(f, answer);
        close_both(f, answer, socket);
    } else if (d || kind == FC_NET_OPEN || name_is_file(name)) {
        request_object(f, kind, name, answer, socket);
    } else if ((d = folder_get(f, name, name_root(name))) != NULL) {
        wait_for(f, &d->waiters, kind, name, answer, socket);
        folder_open(f, d, answer);
    } else {
        close_both(f, answer, socket);
    }
}

void object_expect(fetcher *f, const char *name) {
    const char *rest = "";
    const folder *d = folder_of(f, name, &rest);
    bool is_folder = false;
    fc_error ignored;
    if (name_is_refused(f, name, &ignored) ||
        (d && (d->state != STATE_READY || folder_find(d, rest, &is_folder) != STATE_READY || is_folder))) {
        return;
    }
    object *o = object_get(f, name);
    if (o && o->state == STATE_NEW) {
        object_open(f, o, NULL, -1);
    }
}

/* Where in the shared memory the bytes go. @return false if that is not within it */
static bool find_place(const fetcher *f, const fc_net_request *request, unsigned char **into) {
    const size_t size = f->setup.shared_size;
    *into = NULL;
    if (request->into == FC_NOT_SHARED) {
        return true;
    }
    if (request->into > size || request->length > size - request->into) {
        return false;
    }
    *into = f->setup.shared + request->into;
    return true;
}

/* Gives a reader what the head has of the bytes from `offset` to `end`. @return how many */
static size_t give_head(fetcher *f, object *o, uint64_t offset, uint64_t end, unsigned char *into, int answer) {
    const uint64_t last = end < o->head_size ? end : o->head_size;
    const size_t size = offset < last ? (size_t)(last - offset) : 0;
    o->used = ++f->clock;
    if (into && size > 0) {
        memcpy(into, o->head + offset, size);
    } else if (size > 0) {
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DATA, .size = size}, o->head + offset, size);
    }
    return size;
}

transfer *object_transfer(fetcher *f, object *o, uint64_t offset, uint64_t length) {
    char url[MOST_URL];
    transfer *t = name_url(f, o->name, url) ? transfer_new(f, FOR_RANGE, o->direct ? o->direct : url) : NULL;
    if (t) {
        t->plain_http = strncmp(url, "http://", 7) == 0;
        t->object = o;
        t->offset = offset;
        t->length = length;
    }
    return t;
}

void object_read(fetcher *f, const opened_file *file, const fc_net_request *request, int answer) {
    object *o = file->object;
    unsigned char *into;
    const uint64_t size = o->version.size, offset = request->offset, length = request->length;
    const uint64_t end = offset < size ? (length < size - offset ? offset + length : size) : offset;
    if (!find_place(f, request, &into)) {
        fetcher_close(f, answer);
        return;
    }
    const size_t given = give_head(f, o, offset, end, into, answer);
    if (offset + given == end) { /* the reader sees that it gets less than it asked for */
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE, .size = into ? given : 0}, NULL, 0);
        fetcher_close(f, answer);
        return;
    }
    const read_range wanted = {offset + given, end, given, into ? into + given : NULL};
    if (ahead_read(f, file->socket, &wanted, answer)) {
        return;
    }
    transfer *t = object_transfer(f, o, wanted.first, end - wanted.first);
    if (!t) {
        fetcher_close(f, answer);
        return;
    }
    range_begin(t, &wanted, answer);
}
