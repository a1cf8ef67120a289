/*
 * What is sent to a server, with credentials, and where its bytes go: see fetcher.h.
 */
#include "base/base64.h"
#include "net/fetcher/ahead.h"
#include "net/fetcher/crowds.h"
#include "net/fetcher/uploads.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CONNECT_MS = 20000,
    SLOW_SECONDS = 30, /* with less than SLOW_BYTES a second, a transfer is repeated */
    SLOW_BYTES = 1 << 10,
    SLOW_COMPLETE_SECONDS = 600, /* a server may copy all parts */
    MOST_ERROR_BODY = 64 << 10,
    EXPECT_MS = 200, /* how long a body waits for the server to ask for it; not all servers do */
};

static bool add_header(transfer *t, const char *name, const char *value) {
    char line[MOST_URL + 64];
    snprintf(line, sizeof line, "%s: %s", name, value);
    struct curl_slist *list = curl_slist_append(t->headers, line);
    t->headers = list ? list : t->headers;
    return list != NULL;
}

bool transfer_is_of_bucket(const transfer *t) {
    const provider p = name_provider(transfer_name(t));
    return p == PROVIDER_S3 || p == PROVIDER_GS;
}

static bool sends_body(const transfer *t) {
    return t->purpose == FOR_PART || t->purpose == FOR_WHOLE || t->purpose == FOR_COMPLETE;
}

/* Credentials are for the server that the user named, and not for one to which it redirects. */
static bool add_credentials(const fetcher *f, transfer *t, const char *where) {
    const fc_net_setup *s = &f->setup;
    char text[MOST_URL];
    const size_t hub = strlen(s->hub);
    if (name_provider(transfer_name(t)) == PROVIDER_HUB && s->hub_token[0] && strncmp(t->url, s->hub, hub) == 0 &&
        t->url[hub] == '/') {
        snprintf(text, sizeof text, "Bearer %s", s->hub_token);
        return add_header(t, "Authorization", text);
    }
    if (!transfer_is_of_bucket(t) || !s->key[0]) {
        return true;
    }
    /* libcurl signs these, too; it would leave the port out. What is sent is signed by TLS. */
    const char *port = strrchr(where, ':');
    const bool usual = strcmp(port, strncmp(t->url, "https", 5) == 0 ? ":443" : ":80") == 0;
    snprintf(text, sizeof text, "%.*s", (int)(usual ? (size_t)(port - where) : strlen(where)), where);
    return add_header(t, "Host", text) &&
           add_header(t, "X-Amz-Content-Sha256",
                      sends_body(t) ? "UNSIGNED-PAYLOAD"
                                    : "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855") &&
           (!s->requester_pays || name_provider(transfer_name(t)) != PROVIDER_S3 ||
            add_header(t, "X-Amz-Request-Payer", "requester")) &&
           (!s->token[0] || add_header(t, "X-Amz-Security-Token", s->token));
}

/* @return false if the file cannot be read */
static bool add_sum(transfer *t) {
    unsigned char buffer[1 << 14], sum[MD5_BYTES];
    char text[2 * MD5_BYTES] = "";
    md5 m;
    md5_begin(&m);
    for (uint64_t at = 0; at < t->length;) {
        const uint64_t left = t->length - at;
        const size_t some = left < sizeof buffer ? (size_t)left : sizeof buffer;
        const ssize_t n = pread(t->out->file, buffer, some, (off_t)(t->offset + at));
        if (n <= 0) {
            return false;
        }
        md5_add(&m, buffer, (size_t)n);
        at += (uint64_t)n;
    }
    md5_end(&m, sum);
    fc_base64_encode(sum, sizeof sum, text);
    t->out->summed = true;
    return add_header(t, "Content-MD5", text);
}

/* The type and the metadata of an object are those of the request that makes it. */
static bool add_outgoing_headers(const fetcher *f, transfer *t) {
    const transfer_kind p = t->purpose;
    const char *type = p == FOR_BEGIN || p == FOR_WHOLE ? "application/octet-stream"
                       : p == FOR_COMPLETE              ? "application/xml"
                                                        : NULL;
    const bool only_new = (p == FOR_COMPLETE || p == FOR_WHOLE) && t->out->only_new && !t->out->probed;
    const bool has_run = (p == FOR_BEGIN || p == FOR_WHOLE) && t->out->run != 0;
    const bool has_sum = f->sums && (p == FOR_PART || p == FOR_WHOLE);
    char run[RUN_DIGITS + 1];
    snprintf(run, sizeof run, "%016" PRIx64, t->out->run);
    return (!type || add_header(t, "Content-Type", type)) && (!only_new || add_header(t, "If-None-Match", "*")) &&
           (!has_run || add_header(t, "X-Amz-Meta-" RUN_HEADER, run)) && (!has_sum || add_sum(t));
}

static bool make_headers(const fetcher *f, transfer *t, const char *where) {
    const version *v = t->object ? &t->object->version : NULL;
    const bool pinned = v && (t->purpose == FOR_RANGE || t->done > 0);
    curl_slist_free_all(t->headers);
    t->headers = NULL;
    bool good = add_header(t, "Accept-Encoding", "identity") && add_credentials(f, t, where) &&
                (!t->out || add_outgoing_headers(f, t));
    if (pinned && v->etag[0] == '"') { /* a weak one matches nothing */
        good = good && add_header(t, "If-Match", v->etag);
    } else if (pinned && !v->etag[0] && v->modified[0]) {
        good = good && add_header(t, "If-Unmodified-Since", v->modified);
    }
    return good;
}

/* Adds bytes to the body. @param wanted room for it */
static bool keep_body(transfer *t, const char *bytes, size_t n, size_t wanted) {
    if (t->done + n + 1 > t->capacity) {
        unsigned char *more = realloc(t->body, wanted);
        if (!more) {
            (void)fc_no_memory(&t->error, transfer_name(t));
            return false;
        }
        t->body = more;
        t->capacity = wanted;
    }
    memcpy(t->body + t->done, bytes, n);
    t->done += n;
    t->body[t->done] = '\0';
    return true;
}

static size_t take_body(char *bytes, size_t size, size_t count, void *context) {
    transfer *t = context;
    const size_t n = size * count;
    const bool good = t->answer.status / 100 == 2;
    crowd_heard(t);
    if (t->out) { /* also what it says of an error */
        const uint64_t most = good && (t->purpose == FOR_UPLOADS || t->purpose == FOR_PARTS) ? MOST_PAGE : MOST_ANSWER;
        if (n > most - t->done) {
            return good ? answer_refuse_more(t) : 0;
        }
        return keep_body(t, bytes, n, 2 * (t->done + n) + 1) ? n : 0;
    }
    if (t->answer.status != 200 && t->answer.status != 206) {
        t->answer.bytes += n; /* a page for people */
        if (transfer_is_of_bucket(t)) {
            answer_take_page(&t->answer, bytes, n);
        }
        return t->answer.bytes < MOST_ERROR_BODY + MOST_HEADER_BYTES ? n : 0;
    }
    if (!answer_check(t)) {
        return 0;
    }
    if (t->purpose == FOR_RANGE) {
        return range_take(t, bytes, n);
    }
    const uint64_t most = t->purpose == FOR_HEAD ? t->length : MOST_PAGE;
    if (n > most - t->done) {
        return answer_refuse_more(t);
    }
    return keep_body(t, bytes, n, t->purpose == FOR_HEAD ? t->length + 1 : 2 * (t->done + n) + 1) ? n : 0;
}

/* ---- what is sent ---- */

static size_t give_body(char *out, size_t size, size_t count, void *context) {
    transfer *t = context;
    outgoing *o = t->out;
    const uint64_t left = t->length - o->sent;
    const size_t n = left < size * count ? (size_t)left : size * count;
    if (o->text) {
        memcpy(out, o->text + o->sent, n);
        o->sent += n;
        return n;
    }
    const ssize_t got = n > 0 ? pread(o->file, out, n, (off_t)(t->offset + o->sent)) : 0;
    if (got < 0 || (got == 0 && n > 0)) {
        (void)fc_fail(&t->error, FC_EIO, "%s: the bytes that are to be sent cannot be read", o->name);
        return CURL_READFUNC_ABORT;
    }
    o->sent += (uint64_t)got;
    return (size_t)got;
}

/* libcurl sends again what went into a connection that the server had closed. */
static int seek_body(void *context, curl_off_t offset, int origin) {
    transfer *t = context;
    if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > t->length) {
        return CURL_SEEKFUNC_FAIL;
    }
    t->out->sent = (uint64_t)offset;
    return CURL_SEEKFUNC_OK;
}

static int set_outgoing(transfer *t) {
    static const char *const methods[] = {[FOR_BEGIN] = "POST",   [FOR_PART] = "PUT",  [FOR_COMPLETE] = "POST",
                                          [FOR_ABORT] = "DELETE", [FOR_WHOLE] = "PUT", [FOR_DELETE] = "DELETE"};
    const transfer_kind p = t->purpose;
    CURL *e = t->easy;
    int rc = 0;
    if (p == FOR_PROBE || p == FOR_PROOF) {
        return (int)curl_easy_setopt(e, CURLOPT_NOBODY, 1L);
    }
    if (p == FOR_UPLOADS || p == FOR_PARTS) {
        return 0;
    }
    if (p != FOR_ABORT && p != FOR_DELETE) {
        rc |= curl_easy_setopt(e, CURLOPT_UPLOAD, 1L);
        rc |= curl_easy_setopt(e, CURLOPT_INFILESIZE_LARGE, (curl_off_t)(sends_body(t) ? t->length : 0));
        rc |= curl_easy_setopt(e, CURLOPT_EXPECT_100_TIMEOUT_MS, (long)EXPECT_MS);
        rc |= curl_easy_setopt(e, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
        rc |= curl_easy_setopt(e, CURLOPT_READFUNCTION, give_body);
        rc |= curl_easy_setopt(e, CURLOPT_READDATA, t);
        rc |= curl_easy_setopt(e, CURLOPT_SEEKFUNCTION, seek_body);
        rc |= curl_easy_setopt(e, CURLOPT_SEEKDATA, t);
    }
    if (p == FOR_COMPLETE || (p == FOR_WHOLE && t->out->only_new)) {
        /* In a connection that was used before, libcurl may repeat what has no answer. Then a second answer would be
           judged like a first one. */
        rc |= curl_easy_setopt(e, CURLOPT_FRESH_CONNECT, 1L);
    }
    return rc | curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, methods[p]);
}

static bool set_options(const fetcher *f, transfer *t) {
    char range[64];
    CURL *e = t->easy;
    const long usual = t->purpose == FOR_COMPLETE ? SLOW_COMPLETE_SECONDS : SLOW_SECONDS;
    const long slow = usual * f->setup.pace / 100;
    snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, t->offset + t->done, t->offset + t->length - 1);
    int rc = 0;
    rc |= curl_easy_setopt(e, CURLOPT_URL, t->url);
    rc |= curl_easy_setopt(e, CURLOPT_PRIVATE, t);
    rc |= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "https,http");
    rc |= curl_easy_setopt(e, CURLOPT_RESOLVE, t->resolve);
    rc |= curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->headers);
    rc |= curl_easy_setopt(e, CURLOPT_USERAGENT, "fsdpckpt/" FSDPCKPT_VERSION);
    rc |= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    rc |= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    rc |= curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 128L << 10);
    rc |= curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW_BYTES);
    rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_TIME, slow > 0 ? slow : 1L);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, answer_take_header);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERDATA, t);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, take_body);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEDATA, t);
    if (t->out) {
        rc |= set_outgoing(t);
    } else if (t->purpose != FOR_PAGE) {
        rc |= curl_easy_setopt(e, CURLOPT_RANGE, range);
    }
    if (transfer_is_of_bucket(t) && f->setup.key[0]) {
        char text[sizeof f->setup.region + 32];
        snprintf(text, sizeof text, "aws:amz:%s:s3", name_region(f, transfer_name(t)));
        rc |= curl_easy_setopt(e, CURLOPT_AWS_SIGV4, text);
        rc |= curl_easy_setopt(e, CURLOPT_USERNAME, f->setup.key);
        rc |= curl_easy_setopt(e, CURLOPT_PASSWORD, f->setup.secret);
    }
    return rc == 0 && trust_set(f, e) && proxy_set(f, t);
}

bool request_make(const fetcher *f, transfer *t, const char *where) {
    t->easy = make_headers(f, t, where) ? curl_easy_init() : NULL;
    return t->easy && set_options(f, t);
}
