/*
 * Complete reads and writes of files, and links that stay within a checkpoint.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/** Opens the regular file `path` read-only, close-on-exec. @return FC_ECORRUPT for anything else, e.g. a FIFO, which
 *  would block. */
fc_code fc_open_input(const char *path, int *fd, uint64_t *size, fc_error *err);

/**
 * Checks that symbolic links do not lead from a file of a checkpoint out of its directory. Links within the directory
 * are accepted, and so are those into blobs/ of the cache of huggingface_hub, and a missing file.
 * @param path the file.
 * @param name its name relative to the directory.
 * @param root realpath() of the directory.
 * @return FC_ECORRUPT if a link leads out.
 */
fc_code fc_check_link(const char *path, const char *name, const char *root, fc_error *err);

/** Says that these bytes will soon be read, in ascending order. A file on a server is asked for them now. */
void fc_pread_expect(int fd, const char *path, uint64_t size, uint64_t offset);

/** Reads exactly `size` bytes at `offset`. @return FC_ECORRUPT ("truncated") if the file ends before. */
fc_code fc_pread_full(int fd, void *buf, size_t size, uint64_t offset, const char *path, fc_error *err);

/** Reads up to `size` bytes at `offset`. @return bytes, fewer only at the end of the file; negative for an error */
ssize_t fc_pread_some(int fd, void *buf, size_t size, uint64_t offset);

/**
 * Reads a whole file of at most `most` bytes.
 * @param what the kind of file for the message, such as "a schema".
 * @param text receives the bytes, which the caller frees; NULL after a failure.
 * @return FC_EUNSUPPORTED for a larger file.
 */
fc_code fc_read_whole(const char *path, const char *what, uint64_t most, char **text, size_t *size, fc_error *err);

/** Closes a file that was written; it may be -1. @return `rc`, or the code of a failure if that is FC_OK. */
fc_code fc_close_written(int fd, fc_code rc, const char *path, fc_error *err);

/** Creates a file of `size` zeros. */
fc_code fc_create_zeros(const char *path, uint64_t size, fc_error *err);

/** Writes exactly `size` bytes at `offset`. */
fc_code fc_pwrite_full(int fd, const void *buf, size_t size, uint64_t offset, const char *path, fc_error *err);

/** Returns whether `name` is a relative path without "..", empty components, NUL or a leading "/". */
bool fc_path_is_safe(const char *name);
