/*
 * Failures of single calls in jobs of several ranks on emulated GPUs (emulate/emulate.h).
 */
#pragma once

#include "emulate/emulate.h"
#include "gpu.h"

#include <string.h>
#include <unistd.h>

enum { MINUTE = 60, MOST_RANKS = 8 };

/** What the ranks run. Its context is an array of fc_code, where each rank leaves its outcome. */
typedef fc_code fail_call_work(fc_comm *bootstrap, void *outcomes, fc_error *err);

/**
 * Runs the ranks while a call on a GPU fails. The program ends unless every rank returns an error exactly if the call
 * exists, and it ends after a minute.
 * @return whether the call exists.
 */
static inline bool fail_call(fail_call_work *work, int ranks, int gpu, long call) {
    fc_code outcomes[MOST_RANKS] = {FC_OK};
    fc_error err = {FC_OK, ""};
    emulated_fail(gpu, call);
    alarm(MINUTE);
    const fc_code rc = fc_device_run_local(ranks, work, outcomes, &err);
    alarm(0);
    const char *failed = emulated_failed();
    if (failed && strcmp(failed, "cudaSetDevice") == 0 && rc == FC_OK) {
        return true; /* nothing depends on whether the GPU of the caller is chosen again */
    }
    for (int r = 0; r < ranks; r++) {
        if ((failed != NULL) != (outcomes[r] != FC_OK) || (failed && rc == FC_OK)) {
            fprintf(stderr, "call %ld on GPU %d, %s: rank %d returns %d: %s\n", call, gpu,
                    failed ? failed : "none fails", r, (int)outcomes[r], err.message);
            exit(1);
        }
    }
    return failed != NULL;
}
