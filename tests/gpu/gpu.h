/*
 * Helpers of the GPU tests. A test without a GPU ends as skipped, with the reason.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

#include <stdio.h>
#include <stdlib.h>

enum { SKIPPED = 77 };

/** Opens GPU number `index`. Without that GPU or the module, the program ends with SKIPPED. */
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

/** Returns how many GPUs there are, at most `most`. Without one, the program ends with SKIPPED. */
static inline int gpu_count(int most) {
    int count = 1;
    fc_device *device = gpu_open(0);
    device->destroy(device);
    while (count < most && fc_device_cuda(count, &device, NULL) == FC_OK) {
        device->destroy(device);
        count++;
    }
    return count;
}

/** Ends the program with status 1 if `rc` is an error. */
static inline void must(fc_code rc, const fc_error *err, const char *what) {
    if (rc != FC_OK) {
        fprintf(stderr, "%s: %s\n", what, err->message);
        exit(1);
    }
}

/** Ends the program with status 1 unless `is_true`. */
static inline void must_be(bool is_true, const char *what) {
    if (!is_true) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}
