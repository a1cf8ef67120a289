/*
 * Reads for a reader process what it asks for of a file on a server. See lend.h.
 */
#include "hdf5/reader_process/lend.h"

#include "base/checked.h"
#include "hdf5/reader_process/kept.h"
#include "io/file.h"
#include "net/remote.h"
#include "read/threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { PATIENCE_S = 60, LEAST_COUNTED = 64 << 10, ALLOWED = 64 << 20, MOST_AT_ONCE = 16 };

fc_code fc_h5_loan_begin(fc_h5_loan *loan, const char *path, int fd, uint64_t size, int *given, fc_error *err) {
    int ends[2];
    const struct timeval patience = {PATIENCE_S, 0};
    *loan = (fc_h5_loan){fd, -1, size};
    *given = fd;
    if (!fc_is_remote(path)) {
        return FC_OK;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, "%s: a socket cannot be made", path);
    }
    shutdown(ends[1], SHUT_WR);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    loan->to = ends[0];
    *given = ends[1];
    return FC_OK;
}

void fc_h5_loan_given(const fc_h5_loan *loan, int given) {
    if (loan->to >= 0) {
        close(given);
    }
}

void fc_h5_loan_end(fc_h5_loan *loan) {
    if (loan->to >= 0) {
        close(loan->to);
        loan->to = -1;
    }
}

static bool send_all(int to, const unsigned char *bytes, size_t size) {
    while (size > 0) {
        const ssize_t n = send(to, bytes, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

/* Headers that refer to each other in circles must not cause endless requests. Each part counts as at least one
 * block. */
static void count_part(fc_h5_in *in, uint64_t size) {
    uint64_t most;
    if (!fc_mul_u64(in->loan->size, 2, &most) || !fc_add_u64(most, ALLOWED, &most)) {
        most = UINT64_MAX;
    }
    const uint64_t counted = size > LEAST_COUNTED ? size : LEAST_COUNTED;
    if (!fc_range_within(in->lent, counted, most)) {
        (void)fc_fail(&in->unlent, FC_ECORRUPT,
                      "%s: corrupt HDF5 file: reading its headers takes more than twice its size and 64 MiB", in->path);
        return;
    }
    in->lent += counted;
}

/* The parts of one question. Threads take them in turn, because each may be a request to the server. */
typedef struct reading {
    const fc_h5_in *in;
    fc_h5_part parts[FC_H5_MOST_PARTS];
    unsigned char *bytes[FC_H5_MOST_PARTS];
    size_t count;
    atomic_size_t next;
    pthread_mutex_t lock;
    fc_error failed; /* code FC_OK: nothing has */
} reading;

static void *read_parts(void *context) {
    reading *r = context;
    for (size_t i; (i = atomic_fetch_add(&r->next, 1)) < r->count;) {
        const fc_h5_in *in = r->in;
        const fc_h5_part *p = &r->parts[i];
        fc_error err;
        if (fc_h5_kept_find(in->kept, in->path, p, r->bytes[i])) {
            continue;
        }
        if (fc_pread_full(in->loan->fd, r->bytes[i], (size_t)p->size, p->at, in->path, &err) == FC_OK) {
            fc_h5_kept_add(in->kept, in->path, p, r->bytes[i]);
        } else {
            pthread_mutex_lock(&r->lock);
            r->failed = err;
            pthread_mutex_unlock(&r->lock);
            atomic_store(&r->next, r->count);
        }
    }
    return NULL;
}

/* Reads all parts into `bytes`, one after the other there. */
static void read_all(reading *r, unsigned char *bytes) {
    for (size_t i = 0; i < r->count; bytes += r->parts[i++].size) {
        r->bytes[i] = bytes;
    }
    fc_threads_run((int)(r->count < MOST_AT_ONCE ? r->count : MOST_AT_ONCE), read_parts, r);
}

/* Takes the parts that are asked for. @return false if the record is not valid */
static bool take_parts(const fc_h5_in *in, fc_h5_record *want, reading *r, uint64_t *total) {
    const fc_h5_loan *loan = in->loan;
    *total = 0;
    while (want->at < want->size && r->count < FC_H5_MOST_PARTS) {
        fc_h5_part *p = &r->parts[r->count++];
        p->at = fc_h5_get_u64(want);
        p->size = fc_h5_get_u64(want);
        if (want->bad || !loan || loan->to < 0 || p->size == 0 || p->size > FC_H5_MOST_LENT - *total ||
            !fc_range_within(p->at, p->size, loan->size)) {
            return false;
        }
        *total += p->size;
    }
    return r->count > 0 && want->at == want->size;
}

static bool lend(fc_h5_in *in, reading *r, uint64_t total) {
    unsigned char *bytes = malloc((size_t)total);
    if (!bytes) {
        (void)fc_no_memory(&in->unlent, in->path);
    }
    for (size_t i = 0; bytes && i < r->count && in->unlent.code == FC_OK; i++) {
        count_part(in, r->parts[i].size);
    }
    if (in->unlent.code == FC_OK) {
        read_all(r, bytes);
        in->unlent = r->failed;
    }
    const bool sent =
        in->unlent.code == FC_OK ? send_all(in->loan->to, bytes, (size_t)total) : shutdown(in->loan->to, SHUT_WR) == 0;
    free(bytes);
    return sent;
}

bool fc_h5_lend(fc_h5_in *in, fc_h5_record *want) {
    reading *r = calloc(1, sizeof *r);
    uint64_t total;
    if (!r) {
        in->no_memory = true;
        return false;
    }
    r->in = in;
    pthread_mutex_init(&r->lock, NULL);
    bool good = take_parts(in, want, r, &total);
    if (good && in->unlent.code == FC_OK) { /* else the socket has ended */
        good = lend(in, r, total);
    }
    pthread_mutex_destroy(&r->lock);
    free(r);
    return good;
}
