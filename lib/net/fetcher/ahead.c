/*
 * Ranges, and reading ahead: a caller announces what it will read of an open file, and the server begins to send it.
 * Bytes wait in the connection until a read asks for them, so that they cost no memory. A reader may take an announced
 * range in several pieces. See ahead.h.
 */
#include "net/fetcher/ahead.h"

#include <string.h>

bool has_no_reader(const transfer *t) {
    return t->file >= 0 && t->reply < 0;
}

/* Ends the oldest transfer of a file without a reader if there are too many. @return whether there is room for one */
static bool make_room(fetcher *f, int file) {
    transfer *oldest = NULL; /* transfers are listed from the newest on */
    size_t all = 0, own = 0;
    for (transfer *t = f->transfers; t; t = t->next) {
        all += has_no_reader(t);
        if (has_no_reader(t) && t->file == file) {
            own++;
            oldest = t;
        }
    }
    if (own >= MOST_UNREAD_FILE) {
        transfer_free(f, oldest);
        all--;
    }
    return all < MOST_UNREAD;
}

void ahead_begin(fetcher *f, const opened_file *file, const fc_net_request *request) {
    const object *o = file->object;
    const uint64_t size = o->version.size, offset = request->offset;
    if (offset >= size || request->length == 0) {
        return;
    }
    const uint64_t end = request->length < size - offset ? offset + request->length : size;
    const uint64_t first = offset < o->head_size ? o->head_size : offset;
    if (first >= end || !make_room(f, file->socket)) {
        return;
    }
    transfer *t = object_transfer(f, file->object, first, end - first);
    if (t) {
        t->file = file->socket;
    }
}

void range_begin(transfer *t, const read_range *wanted, int answer) {
    t->reply = answer;
    t->since = fetcher_now();
    t->into = wanted->into;
    t->given = wanted->given;
    t->from = wanted->first - t->offset;
    t->until = wanted->end - t->offset;
}

bool ahead_read(fetcher *f, int file, const read_range *wanted, int answer) {
    transfer *t = f->transfers;
    for (; t; t = t->next) {
        const uint64_t at = t->offset + t->done;
        if (has_no_reader(t) && t->file == file && at <= wanted->first && wanted->first - at <= MOST_GAP &&
            wanted->end <= t->offset + t->length) {
            break;
        }
    }
    if (!t) {
        return false;
    }
    range_begin(t, wanted, answer);
    t->tries = 0;
    if (t->paused) {
        t->paused = false;
        curl_easy_pause(t->easy, CURLPAUSE_CONT);
    }
    return true;
}

void ahead_drop(fetcher *f, int file) {
    for (transfer *t = f->transfers; t;) {
        transfer *next = t->next;
        if (t->file == file && t->reply < 0) {
            transfer_free(f, t);
        } else if (t->file == file) {
            t->file = -1; /* no other read comes */
        }
        t = next;
    }
}

/* Takes bytes of the gap before what the reader wants, or some of that. @return their number; 0: the caller has gone */
static size_t take_some(transfer *t, const char *bytes, size_t n) {
    const bool gap = t->done < t->from;
    const uint64_t wanted = (gap ? t->from : t->until) - t->done;
    const size_t some = wanted < n ? (size_t)wanted : n;
    bool good = true;
    if (!gap && t->into) {
        memcpy(t->into + (t->done - t->from), bytes, some);
    } else if (!gap) {
        good = fetcher_send(t->fetcher, t->reply, (fc_net_answer){.kind = FC_NET_DATA, .size = some}, bytes, some);
    }
    t->done += good ? some : 0;
    return good ? some : 0;
}

size_t range_take(transfer *t, const char *bytes, size_t n) {
    size_t at = t->taken < n ? t->taken : n;
    t->taken -= at;
    if (n - at > t->length - t->done) {
        return answer_refuse_more(t);
    }
    while (at < n) {
        if (t->reply < 0 || outbox_has(t->fetcher, t->reply)) {
            t->paused = true; /* the bytes come again */
            t->taken = at;
            return CURL_WRITEFUNC_PAUSE;
        }
        const size_t some = take_some(t, bytes + at, n - at);
        if (some == 0) {
            return 0;
        }
        at += some;
        if (t->done < t->until || t->done == t->length) { /* after the last piece, the transfer ends */
            continue;
        }
        if (t->file < 0) {
            t->length = t->done;
            return 0;
        }
        range_answer(t->fetcher, t);
        fetcher_close(t->fetcher, t->reply);
        t->reply = -1;
    }
    return n;
}

void range_answer(fetcher *f, transfer *t) {
    const uint64_t size = t->given + t->done - t->from;
    fetcher_send(f, t->reply, (fc_net_answer){.kind = FC_NET_DONE, .size = t->into ? size : 0}, NULL, 0);
}
