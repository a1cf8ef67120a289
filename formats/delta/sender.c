/*
 * Frames on their way to a bucket: see sender.h.
 */
#include "delta/sender.h"

#include "fsdpckpt/try.h"
#include "io/staged_stream.h"
#include "safetensors/header.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_BUDGET = 1 << 20 };

/* Bytes of a frame that wait. */
typedef struct piece {
    struct piece *next;
    size_t size;
    unsigned char bytes[];
} piece;

/* A tensor. Its worker uses the pieces, and once it is done, the worker that sends them. */
typedef struct slot {
    piece *pieces, **last;
    uint64_t held; /* by fc_delta_sender_hold */
    bool done;
} slot;

struct fc_delta_sender {
    fc_staged_stream *stream; /* used by the worker of tensor `next` */
    slot *slots;
    size_t count;
    uint64_t budget;      /* for the frames that wait, and again for what is held */
    pthread_mutex_t lock; /* guards all that follows */
    pthread_cond_t changed;
    size_t next; /* the first tensor that is not sent */
    uint64_t used;
    bool stopped;
};

fc_code fc_delta_sender_new(const char *path, uint64_t memory, fc_delta_sender **out, fc_error *err) {
    fc_delta_sender *s = *out = calloc(1, sizeof *s);
    FC_NEED(s, err, path);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->budget = memory > FC_STREAM_MEMORY ? (memory - FC_STREAM_MEMORY) / 2 : 0;
    s->budget = s->budget > LEAST_BUDGET ? s->budget : LEAST_BUDGET;
    return fc_staged_stream_new(path, ST_MAX_HEADER + ST_LENGTH_BYTES, &s->stream, err);
}

static void free_pieces(slot *t) {
    for (piece *next, *p = t->pieces; p; p = next) {
        next = p->next;
        free(p);
    }
    t->pieces = NULL;
    t->last = &t->pieces;
}

void fc_delta_sender_free(fc_delta_sender *s) {
    if (!s) {
        return;
    }
    for (size_t i = 0; i < s->count; i++) {
        free_pieces(&s->slots[i]);
    }
    free(s->slots);
    fc_staged_stream_free(s->stream);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}

fc_code fc_delta_sender_begin(fc_delta_sender *s, size_t count, fc_error *err) {
    s->slots = calloc(count + 1, sizeof *s->slots);
    FC_NEED(s->slots, err, NULL);
    s->count = count;
    for (size_t i = 0; i < count; i++) {
        s->slots[i].last = &s->slots[i].pieces;
    }
    return FC_OK;
}

/* Waits until `size` bytes more may be in memory, or `index` is the tensor that all others wait for.
   @return whether it is that tensor */
static fc_code wait_for(fc_delta_sender *s, size_t index, size_t size, bool *first, fc_error *err) {
    while (!s->stopped && index != s->next && s->used + size > s->budget) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    *first = index == s->next;
    return s->stopped ? fc_fail(err, FC_EIO, "another thread could not send its part of the delta") : FC_OK;
}

static void give_back(fc_delta_sender *s, uint64_t size) {
    pthread_mutex_lock(&s->lock);
    s->used -= size;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* Sends what waits of tensor `next`. */
static fc_code send_pieces(fc_delta_sender *s, slot *t, fc_error *err) {
    uint64_t size = 0;
    fc_code rc = FC_OK;
    for (const piece *p = t->pieces; p && rc == FC_OK; p = p->next) {
        rc = fc_staged_stream_add(s->stream, p->bytes, p->size, err);
        size += p->size;
    }
    FC_TRY(rc);
    free_pieces(t);
    give_back(s, size);
    return FC_OK;
}

static fc_code add_piece(slot *t, const unsigned char *bytes, size_t size, fc_error *err) {
    piece *p = malloc(sizeof *p + size);
    FC_NEED(p, err, NULL);
    p->next = NULL;
    p->size = size;
    memcpy(p->bytes, bytes, size);
    *t->last = p;
    t->last = &p->next;
    return FC_OK;
}

fc_code fc_delta_sender_put(fc_delta_sender *s, size_t index, const unsigned char *bytes, size_t size, fc_error *err) {
    slot *t = &s->slots[index];
    bool first;
    pthread_mutex_lock(&s->lock);
    const fc_code rc = wait_for(s, index, size, &first, err);
    s->used += first || rc != FC_OK ? 0 : size;
    pthread_mutex_unlock(&s->lock);
    FC_TRY(rc);
    if (!first) {
        return add_piece(t, bytes, size, err);
    }
    FC_TRY(send_pieces(s, t, err));
    return fc_staged_stream_add(s->stream, bytes, size, err);
}

fc_code fc_delta_sender_hold(fc_delta_sender *s, size_t index, const char *name, size_t size, fc_error *err) {
    slot *t = &s->slots[index];
    bool first;
    if (size > s->budget - t->held) {
        return fc_advise(err,
                         fc_fail(err, FC_EUSAGE,
                                 "tensor %.256s: on the way to a bucket, its changes are kept in memory for the "
                                 "encoding overwrite, and need more than %" PRIu64 " MiB: use xor",
                                 name, s->budget >> 20),
                         FC_HINT_MEMORY, NULL);
    }
    pthread_mutex_lock(&s->lock);
    const fc_code rc = wait_for(s, index, size, &first, err);
    s->used += rc == FC_OK ? size : 0;
    t->held += rc == FC_OK ? size : 0;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

fc_code fc_delta_sender_end(fc_delta_sender *s, size_t index, fc_error *err) {
    slot *t = &s->slots[index];
    bool sends;
    pthread_mutex_lock(&s->lock);
    t->done = true;
    s->used -= t->held;
    t->held = 0;
    pthread_cond_broadcast(&s->changed);
    sends = index == s->next;
    pthread_mutex_unlock(&s->lock);
    while (sends) { /* it, and the ones after it that are done, too */
        FC_TRY(send_pieces(s, &s->slots[index], err));
        pthread_mutex_lock(&s->lock);
        index = ++s->next;
        sends = index < s->count && s->slots[index].done;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
    }
    return FC_OK;
}

void fc_delta_sender_stop(fc_delta_sender *s) {
    if (s) {
        pthread_mutex_lock(&s->lock);
        s->stopped = true;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
    }
}

fc_code fc_delta_sender_finish(fc_delta_sender *s, const char *header, size_t size, fc_error *err) {
    return fc_staged_stream_finish(s->stream, header, size, err);
}
