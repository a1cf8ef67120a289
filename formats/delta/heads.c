/*
 * The first bytes of frames on servers: see heads.h.
 */
#include "delta/heads.h"

#include "io/file.h"
#include "net/remote.h"
#include "read/threads.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { MOST_READERS = 32 };

typedef struct heads {
    fc_delta_version *const *versions;
    size_t count;
    pthread_mutex_t lock; /* guards what follows */
    size_t version, tensor;
} heads;

/* @return NULL at the end */
static fc_delta_tensor *take_tensor(heads *h) {
    fc_delta_tensor *taken = NULL;
    pthread_mutex_lock(&h->lock);
    while (!taken && h->version < h->count) {
        const fc_delta_version *v = h->versions[h->version];
        if (fc_is_remote(v->path) && h->tensor < v->ntensors) {
            taken = &v->tensors[h->tensor++];
        } else {
            h->version++;
            h->tensor = 0;
        }
    }
    pthread_mutex_unlock(&h->lock);
    return taken;
}

/* Reads a head. @param fd of the file `*path`, which are those of the tensor afterwards; -1: none is open */
static bool read_head(fc_delta_tensor *t, const char **path, int *fd) {
    const size_t size = t->size < sizeof t->head ? (size_t)t->size : sizeof t->head;
    uint64_t length;
    if (*fd >= 0 && strcmp(*path, t->path) != 0) {
        close(*fd);
        *fd = -1;
    }
    *path = t->path;
    if ((*fd < 0 && fc_open_input(t->path, fd, &length, NULL) != FC_OK) ||
        fc_pread_full(*fd, t->head, size, t->offset, t->path, NULL) != FC_OK) {
        return false;
    }
    t->head_size = size;
    return true;
}

static void *run_reader(void *context) {
    heads *h = context;
    const char *path = NULL;
    int fd = -1;
    for (fc_delta_tensor *t; (t = take_tensor(h)) != NULL && read_head(t, &path, &fd);) {
    }
    if (fd >= 0) {
        close(fd);
    }
    return NULL;
}

void fc_delta_heads_read(fc_delta_version *const *versions, size_t count) {
    heads h = {.versions = versions, .count = count};
    size_t tensors = 0;
    for (size_t i = 0; i < count; i++) {
        tensors += fc_is_remote(versions[i]->path) ? versions[i]->ntensors : 0;
    }
    if (tensors > 1) {
        pthread_mutex_init(&h.lock, NULL);
        fc_threads_run(tensors < MOST_READERS ? (int)tensors : MOST_READERS, run_reader, &h);
        pthread_mutex_destroy(&h.lock);
    }
}
