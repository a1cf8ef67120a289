/*
 * A device that does nothing until it must: what streams are given waits in queues, and synchronize runs it in an order
 * that a number chooses among all that events allow. A race that a GPU would have once in a while is certain here.
 */
#ifndef TESTS_DEFERRED_DEVICE_H
#define TESTS_DEFERRED_DEVICE_H

#include "fsdpckpt/comm.h"

/** What the device is like. */
typedef struct deferred_options {
    unsigned seed;     /**< of the order */
    bool ignore_waits; /**< events mean nothing: what a program without them would do */
    bool remote;       /**< its memory is not the processor's: who follows a pointer of it crashes, as with a GPU */
} deferred_options;

/**
 * Collectives are run in the order in which they were given, as NCCL's are, so that those of all ranks meet.
 */
fc_code deferred_device_new(const deferred_options *options, fc_device **out, fc_error *err);

/** A communicator whose collectives are done in the order of their streams, by `inner`, which is borrowed. */
fc_code deferred_comm_new(fc_device *device, fc_comm *inner, fc_comm **out, fc_error *err);

#endif
