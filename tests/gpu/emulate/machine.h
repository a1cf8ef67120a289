/*
 * What runtime.c and memory.c share.
 */
#pragma once

#include "emulate.h"

enum { MOST_GPUS = 16 };

/** Returns the current GPU of this thread, and that of the running work. */
int emulated_gpu(void);
int emulated_running_gpu(void);

/** Remembers the error for cudaGetLastError. @return it. */
cudaError_t emulated_error(cudaError_t error);

/** Waits for the stream. */
void emulated_synchronize(cudaStream_t stream);
/** Wait for all work on the current GPU, and on any (the machine is locked). If nothing has happened for ten seconds,
 * the second ends the program with the message. */
void emulated_wait_for_gpu(void);
void emulated_wait_for_work(int gpu, const char *message);

void emulated_start_memory(void);

/** Every call that can fail starts with this. */
#define EMULATED_CALL(name, error)                                                                                     \
    do {                                                                                                               \
        if (emulated_fails(name)) {                                                                                    \
            return emulated_error(error);                                                                              \
        }                                                                                                              \
    } while (0)
