/*
 * Targets in buckets while they are made. Each file of such a target is in memory until its parts are sent: a memfd of
 * the file's length, with holes in place of what was sent. The server shows nothing of it before fc_staged_publish.
 *
 * A file is known by the name that it will have, after FC_STAGED: "new:s3://bucket/folder/model.safetensors". The calls
 * of io/path.h and fc_open_input find it by that name, so that formats write and read it like any other file. A process
 * has one table of these names, as it has one file system (docs/ARCHITECTURE.md, decisions).
 *
 * The thread that writes the last byte of a part sends it. A byte that the engine moves is written once. Bytes of
 * headers may be written again until fc_staged_final or fc_staged_end is called. A file may grow: then the engine
 * appends data to it, and its length is known only to fc_staged_end.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define FC_STAGED "new:"

enum {
    /* Bytes of each part except the last; S3 accepts no smaller ones. An object that would have more than
       FC_STAGED_MOST_PARTS has larger parts. */
    FC_STAGED_PART = 5 << 20,
    FC_STAGED_MOST_PARTS = 10000,
};

struct fc_entry_names;
struct fc_progress;

/** Returns whether a path is a name of a file that is being made, or of its folder. */
bool fc_is_staged(const char *path);

/* ---- the target ---- */

/** A target in a bucket that is being made. */
typedef struct fc_staged_target fc_staged_target;

/**
 * Begins the target `name`, a folder or one object.
 * @return FC_EUSAGE if this process is making it already
 */
fc_code fc_staged_begin(const char *name, bool is_folder, fc_staged_target **out, fc_error *err);

/** Returns the path to write to. */
const char *fc_staged_path(const fc_staged_target *target);

/** Returns the number of files. */
size_t fc_staged_count(const fc_staged_target *target);

/** Returns whether the target has a file of this name, relative to it. */
bool fc_staged_has(const fc_staged_target *target, const char *name);

/**
 * Sends what has not been sent, and makes all files visible: those that the engine wrote, in the order of their
 * creation, and then the others, the first of them last, because an index is created before what is put next to it.
 * @param only_new fails with FC_EUSAGE if an object exists
 * @param progress counts files; may be NULL
 */
fc_code fc_staged_publish(fc_staged_target *target, bool only_new, struct fc_progress *progress, fc_error *err);

/** Aborts all that is not visible, and frees it. NULL is allowed. */
void fc_staged_free(fc_staged_target *target);

/** From now on, uploads outlive this process, so that another run can take them up (fc_staged_take_up). */
void fc_staged_stay(fc_staged_target *target);

/** fc_staged_free for a target whose uploads another run takes up. */
void fc_staged_leave(fc_staged_target *target);

/* ---- several processes that make one target ---- */

struct fc_notes;

/**
 * Lets this process write files of a target that another one has begun, which is a folder.
 * @param path what fc_staged_path returned there
 * @param out receives what this process makes of it. Free it when the other process has published the target: what is
 * not visible then is aborted. NULL if this process has begun the target itself: its ranks are threads
 */
fc_code fc_staged_join(const char *path, fc_staged_target **out, fc_error *err);

/**
 * Sends what is left of the files that this process has written since the last call, and adds to `out` what
 * fc_staged_adopt needs of them. Adds nothing if this process has begun the target itself, or `path` is on this
 * machine.
 * @param headers whether the other process reads the headers of the files
 */
fc_code fc_staged_tell(const char *path, bool headers, struct fc_notes *out, fc_error *err);

/** Makes the files of another process also files of this one, which has begun the target `path`. */
fc_code fc_staged_adopt(const char *path, const void *bytes, size_t size, fc_error *err);

/* ---- its files, by name ---- */

/** open(2): the descriptor is one of its own, with its own position. @return -1 with errno */
int fc_staged_open(const char *path, int flags);

/** stat(2). A folder exists as long as a file in it does, and the target itself always. @return -1 with errno */
int fc_staged_stat(const char *path, struct stat *st);

/** The names in a folder. @param out freed by the caller, also after a failure */
fc_code fc_staged_list(const char *path, struct fc_entry_names *out, fc_error *err);

/* ---- parts ---- */

/** Bytes of a file that the engine moves. */
typedef struct fc_staged_data {
    uint64_t offset, size;
} fc_staged_data;

typedef struct fc_staged_file fc_staged_file;

/**
 * Begins the upload of a file that has its final length, or goes on with that of an earlier run.
 * @param then ID of that upload; NULL: a new one
 * @param done the bytes that it is said to have
 * @param id receives the ID, which the file owns; NULL: the file is sent as a whole at the end. After `then`, NULL also
 * means that its upload does not have these bytes.
 */
fc_code fc_staged_take_up(const char *path, const char *then, const fc_staged_data *done, size_t count, const char **id,
                          fc_error *err);

/** Returns the number of the run that began a file, after setting it if `run` is not 0: objects have it as metadata
 * from the start of their upload. */
uint64_t fc_staged_keep_run(const char *path, uint64_t run);

/** Returns whether the server has these bytes of a file that has an upload. */
bool fc_staged_has_sent(fc_staged_file *file, uint64_t offset, uint64_t size);

/**
 * Divides a file into parts, and begins to send it. Only fc_staged_write writes bytes of `data`, and those after the
 * present end of the file, each once and roughly in order.
 * @param data in ascending order, without overlaps; copied
 * @param grows the most bytes that may be appended; 0: the file has its final length
 * @param memory bytes for the parts that are in memory at once; at least two are
 */
fc_code fc_staged_divide(const char *path, const fc_staged_data *data, size_t count, uint64_t grows, uint64_t memory,
                         fc_error *err);

/** @return the file that a path names; NULL if the path is not that of a file that is divided */
fc_staged_file *fc_staged_find(const char *path);

/** @return the most bytes of the parts that are in memory at once; 0 for NULL */
uint64_t fc_staged_held(const fc_staged_file *file);

/**
 * Writes bytes that the engine moves. The thread then calls fc_staged_send. Waits before it begins a part while too
 * many are in memory, and sends some meanwhile. Any thread may call it.
 * @param fd the thread's own descriptor of the file
 */
fc_code fc_staged_write(fc_staged_file *file, int fd, const unsigned char *bytes, size_t size, uint64_t offset,
                        fc_error *err);

/** The engine leaves out these bytes of a file that grows: they are zeros. Called before what follows them is written,
 * by the same thread, which then calls fc_staged_send. */
fc_code fc_staged_skip(fc_staged_file *file, uint64_t offset, uint64_t size, fc_error *err);

/** Sends the parts that are complete and that no other thread sends. */
fc_code fc_staged_send(fc_staged_file *file, fc_error *err);

/** A thread has failed and will not write its bytes: other threads stop waiting for them. */
void fc_staged_stop(fc_staged_file *file);

/** The format has written these bytes, or never will, and does not write them again. For a path on this machine it does
 * nothing. */
fc_code fc_staged_final(const char *path, uint64_t offset, uint64_t size, fc_error *err);

/** From `offset` on, the file has nothing but what the engine moves, and gaps. Called before the file is divided. */
void fc_staged_final_from(const char *path, uint64_t offset);

/** The format has finished a file, which has its length: sends all parts that are left. For a path on this machine it
 * does nothing. */
fc_code fc_staged_end(const char *path, fc_error *err);
