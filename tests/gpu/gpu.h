/*
 * What the tests of GPUs share: the first GPU, or the end of the program as skipped, with the reason.
 */
#ifndef TESTS_GPU_H
#define TESTS_GPU_H

#include "fsdpckpt/comm.h"

#include <stdio.h>
#include <stdlib.h>

enum { SKIPPED = 77 };

/** GPU number `index`. Without GPUs at all, or without the module, the program ends with SKIPPED. */
static inline fc_device *gpu_open(int index) {
    fc_error err = {FC_OK, ""};
    fc_device *device = NULL;
    fc_code rc = fc_device_cuda(index, &device, &err);
    if (rc == FC_EUNSUPPORTED) {
        printf("skipped: %s\n", err.message);
        exit(SKIPPED);
    }
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    return device;
}

/** Ends the program when something did not work. */
static inline void must(fc_code rc, const fc_error *err, const char *what) {
    if (rc != FC_OK) {
        fprintf(stderr, "%s: %s\n", what, err->message);
        exit(1);
    }
}

#endif
