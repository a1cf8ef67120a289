/*
 * A device that queues the work of its streams until synchronize. It then runs the work in an order that a seed chooses
 * among all that events allow. A race that a GPU shows rarely is reproducible here.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

/** The options of the device. */
typedef struct deferred_options {
    unsigned seed;     /**< seed of the order */
    bool ignore_waits; /**< ignores events, as a program without them would */
    bool remote;       /**< uses addresses that the processor cannot access, as on a GPU; dereferencing them crashes */
} deferred_options;

/**
 * Collectives run in the order in which they were enqueued, as with NCCL, so that those of all ranks match.
 */
fc_code deferred_device_new(const deferred_options *options, fc_device **out, fc_error *err);

/** Makes a communicator that defers the collectives of `inner`, which is borrowed, to their streams. */
fc_code deferred_comm_new(fc_device *device, fc_comm *inner, fc_comm **out, fc_error *err);
