/*
 * Runs a job of the library in a thread, while the calling thread answers Ctrl-C and reports progress.
 */
#pragma once

#include "native.h"

#include "fsdpckpt/progress.h"

/** A job: runs without the interpreter lock, counts in `progress`, and ends early when that is cancelled. */
typedef fc_code native_work(void *context, fc_progress *progress, fc_error *err);

/**
 * Runs `work` to its end. A signal handler that raises cancels it.
 * @param update called with (phase, unit, done, total) ten times a second; what it raises cancels the job. None:
 * nothing
 * @return false with an exception set.
 */
bool native_run(native_work *work, void *context, PyObject *update);
