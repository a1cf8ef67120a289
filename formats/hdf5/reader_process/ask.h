/*
 * In the reader process: bytes of a file on a server, for which it asks the parent. Runs only in the child.
 *
 * A question is a record (FC_H5_WANT) in the pipe to which all records go. The answer comes on the socket that takes
 * the place of the file's descriptor, from which the child can only read. So it needs the same system calls as for a
 * file on this machine, and it cannot reach the fetcher.
 */
#pragma once

#include "hdf5/reader_process/records.h"

typedef struct fc_h5_asking fc_h5_asking;

/**
 * @param out  where the records of the file go
 * @param fd   the socket for the answers, borrowed
 * @param size of the file in bytes
 */
fc_h5_asking *fc_h5_asking_new(fc_h5_sink *out, int fd, uint64_t size);
void fc_h5_asking_free(fc_h5_asking *asking); /**< NULL is allowed */

/** Reads bytes that are within the file. @return false if the parent could not read them */
bool fc_h5_ask(fc_h5_asking *asking, uint64_t at, size_t size, unsigned char *bytes);

/** Asks at once for the blocks in which headers begin, so that they are known when they are read.
 * @param places their offsets, which are sorted here; those that are not within the file are ignored
 * @param count at most FC_H5_MOST_PARTS
 * @return false if no more should be asked for, because they would push each other out */
bool fc_h5_ask_ahead(fc_h5_asking *asking, uint64_t *places, size_t count);
