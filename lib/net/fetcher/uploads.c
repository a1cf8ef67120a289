/*
 * The answers of servers to transfers that write, and what they mean for the caller. See uploads.h.
 */
#include "net/fetcher/uploads.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_CODE = 64 };

/* ---- errors ---- */

/* Copies the code of an error, such as NoSuchBucket, which is all of it that is shown. */
static void read_code(const transfer *t, char code[MOST_CODE]) {
    const char *at = t->body ? (const char *)t->body : "";
    char *text = xml_find(at, "<Error>") ? xml_next_text(&at, "<Code>", "</Code>") : NULL;
    bool good = text && strlen(text) < MOST_CODE;
    for (const char *c = text; good && *c; c++) {
        good = isalnum((unsigned char)*c);
    }
    snprintf(code, MOST_CODE, "%s", good ? text : "");
    free(text);
}

static void fail_with_status(fetcher *f, transfer *t, const char *code) {
    char text[256];
    const long status = t->answer.status;
    const bool refused = status == 401 || status == 403;
    const char *what = strcmp(code, "NoSuchBucket") == 0 ? "there is no such bucket"
                       : refused                         ? "the server refuses access"
                       : t->purpose == FOR_DELETE        ? "the server cannot delete it"
                       : t->purpose == FOR_UPLOADS       ? "the server cannot list its uploads"
                       : t->purpose == FOR_PARTS         ? "the server cannot list the parts of its upload"
                                                         : "the server cannot write it";
    snprintf(text, sizeof text, "%s (status %ld%s%s)%s", what, status, *code ? ", " : "", code,
             refused && !f->setup.key[0] ? "; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY give access" : "");
    transfer_fail(f, t, FC_EIO, text);
}

static bool is_transient(const char *code) {
    return strcmp(code, "RequestTimeout") == 0 || strcmp(code, "InternalError") == 0 || strcmp(code, "SlowDown") == 0 ||
           strcmp(code, "ServiceUnavailable") == 0;
}

static void repeat_for(fetcher *f, transfer *t, const char *code) {
    char text[128];
    snprintf(text, sizeof text, "the server is busy or has an error (%s)", code);
    transfer_repeat(f, t, 0, text);
}

/* Buckets with Object Lock demand an MD5 sum of what is sent. It doubles the processor time of an upload, so it is sent
   only after a server said so. @return whether the request is sent again */
static bool send_sum(fetcher *f, transfer *t) {
    const char *text = t->body ? (const char *)t->body : "";
    const bool may = (t->purpose == FOR_PART || t->purpose == FOR_WHOLE) && !t->out->summed;
    if (!may || t->answer.status != 400 || (!strstr(text, "Content-MD5") && !strstr(text, "ContentMD5"))) {
        return false;
    }
    f->sums = true;
    t->progress = WAITS;
    t->wake = 0;
    return true;
}

/* ---- whether an object is ours ---- */

/* The object exists already. */
static void end_with_other(fetcher *f, transfer *t) {
    t->out->exists = true;
    transfer_end(f, t);
}

static bool is_ours(const transfer *t) {
    return t->answer.status == 200 && t->out->run != 0 && t->answer.run == t->out->run;
}

static void judge_proof(fetcher *f, transfer *t) {
    const long status = t->answer.status;
    if (is_ours(t)) {
        transfer_end(f, t);
    } else if (t->out->only_new && status == 200) {
        end_with_other(f, t);
    } else if (status == 404) {
        transfer_fail(f, t, FC_EIO, "the upload was aborted by another program or by a rule of the bucket");
    } else {
        transfer_fail(f, t, FC_EIO,
                      "the server's answer was lost, and whether the object is what was sent cannot be found out: "
                      "compare it with its source, or write it again");
    }
}

/* An answer may have been lost, so this one may be to what was done before. */
static void prove(fetcher *f, transfer *t) {
    t->out->next = t->purpose;
    if (!upload_turn(f, t, FOR_PROOF)) {
        transfer_end(f, t);
    }
}

static void judge_probe(fetcher *f, transfer *t, const char *code) {
    const bool deletes = t->out->next == FOR_DELETE, missing = t->answer.status == 404;
    if (deletes ? is_ours(t) : missing) {
        t->out->probed = true;
        if (!upload_turn(f, t, t->out->next)) {
            transfer_end(f, t);
        }
    } else if (missing) {
        transfer_end(f, t);
    } else if (t->answer.status == 200) {
        end_with_other(f, t);
    } else {
        fail_with_status(f, t, code);
    }
}

/* ---- success ---- */

static void fail_to_understand(fetcher *f, transfer *t) {
    transfer_fail(f, t, FC_ECORRUPT, "the server's answer cannot be understood");
}

static void take_id(fetcher *f, transfer *t) {
    const char *at = t->body ? (const char *)t->body : "";
    char *id = xml_next_text(&at, "<UploadId>", "</UploadId>");
    if (!id || !*id || strlen(id) > FC_NET_MOST_ID) {
        free(id);
        fail_to_understand(f, t);
        return;
    }
    t->out->upload->id = id;
    transfer_end(f, t);
}

static bool make_room(upload *u, unsigned part) {
    if (part <= u->capacity) {
        return true;
    }
    const size_t capacity = part < 32 ? 64 : 2 * (size_t)part;
    sent_part *more = realloc(u->parts, capacity * sizeof *more);
    if (!more) {
        return false;
    }
    memset(more + u->capacity, 0, (capacity - u->capacity) * sizeof *more);
    u->parts = more;
    u->capacity = capacity;
    return true;
}

bool upload_keep_part(upload *u, unsigned part, char *etag, uint64_t size) {
    if (!etag || !make_room(u, part)) {
        free(etag);
        return false;
    }
    free(u->parts[part - 1].etag);
    u->parts[part - 1] = (sent_part){etag, size};
    return true;
}

static void take_part(fetcher *f, transfer *t) {
    upload *u = t->out->upload;
    if (!t->answer.etag[0]) {
        transfer_fail(f, t, FC_ECORRUPT, "the server did not say which part it has (ETag)");
        return;
    }
    if (!upload_keep_part(u, t->out->part, strdup(t->answer.etag), t->length)) {
        (void)fc_no_memory(&t->error, u->name);
    }
    transfer_end(f, t);
}

/* The answer may begin with success long before the object is made, and end with an error. */
static void take_completion(fetcher *f, transfer *t, const char *code) {
    const char *text = t->body ? (const char *)t->body : "";
    if (xml_find(text, "<CompleteMultipartUploadResult")) {
        transfer_end(f, t);
    } else if (is_transient(code)) {
        repeat_for(f, t, code);
    } else if (*code) {
        fail_with_status(f, t, code);
    } else {
        repeat_for(f, t, "its answer cannot be understood");
    }
}

static void judge_success(fetcher *f, transfer *t, const char *code) {
    switch (t->purpose) {
    case FOR_BEGIN:
        take_id(f, t);
        break;
    case FOR_PARTS:
        upload_take_parts(f, t);
        break;
    case FOR_PART:
        take_part(f, t);
        break;
    case FOR_COMPLETE:
        take_completion(f, t, code);
        break;
    default:
        transfer_end(f, t);
    }
}

static void judge_missing(fetcher *f, transfer *t, const char *code) {
    const transfer_kind p = t->purpose;
    if (p == FOR_ABORT || p == FOR_DELETE || p == FOR_UPLOADS) {
        transfer_end(f, t);
    } else if (strcmp(code, "NoSuchUpload") == 0 && (p == FOR_PARTS || (p == FOR_COMPLETE && t->tries == 0))) {
        t->out->missing = true;
        t->out->upload->ended = true;
        transfer_end(f, t);
    } else if (p == FOR_COMPLETE && t->tries > 0) {
        prove(f, t);
    } else if (p == FOR_COMPLETE || p == FOR_PART) {
        t->out->upload->ended = strcmp(code, "NoSuchUpload") == 0;
        transfer_fail(f, t, FC_EIO, "the upload was aborted by another program or by a rule of the bucket");
    } else {
        fail_with_status(f, t, code);
    }
}

void upload_judge(fetcher *f, transfer *t) {
    const long status = t->answer.status;
    const bool writes = t->purpose == FOR_COMPLETE || t->purpose == FOR_WHOLE, only_new = writes && t->out->only_new;
    char code[MOST_CODE], text[128];
    read_code(t, code);
    if (t->purpose == FOR_PROOF) {
        judge_proof(f, t);
    } else if (t->purpose == FOR_PROBE) {
        judge_probe(f, t, code);
    } else if (status / 100 == 2) {
        judge_success(f, t, code);
    } else if (status == 404) {
        judge_missing(f, t, code);
    } else if (only_new && (status == 412 || (status == 409 && t->purpose == FOR_COMPLETE)) && t->tries > 0) {
        prove(f, t);
    } else if (only_new && (status == 412 || (status == 409 && t->purpose == FOR_COMPLETE))) {
        end_with_other(f, t);
    } else if (send_sum(f, t)) {
        return;
    } else if (status == 409 || is_transient(code)) {
        repeat_for(f, t, *code ? code : "status 409");
    } else if (t->purpose == FOR_UPLOADS && status == 501) { /* a server without such lists */
        transfer_end(f, t);
    } else if (only_new && status == 501 && !t->out->probed) { /* a server without conditions */
        t->out->next = t->purpose;
        if (!upload_turn(f, t, FOR_PROBE)) {
            transfer_end(f, t);
        }
    } else if (status == 400 && t->answer.region[0]) {
        snprintf(text, sizeof text, "the bucket is in another region: set AWS_REGION to %s", t->answer.region);
        transfer_fail(f, t, FC_EUSAGE, text);
    } else {
        fail_with_status(f, t, code);
    }
}

/* ---- uploads of other runs ---- */

/* Aborts an upload of a list if it belongs to what is cleared. @return false: out of memory */
static bool clear_one(fetcher *f, clearing *c, const char *key, const char *id) {
    char url[MOST_URL], name[FC_NET_MOST_NAME + 1];
    const char *own = "";
    const bool known = name_bucket_url(f, c->name, url, &own);
    const size_t n = strlen(own), bucket = *own ? (size_t)(own - c->name) : strlen(c->name);
    const bool below = c->is_folder && (n == 0 || (strncmp(key, own, n) == 0 && key[n] == '/'));
    const char *slash = c->name[bucket - 1] == '/' ? "" : "/";
    const char *deeper = below ? strchr(key + n + (n > 0), '/') : NULL;
    if (!known || (deeper && strchr(deeper + 1, '/')) ||
        /* targets have one level of folders */ (!below && (c->is_folder || strcmp(key, own) != 0)) ||
        snprintf(name, sizeof name, "%.*s%s%s", (int)bucket, c->name, slash, key) >= (int)sizeof name) {
        return true;
    }
    transfer *t = upload_transfer(f, FOR_ABORT, name, -1, -1);
    if (!t) {
        return false;
    }
    c->pending++;
    t->out->clearing = c;
    t->out->id = strdup(id);
    if (!t->out->id) {
        (void)fc_no_memory(&t->error, name);
    }
    if (!t->out->id || !upload_turn(f, t, FOR_ABORT)) {
        transfer_end(f, t);
    }
    return true;
}

static bool ask_for_more(fetcher *f, clearing *c, const char *key, const char *id) {
    char url[MOST_URL];
    transfer *t = c->pages < MOST_PAGES && upload_list_url(f, c, key, id, url)
                      ? upload_transfer(f, FOR_UPLOADS, c->name, -1, -1)
                      : NULL;
    if (!t) {
        return false;
    }
    c->pending++;
    t->out->clearing = c;
    if (!upload_set_url(t, url)) {
        transfer_end(f, t);
    }
    return true;
}

/* @return false: it cannot be understood */
static bool take_uploads(fetcher *f, clearing *c, const transfer *t) {
    const char *text = t->body ? (const char *)t->body : "", *at = text;
    bool good = xml_find(text, "<ListMultipartUploadsResult") && xml_find(text, "</ListMultipartUploadsResult>");
    while (good && (at = xml_find(at, "<Upload>")) != NULL) {
        const char *key_at = at, *id_at = at;
        char *key = xml_next_text(&key_at, "<Key>", "</Key>"), *id = xml_next_text(&id_at, "<UploadId>", "</UploadId>");
        good = key && id && strlen(id) <= FC_NET_MOST_ID && clear_one(f, c, key, id);
        free(key);
        free(id);
        at++;
    }
    if (good && strstr(text, "<IsTruncated>true<")) {
        const char *key_at = text, *id_at = text;
        char *key = xml_next_text(&key_at, "<NextKeyMarker>", "</NextKeyMarker>");
        char *id = xml_next_text(&id_at, "<NextUploadIdMarker>", "</NextUploadIdMarker>");
        good = key && *key && ask_for_more(f, c, key, id && *id ? id : NULL);
        free(key);
        free(id);
    }
    return good;
}

static void clearing_ended(fetcher *f, transfer *t) {
    clearing *c = t->out->clearing;
    if (t->purpose == FOR_UPLOADS && t->error.code == FC_OK && t->answer.status / 100 == 2) {
        c->pages++;
        if (!take_uploads(f, c, t)) {
            (void)fc_fail(&t->error, FC_ECORRUPT, "%s: the server's list of uploads cannot be understood", c->name);
        }
    }
    c->count += t->purpose == FOR_ABORT && t->error.code == FC_OK;
    if (c->error.code == FC_OK) {
        c->error = t->error;
    }
    if (--c->pending > 0) {
        return;
    }
    if (c->error.code != FC_OK) {
        fetcher_send_error(f, c->answer, &c->error);
    } else {
        fetcher_send(f, c->answer, (fc_net_answer){.kind = FC_NET_DONE, .size = c->count}, NULL, 0);
    }
    fetcher_close(f, c->answer);
    free(c->name);
    free(c);
}

/* ---- ends ---- */

/* An upload that was begun gets its socket. */
static void upload_begun(fetcher *f, transfer *t) {
    upload *u = t->out->upload;
    if (f->leaves) { /* nobody sends its parts, or knows the ID of a new one */
        u->stays = u->stays && t->purpose == FOR_PARTS;
        return;
    }
    if (t->error.code == FC_OK && !t->out->missing && fetcher_add_file(f, (opened_file){t->out->file, NULL, u})) {
        t->out->file = -1;
        u->open = true;
    } else if (t->error.code == FC_OK && !t->out->missing) {
        (void)fc_no_memory(&t->error, u->name);
    }
}

void upload_ended(fetcher *f, transfer *t) {
    outgoing *o = t->out;
    upload *u = o->upload;
    const transfer_kind done = t->purpose == FOR_PROOF ? o->next : t->purpose;
    const bool good = t->error.code == FC_OK && !o->exists && !o->missing;
    const bool begins = u && (t->purpose == FOR_BEGIN || t->purpose == FOR_PARTS);
    if (begins) {
        upload_begun(f, t);
    }
    if (good && u && (done == FOR_COMPLETE || done == FOR_ABORT)) {
        u->ended = true;
    }
    if (good && (done == FOR_COMPLETE || done == FOR_WHOLE || done == FOR_DELETE)) {
        fetcher_forget_now(f, o->name);
    }
    if (o->clearing) {
        clearing_ended(f, t);
    } else if (t->reply >= 0 && t->error.code != FC_OK) {
        fetcher_send_error(f, t->reply, &t->error);
    } else if (t->reply >= 0 && (!begins || !u->open || !u->stays || upload_tell(f, t))) {
        const fc_net_answer_kind kind = o->exists ? FC_NET_EXISTS : o->missing ? FC_NET_MISSING : FC_NET_DONE;
        fetcher_send(f, t->reply, (fc_net_answer){.kind = kind}, NULL, 0);
    } else if (u && t->purpose == FOR_BEGIN) { /* nobody knows its ID */
        u->stays = false;
    }
    transfer_free(f, t);
    if (begins && f->leaves) {
        upload_closed(f, u);
    } else if (u) {
        upload_release(f, u);
    }
}
