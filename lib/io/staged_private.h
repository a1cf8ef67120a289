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

/* A part, by its bytes that are still to come. It is sent when both numbers are 0. */
typedef struct staged_part {
    uint64_t missing; /* all that are not final */
    uint64_t engine;  /* those of the engine */
    bool begun;       /* the engine has begun to write it */
} staged_part;

struct fc_staged_file {
    fc_staged_file *next; /* in the order of creation */
    fc_staged_target *target;
    char *path;        /* with FC_STAGED */
    int fd;            /* memfd */
    bool engine;       /* it is not an index */
    fc_upload *upload; /* NULL: it is sent as a whole */
    uint64_t size, part;
    unsigned nparts;
    struct staged_part *parts;
    unsigned open, most_open; /* parts that the engine has begun and that are not sent; those that are held for their
                                 headers do not count */
    bool stopped;
    fc_staged_data *data;
    size_t count;
};

struct fc_staged_target {
    fc_staged_target *next;
    char *path; /* with FC_STAGED */
    bool is_folder;
    pthread_mutex_t lock; /* guards the states of parts */
    pthread_cond_t sent;  /* a part is not open any more */
    fc_staged_file *files;
};
