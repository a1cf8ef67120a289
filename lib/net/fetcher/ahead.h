/*
 * Ranges of files, and reading ahead.
 */
#pragma once

#include "net/fetcher/fetcher.h"

enum {
    MOST_UNREAD = 64,     /* transfers that were announced and have no reader; each can hold up a connection */
    MOST_UNREAD_FILE = 4, /* of one open file */
    MOST_GAP = 256 << 10, /* bytes between two reads that cost less than another request */
};

/* What a reader wants. */
typedef struct read_range {
    uint64_t first, end; /* in the file */
    size_t given;        /* bytes before them, which it has */
    unsigned char *into; /* where they go in shared memory; NULL: they are sent */
} read_range;

/* Begins to read what will be asked for on the socket of an open file. */
void ahead_begin(fetcher *f, const opened_file *file, const fc_net_request *request);
/* Gives a read to the transfer that was announced for it. @return false if there is none */
bool ahead_read(fetcher *f, int file, const read_range *wanted, int answer);
/* The socket of a file was closed: nobody reads what was announced on it. */
void ahead_drop(fetcher *f, int file);
/* Whether a transfer is a range that was announced, and nobody waits for its bytes. */
bool has_no_reader(const transfer *t);
/* Makes a reader that of a transfer. */
void range_begin(transfer *t, const read_range *wanted, int answer);
/* Takes bytes of a range for its reader. @return the number of bytes, or what libcurl should do */
size_t range_take(transfer *t, const char *bytes, size_t n);
/* Tells the reader of a range that it has all. */
void range_answer(fetcher *f, transfer *t);
