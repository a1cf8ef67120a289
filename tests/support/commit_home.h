/*
 * For tests of the commit: a directory of its own for each test, files in it, and a commit that records its messages.
 */
#pragma once

#include "fsdpckpt/io.h"

/* The start of every file that the commits of `begin` may replace. */
#define OURS "ours "

/* Setup and teardown: the working directory is a new, empty one. */
int enter(void **state);
int leave(void **state);

/* The number of entries in a directory. */
int entries(const char *path);
void put(const char *path, const char *text);
void put_in(const fc_commit *commit, const char *name, const char *text);
void assert_content(const char *path, const char *text);

/* The last message that the commit reported. */
extern char told[1024];
void tell(void *unused, const char *line);

/* Begins a commit whose messages go to `told`. It may replace files that begin with OURS and, in a directory, have a
   name of DCP or HDF5 shards, or of accelerate in a folder. */
fc_code begin(const char *path, bool is_directory, bool force, uint64_t bytes, fc_commit **out, fc_error *err);
