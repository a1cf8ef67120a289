/*
 * Reads for a reader process what it asks for of a file on a server. See lend.h.
 */
#include "hdf5/reader_process/lend.h"

#include "base/checked.h"
#include "io/file.h"
#include "net/remote.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { PATIENCE_S = 60, LEAST_COUNTED = 64 << 10, ALLOWED = 64 << 20 };

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

/* Headers that refer to each other in circles must not make requests without an end. Each question counts as one block
 * at least. */
static bool may_ask(fc_h5_in *in, uint64_t size) {
    uint64_t most;
    if (!fc_mul_u64(in->loan->size, 2, &most) || !fc_add_u64(most, ALLOWED, &most)) {
        most = UINT64_MAX;
    }
    const uint64_t counted = size > LEAST_COUNTED ? size : LEAST_COUNTED;
    if (!fc_range_within(in->lent, counted, most)) {
        return fc_fail(&in->unlent, FC_ECORRUPT,
                       "%s: corrupt HDF5 file: reading its headers takes more than twice its size", in->path) == FC_OK;
    }
    in->lent += counted;
    return true;
}

bool fc_h5_lend(fc_h5_in *in, fc_h5_record *want) {
    const uint64_t at = fc_h5_get_u64(want), size = fc_h5_get_u64(want);
    const fc_h5_loan *loan = in->loan;
    if (want->bad || want->at != want->size || !loan || loan->to < 0 || size == 0 || size > FC_H5_MOST_LENT ||
        !fc_range_within(at, size, loan->size)) {
        return false;
    }
    if (in->unlent.code != FC_OK) {
        return true; /* the socket has ended */
    }
    unsigned char *bytes = malloc((size_t)size);
    if (!bytes) {
        (void)fc_no_memory(&in->unlent, in->path);
    }
    const bool have =
        bytes && may_ask(in, size) && fc_pread_full(loan->fd, bytes, (size_t)size, at, in->path, &in->unlent) == FC_OK;
    const bool sent = have ? send_all(loan->to, bytes, (size_t)size) : shutdown(loan->to, SHUT_WR) == 0;
    free(bytes);
    return sent;
}
