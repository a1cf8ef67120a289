/*
 * What staged_objects.c and staged_publish.c share.
 */
#pragma once

#include "fsdpckpt/order.h"
#include "io/staged_objects.h"
#include "net/upload.h"

#include <pthread.h>
#include <string.h>

/* The name that a file will have, for servers and messages. @param path with FC_STAGED */
static inline const char *fc_staged_final_name(const char *path) {
    return path + strlen(FC_STAGED);
}

/* A smaller file is sent as a whole when the target becomes visible, with one request instead of three. */
enum { FC_STAGED_WHOLE = 64 << 10 };

/* A part, by its bytes that are still to come. It is sent when both numbers are 0. */
typedef struct staged_part {
    uint64_t missing; /* all that are not final */
    uint64_t engine;  /* those of the engine */
    bool open;        /* it counts in fc_staged_file.open */
    bool sent;        /* or about to be */
    bool done;        /* the server has it */
    bool known;       /* from an earlier run: nothing of it is written */
    unsigned next;    /* in fc_staged_file.full */
} staged_part;

struct fc_staged_file {
    fc_staged_file *next; /* in the order of creation */
    fc_staged_target *target;
    char *path;          /* with FC_STAGED */
    int fd;              /* memfd */
    bool engine;         /* it has data, so it is not an index */
    fc_upload *upload;   /* NULL: it is sent as a whole */
    char *id;            /* of the upload, if it stays for another run; else NULL */
    uint64_t run;        /* of the process that began the upload */
    uint64_t size, part; /* while it grows, the size is the largest that it may reach */
    bool grows;          /* data is appended, and the length is known only at the end */
    unsigned nparts;
    struct staged_part *parts;
    bool divided;
    unsigned first;     /* the first part of which the engine has bytes to write */
    unsigned most_open; /* parts that may be in memory at once */
    unsigned open;      /* parts in memory, without those that only lack headers */
    unsigned sending;   /* of these, parts that are complete */
    unsigned full;      /* of these, a list of the parts that no thread sends yet: number + 1; 0 ends it */
    bool stopped;
    bool told;            /* another process has adopted it */
    fc_staged_data *data; /* what the engine moves */
    size_t count;
    fc_staged_data *finals; /* what was final before the file was divided */
    size_t nfinals, capacity;
    uint64_t gaps; /* from here on, all that the engine does not move is final */
};

/** Finds a file, and its target, which may exist without it. Files are freed only with their target. */
fc_staged_file *fc_staged_find_file(const char *path, fc_staged_target **target);

struct fc_staged_target {
    fc_staged_target *next;
    char *path; /* with FC_STAGED */
    bool is_folder;
    bool stays;                     /* what is sent outlives this process */
    uint64_t run;                   /* number of this run, by which the next one knows the objects of this process */
    bool joined;                    /* another process has begun it */
    pthread_mutex_t lock;           /* guards the states of parts */
    pthread_cond_t changed;         /* a part was opened or closed, or another one is first */
    fc_staged_file *files, *newest; /* the last one is the one that is asked for most */
};
