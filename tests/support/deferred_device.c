/*
 * The device that defers its work, see deferred_device.h. It uses host memory, so a task is just the arguments of a
 * call.
 */
#include "deferred_device.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_STREAMS = 32 };

typedef enum task_kind {
    COPY,
    ZERO,
    COPY_BOX,
    CAST,
    ADD,
    DIVIDE,
    MULTIPLY,
    POWERS,
    RECORD,
    WAIT,
    GATHER,
    SCATTER,
    REDUCE
} task_kind;

typedef struct task {
    struct task *next;
    task_kind kind;
    void *dst;
    const void *src;
    size_t count;
    uint32_t element;
    fc_strided_box to, from;
    fc_dtype dtype, dtype_to;
    double divisor; /* or factor, or power */
    double weight;
    fc_event *event;
    unsigned long mark; /* RECORD: the value it sets; WAIT: the value it needs; collectives: their number */
    fc_comm *comm;
    fc_reduce op;
} task;

struct fc_event {
    unsigned long promised, done;
};

struct fc_stream {
    task *first, **last;
};

typedef struct deferred {
    fc_device *cpu;
    fc_stream *streams[MOST_STREAMS];
    fc_stream compute; /* NULL */
    int count;
    unsigned random; /* the state of the random generator */
    unsigned long collectives,
        next_collective; /* number of collectives enqueued, and of the next to run; the same order on all ranks */
    deferred_options options;
    fc_code failed;
    fc_error error;
} deferred;

/* Addresses of remote memory have bit 60 set, which no processor maps, so that an access faults. */
static const uintptr_t remote_bit = (uintptr_t)1 << 60;

static void *to_remote(const deferred *d, void *memory) {
    return d->options.remote ? (void *)((uintptr_t)memory + remote_bit) : memory;
}

static void *to_local(const void *memory) {
    uintptr_t at = (uintptr_t)memory;
    return (void *)(at & remote_bit ? at - remote_bit : at);
}

static fc_stream *queue_of(deferred *d, fc_stream *stream) {
    return stream ? stream : &d->compute;
}

static bool is_collective(const task *t) {
    return t->kind == GATHER || t->kind == SCATTER || t->kind == REDUCE;
}

static fc_code give(fc_device *device, fc_stream *stream, const task *what, fc_error *err) {
    task *t = malloc(sizeof *t);
    if (!t) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    deferred *d = device->state;
    *t = *what;
    t->next = NULL;
    t->dst = to_local(t->dst);
    t->src = to_local(t->src);
    if (is_collective(t)) {
        t->mark = d->collectives++;
    }
    fc_stream *q = queue_of(d, stream);
    *q->last = t;
    q->last = &t->next;
    return FC_OK;
}

static fc_code run(deferred *d, task *t) {
    fc_device *cpu = d->cpu;
    fc_error *err = &d->error;
    switch (t->kind) {
    case COPY:
        return cpu->copy(cpu, t->dst, t->src, t->count, NULL, err);
    case ZERO:
        return cpu->zero(cpu, t->dst, t->count, NULL, err);
    case COPY_BOX:
        return cpu->copy_box(cpu, t->dst, &t->to, t->src, &t->from, t->element, NULL, err);
    case CAST:
        return cpu->cast(cpu, t->dtype, t->src, t->dtype_to, t->dst, t->count, NULL, err);
    case ADD:
        return cpu->add(cpu, t->dtype, t->dst, t->src, t->count, NULL, err);
    case DIVIDE:
        return cpu->divide(cpu, t->dtype, t->dst, t->divisor, t->count, NULL, err);
    case MULTIPLY:
        return cpu->multiply(cpu, t->dtype, t->dst, t->divisor, t->count, NULL, err);
    case POWERS:
        return cpu->powers(cpu, t->dtype, t->src, t->divisor, t->weight, t->count, t->dst, NULL, err);
    case RECORD:
        t->event->done = t->mark > t->event->done ? t->mark : t->event->done;
        return FC_OK;
    case WAIT:
        return FC_OK;
    case GATHER:
        return t->comm->all_gather(t->comm, t->src, t->dst, t->count, err);
    case SCATTER:
        return fc_reduce_scatter(t->comm, t->src, t->dst, t->count, t->dtype, t->op, NULL, err);
    case REDUCE:
        return t->comm->all_reduce(t->comm, t->dst, t->count, t->dtype, t->op, err);
    }
    return FC_EUSAGE;
}

static bool is_ready(const deferred *d, const fc_stream *q) {
    const task *t = q->first;
    if (t && is_collective(t)) {
        return t->mark == d->next_collective;
    }
    return t && (t->kind != WAIT || d->options.ignore_waits || t->event->done >= t->mark);
}

/* Runs the next task of a stream that is chosen at random among those that may continue. */
static bool run_one(deferred *d) {
    fc_stream *ready[MOST_STREAMS + 1];
    unsigned count = 0;
    for (int i = -1; i < d->count; i++) {
        fc_stream *q = i < 0 ? &d->compute : d->streams[i];
        if (q && is_ready(d, q)) {
            ready[count++] = q;
        }
    }
    if (count == 0) {
        return false;
    }
    d->random = d->random * 1103515245u + 12345u;
    fc_stream *q = ready[(d->random >> 16) % count];
    task *t = q->first;
    q->first = t->next;
    if (!q->first) {
        q->last = &q->first;
    }
    d->next_collective += is_collective(t);
    fc_code rc = run(d, t);
    d->failed = d->failed == FC_OK ? rc : d->failed;
    free(t);
    return true;
}

static fc_code deferred_synchronize(fc_device *device, fc_stream *stream, fc_error *err) {
    deferred *d = device->state;
    fc_stream *q = queue_of(d, stream);
    while (q->first) {
        if (!run_one(d)) {
            return fc_fail(err, FC_EUSAGE, "streams wait for each other for ever");
        }
    }
    return d->failed == FC_OK ? FC_OK : fc_fail(err, d->failed, "%s", d->error.message);
}

static fc_code deferred_alloc(fc_device *device, size_t bytes, void **out, fc_error *err) {
    deferred *d = device->state;
    fc_code rc = d->cpu->alloc(d->cpu, bytes, out, err);
    if (rc == FC_OK) {
        memset(*out, 0xa5, bytes); /* as if used before */
        *out = to_remote(d, *out);
    }
    return rc;
}

static fc_code deferred_alloc_staging(fc_device *device, size_t bytes, void **out, fc_error *err) {
    deferred *d = device->state;
    return d->cpu->alloc(d->cpu, bytes, out, err);
}

static void deferred_release(fc_device *device, void *memory) {
    deferred *d = device->state;
    d->cpu->release(d->cpu, to_local(memory));
}

static fc_code deferred_stream_new(fc_device *device, fc_stream **out, fc_error *err) {
    deferred *d = device->state;
    fc_stream *s = d->count < MOST_STREAMS ? calloc(1, sizeof *s) : NULL;
    if (!s) {
        return fc_fail(err, FC_ENOMEM, "too many streams");
    }
    s->last = &s->first;
    d->streams[d->count++] = s;
    *out = s;
    return FC_OK;
}

static void deferred_stream_free(fc_device *device, fc_stream *stream) {
    deferred *d = device->state;
    deferred_synchronize(device, stream, NULL);
    for (int i = 0; i < d->count; i++) {
        if (d->streams[i] == stream) {
            d->streams[i] = NULL;
        }
    }
    free(stream);
}

static fc_code deferred_event_new(fc_device *device, fc_event **out, fc_error *err) {
    (void)device;
    *out = calloc(1, sizeof **out);
    return *out ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory");
}

static void deferred_event_free(fc_device *device, fc_event *event) {
    (void)device;
    free(event);
}

static fc_code deferred_record(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err) {
    task t = {.kind = RECORD, .event = event, .mark = ++event->promised};
    return give(device, stream, &t, err);
}

static fc_code deferred_wait(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err) {
    task t = {.kind = WAIT, .event = event, .mark = event->promised};
    return give(device, stream, &t, err);
}

static fc_code deferred_copy(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream,
                             fc_error *err) {
    task t = {.kind = COPY, .dst = dst, .src = src, .count = bytes};
    return give(device, stream, &t, err);
}

static fc_code deferred_zero(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err) {
    task t = {.kind = ZERO, .dst = dst, .count = bytes};
    return give(device, stream, &t, err);
}

static fc_code deferred_copy_box(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                                 const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err) {
    task t = {.kind = COPY_BOX, .dst = dst, .src = src, .to = *to, .from = *from, .element = element};
    return give(device, stream, &t, err);
}

static fc_code deferred_cast(fc_device *device, fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                             fc_stream *stream, fc_error *err) {
    task t = {.kind = CAST, .dst = dst, .src = src, .count = count, .dtype = from, .dtype_to = to};
    return give(device, stream, &t, err);
}

static fc_code deferred_add(fc_device *device, fc_dtype dtype, void *dst, const void *src, size_t count,
                            fc_stream *stream, fc_error *err) {
    task t = {.kind = ADD, .dst = dst, .src = src, .count = count, .dtype = dtype};
    return give(device, stream, &t, err);
}

static fc_code deferred_divide(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count,
                               fc_stream *stream, fc_error *err) {
    task t = {.kind = DIVIDE, .dst = data, .count = count, .dtype = dtype, .divisor = divisor};
    return give(device, stream, &t, err);
}

static fc_code deferred_multiply(fc_device *device, fc_dtype dtype, void *data, double factor, size_t count,
                                 fc_stream *stream, fc_error *err) {
    task t = {.kind = MULTIPLY, .dst = data, .count = count, .dtype = dtype, .divisor = factor};
    return give(device, stream, &t, err);
}

static fc_code deferred_powers(fc_device *device, fc_dtype dtype, const void *data, double p, double weight,
                               size_t count, double *sums, fc_stream *stream, fc_error *err) {
    task t = {.kind = POWERS, .dst = sums, .src = data, .count = count, .dtype = dtype, .divisor = p, .weight = weight};
    return give(device, stream, &t, err);
}

static void deferred_destroy(fc_device *device) {
    deferred *d = device->state;
    deferred_synchronize(device, NULL, NULL);
    d->cpu->destroy(d->cpu);
    free(d);
    free(device);
}

fc_code deferred_device_new(const deferred_options *options, fc_device **out, fc_error *err) {
    static const fc_device functions = {
        .name = "cpu",
        .is_host = true,
        .alloc = deferred_alloc,
        .release = deferred_release,
        .alloc_staging = deferred_alloc_staging,
        .release_staging = deferred_release,
        .stream_new = deferred_stream_new,
        .stream_free = deferred_stream_free,
        .synchronize = deferred_synchronize,
        .event_new = deferred_event_new,
        .event_free = deferred_event_free,
        .record = deferred_record,
        .wait = deferred_wait,
        .copy = deferred_copy,
        .zero = deferred_zero,
        .copy_box = deferred_copy_box,
        .cast = deferred_cast,
        .add = deferred_add,
        .divide = deferred_divide,
        .multiply = deferred_multiply,
        .powers = deferred_powers,
        .destroy = deferred_destroy,
    };
    fc_device *device = malloc(sizeof *device);
    deferred *d = calloc(1, sizeof *d);
    if (!device || !d || fc_device_cpu(&d->cpu, err) != FC_OK) {
        free(device);
        free(d);
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    d->random = options->seed;
    d->options = *options;
    d->compute.last = &d->compute.first;
    *device = functions;
    device->state = d;
    if (options->remote) {
        device->name = "cuda:0";
        device->is_host = false;
    }
    *out = device;
    return FC_OK;
}

static fc_code comm_all_gather(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_stream *stream,
                               fc_error *err) {
    task t = {.kind = GATHER, .comm = comm->state, .src = send, .dst = recv, .count = bytes};
    return give(comm->device, stream, &t, err);
}

static fc_code comm_reduce_scatter(fc_comm *comm, const void *send, void *recv, size_t count, fc_dtype dtype,
                                   fc_reduce op, fc_stream *stream, fc_error *err) {
    task t = {.kind = SCATTER, .comm = comm->state, .src = send, .dst = recv, .count = count, .dtype = dtype, .op = op};
    return give(comm->device, stream, &t, err);
}

static fc_code comm_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_stream *stream,
                               fc_error *err) {
    task t = {.kind = REDUCE, .comm = comm->state, .dst = data, .count = count, .dtype = dtype, .op = op};
    return give(comm->device, stream, &t, err);
}

/* The counts belong to the caller, so this runs now, after the earlier work on the stream. */
static fc_code comm_all_gather_v(fc_comm *comm, const void *send, void *recv, const size_t *counts,
                                 const size_t *displs, fc_stream *stream, fc_error *err) {
    fc_comm *inner = comm->state;
    fc_code rc = deferred_synchronize(comm->device, stream, err);
    return rc == FC_OK ? inner->all_gather_v(inner, to_local(send), to_local(recv), counts, displs, err) : rc;
}

static void comm_free(fc_comm *comm) {
    free(comm);
}

static void split_free(fc_comm *comm) {
    fc_comm *inner = comm->state;
    inner->free(inner);
    free(comm);
}

static fc_code comm_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    fc_comm *inner = comm->state, *made;
    fc_code rc = inner->split(inner, color, &made, err);
    rc = rc == FC_OK ? deferred_comm_new(comm->device, made, out, err) : rc;
    if (rc == FC_OK) {
        (*out)->free = split_free;
    }
    return rc;
}

static fc_code comm_all_gather_host(fc_comm *comm, const void *send, void *recv, size_t bytes, fc_error *err) {
    fc_comm *inner = comm->state;
    return inner->all_gather(inner, send, recv, bytes, err);
}

static const fc_device_collectives collectives = {.all_gather = comm_all_gather,
                                                  .all_gather_v = comm_all_gather_v,
                                                  .reduce_scatter = comm_reduce_scatter,
                                                  .all_reduce = comm_all_reduce};

fc_code deferred_comm_new(fc_device *device, fc_comm *inner, fc_comm **out, fc_error *err) {
    fc_comm *comm = calloc(1, sizeof *comm);
    if (!comm) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    comm->backend = "deferred";
    comm->rank = inner->rank;
    comm->size = inner->size;
    comm->device = device;
    comm->state = inner;
    comm->on_device = &collectives;
    comm->all_gather = comm_all_gather_host;
    comm->split = comm_split;
    comm->free = comm_free;
    *out = comm;
    return FC_OK;
}
