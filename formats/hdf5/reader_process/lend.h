/*
 * The parent's side of ask.h: gives a reader process bytes of a file on a server, when it asks for them.
 */
#pragma once

#include "hdf5/reader_process/records.h"

/** A file that a reader process reads. */
typedef struct fc_h5_loan {
    int fd;        /**< of the file, borrowed */
    int to;        /**< our end of the socket for the answers; -1: the process has the file itself */
    uint64_t size; /**< of the file in bytes */
} fc_h5_loan;

/**
 * Makes what a process gets for the open file `fd`.
 * @param given receives `fd`, or for a file on a server the other end of a socket, which the caller closes when the
 *              process has it: fc_h5_loan_given
 */
fc_code fc_h5_loan_begin(fc_h5_loan *loan, const char *path, int fd, uint64_t size, int *given, fc_error *err);

/** Closes `given` unless it is the file. */
void fc_h5_loan_given(const fc_h5_loan *loan, int given);

/** Ends the socket: a process that waits for an answer gets none. May be called twice. */
void fc_h5_loan_end(fc_h5_loan *loan);

/**
 * Answers a FC_H5_WANT record from in->loan. If the file cannot be read, the reason is in in->unlent.
 * @return false if the record is not valid, or the process does not take the answer
 */
bool fc_h5_lend(fc_h5_in *in, fc_h5_record *want);
