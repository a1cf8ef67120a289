/*
 * Opens what Python names: a checkpoint on disk or values in memory, with the options of fsdpckpt.open.
 */
#pragma once

#include "native.h"

#include "fsdpckpt/memory.h"
#include "fsdpckpt/select.h"

/** How to open. Text belongs to the caller, except in `selection` and `delta`, where it is in the arena. */
typedef struct native_open_request {
    const char *path; /**< of values in memory: what messages call them */
    const char *schema, *tp_plan, *recipe, *config;
    int headers_only, follow_external, reverse, model_only;
    const char *const *delta; /**< NULL: none */
    long long up_to;
    fc_memory_tensor *rows; /**< values in memory; NULL: the checkpoint is on disk */
    size_t nrows;
    fc_selection selection;
} native_open_request;

/** An open checkpoint and the values that are selected of it. */
typedef struct native_opened {
    fc_checkpoint *checkpoint; /**< NULL: closed */
    fc_arena *arena;           /**< owns the selection; made by the caller */
    fc_target target;          /**< the selected values */
    fc_selection selection;    /**< what selects them from the checkpoint */
} native_opened;

/** Opens the checkpoint and selects values. On failure, the caller frees what `out` has. */
fc_code native_open(const native_open_request *r, native_opened *out, fc_error *err);

/** Returns what is open in `object`, if it is of the type Checkpoint of `module`. @return NULL with an exception set.
 */
const native_opened *native_opened_of(PyObject *module, PyObject *object);

/** Whether something that is named may be on a server. */
bool native_open_is_remote(const native_open_request *r);
