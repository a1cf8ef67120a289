/*
 * For tests of the commit: a directory of its own for each test, files in it, and a commit that records its messages.
 */
#ifndef FSDPCKPT_TESTS_COMMIT_HOME_H
#define FSDPCKPT_TESTS_COMMIT_HOME_H

#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"

/* The signature of HDF5, which makes a single file one that --force replaces. */
#define OURS "\x89HDF\r\n\x1a\n"
/* The start of a zip archive: in a directory, an HDF5 file must also have our schema. */
/* A zip record: its 26 bytes of header have no NUL here, so its name ends with the file. */
#define OURS_ZIP                                                                                                       \
    "PK\3\4"                                                                                                           \
    "--------------------------"                                                                                       \
    "archive/data.pkl"

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

/* Begins a commit whose messages go to `told`. */
fc_code begin(const char *path, bool is_directory, bool force, uint64_t bytes, fc_commit **out, fc_error *err);

#endif
