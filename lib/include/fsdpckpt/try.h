/*
 * Error propagation: FC_TRY where a function has nothing to clean up (FC_TRY_CONTEXT where the error needs context,
 * FC_NEED after an allocation), FC_TRY_GOTO where it has. A function that cleans up ends in the label `out`, releases
 * there, and returns rc.
 */
#pragma once

#include "fsdpckpt/error.h"

/** Evaluates `call` once and returns its code from the enclosing function unless that is FC_OK. */
#define FC_TRY(call)                                                                                                   \
    do {                                                                                                               \
        const fc_code fc_try_code = (call);                                                                            \
        if (fc_try_code != FC_OK) {                                                                                    \
            return fc_try_code;                                                                                        \
        }                                                                                                              \
    } while (0)

/** FC_TRY for a call whose error needs context: the arguments after `err` are those of fc_context's printf. */
#define FC_TRY_CONTEXT(call, err, ...)                                                                                 \
    do {                                                                                                               \
        const fc_code fc_try_code = (call);                                                                            \
        if (fc_try_code != FC_OK) {                                                                                    \
            return fc_context(err, fc_try_code, __VA_ARGS__);                                                          \
        }                                                                                                              \
    } while (0)

/** Returns fc_no_memory(err, path) from the enclosing function unless `memory` is there: a pointer, or several with &&.
 */
#define FC_NEED(memory, err, path)                                                                                     \
    do {                                                                                                               \
        if (!(memory)) {                                                                                               \
            return fc_no_memory(err, path);                                                                            \
        }                                                                                                              \
    } while (0)

/** Evaluates `call` once, stores its code in `rc`, and jumps to `label` unless that is FC_OK. */
#define FC_TRY_GOTO(call, rc, label)                                                                                   \
    do {                                                                                                               \
        (rc) = (call);                                                                                                 \
        if ((rc) != FC_OK) {                                                                                           \
            goto label;                                                                                                \
        }                                                                                                              \
    } while (0)
