/*
 * What staged_objects.c and staged_publish.c share.
 */
#pragma once

#include "fsdpckpt/order.h"
#include "io/staged_objects.h"
#include "net/upload.h"

#include <pthread.h>

/* A smaller file is sent as a whole when the target becomes visible, with one request instead of three. */
enum { FC_STAGED_WHOLE = 64 << 10 };

struct fc_staged_file {
    fc_staged_file *next; /* in the order of creation */
    fc_staged_target *target;
    char *path;        /* with FC_STAGED */
    int fd;            /* memfd */
    bool engine;       /* it is not an index */
    fc_upload *upload; /* NULL: it is sent as a whole */
    uint64_t size, part;
    unsigned nparts;
    uint64_t *missing; /* of each part: bytes that are not final. 0: it is sent, or being sent */
    fc_staged_data *data;
    size_t count;
};

struct fc_staged_target {
    fc_staged_target *next;
    char *path; /* with FC_STAGED */
    bool is_folder;
    pthread_mutex_t lock; /* guards fc_staged_file.missing */
    fc_staged_file *files;
};
