/*
 * All of the library for conversions. A program that needs only a part may include that header alone. Programs that
 * train include more: fsdpckpt/sharded_tensor/ (ShardMetadata, sharding specs, DTensors), fsdpckpt/gather/ (devices,
 * arrays, gathers of FSDP and TP shards), and fsdpckpt/train/, the training step, a library of its own.
 */
#ifndef FSDPCKPT_FSDPCKPT_H
#define FSDPCKPT_FSDPCKPT_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/atomic.h"
#include "fsdpckpt/average.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/check.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/comm.h"
#include "fsdpckpt/compare.h"
#include "fsdpckpt/decls.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/export.h"
#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/gather_files.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/mesh.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/progress.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/recipe.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/sharding.h"
#include "fsdpckpt/shards.h"
#include "fsdpckpt/stats.h"
#include "fsdpckpt/target.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"
#include "fsdpckpt/verify.h"
#include "fsdpckpt/view.h"
#include "fsdpckpt/weights.h"
#include "fsdpckpt/wrap_policy.h"

#endif
