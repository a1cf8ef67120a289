/*
 * The thread that shows progress: see progress.h. What a line looks like and when it is due is in
 * output/progress_line.c.
 */
#include "progress_view.h"

#include "output/progress_line.h"
#include "output/terminal.h"
#include "output/text.h"
#include "ranks.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct progress_view {
    fc_progress *progress;
    progress_kind kind;
    progress_style style;
    bool asked;     /* --progress was given: the start of each phase is also shown */
    unsigned phase; /* the last phase that began; used by the thread of the job only */
    double started;
    sigset_t wakes, before; /* SIGWINCH; the mask of the thread that started this one */
    pthread_t thread;
    sem_t ready; /* the thread waits for its first step */
    atomic_bool stop;
    pthread_mutex_t lock; /* guards the fields below */
    progress_meter meter;
    double last; /* time of the last line in seconds; negative: none yet */
};

enum { STEP_MS = 100 };

/*
 * Opening HDF5 forks. If this thread were inside the C library at that moment, the child would inherit a lock that
 * nobody releases. So the thread does everything under `lock`, fork waits for that lock, and the thread is not started
 * while a fork runs. The handlers of pthread_atfork take no argument, hence the static pointer.
 */
static _Atomic(progress_view *) watched;
static pthread_once_t handlers = PTHREAD_ONCE_INIT;

static void hold_thread(void) {
    progress_view *view = atomic_load(&watched);
    if (view) {
        pthread_mutex_lock(&view->lock);
    }
}

static void release_thread(void) {
    progress_view *view = atomic_load(&watched);
    if (view) {
        pthread_mutex_unlock(&view->lock);
    }
}

static void install_handlers(void) {
    pthread_atfork(hold_thread, release_thread, release_thread);
}

double progress_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Call it with the lock held. */
static void show_progress(progress_view *view) {
    char line[PROGRESS_LINE_MAX];
    view->last = view->meter.now;
    if (view->kind == PROGRESS_KIND_TERMINAL) {
        /* The last column stays free: some terminals go to the next line when it is filled. */
        view->style.width = terminal_width() - 1;
        terminal_show_line(line, progress_line_terminal(&view->meter, &view->style, line));
    } else if (view->kind == PROGRESS_KIND_JSON) {
        terminal_write_lines(line, progress_line_json(&view->meter, line));
    } else {
        terminal_write_lines(line, progress_line_log(&view->meter, line));
    }
}

/* Reads the counters, and shows them if a line is due or `always` is set. */
static void look_at_counters(progress_view *view, bool always) {
    pthread_mutex_lock(&view->lock);
    const fc_progress_state state = fc_progress_look(view->progress);
    progress_meter_see(&view->meter, &state, progress_now() - view->started);
    if (always || (state.phase != FC_PHASE_NONE && progress_line_is_due(view->kind, view->meter.now, view->last))) {
        show_progress(view);
    }
    pthread_mutex_unlock(&view->lock);
}

/* A phase that continues in another unit is not shown as a new one. */
static void on_phase(void *context, const fc_progress *progress) {
    progress_view *view = context;
    unsigned phase = atomic_load(&progress->phase);
    bool same = view->phase == phase;
    view->phase = phase;
    look_at_counters(view, !same);
}

/* Whether the line must be redrawn because the window was resized. */
static bool was_resized(progress_view *view) {
    pthread_mutex_lock(&view->lock);
    bool resized = view->kind == PROGRESS_KIND_TERMINAL && view->last >= 0;
    pthread_mutex_unlock(&view->lock);
    return resized;
}

static void *watch_counters(void *arg) {
    progress_view *view = arg;
    static const struct timespec step = {0, STEP_MS * 1000000L};
    sem_post(&view->ready);
    while (!atomic_load(&view->stop)) {
        bool resized = sigtimedwait(&view->wakes, NULL, &step) == SIGWINCH && was_resized(view);
        if (!atomic_load(&view->stop)) {
            look_at_counters(view, resized);
        }
    }
    return NULL;
}

/* @return whether progress is shown. @param out receives how. */
static bool choose_kind(const options *o, progress_kind *out) {
    if (o->progress == PROGRESS_NEVER || (o->quiet && o->progress != PROGRESS_JSON) || !ranks_is_launched_first()) {
        return false;
    }
    *out = o->progress == PROGRESS_JSON     ? PROGRESS_KIND_JSON
           : terminal_can_rewrite()         ? PROGRESS_KIND_TERMINAL
           : o->progress == PROGRESS_ALWAYS ? PROGRESS_KIND_LOG
                                            : PROGRESS_KIND_LONG_LOG;
    return true;
}

progress_view *progress_start(fc_progress *progress, const options *o, double started) {
    progress_kind kind;
    progress_view *view = choose_kind(o, &kind) ? calloc(1, sizeof *view) : NULL;
    if (!view) {
        return NULL;
    }
    *view = (progress_view){.progress = progress,
                            .kind = kind,
                            .style = {.utf8 = text_is_utf8(), .color = terminal_has_color(STDERR_FILENO)},
                            .asked = o->progress != PROGRESS_AUTO,
                            .started = started,
                            .last = -1};
    pthread_mutex_init(&view->lock, NULL);
    sem_init(&view->ready, 0, 0);
    /*
     * SIGWINCH stays pending until the thread waits for it, and so does the signal that stops it. Later threads inherit
     * the mask. Other signals are left to the caller.
     */
    sigset_t all;
    sigfillset(&all);
    sigemptyset(&view->wakes);
    sigaddset(&view->wakes, SIGWINCH);
    pthread_sigmask(SIG_SETMASK, &all, &view->before);
    int failed = pthread_create(&view->thread, NULL, watch_counters, view);
    pthread_sigmask(SIG_SETMASK, &view->before, NULL);
    if (failed) {
        sem_destroy(&view->ready);
        pthread_mutex_destroy(&view->lock);
        free(view);
        return NULL;
    }
    while (sem_wait(&view->ready) != 0 && errno == EINTR) {
    }
    pthread_once(&handlers, install_handlers);
    atomic_store(&watched, view);
    pthread_sigmask(SIG_BLOCK, &view->wakes, NULL);
    if (view->asked) {
        progress->context = view;
        progress->began = on_phase;
    }
    return view;
}

void progress_stop(progress_view *view) {
    if (!view) {
        return;
    }
    atomic_store(&view->stop, true);
    pthread_kill(view->thread, SIGWINCH);
    pthread_join(view->thread, NULL);
    atomic_store(&watched, NULL);
    view->progress->began = NULL;
    if (view->kind == PROGRESS_KIND_JSON && view->progress->phase != FC_PHASE_NONE) {
        look_at_counters(view, true); /* the final state */
    }
    terminal_end_line();
    pthread_sigmask(SIG_SETMASK, &view->before, NULL);
    sem_destroy(&view->ready);
    pthread_mutex_destroy(&view->lock);
    free(view);
}
