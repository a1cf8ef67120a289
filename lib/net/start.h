/*
 * Starts the fetcher of this process.
 */
#pragma once

#include "net/module.h"

#include <stdbool.h>

typedef struct fc_fetcher {
    int requests; /**< socket for requests with names */
    const fc_net_module *module;
} fc_fetcher;

/** Returns the fetcher of this process, which is started at the first call. */
fc_code fc_fetcher_get(fc_fetcher *out, fc_error *err);

/**
 * In the fetcher: forbids what it does not need. It can use its sockets and make connections, but open no file and
 * start no process. @return false if the filter cannot be made
 */
bool fc_fetcher_confine(void);
