/*
 * What training adds to the backend `local`.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

/** fc_comm.on_device of ranks that are threads. */
extern const fc_device_collectives fc_local_on_device;
