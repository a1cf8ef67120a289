/*
 * What a process asks of its fetcher, and what the fetcher answers. Requests are messages on SOCK_SEQPACKET sockets:
 * one for names, and one for each open file and each upload. Each carries a socket of its own for the answer, so any
 * number of threads can ask at once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { FC_NET_MOST_NAME = 4095, FC_NET_MOST_TEXT = 1023, FC_NET_MOST_ID = 2048, FC_NET_MOST_TICKET = 4 << 20 };

typedef enum fc_net_request_kind {
    FC_NET_STAT = 1, /**< name, or an open file: answered with FC_NET_DONE or FC_NET_MISSING */
    FC_NET_LOOK,     /**< FC_NET_STAT of a name that a person gave: it may exist even if its folder does not list it */
    FC_NET_LIST,     /**< name: FC_NET_NAME for each entry, then FC_NET_DONE */
    FC_NET_OPEN,     /**< name; the message also has the fetcher's end of the file's socket */
    FC_NET_READ,     /**< bytes of an open file: FC_NET_DATA until all are sent, then FC_NET_DONE; of shared memory only
                          FC_NET_DONE, with the number of bytes that were written there */
    FC_NET_AHEAD,    /**< name of a file that will be opened soon; or bytes of an open file that will be read soon, in
                          their order, by whoever has this socket; no answer */
    FC_NET_HOST,     /**< name is "host:port:addresses" for CURLOPT_RESOLVE, or "host:port" if it has no address; no
                          answer */
    FC_NET_HIDE,     /**< name is a URL with a query; `size` of the answer is the number for fc_net_hidden_name */

    /* What is written */
    FC_NET_BEGIN, /**< name; the message also has the fetcher's end of the upload's socket. `flag`: the upload outlives
                       this process unless it is ended, and FC_NET_DATA has the server's ID for it */
    FC_NET_CONTINUE, /**< an upload that outlived another process: its name, NUL, its ID; with a socket as above.
                          FC_NET_DATA has the sizes of the parts 1 to `part`, 8 bytes each, 0 for those that are
                          missing; FC_NET_MISSING: there is no such upload */
    FC_NET_PART,     /**< of an upload: part `part` is `length` bytes at `offset` of the file in the message */
    FC_NET_COMPLETE, /**< of an upload, from the parts 1 to `part`; `flag`: only if there is no such object.
                          FC_NET_MISSING: there is no such upload */
    FC_NET_ABORT,    /**< of an upload */
    FC_NET_WHOLE,    /**< name; the message also has the file, of `length` bytes; `flag` as above */
    FC_NET_DELETE,   /**< name; with `run`, FC_NET_EXISTS if the object is not of that run, and stays */
    FC_NET_CLEAR,    /**< name; `flag`: it is a folder. `size` of the answer says how many uploads were aborted */
    FC_NET_TICKET,   /**< of an upload: FC_NET_DATA, at most `length` bytes, for FC_NET_TAKE in another process; then
                          FC_NET_DONE. It has the parts 1 to `part` */
    FC_NET_ADOPT,    /**< name; the message also has the fetcher's end of the socket of an upload that another process
                          has begun. FC_NET_TAKE must follow */
    FC_NET_TAKE      /**< of an adopted upload: its ticket is the `length` bytes of the file in the message, with `part`
                          parts */
} fc_net_request_kind;

typedef struct fc_net_request {
    uint32_t kind;
    uint32_t name_size;
    uint64_t offset, length;
    uint64_t into; /**< of FC_NET_READ: where in the shared memory; else FC_NOT_SHARED */
    uint32_t part, flag;
    uint64_t run;                    /**< number of the run that makes or made the object, in its metadata; 0: none */
    char name[FC_NET_MOST_NAME + 1]; /**< only name_size bytes are sent, without a NUL */
} fc_net_request;

#define FC_NET_REQUEST_HEAD offsetof(fc_net_request, name)

typedef enum fc_net_answer_kind {
    FC_NET_DONE = 1,
    FC_NET_MISSING,
    FC_NET_EXISTS, /**< an object that must be new exists already */
    FC_NET_DATA,   /**< `size` bytes follow */
    FC_NET_NAME,   /**< text: the name of an entry */
    FC_NET_WHERE,  /**< text: "host:port", whose addresses the fetcher needs to go on */
    FC_NET_ERROR   /**< code and text */
} fc_net_answer_kind;

typedef struct fc_net_answer {
    uint32_t kind;
    uint32_t code;      /**< fc_code */
    uint32_t is_folder; /**< of FC_NET_DONE */
    uint32_t text;      /**< bytes of text that follow, at most FC_NET_MOST_TEXT */
    uint64_t size;      /**< of the bytes that follow, of a file, or of what was read */
    uint64_t identity;  /**< of FC_NET_DONE: differs between versions of an object */
} fc_net_answer;

/** In a name, in place of the query of a URL, which may be a secret. */
#define FC_NET_HIDDEN "?\xe2\x80\xa6"

/** Writes the name for a URL with a query, which is the number-th with the same text before it.
 * @return false if it is too long */
static inline bool fc_net_hidden_name(const char *url, uint64_t number, char out[FC_NET_MOST_NAME + 1]) {
    char digits[24] = "";
    if (number > 1) {
        snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    }
    return snprintf(out, FC_NET_MOST_NAME + 1, "%.*s" FC_NET_HIDDEN "%s", (int)strcspn(url, "?"), url, digits) <=
           FC_NET_MOST_NAME;
}
