/*
 * Transfers: one request to a server each, with redirects, and repetitions when the server is busy or a connection
 * breaks. See fetcher.h.
 */
#include "net/fetcher/ahead.h"
#include "net/fetcher/crowds.h"
#include "net/fetcher/uploads.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    FIRST_PAUSE_MS = 500, /* doubled at each repetition */
    MOST_PAUSE_MS = 60000,
};

const char *transfer_name(const transfer *t) {
    return t->out ? t->out->name : t->object ? t->object->name : t->folder->name;
}

transfer *transfer_new(fetcher *f, transfer_kind purpose, const char *url) {
    transfer *t = calloc(1, sizeof *t);
    char *copy = strdup(url);
    if (!t || !copy) {
        free(t);
        free(copy);
        return NULL;
    }
    t->fetcher = f;
    t->purpose = purpose;
    t->url = copy;
    t->reply = t->file = -1;
    t->plain_http = strncmp(url, "http://", 7) == 0;
    t->next = f->transfers;
    f->transfers = t;
    return t;
}

void transfer_free(fetcher *f, transfer *t) {
    for (transfer **at = &f->transfers; *at; at = &(*at)->next) {
        if (*at == t) {
            *at = t->next;
            break;
        }
    }
    if (t->easy) {
        curl_multi_remove_handle(f->multi, t->easy);
        curl_easy_cleanup(t->easy);
    }
    if (t->reply >= 0) {
        fetcher_close(f, t->reply);
    }
    outgoing_free(t->out);
    curl_slist_free_all(t->headers);
    curl_slist_free_all(t->resolve);
    free(t->body);
    free(t->url);
    free(t);
}

/* ---- ends ---- */

void transfer_end(fetcher *f, transfer *t) {
    if (t->out) {
        upload_ended(f, t);
    } else if (t->purpose == FOR_HEAD) {
        object *o = t->object;
        o->state = t->error.code != FC_OK ? STATE_FAILED : o->state == STATE_MISSING ? STATE_MISSING : STATE_READY;
        o->error = t->error;
        if (o->state == STATE_READY) {
            o->head = t->body;
            o->head_size = t->done;
            t->body = NULL;
            if (t->redirects > 0) {
                free(o->direct);
                o->direct = t->url;
                t->url = NULL;
            }
        }
        folder *wanted_by = t->folder;
        transfer_free(f, t);
        object_opened(f, o, wanted_by);
    } else if (t->purpose == FOR_RANGE) {
        if (t->error.code == FC_OK && t->redirects > 0 && !t->object->direct) {
            t->object->direct = strdup(t->url); /* NULL: the next read is redirected again */
        }
        if (t->error.code != FC_OK && t->reply >= 0) {
            t->object->known_since = 0; /* whoever opens it again gets the version of that time */
            fetcher_send_error(f, t->reply, &t->error);
        } else if (t->reply >= 0) {
            range_answer(f, t);
        }
        transfer_free(f, t);
    } else {
        folder_page_done(f, t->folder, t);
        transfer_free(f, t);
    }
}

void transfer_fail(fetcher *f, transfer *t, fc_code code, const char *what) {
    if (t->error.code == FC_OK) {
        fc_fail(&t->error, code, "%s: %s", transfer_name(t), what);
    }
    transfer_end(f, t);
}

/* ---- starts ---- */

static void start(fetcher *f, transfer *t) {
    char where[512], peer[512];
    const char *wrong = host_find(t, where, sizeof where);
    if (wrong) {
        transfer_fail(f, t, FC_EUSAGE, wrong);
        return;
    }
    if (!host_find_peer(f, t, where, peer, sizeof peer)) {
        return;
    }
    const char *line = host_known(f, peer);
    if (line && !*line) {
        transfer_fail(f, t, FC_EIO,
                      t->proxied ? "no address was found for the proxy: check https_proxy and the network"
                                 : "no address was found for the server: check its name and the network");
        return;
    }
    if (!line) {
        host_ask(f, t, peer);
        return;
    }
    t->host = crowd_find(f, peer);
    if (!crowd_admits(f, t)) {
        t->wake = 0; /* it starts when there is room */
        return;
    }
    curl_slist_free_all(t->resolve);
    t->resolve = curl_slist_append(NULL, line);
    t->answer = (response){.bytes = 0};
    t->paused = false;
    t->taken = 0;
    if (t->purpose == FOR_PAGE || t->out) { /* a page comes as a whole */
        t->done = 0;
        if (t->body) {
            t->body[0] = '\0'; /* the next answer may have no body */
        }
    }
    if (t->out) {
        t->out->sent = 0;
    }
    if (!t->resolve || !request_make(f, t, where) || curl_multi_add_handle(f->multi, t->easy) != CURLM_OK) {
        transfer_fail(f, t, FC_EIO, "a transfer cannot be started");
        return;
    }
    t->progress = RUNS;
    t->began = t->since = fetcher_now();
    t->heard = false;
}

void transfers_go_on(fetcher *f, int socket) {
    for (transfer *t = f->transfers; t; t = t->next) {
        if (t->paused && t->reply == socket) { /* a reader, not -1 */
            t->paused = false;
            curl_easy_pause(t->easy, CURLPAUSE_CONT);
        }
    }
}

/* Those with a reader start first, and of these the oldest: transfers are listed from the newest on. */
static transfer *next_to_start(const fetcher *f, int64_t now) {
    transfer *found = NULL;
    for (transfer *t = f->transfers; t; t = t->next) {
        if (t->progress == WAITS && t->wake <= now && (!found || !has_no_reader(t) || has_no_reader(found)) &&
            crowd_admits(f, t)) {
            found = t;
        }
    }
    return found;
}

void transfers_start(fetcher *f) {
    const int64_t now = fetcher_now();
    for (transfer *t = f->transfers; t; t = t->next) {
        if (t->progress == NEEDS_HOST && t->wake <= now) {
            t->progress = host_is_asked_in_vain(t) ? WAITS : NEEDS_HOST;
            t->wake = t->progress == WAITS ? now : now + ASK_AGAIN_MS;
        }
    }
    for (transfer *t; (t = next_to_start(f, now)) != NULL;) { /* starting may end one, and that may begin others */
        t->wake = now + 50;                                   /* if nobody can say where its host is yet */
        start(f, t);
    }
}

int transfers_pause(const fetcher *f) {
    const int64_t now = fetcher_now();
    int64_t least = 1000;
    for (const transfer *t = f->transfers; t; t = t->next) {
        if (t->progress == WAITS && (t->wake > now || crowd_admits(f, t))) {
            least = t->wake - now < least ? t->wake - now : least;
        }
    }
    least = crowds_pause(f, least);
    return least > 0 ? (int)least : 0;
}

void transfer_repeat(fetcher *f, transfer *t, int64_t server_asks_ms, const char *why) {
    const int most = t->purpose == FOR_ABORT ? MOST_ABORTS : MOST_TRIES;
    if (++t->tries >= most) {
        char text[256];
        snprintf(text, sizeof text, "%s; gave up after %d attempts%s", why, most,
                 t->purpose == FOR_COMPLETE ? "; the object may have been made" : "");
        transfer_fail(f, t, FC_EIO, text);
        return;
    }
    int64_t pause = (int64_t)FIRST_PAUSE_MS << (t->tries - 1);
    f->random = f->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    pause = pause / 2 + (int64_t)((f->random >> 33) % (uint64_t)(pause / 2 + 1));
    pause = server_asks_ms > pause ? server_asks_ms : pause;
    pause = pause < MOST_PAUSE_MS ? pause : MOST_PAUSE_MS;
    t->progress = WAITS;
    t->wake = fetcher_now() + pause * f->setup.pace / 100;
}

static void redirect(fetcher *f, transfer *t) {
    char *target = NULL;
    CURLU *url = curl_url();
    const bool good = url && t->answer.location[0] && curl_url_set(url, CURLUPART_URL, t->url, 0) == CURLUE_OK &&
                      curl_url_set(url, CURLUPART_URL, t->answer.location, 0) == CURLUE_OK &&
                      curl_url_get(url, CURLUPART_URL, &target, 0) == CURLUE_OK;
    char *copy = good ? strdup(target) : NULL;
    curl_free(target);
    curl_url_cleanup(url);
    if (++t->redirects > MOST_REDIRECTS) {
        free(copy);
        transfer_fail(f, t, FC_ECORRUPT, "the server redirects more than 5 times");
    } else if (!copy) {
        transfer_fail(f, t, FC_ECORRUPT, "the server redirects to a place that cannot be understood");
    } else {
        free(t->url);
        t->url = copy;
        t->progress = WAITS;
        t->wake = 0;
    }
}

static void succeed(fetcher *f, transfer *t) {
    if (t->purpose != FOR_PAGE) {
        if (!answer_check(t)) { /* an answer without a body */
            transfer_end(f, t);
            return;
        }
        if (t->done < t->length) {
            transfer_fail(f, t, FC_ECORRUPT, "the server sent fewer bytes than it was asked for");
            return;
        }
    }
    transfer_end(f, t);
}

/* An address to which redirects led may be valid only for minutes. */
static bool go_back(fetcher *f, transfer *t) {
    char url[MOST_URL];
    if (t->purpose != FOR_RANGE || !t->object->direct || !name_url(f, t->object->name, url)) {
        return false;
    }
    char *copy = strdup(url);
    if (!copy) {
        return false;
    }
    free(t->object->direct);
    t->object->direct = NULL;
    free(t->url);
    t->url = copy;
    t->redirects = 0;
    t->progress = WAITS;
    t->wake = 0;
    return true;
}

static void judge_status(fetcher *f, transfer *t, int64_t server_asks_ms) {
    const long status = t->answer.status;
    char text[128];
    if (!t->out && transfer_is_of_bucket(t) && (answer_is_redirect(status) || status == 400) && transfer_move(f, t)) {
        return;
    }
    if (answer_is_redirect(status) && transfer_is_of_bucket(t)) {
        snprintf(text, sizeof text, "the bucket is in another region: set AWS_REGION to %s",
                 t->answer.region[0] ? t->answer.region : "it");
        transfer_fail(f, t, FC_EUSAGE, text);
    } else if (answer_is_redirect(status)) {
        redirect(f, t);
    } else if (answer_is_busy(status)) {
        snprintf(text, sizeof text, "the server is busy or has an error (status %ld)", status);
        transfer_repeat(f, t, server_asks_ms, text);
    } else if (t->out) {
        upload_judge(f, t);
    } else if (status == 200 || status == 206) {
        succeed(f, t);
    } else if (status == 412 && t->object) {
        transfer_fail(f, t, FC_ECORRUPT, "was changed while it was read: start again when nothing writes to it");
    } else if (status == 416 && t->purpose == FOR_HEAD && t->answer.has_range && t->answer.total == 0) {
        transfer_end(f, t); /* an empty file has no first byte */
    } else if ((status == 401 || status == 403 || status == 404 || status == 410) && go_back(f, t)) {
        return;
    } else if (status == 404 || status == 410) {
        if (t->purpose == FOR_HEAD || !t->object) {
            if (t->object) {
                t->object->state = STATE_MISSING;
            }
            transfer_end(f, t); /* a bucket or a model that does not exist has no files */
        } else {
            transfer_fail(f, t, FC_ECORRUPT, "was removed while it was read");
        }
    } else {
        transfer_refused(f, t);
    }
}

static bool may_repeat(CURLcode result) {
    switch (result) {
    case CURLE_COULDNT_CONNECT:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_WEIRD_SERVER_REPLY:
        return true;
    default:
        return false;
    }
}

/* What the proxy says instead of connecting. */
static void judge_proxy(fetcher *f, transfer *t, long status) {
    char text[128];
    if (status == 407) {
        transfer_fail(f, t, FC_EIO,
                      "the proxy wants a user and a password: https_proxy=http://USER:PASSWORD@host:port gives them");
    } else if (answer_is_busy(status)) {
        snprintf(text, sizeof text, "the proxy is busy or cannot reach the server (status %ld)", status);
        transfer_repeat(f, t, 0, text);
    } else {
        snprintf(text, sizeof text, "the proxy refuses to connect to the server (status %ld)", status);
        transfer_fail(f, t, FC_EIO, text);
    }
}

/* libcurl may find that a transfer was slow when its last byte is there. */
static bool has_all(const transfer *t) {
    return (t->purpose == FOR_HEAD || t->purpose == FOR_RANGE) && t->answer.checked && t->length > 0 &&
           t->done == t->length;
}

static void judge(fetcher *f, transfer *t, CURLcode result) {
    curl_off_t seconds = 0;
    long connected = 0;
    char text[256];
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_CONNECTCODE, &connected);
    curl_easy_getinfo(t->easy, CURLINFO_RETRY_AFTER, &seconds);
    seconds = seconds > 0 ? seconds < 3600 ? seconds : 3600 : 0;
    curl_multi_remove_handle(f->multi, t->easy);
    curl_easy_cleanup(t->easy);
    t->easy = NULL;
    t->host = NULL; /* the next one may be another */
    if (t->error.code != FC_OK) {
        transfer_end(f, t);
    } else if (result == CURLE_OK || has_all(t) || (result == CURLE_WRITE_ERROR && t->answer.status / 100 != 2)) {
        judge_status(f, t, (int64_t)seconds * 1000);
    } else if (t->proxied && connected != 0 && connected / 100 != 2) {
        judge_proxy(f, t, connected);
    } else if (may_repeat(result)) {
        snprintf(text, sizeof text, "the connection%s failed (%s)", t->proxied ? " through the proxy" : "",
                 curl_easy_strerror(result));
        transfer_repeat(f, t, 0, text);
    } else if (result == CURLE_PEER_FAILED_VERIFICATION) {
        transfer_fail(
            f, t, FC_EIO,
            "the server's certificate is not trusted: set SSL_CERT_FILE to a file with the certificate of its "
            "authority");
    } else {
        transfer_fail(f, t, FC_EIO, curl_easy_strerror(result));
    }
}

bool transfers_finish(fetcher *f) {
    int left;
    bool any = false;
    for (const CURLMsg *m; (m = curl_multi_info_read(f->multi, &left)) != NULL;) {
        char *t = NULL;
        if (m->msg == CURLMSG_DONE && curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &t) == CURLE_OK && t) {
            judge(f, (transfer *)(void *)t, m->data.result);
            any = true;
        }
    }
    return any;
}
