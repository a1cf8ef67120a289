/*
 * Opens files ahead of the thread that takes them. See open_files.h. The slots are a ring: a file may be opened when
 * its slot is free, so memory and descriptors do not grow with the number of files. The calling thread opens files too,
 * unless the next one to take is ready.
 */
#include "read/open_files.h"

#include "base/checked.h"
#include "read/threads.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Reading headers is mostly work for the processor; more threads help only while files come from a slow disk. */
    MOST_THREADS = 8,
    /* A thread is worth starting for so many files. */
    FILES_PER_THREAD = 16,
    SLOTS_PER_THREAD = 2
};

typedef struct place {
    void *slot;
    fc_code rc; /* the result of `open` */
    fc_error err;
    bool opened; /* `rc`, `err` and the slot are valid */
} place;

typedef struct file_queue {
    const fc_file_opener *how;
    pthread_t caller;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a file was opened or taken, or `stop` was set */
    place *places;
    unsigned char *slots;
    size_t nplaces;
    size_t next;  /* the next file to open */
    size_t taken; /* files that were taken */
    bool stop;
    fc_code rc; /* the result */
    fc_error *err;
} file_queue;

static bool may_open(const file_queue *o) {
    return o->next < o->how->count && o->next < o->taken + o->nplaces;
}

/* Opens the next file. The lock is held, except while the file is read. */
static void open_next(file_queue *o) {
    size_t index = o->next++;
    place *p = &o->places[index % o->nplaces];
    pthread_mutex_unlock(&o->lock);
    memset(p->slot, 0, o->how->slot_size);
    p->rc = o->how->open(o->how->context, index, p->slot, &p->err);
    pthread_mutex_lock(&o->lock);
    p->opened = true;
    pthread_cond_broadcast(&o->changed);
}

/* Takes the next file, which is open. The lock is held, except while the file is taken. */
static void take_next(file_queue *o) {
    place *p = &o->places[o->taken % o->nplaces];
    pthread_mutex_unlock(&o->lock);
    o->rc = p->rc == FC_OK ? o->how->take(o->how->context, o->taken, p->slot, o->err) : p->rc;
    if (p->rc != FC_OK && o->err) {
        *o->err = p->err;
    }
    o->how->close(p->slot);
    pthread_mutex_lock(&o->lock);
    p->opened = false;
    o->taken++;
    pthread_cond_broadcast(&o->changed);
}

static void take_all(file_queue *o) {
    while (o->rc == FC_OK && o->taken < o->how->count) {
        if (o->places[o->taken % o->nplaces].opened) {
            take_next(o);
        } else if (may_open(o)) {
            open_next(o);
        } else {
            pthread_cond_wait(&o->changed, &o->lock);
        }
    }
    o->stop = true;
    pthread_cond_broadcast(&o->changed);
}

static void help_open_files(file_queue *o) {
    while (!o->stop && o->next < o->how->count) {
        if (may_open(o)) {
            open_next(o);
        } else {
            pthread_cond_wait(&o->changed, &o->lock);
        }
    }
}

static void *run_opener(void *context) {
    file_queue *o = context;
    pthread_mutex_lock(&o->lock);
    if (pthread_equal(pthread_self(), o->caller)) {
        take_all(o);
    } else {
        help_open_files(o);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

static int choose_threads(size_t count) {
    int threads = fc_default_threads();
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    while (threads > 1 &&
           ((size_t)threads > count / FILES_PER_THREAD || fc_files_per_worker(threads) < SLOTS_PER_THREAD)) {
        threads--;
    }
    return threads;
}

static bool make_slots(file_queue *o) {
    size_t size;
    if (!fc_mul_size(o->nplaces, o->how->slot_size, &size)) {
        return false;
    }
    o->places = calloc(o->nplaces, sizeof *o->places);
    o->slots = malloc(size);
    if (!o->places || !o->slots) {
        return false;
    }
    for (size_t i = 0; i < o->nplaces; i++) {
        o->places[i].slot = o->slots + i * o->how->slot_size;
    }
    return true;
}

static bool init_lock(file_queue *o) {
    if (pthread_mutex_init(&o->lock, NULL) != 0) {
        return false;
    }
    if (pthread_cond_init(&o->changed, NULL) != 0) {
        pthread_mutex_destroy(&o->lock);
        return false;
    }
    return true;
}

static void run_open_files(file_queue *o, int threads) {
    fc_threads_run(threads, run_opener, o);
    for (size_t i = 0; i < o->nplaces; i++) { /* files after the first error */
        if (o->places[i].opened) {
            o->how->close(o->places[i].slot);
        }
    }
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
}

fc_code fc_open_files(const fc_file_opener *how, fc_error *err) {
    int threads = choose_threads(how->count);
    file_queue o = {.how = how,
                    .caller = pthread_self(),
                    .nplaces = threads == 1 ? 1 : (size_t)threads * SLOTS_PER_THREAD,
                    .err = err};
    if (make_slots(&o) && init_lock(&o)) {
        run_open_files(&o, threads);
    } else {
        o.rc = fc_no_memory(err, NULL);
    }
    free(o.places);
    free(o.slots);
    return o.rc;
}
