/*
 * What the files of the fetcher that write objects share with each other and with the rest of it.
 */
#pragma once

#include "net/fetcher/fetcher.h"

/* ---- upload_requests.c ---- */

/* Takes a request to write something. Owns the descriptors. */
void upload_request(fetcher *f, const fc_net_request *request, int answer, int extra);
/* The same for an upload that was begun. */
void upload_request_of(fetcher *f, upload *u, const fc_net_request *request, int answer, int extra);
/* The socket of an upload was closed. */
void upload_closed(fetcher *f, upload *u);
/* Makes an upload. @param id of one that the server knows; NULL: it has none yet @return NULL: out of memory */
upload *upload_new(const fc_net_request *request, const char *id);
/* Frees an upload that nothing uses any more. */
void upload_release(const fetcher *f, upload *u);
/* Makes a transfer that writes. Owns the descriptors. @return NULL after answering that it cannot */
transfer *upload_transfer(fetcher *f, transfer_kind purpose, const char *name, int answer, int file);
/* Sets the URL of a transfer for another purpose. It begins at once. @return false after setting t->error */
bool upload_turn(const fetcher *f, transfer *t, transfer_kind purpose);
bool upload_set_url(transfer *t, const char *url);
/* Writes the URL of a page of uploads. @param marks as in the page before, or NULL */
bool upload_list_url(const fetcher *f, const clearing *c, const char *key, const char *id, char url[MOST_URL]);
void outgoing_free(outgoing *out);

/* ---- kept_uploads.c ---- */

/* Takes a page of the parts of an upload. Goes on with the next one, or ends the transfer. */
void upload_take_parts(fetcher *f, transfer *t);
/* Tells the caller what it keeps of an upload that stays: its ID, or the sizes of its parts. @return false: the caller
   has gone */
bool upload_tell(fetcher *f, const transfer *t);

/* ---- tickets.c ---- */

/* Answers with the ticket of an upload. */
void ticket_write(fetcher *f, const upload *u, const fc_net_request *request, int answer);
/* An upload that another process has begun; ticket_take says which. Owns the sockets. */
void upload_adopt(fetcher *f, const fc_net_request *request, int answer, int socket);
void ticket_take(fetcher *f, upload *u, const fc_net_request *request, int answer, int file);

/* ---- uploads.c ---- */

/* Keeps the ETag of a part, and owns it from then on. @return false: out of memory */
bool upload_keep_part(upload *u, unsigned part, char *etag, uint64_t size);

/* Judges what a server answers to a transfer that writes. */
void upload_judge(fetcher *f, transfer *t);
/* A transfer that writes has ended, with t->error or with success: tells the caller. */
void upload_ended(fetcher *f, transfer *t);

/* ---- md5.c ---- */

typedef struct md5 {
    uint32_t state[4];
    uint64_t size;
    unsigned char block[64];
} md5;

void md5_begin(md5 *m);
void md5_add(md5 *m, const void *bytes, size_t size);
void md5_end(md5 *m, unsigned char out[MD5_BYTES]);
