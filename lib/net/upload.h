/*
 * Objects in buckets (s3://, gs://) that are written, through the fetcher. An object that is sent in parts is not
 * visible before it is completed.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FC_UPLOAD_MOST_PARTS = 10000,
    FC_UPLOAD_PATIENCE = 2000, /**< milliseconds, for fc_upload_abort of all uploads of a job together */
};

/** An object that is sent in parts. */
typedef struct fc_upload fc_upload;

/** Refuses a name that nothing can be written to. */
fc_code fc_upload_check(const char *name, fc_error *err);

/**
 * Begins to send the object `name` in parts.
 * @param run number of the run, which the object keeps as metadata: see fc_upload_delete_own
 * @param id NULL: the upload is aborted when this process ends. Otherwise it stays until it is completed or aborted,
 * and `id` receives the server's ID for it, which the caller frees.
 * @param out owned by the caller, who completes, aborts or leaves it
 */
fc_code fc_upload_begin(const char *name, uint64_t run, char **id, fc_upload **out, fc_error *err);

/**
 * Goes on with an upload that another process has left.
 * @param run with which it was begun
 * @param sizes receives the bytes of the parts 1 to `count` that the server has, 0 for those that it lacks
 * @param out receives NULL if there is no such upload any more
 */
fc_code fc_upload_continue(const char *name, uint64_t run, const char *id, uint64_t *sizes, unsigned count,
                           fc_upload **out, fc_error *err);

/** Sends `size` bytes at `offset` of `fd`, which must stay as they are until this returns, as a part. Any thread.
 * @param part from 1 to FC_UPLOAD_MOST_PARTS; the same number again replaces the part */
fc_code fc_upload_part(fc_upload *u, int fd, uint64_t offset, uint64_t size, unsigned part, fc_error *err);

/** Makes the object visible; it has the parts 1 to `parts`. Frees the upload, except after a failure.
 * @param only_new there must be no such object (FC_EUSAGE). S3 tests that at the same moment; for gs://, and for
 * servers that cannot, it is tested immediately before.
 * @param gone receives whether there was no such upload any more: this call made nothing */
fc_code fc_upload_complete(fc_upload *u, unsigned parts, bool only_new, bool *gone, fc_error *err);

/** Gives an upload up, as far as the server can be reached, and frees it.
 * @param u may be NULL
 * @param patience milliseconds that a cancelled job waits for the server at most; receives what is left of them. The
 * fetcher goes on with what is not done by then. */
void fc_upload_abort(fc_upload *u, int *patience);

/** Frees an upload that has an ID, and keeps what was sent for the process that continues it. @param u may be NULL */
void fc_upload_leave(fc_upload *u);

/**
 * Makes the ticket of an upload whose parts 1 to `parts` are sent. With it, another process can adopt the upload. Then
 * each of the two may complete or abort it, and what the first one does counts. So this process keeps the upload until
 * the other one has completed it, and then aborts it, which does nothing any more.
 * @param ticket receives the bytes, malloc'ed
 */
fc_code fc_upload_ticket(const fc_upload *u, unsigned parts, char **ticket, size_t *size, fc_error *err);

/** Adopts the upload of the object `name` that another process has begun, with `run`.
 * @param out owned by the caller, who completes or aborts it */
fc_code fc_upload_adopt(const char *name, uint64_t run, const char *ticket, size_t size, unsigned parts,
                        fc_upload **out, fc_error *err);

/** Writes a whole object in one request, the first `size` bytes of `fd`. */
fc_code fc_upload_whole(const char *name, uint64_t run, int fd, uint64_t size, bool only_new, fc_error *err);

/** fc_upload_whole and fc_upload_delete for the journal of a conversion that can be resumed. If the job is cancelled,
 * they wait for at most FC_UPLOAD_PATIENCE, because what becomes of it need not be known. */
fc_code fc_upload_journal(const char *name, int fd, uint64_t size, fc_error *err);
fc_code fc_upload_delete_journal(const char *name, fc_error *err);

/** Deletes an object. It may be missing. */
fc_code fc_upload_delete(const char *name, fc_error *err);

/** Deletes an object if its metadata says that `run` made it. It may be missing.
 * @param left receives whether it stays, because it is of another program, or the server does not keep metadata */
fc_code fc_upload_delete_own(const char *name, uint64_t run, bool *left, fc_error *err);

/** Aborts what other runs began and did not complete: the uploads of the object `name`, or of all objects in the folder
 * `name`. A server may refuse this to users who may write (FC_EIO). A server without lists of uploads has nothing
 * to abort. @param count receives how many were aborted */
fc_code fc_upload_clear(const char *name, bool is_folder, size_t *count, fc_error *err);
