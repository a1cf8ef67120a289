/*
 * Servers that serve few connections at once: see crowds.h. Other connections wait until the server has ended one. If
 * ranges without a reader have them all, no reader gets an answer. Connections that are idle may have them all, too,
 * while reads wait in new connections. Neither can be seen at once. But when reads wait for long, and none receives
 * anything, such ranges are ended, and such reads begin again, in an idle connection if there is one. From then on, no
 * more reads of that server run than it was seen to serve at once. Slowly, more are tried again.
 */
#include "net/fetcher/crowds.h"
#include "net/fetcher/ahead.h"

#include <string.h>

enum {
    PATIENCE_MS = 500,       /* how long a server may be silent while reads wait */
    LEAST_PATIENCE_MS = 200, /* also in tests, because a busy machine may be slow */
    MOST_AVERAGE_MS = 2000,
    AVERAGE_OF = 8,
    MOST_RESTARTS = 4,  /* of one transfer; each waits twice as long */
    FIRST_ANSWERS = 64, /* after which more reads are tried; doubled each time that the server is silent again */
    MOST_DOUBLINGS = 10,
    MOST_READS = 128, /* more than ever run at once */
};

host_line *crowd_find(const fetcher *f, const char *where) {
    const size_t n = strlen(where);
    host_line *h = f->hosts;
    while (h && (strncmp(h->line, where, n) != 0 || (h->line[n] != ':' && h->line[n] != '\0'))) {
        h = h->next;
    }
    return h;
}

static bool runs_read(const transfer *t, const host_line *host) {
    return t->host == host && t->progress == RUNS && !t->out;
}

static unsigned count_reads(const fetcher *f, const host_line *host, bool only_unread) {
    unsigned count = 0;
    for (const transfer *t = f->transfers; t; t = t->next) {
        count += runs_read(t, host) && (!only_unread || has_no_reader(t));
    }
    return count;
}

/* Half of what a server serves is for readers. */
bool crowd_admits(const fetcher *f, const transfer *t) {
    const host_line *h = t->host;
    return !h || h->most == 0 || t->out ||
           (count_reads(f, h, false) < h->most && (!has_no_reader(t) || count_reads(f, h, true) < h->most / 2));
}

/* Whether the connection of a transfer is new, so the server may have none to serve it. */
static bool is_in_new_connection(const transfer *t) {
    long connections = 0;
    return curl_easy_getinfo(t->easy, CURLINFO_NUM_CONNECTS, &connections) == CURLE_OK && connections > 0;
}

/* Whether the server serves the connection of a transfer: it has sent something in it, maybe for another one. */
static bool is_served(const transfer *t) {
    curl_off_t ready = 0; /* microseconds until it had a connection */
    return t->heard || (!is_in_new_connection(t) &&
                        curl_easy_getinfo(t->easy, CURLINFO_PRETRANSFER_TIME_T, &ready) == CURLE_OK && ready > 0);
}

void crowd_heard(transfer *t) {
    host_line *h = t->host;
    unsigned served = 0;
    if (!h || t->out) {
        return;
    }
    h->heard = fetcher_now();
    if (t->heard) {
        return;
    }
    t->heard = true;
    for (const transfer *other = t->fetcher->transfers; other; other = other->next) {
        served += runs_read(other, h) && is_served(other);
    }
    h->served = served > h->served ? served : h->served;
    if (t->began > 0) {
        const int64_t took = h->heard - t->began;
        const int64_t some = took < MOST_AVERAGE_MS ? took : MOST_AVERAGE_MS;
        h->average = h->average > 0 ? (h->average * (AVERAGE_OF - 1) + some) / AVERAGE_OF : some;
    }
    if (h->most > 0 && ++h->answers >= (unsigned)FIRST_ANSWERS << h->doublings) {
        h->answers = 0;
        h->most += h->most / 4 > 0 ? h->most / 4 : 1;
        h->most = h->most < MOST_READS ? h->most : 0;
    }
}

/* Whether a reader waits for the first byte of an answer of a server that has answered others. */
static bool waits_for_server(const transfer *t) {
    return t->host && t->host->heard > 0 && t->progress == RUNS && !t->out && !t->heard && !has_no_reader(t);
}

static bool may_restart(const transfer *t) {
    return waits_for_server(t) && t->restarts < MOST_RESTARTS && is_in_new_connection(t);
}

static bool holds_server(const transfer *t, const host_line *host) {
    return runs_read(t, host) && t->heard && has_no_reader(t);
}

/* Whether something can be done for a reader that waits. */
static bool can_help(const fetcher *f, const transfer *waiting) {
    bool can = may_restart(waiting);
    for (const transfer *t = f->transfers; t && !can; t = t->next) {
        can = holds_server(t, waiting->host);
    }
    return can;
}

/* When a reader has waited for too long. */
static int64_t patience_ends(const fetcher *f, const transfer *t) {
    const host_line *h = t->host;
    const int64_t own = (int64_t)PATIENCE_MS * f->setup.pace / 100, usual = 3 * h->average;
    int64_t patience = own > LEAST_PATIENCE_MS ? own : LEAST_PATIENCE_MS;
    patience = usual > patience ? usual : patience;
    return (t->since > h->heard ? t->since : h->heard) + (patience << t->restarts);
}

/* Forgets the request, not what it is for. */
static void restart(fetcher *f, transfer *t) {
    curl_multi_remove_handle(f->multi, t->easy);
    curl_easy_cleanup(t->easy);
    t->easy = NULL;
    t->progress = WAITS;
    t->wake = 0;
    t->restarts++;
}

static void relieve(fetcher *f, host_line *host) {
    const bool again = host->most > 0;
    const unsigned less = again && host->most <= host->served ? host->most / 2 : host->served;
    host->most = less > 0 ? less : 1;
    host->served = host->most;
    host->doublings += again && host->doublings < MOST_DOUBLINGS;
    host->answers = 0;
    host->heard = fetcher_now();
    for (transfer *t = f->transfers; t;) {
        transfer *next = t->next;
        if (runs_read(t, host) && has_no_reader(t)) {
            transfer_free(f, t); /* its reader asks by itself */
        } else if (t->host == host && may_restart(t)) {
            restart(f, t);
        } else if (runs_read(t, host)) {
            t->began = 0; /* it says nothing about how long the server takes */
        }
        t = next;
    }
}

/* Where readers of ranges have gone, there may be more ranges without one than a server has room for. Then a reader
   takes the place of the newest one. @return whether it can start */
static bool make_way(fetcher *f, const transfer *waiting) {
    const host_line *h = waiting->host;
    transfer *t = f->transfers;
    if (count_reads(f, h, true) <= h->most / 2) {
        return false;
    }
    while (!runs_read(t, h) || !has_no_reader(t)) {
        t = t->next;
    }
    transfer_free(f, t);
    return true;
}

bool crowds_relieve(fetcher *f) {
    const int64_t now = fetcher_now();
    for (transfer *t = f->transfers; t; t = t->next) {
        if (waits_for_server(t) && patience_ends(f, t) <= now && can_help(f, t)) {
            relieve(f, t->host);
            return true;
        }
        if (t->progress == WAITS && t->wake <= now && !has_no_reader(t) && !crowd_admits(f, t) && make_way(f, t)) {
            return true;
        }
    }
    return false;
}

int64_t crowds_pause(const fetcher *f, int64_t most) {
    const int64_t now = fetcher_now();
    for (const transfer *t = f->transfers; t; t = t->next) {
        const int64_t left = waits_for_server(t) ? patience_ends(f, t) - now : most;
        most = left > 0 && left < most ? left : most;
    }
    return most;
}
