/*
 * Runs a function on ranks that are threads, and checks on them, for unit tests. Include it after cmocka.h.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Runs `body` as the only rank of the local backend. */
typedef struct body {
    void (*run)(fc_comm *comm);
} body;

static fc_code call(fc_comm *comm, void *context, fc_error *err) {
    (void)err;
    ((body *)context)->run(comm);
    return FC_OK;
}

static void on_ranks(int size, void (*run)(fc_comm *comm)) {
    fc_error err = {FC_OK, ""};
    body b = {run};
    fc_code rc = fc_device_run_local(size, call, &b, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
}

/* An assert of cmocka works only on the thread of the test. On the threads of ranks, a failure ends the program. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)
#define MUST_FAIL(rc, wanted, err, text)                                                                               \
    do {                                                                                                               \
        MUST((rc) == (wanted));                                                                                        \
        if (!strstr((err).message, text)) {                                                                            \
            fprintf(stderr, "%s:%d: '%s' is not in '%s'\n", __FILE__, __LINE__, text, (err).message);                  \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)
