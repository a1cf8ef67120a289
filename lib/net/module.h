/*
 * The interface to the module `net`, which links libcurl.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** The version of this interface and of wire.h. */
enum { FC_NET_ABI = 7 };

#define FC_NET_SYMBOL fc_net_module_table
#define FC_NET_SYMBOL_NAME "fc_net_module_table"

/** What the fetcher gets when it starts. Its strings are valid as long as the fetcher. */
typedef struct fc_net_setup {
    const char *certificates; /**< file with the certificates that are trusted; NULL: libcurl's own */
    unsigned char *shared;    /**< memory that is shared with the caller; NULL: none */
    size_t shared_size;
    int pace;                                /**< percent of the usual waiting times, for tests */
    char key[256], secret[256], token[4096]; /**< of S3; "" if there are none */
    char region[64];
    bool requester_pays;                    /**< the user pays for requests to buckets of S3 */
    char endpoint[512];                     /**< of S3: "https://host"; "" for Amazon's */
    char hub[512];                          /**< of the Hugging Face hub */
    char hub_token[256];                    /**< "" if there is none */
    char proxy[1024];                       /**< URL of the proxy for https://, with its password; "" for none */
    char no_proxy[4096];                    /**< names of servers that are asked without it */
    char wrong_proxy[128];                  /**< why the proxy cannot be used; "" if it can */
    bool proxy_unsupported;                 /**< the reason is that it is of another kind */
    char wrong_bucket[128], wrong_hub[128]; /**< why their settings cannot be used; "" if they can */
} fc_net_setup;

typedef struct fc_net_module {
    int abi;             /**< FC_NET_ABI */
    const char *version; /**< FSDPCKPT_VERSION */
    /** In the caller's process: finds addresses for "host:port". @param out receives what FC_NET_HOST sends. */
    void (*find_addresses)(const char *where, char *out, size_t size);
    /** In the fetcher, before it is confined: starts libraries, reads certificates. @return its state; NULL: failed */
    void *(*prepare)(const fc_net_setup *setup, int requests);
    /** In the confined fetcher: answers requests until the other end is closed. @return exit status */
    int (*serve)(void *state);
} fc_net_module;
