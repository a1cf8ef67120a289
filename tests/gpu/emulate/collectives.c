/*
 * The collectives of the emulated NCCL. They run when every rank has reached them. See emulate.h. As in NCCL, calls of
 * one communicator run in their order on all streams.
 */
#include "collectives.h"

static long collectives;
static _Thread_local int depth;
static _Thread_local batch *group; /* of the open group */
static _Thread_local bool group_failed;
static _Thread_local struct ncclComm *aborted; /* in the open group */

static bool fails(const char *name) {
    return emulated_fails(name);
}

/* Returns whether the other rank has reached the batch of this number: it is the next of its stream. */
static const batch *arrived(const struct ncclComm *comm, unsigned long number) {
    const batch *b = comm && !comm->aborted ? comm->first : NULL;
    return b && b->launched && b->number == number && b->at_head ? b : NULL;
}

static bool is_ready(void *argument) {
    batch *b = argument;
    struct ncclComm *comm = b->comm;
    b->at_head = true; /* its stream asks, so it is the next one there */
    if (comm->aborted || comm->world->done > b->number) {
        return true;
    }
    if (comm->first != b) {
        return false;
    }
    for (int r = 0; r < comm->world->size; r++) {
        if (!arrived(comm->world->ranks[r], b->number)) {
            return false;
        }
    }
    return true;
}

static void reduce_hop(const item *i, void *sum, const void *with, size_t count) {
    const void *inputs[] = {sum, with};
    fc_arith_reduce(i->dtype, i->op == FC_REDUCE_AVG ? FC_REDUCE_SUM : i->op, inputs, 2, sum, count);
}

/* Reduces `count` elements at `offset` of all ranks' `send`, from rank to rank as in a ring that ends at `last`. */
static void *reduce_ring(const item *const *items, int size, int last, size_t offset, size_t count) {
    const item *i = items[0];
    size_t element = fc_dtype_size(i->dtype);
    void *sum = malloc(count * element + 1);
    if (!sum) {
        emulated_die("out of memory");
    }
    for (int hop = 1; hop <= size; hop++) {
        const char *theirs = (const char *)emulated_remote(items[(last + hop) % size]->send) + offset * element;
        if (hop == 1) {
            memcpy(sum, theirs, count * element);
        } else {
            reduce_hop(i, sum, theirs, count);
        }
    }
    if (i->op == FC_REDUCE_AVG) {
        fc_arith_divide(i->dtype, size, sum, count);
    }
    return sum;
}

static void run_reduce_scatter(const item *const *items, int size) {
    size_t count = items[0]->count, bytes = count * fc_dtype_size(items[0]->dtype);
    void *sums[MOST_RANKS];
    for (int r = 0; r < size; r++) {
        sums[r] = reduce_ring(items, size, r, (size_t)r * count, count);
    }
    for (int r = 0; r < size; r++) {
        memcpy(emulated_remote(items[r]->recv), sums[r], bytes);
        free(sums[r]);
    }
}

/* The segments of an all-reduce end at different ranks of the ring. */
static void run_all_reduce(const item *const *items, int size) {
    size_t count = items[0]->count, element = fc_dtype_size(items[0]->dtype), segment = count / (size_t)size + 1;
    void *sums[MOST_RANKS];
    for (int r = 0; r < size; r++) {
        size_t at = segment * (size_t)r < count ? segment * (size_t)r : count;
        sums[r] = reduce_ring(items, size, r, at, count - at < segment ? count - at : segment);
    }
    for (int r = 0; r < size; r++) {
        size_t at = segment * (size_t)r < count ? segment * (size_t)r : count;
        for (int to = 0; to < size; to++) {
            memcpy((char *)emulated_remote(items[to]->recv) + at * element, sums[r],
                   (count - at < segment ? count - at : segment) * element);
        }
        free(sums[r]);
    }
}

static void run_all_gather(const item *const *items, int size) {
    size_t bytes = items[0]->count * fc_dtype_size(items[0]->dtype);
    for (int to = 0; to < size; to++) {
        for (int from = 0; from < size; from++) {
            memmove((char *)emulated_remote(items[to]->recv) + bytes * (size_t)from, emulated_remote(items[from]->send),
                    bytes);
        }
    }
}

static void run_broadcast(const item *const *items, int size) {
    const item *root = items[items[0]->peer];
    for (int to = 0; to < size; to++) {
        memmove(emulated_remote(items[to]->recv), emulated_remote(root->send),
                root->count * fc_dtype_size(root->dtype));
    }
}

/* Receives what the n-th matching ncclSend of the peer sends. */
static void run_receive(const world *w, const batch *mine, int index) {
    const item *to = &mine->items[index];
    const batch *theirs = w->ranks[to->peer]->first;
    int skip = 0;
    for (int i = 0; i < index; i++) {
        skip += mine->items[i].kind == RECEIVE && mine->items[i].peer == to->peer;
    }
    for (int i = 0; i < theirs->count; i++) {
        const item *from = &theirs->items[i];
        if (from->kind != SEND || from->peer != mine->comm->rank || skip-- > 0) {
            continue;
        }
        if (from->count != to->count || from->dtype != to->dtype) {
            emulated_die("rank %d receives another size than rank %d sends", mine->comm->rank, to->peer);
        }
        memmove(emulated_remote(to->recv), emulated_remote(from->send), to->count * fc_dtype_size(to->dtype));
        return;
    }
    emulated_die("rank %d receives what rank %d does not send", mine->comm->rank, to->peer);
}

/* Returns the n-th call of a rank's batch that is not between two ranks, or NULL. */
static const item *find_together(const batch *b, int n) {
    for (int i = 0; i < b->count; i++) {
        if (b->items[i].kind < SEND && n-- == 0) {
            return &b->items[i];
        }
    }
    return NULL;
}

/* Runs the n-th of them. @return false if there is none. */
static bool run_together(const world *w, int n) {
    static void (*const runs[])(const item *const *, int) = {run_all_gather, run_reduce_scatter, run_all_reduce,
                                                             run_broadcast};
    const item *items[MOST_RANKS];
    for (int r = 0; r < w->size; r++) {
        const item *i = items[r] = find_together(w->ranks[r]->first, n);
        if (!i != !items[0] ||
            (i && (i->kind != items[0]->kind || i->count != items[0]->count || i->dtype != items[0]->dtype ||
                   i->op != items[0]->op || i->peer != items[0]->peer))) {
            emulated_die("ranks 0 and %d make different calls", r);
        }
    }
    if (items[0]) {
        runs[items[0]->kind](items, w->size);
    }
    return items[0] != NULL;
}

/* The first rank whose stream comes to the batch does the work of all. */
static void run_batch(void *argument) {
    const batch *b = argument;
    world *w = b->comm->world;
    if (b->comm->aborted || w->done > b->number) {
        return;
    }
    for (int r = 0; r < w->size; r++) {
        const batch *theirs = w->ranks[r]->first;
        for (int i = 0; i < theirs->count; i++) {
            if (theirs->items[i].kind == RECEIVE) {
                run_receive(w, theirs, i);
            }
        }
    }
    for (int n = 0; run_together(w, n); n++) {
    }
    w->done = b->number + 1;
    collectives++;
}

long emulated_collectives(void) {
    emulated_lock();
    long count = collectives;
    emulated_unlock();
    return count;
}

void emulated_drop_batch(void *argument) {
    batch *b = argument;
    struct ncclComm *comm = b->comm;
    for (batch **p = &comm->first; *p; p = &(*p)->next) {
        if (*p == b) {
            *p = b->next;
            break;
        }
    }
    comm->last = &comm->first;
    while (*comm->last) {
        comm->last = &(*comm->last)->next;
    }
    comm->finished++;
    free(b);
    emulated_let_go(comm);
}

void emulated_launch(batch *b) {
    b->launched = true;
    emulated_enqueue_locked(b->stream, (emulated_work){is_ready, run_batch, emulated_drop_batch, b});
}

/* Puts the batch on its stream, now or when the caller has asked. */
static ncclResult_t issue(batch *b) {
    struct ncclComm *comm = b->comm;
    emulated_lock();
    emulated_check_idle(comm, "a collective");
    b->number = comm->issued++;
    comm->users++;
    *comm->last = b;
    comm->last = &b->next;
    comm->lazy = comm->nonblocking && emulated_is_lazy();
    comm->questions = 0;
    bool later = comm->lazy;
    if (!later) {
        emulated_launch(b);
    }
    emulated_unlock();
    return later ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    if (fails("ncclGroupStart")) {
        return ncclSystemError;
    }
    depth++;
    return ncclSuccess;
}

bool emulated_abort_in_group(struct ncclComm *comm) {
    if (group) {
        emulated_die("a communicator is aborted in a group of collectives");
    }
    if (depth > 0) {
        comm->next_aborted = aborted;
        aborted = comm;
    }
    return depth > 0;
}

static void end_aborts(void) {
    emulated_lock();
    while (aborted) {
        struct ncclComm *comm = aborted;
        aborted = comm->next_aborted;
        emulated_end_abort(comm);
    }
    emulated_unlock();
}

ncclResult_t ncclGroupEnd(void) {
    batch *b = group;
    bool failed = group_failed;
    if (--depth > 0) { /* of a group within a group */
        return ncclSuccess;
    }
    end_aborts();
    group = NULL;
    group_failed = false;
    if (fails("ncclGroupEnd") || failed) {
        free(b);
        return ncclSystemError;
    }
    return b ? issue(b) : ncclSuccess;
}

static ncclResult_t add(const char *name, ncclComm_t comm, cudaStream_t stream, item new_item) {
    if (fails(name)) {
        group_failed = depth > 0;
        return ncclSystemError;
    }
    batch *b = depth > 0 ? group : NULL;
    if (!b) {
        b = calloc(1, sizeof *b);
        if (!b) {
            emulated_die("out of memory");
        }
        b->comm = comm;
        b->stream = stream;
    }
    if (b->comm != comm || b->stream != stream || b->count == MOST_ITEMS) {
        emulated_die("a group of several communicators or streams, or of too many calls");
    }
    b->items[b->count++] = new_item;
    if (depth > 0) {
        group = b;
        return ncclSuccess;
    }
    return issue(b);
}

static fc_dtype dtype_of(ncclDataType_t type) {
    static const fc_dtype dtypes[] = {FC_I8,  FC_U8,  FC_I32, FC_U32,  FC_I64,       FC_U64,
                                      FC_F16, FC_F32, FC_F64, FC_BF16, FC_F8_E4M3FN, FC_F8_E5M2};
    return dtypes[type];
}

static fc_reduce op_of(ncclRedOp_t op) {
    return op == ncclMax   ? FC_REDUCE_MAX
           : op == ncclMin ? FC_REDUCE_MIN
           : op == ncclAvg ? FC_REDUCE_AVG
                           : FC_REDUCE_SUM;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    item i = {.kind = ALL_GATHER, .send = send, .recv = recv, .count = count, .dtype = dtype_of(type)};
    emulated_lock();
    emulated_count_gather(comm, recv);
    emulated_unlock();
    return add("ncclAllGather", comm, stream, i);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    item i = {REDUCE_SCATTER, send, recv, count, dtype_of(type), op_of(op), 0};
    return add("ncclReduceScatter", comm, stream, i);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    item i = {ALL_REDUCE, send, recv, count, dtype_of(type), op_of(op), 0};
    return add("ncclAllReduce", comm, stream, i);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    item i = {.kind = BROADCAST, .send = send, .recv = recv, .count = count, .dtype = dtype_of(type), .peer = root};
    return add("ncclBroadcast", comm, stream, i);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    item i = {.kind = SEND, .send = send, .count = count, .dtype = dtype_of(type), .peer = peer};
    return add("ncclSend", comm, stream, i);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    item i = {.kind = RECEIVE, .recv = recv, .count = count, .dtype = dtype_of(type), .peer = peer};
    return add("ncclRecv", comm, stream, i);
}
