/*
 * The thread of a job: see work.h.
 */
#include "work.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

enum { LOOK_MILLISECONDS = 100 };

typedef struct job {
    native_work *work;
    void *context;
    fc_progress progress;
    fc_error err;
    fc_code rc;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done; /* under `lock` */
} job;

static void *run_job(void *argument) {
    job *j = argument;
    fc_progress_watch(&j->progress);
    j->rc = j->work(j->context, &j->progress, &j->err);
    pthread_mutex_lock(&j->lock);
    j->done = true;
    pthread_cond_signal(&j->ended);
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* Waits for the end of the job, but not for long. @return whether it has ended. */
static bool wait_a_little(job *j) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += LOOK_MILLISECONDS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_mutex_lock(&j->lock);
    while (!j->done && pthread_cond_timedwait(&j->ended, &j->lock, &until) != ETIMEDOUT) {
    }
    bool done = j->done;
    pthread_mutex_unlock(&j->lock);
    return done;
}

/* Answers signals and reports progress. @return false with an exception set. */
static bool look(job *j, PyObject *update) {
    if (PyErr_CheckSignals() != 0) {
        return false;
    }
    fc_progress_state state = fc_progress_look(&j->progress);
    if (update == Py_None || state.phase == FC_PHASE_NONE) {
        return true;
    }
    PyObject *answer = PyObject_CallFunction(update, "ssKK", fc_phase_name(state.phase), fc_counted_name(state.unit),
                                             (unsigned long long)state.done, (unsigned long long)state.total);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Follows the job to its end. @return false with an exception set, after the job has ended, too. */
static bool follow(job *j, PyObject *update) {
    bool good = true, done = false;
    while (!done) {
        Py_BEGIN_ALLOW_THREADS done = wait_a_little(j);
        Py_END_ALLOW_THREADS if (good && !look(j, update)) {
            good = false;
            atomic_store(&j->progress.cancel, true);
        }
    }
    return good;
}

bool native_run(native_work *work, void *context, PyObject *update) {
    job j = {.work = work, .context = context, .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, run_job, &j);
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    bool good = follow(&j, update);
    pthread_join(thread, NULL);
    return good && (j.rc == FC_OK || native_raise(&j.err));
}
