/*
 * Progress on stderr: see progress.h.
 */
#include "progress.h"

#include "text.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct progress_view {
    fc_progress *progress;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop;     /* guarded by lock */
    bool terminal; /* rewrite one line; else a line every few seconds */
    bool shown;
};

enum { TERMINAL_MS = 200, PLAIN_MS = 2000, QUIET_MS = 1000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* "1:02:03" or "4:05", of at most 99 days. */
static void format_time(char *buf, size_t size, double seconds) {
    unsigned long s = seconds < 0 ? 0 : seconds > 99 * 86400.0 ? 99UL * 86400 : (unsigned long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(buf, size, "%lu:%02lu:%02lu", s / 3600, s / 60 % 60, s % 60);
    } else {
        snprintf(buf, size, "%lu:%02lu", s / 60, s % 60);
    }
}

static void show(progress_view *view, uint64_t done, double elapsed, double rate) {
    uint64_t total = view->progress->total;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX], r[TEXT_SIZE_MAX], eta[32], line[160];
    double left = rate > 0 ? (double)(total - (done < total ? done : total)) / rate : -1;
    format_time(eta, sizeof eta, left >= 0 ? left : elapsed);
    int n = snprintf(line, sizeof line, "%s%3u%%  %s of %s  %s/s  %s %s%s", view->terminal ? "\r" : "fsdpckpt: ",
                     total ? (unsigned)((double)(done < total ? done : total) / (double)total * 100) : 0U,
                     text_bytes(a, done), text_bytes(b, total), text_bytes(r, rate > 0 ? (uint64_t)rate : 0), eta,
                     left >= 0 ? "left" : "elapsed", view->terminal ? "\x1b[K" : "\n");
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) > 0) {
        view->shown = true;
    }
}

/* Waits `ms` or until told to stop. @return whether to go on. */
static bool pause_for(progress_view *view, long ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&view->lock);
    while (!view->stop && pthread_cond_timedwait(&view->wake, &view->lock, &until) == 0) {
    }
    bool go_on = !view->stop;
    pthread_mutex_unlock(&view->lock);
    return go_on;
}

static void *watch(void *arg) {
    progress_view *view = arg;
    double start = now(), last = start, rate = 0;
    uint64_t before = 0;
    long step = view->terminal ? TERMINAL_MS : PLAIN_MS;
    bool go_on = pause_for(view, QUIET_MS);
    while (go_on) {
        double t = now();
        uint64_t done = atomic_load(&view->progress->done);
        double recent = t > last && done >= before ? (double)(done - before) / (t - last) : 0;
        /* A moving average over about two seconds: steady enough to read, quick enough to show a stall. */
        rate = rate > 0 ? rate + (recent - rate) * (view->terminal ? 0.1 : 0.6) : recent;
        before = done;
        last = t;
        if (view->progress->total > 0) {
            show(view, done, t - start, rate);
        }
        go_on = pause_for(view, step);
    }
    return NULL;
}

progress_view *progress_start(fc_progress *progress, progress_mode mode) {
    bool terminal = isatty(STDERR_FILENO);
    if (mode == PROGRESS_NEVER || (mode == PROGRESS_AUTO && !terminal)) {
        return NULL;
    }
    progress_view *view = calloc(1, sizeof *view);
    if (!view) {
        return NULL;
    }
    view->progress = progress;
    view->terminal = terminal;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&view->lock, NULL);
    pthread_cond_init(&view->wake, &attr);
    pthread_condattr_destroy(&attr);
    if (pthread_create(&view->thread, NULL, watch, view) != 0) {
        pthread_cond_destroy(&view->wake);
        pthread_mutex_destroy(&view->lock);
        free(view);
        return NULL;
    }
    return view;
}

void progress_stop(progress_view *view) {
    if (!view) {
        return;
    }
    pthread_mutex_lock(&view->lock);
    view->stop = true;
    pthread_cond_signal(&view->wake);
    pthread_mutex_unlock(&view->lock);
    pthread_join(view->thread, NULL);
    if (view->shown && view->terminal && write(STDERR_FILENO, "\r\x1b[K", 4) < 0) {
        view->shown = false; /* stderr is gone: nothing to clean */
    }
    pthread_cond_destroy(&view->wake);
    pthread_mutex_destroy(&view->lock);
    free(view);
}
