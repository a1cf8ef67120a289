/*
 * One request to the fetcher, and its answer. remote.c asks for what is read, upload.c for what is written.
 */
#pragma once

#include "net/remote.h"
#include "net/start.h"
#include "net/wire.h"

typedef struct fc_exchange {
    fc_fetcher fetcher;
    const char *name;       /**< for messages */
    int answer;             /**< our end of the socket for the answer */
    bool stops;             /**< a cancelled job does not wait for the answer: see fc_progress_watch. The caller sets it
                                 for what changes an object whose state need not be known */
    int patience;           /**< milliseconds that a cancelled job waits in any case; what is left of them */
    fc_entry_names *listed; /**< receives FC_NET_NAME */
    unsigned char *buffer;  /**< receives FC_NET_DATA */
    size_t size;            /**< bytes that are still expected there */
    fc_net_answer last;     /**< FC_NET_DONE, FC_NET_MISSING or FC_NET_EXISTS */
} fc_exchange;

/** Returns a request with a name. */
fc_net_request fc_exchange_request(fc_net_request_kind kind, const char *name);

/** Sends a request on the socket `to`, with the descriptor `extra` unless that is -1, and takes the answers. */
fc_code fc_exchange_ask(fc_exchange *x, int to, const fc_net_request *request, int extra, fc_error *err);

/** Sends a request that has no answer, if the fetcher is there. */
void fc_exchange_tell(int to, const fc_net_request *request);

/** Fails because the fetcher, which is not trusted more than the servers, sent what it was not asked for. */
fc_code fc_exchange_fail_odd(const fc_exchange *x, fc_error *err);
