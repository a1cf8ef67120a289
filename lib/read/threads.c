/*
 * Runs the engine's workers. See threads.h.
 */
#include "read/threads.h"

#include "fsdpckpt/progress.h"
#include "read/tuning.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

int fc_processors(void) {
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n;
}

int fc_default_threads(void) {
    int n = fc_processors(), more = n * FC_THREADS_PROCESSOR;
    more = more > FC_THREADS_DISK ? FC_THREADS_DISK : more;
    return n > more ? n : more;
}

int fc_shared_threads(int processes) {
    const int all = fc_default_threads(), each = processes > 1 ? all / processes : all;
    return each > FC_THREADS_SHARED ? each : all < FC_THREADS_SHARED ? all : FC_THREADS_SHARED;
}

int fc_useful_threads(int wanted, uint64_t bytes, uint64_t least) {
    int threads = wanted > 0 ? wanted : fc_default_threads();
    threads = threads > FC_MOST_THREADS ? FC_MOST_THREADS : threads;
    const uint64_t useful = bytes / least + 1;
    return (uint64_t)threads > useful ? (int)useful : threads;
}

int fc_files_per_worker(int threads) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return FC_OPEN_FILES;
    }
    rlim_t mine = limit.rlim_cur / 2 / (rlim_t)threads;
    return mine < 2 ? 1 : mine - 1 > FC_OPEN_FILES ? FC_OPEN_FILES : (int)(mine - 1);
}

typedef struct workers {
    void *(*work)(void *context);
    void *context;
    const fc_progress *watched;
} workers;

static void *run_worker(void *context) {
    const workers *w = context;
    fc_progress_watch(w->watched);
    return w->work(w->context);
}

void fc_threads_run(int count, void *(*work)(void *context), void *context) {
    pthread_t threads[FC_MOST_THREADS];
    int started = 0;
    workers w = {work, context, fc_progress_watched()};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's: the new threads inherit the mask */
    while (started < count - 1 && pthread_create(&threads[started], NULL, run_worker, &w) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(context);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
}
