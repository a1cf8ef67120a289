/*
 * The CUDA runtime of emulated GPUs, without memory: devices, streams, events, faults. See emulate.h.
 */
#include "machine.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

enum { DEADLOCK = 10 /* seconds without any work */ };

typedef struct task {
    struct task *next;
    unsigned long number; /* in the order of the calls */
    emulated_work work;
} task;

struct emulated_stream {
    struct emulated_stream *next;
    int gpu;
    bool destroyed;
    task *first, **last;
};

struct emulated_event {
    unsigned long promised, done;
    int users;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int gpus;
    unsigned seed, random;
    unsigned long tasks;
    struct emulated_stream defaults[MOST_GPUS], *streams;
    int running; /* the GPU of the running work */
    long calls[MOST_GPUS], fail_at[MOST_GPUS];
    const char *failed;
} machine = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local int current;
static _Thread_local cudaError_t last_error;

void emulated_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("emulated GPU: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

static int number_of(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static void start(void) {
    machine.gpus = number_of("FSDPCKPT_EMULATED_GPUS", 1);
    machine.seed = machine.random = (unsigned)number_of("FSDPCKPT_EMULATED_ORDER", 0);
    if (machine.gpus < 0 || machine.gpus > MOST_GPUS) {
        emulated_die("there are at most %d", MOST_GPUS);
    }
    emulated_start_memory();
    for (int g = 0; g < MOST_GPUS; g++) {
        struct emulated_stream *s = &machine.defaults[g];
        s->gpu = g;
        s->last = &s->first;
        s->next = machine.streams;
        machine.streams = s;
    }
}

void emulated_lock(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    pthread_mutex_lock(&machine.lock);
}

void emulated_unlock(void) {
    pthread_mutex_unlock(&machine.lock);
}

void emulated_changed(void) {
    pthread_cond_broadcast(&machine.changed);
}

bool emulated_is_lazy(void) {
    return machine.seed % 2 == 1;
}

/* ---- faults ---- */

void emulated_fail(int gpu, long call) {
    emulated_lock();
    memset(machine.calls, 0, sizeof machine.calls);
    memset(machine.fail_at, 0, sizeof machine.fail_at);
    machine.fail_at[gpu] = call;
    machine.failed = NULL;
    emulated_unlock();
}

const char *emulated_failed(void) {
    emulated_lock();
    const char *failed = machine.failed;
    emulated_unlock();
    return failed;
}

/* How often a waiting thread asks depends on the machine, so only the first questions of a wait count. */
static bool is_repeated(const char *name) {
    static _Thread_local int questions;
    bool asks = strcmp(name, "cudaStreamQuery") == 0 || strcmp(name, "ncclCommGetAsyncError") == 0;
    questions = asks ? questions + 1 : 0;
    return questions > 4;
}

bool emulated_fails(const char *name) {
    if (is_repeated(name)) {
        return false;
    }
    emulated_lock();
    bool fails = ++machine.calls[current] == machine.fail_at[current];
    if (fails) {
        machine.failed = name;
    }
    emulated_unlock();
    return fails;
}

cudaError_t emulated_error(cudaError_t error) {
    last_error = error;
    return error;
}

int emulated_gpu(void) {
    return current;
}

int emulated_running_gpu(void) {
    return machine.running;
}

/* ---- streams ---- */

static struct emulated_stream *stream_of(cudaStream_t stream) {
    return stream ? stream : &machine.defaults[current];
}

void emulated_enqueue_locked(cudaStream_t stream, emulated_work work) {
    struct emulated_stream *s = stream_of(stream);
    task *t = malloc(sizeof *t);
    if (!t || s->destroyed) {
        emulated_die("work is given to a stream that does not exist");
    }
    *t = (task){.number = machine.tasks++, .work = work};
    *s->last = t;
    s->last = &t->next;
    emulated_changed();
}

void emulated_enqueue(cudaStream_t stream, emulated_work work) {
    emulated_lock();
    emulated_enqueue_locked(stream, work);
    emulated_unlock();
}

/* Chooses a stream whose next task can run: that of the earliest call, or a random one. */
static struct emulated_stream *choose_stream(void) {
    struct emulated_stream *best = NULL;
    unsigned seen = 0;
    for (struct emulated_stream *s = machine.streams; s; s = s->next) {
        const task *t = s->first;
        if (!t || (t->work.is_ready && !t->work.is_ready(t->work.argument))) {
            continue;
        }
        machine.random = machine.random * 1664525u + 1013904223u;
        seen++;
        if (!best || (machine.seed ? (machine.random >> 8) % seen == 0 : t->number < best->first->number)) {
            best = s;
        }
    }
    return best;
}

static void remove_stream(struct emulated_stream *s) {
    for (struct emulated_stream **p = &machine.streams; *p; p = &(*p)->next) {
        if (*p == s) {
            *p = s->next;
            free(s);
            return;
        }
    }
}

/* Runs one task. @return false if none can run. */
static bool run_one(void) {
    struct emulated_stream *s = choose_stream();
    s = s ? s : choose_stream(); /* a rank's own collective may have become known as the next one of its stream */
    if (!s) {
        return false;
    }
    task *t = s->first;
    machine.running = s->gpu;
    if (t->work.run) {
        t->work.run(t->work.argument);
    }
    s->first = t->next;
    s->last = s->first ? s->last : &s->first;
    if (t->work.drop) {
        t->work.drop(t->work.argument);
    }
    free(t);
    if (s->destroyed && !s->first) {
        remove_stream(s);
    }
    emulated_changed();
    return true;
}

void emulated_work_on(void) {
    while (run_one()) {
    }
}

void emulated_wait(bool (*is_true)(void *argument), void *argument) {
    while (!is_true(argument)) {
        if (!run_one()) {
            pthread_cond_wait(&machine.changed, &machine.lock);
        }
    }
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, int flags) {
    EMULATED_CALL("cudaStreamCreateWithFlags", cudaErrorUnknown);
    (void)flags;
    struct emulated_stream *s = calloc(1, sizeof *s);
    if (!s) {
        return emulated_error(cudaErrorMemoryAllocation);
    }
    s->gpu = current;
    s->last = &s->first;
    emulated_lock();
    s->next = machine.streams;
    machine.streams = s;
    emulated_unlock();
    *stream = s;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emulated_lock();
    stream->destroyed = true; /* what it still has to do is done */
    if (!stream->first) {
        remove_stream(stream);
    }
    emulated_unlock();
    return cudaSuccess;
}

static bool is_empty(void *stream) {
    return !((struct emulated_stream *)stream)->first;
}

void emulated_synchronize(cudaStream_t stream) {
    emulated_lock();
    emulated_wait(is_empty, stream_of(stream));
    emulated_unlock();
}

static bool is_idle(void *gpu) {
    for (const struct emulated_stream *s = machine.streams; s; s = s->next) {
        if (s->gpu == *(int *)gpu && s->first) {
            return false;
        }
    }
    return true;
}

void emulated_wait_for_gpu(void) {
    emulated_wait(is_idle, &current);
}

void emulated_wait_for_work(int gpu, const char *message) {
    struct timespec end;
    while (!is_idle(&gpu)) {
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += DEADLOCK;
        if (!run_one() && pthread_cond_timedwait(&machine.changed, &machine.lock, &end) == ETIMEDOUT) {
            emulated_die("%s", message);
        }
    }
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    EMULATED_CALL("cudaStreamSynchronize", cudaErrorUnknown);
    emulated_synchronize(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    EMULATED_CALL("cudaStreamQuery", cudaErrorUnknown);
    emulated_lock();
    emulated_work_on();
    bool done = is_empty(stream_of(stream));
    emulated_unlock();
    return done ? cudaSuccess : emulated_error(cudaErrorNotReady);
}

/* ---- events ---- */

/* A task that records an event or waits for it. */
typedef struct mark {
    struct emulated_event *event;
    unsigned long value;
} mark;

static void let_go(struct emulated_event *event) {
    if (--event->users == 0) {
        free(event);
    }
}

static void drop_mark(void *argument) {
    let_go(((mark *)argument)->event);
    free(argument);
}

static void happen(void *argument) {
    mark *m = argument;
    m->event->done = m->event->done > m->value ? m->event->done : m->value;
}

static bool has_happened(void *argument) {
    mark *m = argument;
    return m->event->done >= m->value;
}

static void enqueue_mark(cudaEvent_t event, cudaStream_t stream, bool records) {
    mark *m = malloc(sizeof *m);
    if (!m) {
        emulated_die("out of memory");
    }
    emulated_lock();
    event->promised += records;
    event->users++;
    *m = (mark){event, event->promised};
    emulated_work work = {.argument = m, .drop = drop_mark};
    if (records) {
        work.run = happen;
    } else {
        work.is_ready = has_happened;
    }
    emulated_enqueue_locked(stream, work);
    emulated_unlock();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, int flags) {
    EMULATED_CALL("cudaEventCreateWithFlags", cudaErrorUnknown);
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (!*event) {
        return emulated_error(cudaErrorMemoryAllocation);
    }
    (*event)->users = 1;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    emulated_lock();
    let_go(event);
    emulated_unlock();
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    EMULATED_CALL("cudaEventRecord", cudaErrorUnknown);
    enqueue_mark(event, stream, true);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    EMULATED_CALL("cudaStreamWaitEvent", cudaErrorUnknown);
    (void)flags;
    enqueue_mark(event, stream, false);
    return cudaSuccess;
}

/* ---- the rest ---- */

cudaError_t cudaSetDevice(int index) {
    emulated_lock();
    bool exists = index >= 0 && index < machine.gpus;
    emulated_unlock();
    current = exists ? index : current;
    EMULATED_CALL("cudaSetDevice", cudaErrorUnknown);
    return exists ? cudaSuccess : emulated_error(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *index) {
    *index = current;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    emulated_lock();
    *count = machine.gpus;
    emulated_unlock();
    return *count > 0 ? cudaSuccess : emulated_error(cudaErrorInsufficientDriver);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInsufficientDriver:
        return "no driver";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorNotReady:
        return "device not ready";
    default:
        return "unknown error";
    }
}
