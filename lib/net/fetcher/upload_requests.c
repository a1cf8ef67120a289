/*
 * Requests to write objects, and the transfers that they need: see uploads.h.
 */
#include "net/fetcher/uploads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_PART_TEXT = MOST_ETAG * 6 + 128 }; /* in the text that completes an upload */

/* ---- transfers ---- */

static void close_any(int file) {
    if (file >= 0) {
        close(file);
    }
}

void outgoing_free(outgoing *out) {
    if (out) {
        close_any(out->file);
        free(out->name);
        free(out->id);
        free(out->text);
        free(out);
    }
}

static void refuse(fetcher *f, int answer, const fc_error *error) {
    if (answer >= 0) {
        fetcher_send_error(f, answer, error);
        fetcher_close(f, answer);
    }
}

transfer *upload_transfer(fetcher *f, transfer_kind purpose, const char *name, int answer, int file) {
    outgoing *out = calloc(1, sizeof *out);
    char *copy = strdup(name);
    transfer *t = out && copy ? transfer_new(f, purpose, "") : NULL;
    if (!t) {
        fc_error error;
        (void)fc_no_memory(&error, name);
        refuse(f, answer, &error);
        close_any(file);
        free(out);
        free(copy);
        return NULL;
    }
    *out = (outgoing){.name = copy, .file = file};
    t->out = out;
    t->reply = answer;
    return t;
}

/* The parameters of a query are in the order in which they are signed. */
static bool add_query(const transfer *t, transfer_kind purpose, char url[MOST_URL]) {
    const outgoing *o = t->out;
    const char *id = o->id ? o->id : o->upload ? o->upload->id : NULL;
    char number[32];
    switch (purpose) {
    case FOR_BEGIN:
        return url_add(url, "?uploads=");
    case FOR_PART:
        snprintf(number, sizeof number, "?partNumber=%u&", o->part);
        return id && url_add(url, number) && url_add(url, "uploadId=") && url_add_value(url, id);
    case FOR_PARTS:
        snprintf(number, sizeof number, "?part-number-marker=%u&", o->after);
        return id && url_add(url, number) && url_add(url, "uploadId=") && url_add_value(url, id);
    case FOR_COMPLETE:
    case FOR_ABORT:
        return id && url_add(url, "?uploadId=") && url_add_value(url, id);
    default:
        return true;
    }
}

bool upload_list_url(const fetcher *f, const clearing *c, const char *key, const char *id, char url[MOST_URL]) {
    const char *prefix = "";
    return name_bucket_url(f, c->name, url, &prefix) && url_add(url, "/?") &&
           (!key || (url_add(url, "key-marker=") && url_add_value(url, key) && url_add(url, "&"))) &&
           url_add(url, "prefix=") && url_add_value(url, prefix) &&
           (!c->is_folder || !*prefix || url_add_value(url, "/")) &&
           (!id || (url_add(url, "&upload-id-marker=") && url_add_value(url, id))) && url_add(url, "&uploads=");
}

bool upload_set_url(transfer *t, const char *url) {
    char *copy = strdup(url);
    if (!copy) {
        (void)fc_no_memory(&t->error, t->out->name);
        return false;
    }
    free(t->url);
    t->url = copy;
    t->plain_http = strncmp(url, "http://", 7) == 0;
    return true;
}

bool upload_turn(const fetcher *f, transfer *t, transfer_kind purpose) {
    char url[MOST_URL];
    t->purpose = purpose;
    t->progress = WAITS;
    t->wake = 0;
    t->tries = 0;
    if (!name_url(f, t->out->name, url) || !add_query(t, purpose, url)) {
        (void)fc_fail(&t->error, FC_EUNSUPPORTED, "%s: the name is too long", t->out->name);
        return false;
    }
    return upload_set_url(t, url);
}

/* Begins a transfer with all that it needs, or ends it. */
static void go(fetcher *f, transfer *t) {
    if (!upload_turn(f, t, t->purpose)) {
        transfer_end(f, t);
    }
}

/* For gs://, conditions are not for what is sent in parts. */
static void go_if_new(fetcher *f, transfer *t) {
    t->out->next = t->purpose;
    if (t->out->only_new && name_provider(t->out->name) == PROVIDER_GS) {
        t->purpose = FOR_PROBE;
    }
    go(f, t);
}

/* ---- requests about names ---- */

upload *upload_new(const fc_net_request *request, const char *id) {
    upload *u = calloc(1, sizeof *u);
    char *copy = strdup(request->name), *copy_of_id = id ? strdup(id) : NULL;
    if (!u || !copy || (id && !copy_of_id)) {
        free(u);
        free(copy);
        free(copy_of_id);
        return NULL;
    }
    u->name = copy;
    u->id = copy_of_id;
    u->run = request->run;
    return u;
}

static void begin(fetcher *f, const fc_net_request *request, const char *id, int answer, int socket) {
    upload *u = upload_new(request, id);
    if (!u) {
        fc_error error;
        (void)fc_no_memory(&error, request->name);
        refuse(f, answer, &error);
        close_any(socket);
        return;
    }
    u->stays = id || request->flag;
    transfer *t = upload_transfer(f, id ? FOR_PARTS : FOR_BEGIN, request->name, answer, socket);
    if (!t) {
        upload_release(f, u);
        return;
    }
    t->out->upload = u;
    t->out->run = u->run;
    t->out->part = request->part;
    go(f, t);
}

/* @return the ID in a request; NULL: it has none */
static const char *id_of(const fc_net_request *request) {
    const size_t name = strlen(request->name);
    return name + 1 < request->name_size && request->name_size <= FC_NET_MOST_NAME ? request->name + name + 1 : NULL;
}

static void send_whole(fetcher *f, const fc_net_request *request, int answer, int file) {
    transfer *t = upload_transfer(f, FOR_WHOLE, request->name, answer, file);
    if (t) {
        t->length = request->length;
        t->out->only_new = request->flag != 0;
        t->out->run = request->run;
        go_if_new(f, t);
    }
}

static void delete_object(fetcher *f, const fc_net_request *request, int answer) {
    transfer *t = upload_transfer(f, request->run ? FOR_PROBE : FOR_DELETE, request->name, answer, -1);
    if (t) {
        t->out->next = FOR_DELETE;
        t->out->run = request->run;
        go(f, t);
    }
}

static void clear(fetcher *f, const fc_net_request *request, int answer) {
    char url[MOST_URL] = "";
    clearing *c = calloc(1, sizeof *c);
    char *copy = strdup(request->name);
    transfer *t = c && copy ? upload_transfer(f, FOR_UPLOADS, request->name, -1, -1) : NULL;
    if (!t) {
        fc_error error;
        (void)fc_no_memory(&error, request->name);
        refuse(f, answer, &error);
        free(copy);
        free(c);
        return;
    }
    *c = (clearing){.name = copy, .answer = answer, .is_folder = request->flag != 0, .pending = 1};
    t->out->clearing = c;
    if (!upload_list_url(f, c, NULL, NULL, url) || !upload_set_url(t, url)) {
        (void)fc_fail(&t->error, FC_EUNSUPPORTED, "%s: the name is too long", c->name);
        transfer_end(f, t);
    }
}

void upload_request(fetcher *f, const fc_net_request *request, int answer, int extra) {
    fc_error error;
    const bool begins = request->kind == FC_NET_BEGIN || request->kind == FC_NET_CONTINUE;
    const bool needs_extra = begins || request->kind == FC_NET_WHOLE || request->kind == FC_NET_ADOPT;
    const char *id = request->kind == FC_NET_CONTINUE ? id_of(request) : NULL;
    if (name_is_refused(f, request->name, &error)) {
        refuse(f, answer, &error);
        close_any(extra);
    } else if (needs_extra != (extra >= 0) || (request->kind == FC_NET_CONTINUE && !id)) {
        close(answer);
        close_any(extra);
    } else if (begins) {
        begin(f, request, id, answer, extra);
    } else if (request->kind == FC_NET_WHOLE) {
        send_whole(f, request, answer, extra);
    } else if (request->kind == FC_NET_DELETE) {
        delete_object(f, request, answer);
    } else if (request->kind == FC_NET_CLEAR) {
        clear(f, request, answer);
    } else if (request->kind == FC_NET_ADOPT) {
        upload_adopt(f, request, answer, extra);
    } else {
        close(answer);
    }
}

/* ---- requests about an upload ---- */

static void send_part(fetcher *f, upload *u, const fc_net_request *request, int answer, int file) {
    transfer *t = upload_transfer(f, FOR_PART, u->name, answer, file);
    if (!t) {
        return;
    }
    t->out->upload = u;
    t->out->part = request->part;
    t->offset = request->offset;
    t->length = request->length;
    if (file < 0 || request->part < 1 || request->part > MOST_PARTS) {
        (void)fc_fail(&t->error, FC_EUNSUPPORTED, "%s: a part must have a number from 1 to %d", u->name, MOST_PARTS);
        transfer_end(f, t);
        return;
    }
    go(f, t);
}

/* Copies an ETag as text of XML. */
static size_t add_escaped(char *out, const char *etag) {
    size_t n = 0;
    for (const char *c = etag; *c; c++) {
        const char *as = *c == '"' ? "&quot;" : *c == '&' ? "&amp;" : *c == '<' ? "&lt;" : *c == '>' ? "&gt;" : NULL;
        if (as) {
            memcpy(out + n, as, strlen(as));
            n += strlen(as);
        } else {
            out[n++] = *c;
        }
    }
    out[n] = '\0';
    return n;
}

/* @return NULL after setting `error` */
static char *list_parts(const upload *u, unsigned count, fc_error *error) {
    char *text = count <= MOST_PARTS ? malloc(((size_t)count + 1) * MOST_PART_TEXT) : NULL;
    if (!text) {
        (void)fc_no_memory(error, u->name);
        return NULL;
    }
    size_t n = (size_t)sprintf(text, "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (unsigned i = 0; i < count; i++) {
        const char *etag = i < u->capacity ? u->parts[i].etag : NULL;
        if (!etag) {
            (void)fc_fail(error, FC_EUSAGE, "%s: part %u was not sent", u->name, i + 1);
            free(text);
            return NULL;
        }
        n += (size_t)sprintf(text + n, "<Part><PartNumber>%u</PartNumber><ETag>", i + 1);
        n += add_escaped(text + n, etag);
        n += (size_t)sprintf(text + n, "</ETag></Part>");
    }
    (void)sprintf(text + n, "</CompleteMultipartUpload>");
    return text;
}

static void complete(fetcher *f, upload *u, const fc_net_request *request, int answer) {
    transfer *t = upload_transfer(f, FOR_COMPLETE, u->name, answer, -1);
    if (!t) {
        return;
    }
    t->out->upload = u;
    t->out->run = u->run;
    t->out->part = request->part;
    t->out->only_new = request->flag != 0;
    t->out->text = list_parts(u, request->part, &t->error);
    if (!t->out->text) {
        transfer_end(f, t);
        return;
    }
    t->length = strlen(t->out->text);
    go_if_new(f, t);
}

static transfer *transfer_of(const fetcher *f, const upload *u) {
    transfer *t = f->transfers;
    while (t && (!t->out || t->out->upload != u)) {
        t = t->next;
    }
    return t;
}

/* Ends what is under way for an upload without an answer: nobody waits for it any more. */
static void drop_transfers(fetcher *f, const upload *u) {
    for (transfer *t; (t = transfer_of(f, u)) != NULL;) {
        transfer_free(f, t);
    }
}

/* @param answer -1: nobody waits for it */
static void abort_upload(fetcher *f, upload *u, int answer) {
    transfer *t = upload_transfer(f, FOR_ABORT, u->name, answer, -1);
    if (t) {
        t->out->upload = u;
        go(f, t);
    }
}

void upload_request_of(fetcher *f, upload *u, const fc_net_request *request, int answer, int extra) {
    if (request->kind == FC_NET_PART) {
        send_part(f, u, request, answer, extra);
        return;
    }
    if (request->kind == FC_NET_TAKE) {
        ticket_take(f, u, request, answer, extra);
    }
    close_any(extra);
    if (request->kind == FC_NET_COMPLETE) {
        complete(f, u, request, answer);
    } else if (request->kind == FC_NET_ABORT) {
        drop_transfers(f, u); /* a part that came after the abort would stay */
        u->stays = false;
        abort_upload(f, u, answer);
    } else if (request->kind == FC_NET_TICKET) {
        ticket_write(f, u, request, answer);
    } else if (request->kind != FC_NET_TAKE) {
        close(answer);
    }
}

void upload_closed(fetcher *f, upload *u) {
    u->open = true; /* an abort that fails at once does not free it */
    drop_transfers(f, u);
    if (!u->ended && u->id && !u->stays) {
        abort_upload(f, u, -1);
    }
    u->open = false;
    upload_release(f, u);
}

void upload_release(const fetcher *f, upload *u) {
    if (u->open || transfer_of(f, u)) {
        return;
    }
    for (size_t i = 0; i < u->capacity; i++) {
        free(u->parts[i].etag);
    }
    free(u->parts);
    free(u->id);
    free(u->name);
    free(u);
}
