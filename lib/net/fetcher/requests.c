/*
 * What is sent to a server, with credentials, and where its bytes go: see fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CONNECT_MS = 20000,
    SLOW_SECONDS = 30, /* with less than SLOW_BYTES a second, a transfer is repeated */
    SLOW_BYTES = 1 << 10,
    MOST_ERROR_BODY = 64 << 10,
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
    /* libcurl signs these, too; it would leave the port out. The sum is that of no bytes. */
    const char *port = strrchr(where, ':');
    const bool usual = strcmp(port, strncmp(t->url, "https", 5) == 0 ? ":443" : ":80") == 0;
    snprintf(text, sizeof text, "%.*s", (int)(usual ? (size_t)(port - where) : strlen(where)), where);
    return add_header(t, "Host", text) &&
           add_header(t, "X-Amz-Content-Sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855") &&
           (!s->token[0] || add_header(t, "X-Amz-Security-Token", s->token));
}

static bool make_headers(const fetcher *f, transfer *t, const char *where) {
    const version *v = t->object ? &t->object->version : NULL;
    const bool pinned = v && (t->purpose == FOR_RANGE || t->done > 0);
    curl_slist_free_all(t->headers);
    t->headers = NULL;
    bool good = add_header(t, "Accept-Encoding", "identity") && add_credentials(f, t, where);
    if (pinned && v->etag[0] == '"') { /* a weak one matches nothing */
        good = good && add_header(t, "If-Match", v->etag);
    } else if (pinned && !v->etag[0] && v->modified[0]) {
        good = good && add_header(t, "If-Unmodified-Since", v->modified);
    }
    return good;
}

static size_t take_body(char *bytes, size_t size, size_t count, void *context) {
    transfer *t = context;
    const size_t n = size * count;
    if (t->answer.status != 200 && t->answer.status != 206) {
        t->answer.bytes += n; /* a page for people */
        return t->answer.bytes < MOST_ERROR_BODY + MOST_HEADER_BYTES ? n : 0;
    }
    if (!answer_check(t)) {
        return 0;
    }
    if (t->purpose == FOR_RANGE) {
        if (n > t->length - t->done) {
            fc_fail(&t->error, FC_ECORRUPT, "%s: the server sent more bytes than it was asked for", transfer_name(t));
            return 0;
        }
        t->done += n;
        return fetcher_send(t->reply, (fc_net_answer){.kind = FC_NET_DATA, .size = n}, bytes, n) ? n : 0;
    }
    const uint64_t most = t->purpose == FOR_HEAD ? t->length : MOST_PAGE;
    if (n > most - t->done) {
        fc_fail(&t->error, FC_ECORRUPT, "%s: the server sent more bytes than it was asked for", transfer_name(t));
        return 0;
    }
    if (t->done + n + 1 > t->capacity) {
        const size_t wanted = t->purpose == FOR_HEAD ? t->length + 1 : 2 * (t->done + n) + 1;
        unsigned char *more = realloc(t->body, wanted);
        if (!more) {
            (void)fc_no_memory(&t->error, transfer_name(t));
            return 0;
        }
        t->body = more;
        t->capacity = wanted;
    }
    memcpy(t->body + t->done, bytes, n);
    t->done += n;
    t->body[t->done] = '\0';
    return n;
}

static bool set_options(const fetcher *f, transfer *t) {
    char range[64];
    CURL *e = t->easy;
    const long slow = (long)SLOW_SECONDS * f->setup.pace / 100;
    snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, t->offset + t->done, t->offset + t->length - 1);
    int rc = 0;
    rc |= curl_easy_setopt(e, CURLOPT_URL, t->url);
    rc |= curl_easy_setopt(e, CURLOPT_PRIVATE, t);
    rc |= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "https,http");
    rc |= curl_easy_setopt(e, CURLOPT_PROXY, ""); /* its address is not known */
    rc |= curl_easy_setopt(e, CURLOPT_RESOLVE, t->resolve);
    rc |= curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->headers);
    rc |= curl_easy_setopt(e, CURLOPT_USERAGENT, "fsdpckpt/" FSDPCKPT_VERSION);
    rc |= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_2TLS);
    rc |= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    rc |= curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 256L << 10);
    rc |= curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW_BYTES);
    rc |= curl_easy_setopt(e, CURLOPT_LOW_SPEED_TIME, slow > 0 ? slow : 1L);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, answer_take_header);
    rc |= curl_easy_setopt(e, CURLOPT_HEADERDATA, t);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, take_body);
    rc |= curl_easy_setopt(e, CURLOPT_WRITEDATA, t);
    if (t->purpose != FOR_PAGE) {
        rc |= curl_easy_setopt(e, CURLOPT_RANGE, range);
    }
    if (f->certificates) {
        struct curl_blob blob = {f->certificates, f->certificates_size, CURL_BLOB_NOCOPY};
        rc |= curl_easy_setopt(e, CURLOPT_CAINFO_BLOB, &blob);
    }
    rc |= curl_easy_setopt(e, CURLOPT_CAPATH, NULL);
    if (transfer_is_of_bucket(t) && f->setup.key[0]) {
        char text[sizeof f->setup.region + 32];
        const bool google = name_provider(transfer_name(t)) == PROVIDER_GS;
        snprintf(text, sizeof text, "aws:amz:%s:s3", google ? "auto" : f->setup.region);
        rc |= curl_easy_setopt(e, CURLOPT_AWS_SIGV4, text);
        rc |= curl_easy_setopt(e, CURLOPT_USERNAME, f->setup.key);
        rc |= curl_easy_setopt(e, CURLOPT_PASSWORD, f->setup.secret);
    }
    return rc == 0;
}

bool request_make(const fetcher *f, transfer *t, const char *where) {
    t->easy = make_headers(f, t, where) ? curl_easy_init() : NULL;
    return t->easy && set_options(f, t);
}
