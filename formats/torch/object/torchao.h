/*
 * Tensors of torchao, as torch.save pickles them: a class, and a dict with the tensors and settings that it has. Those
 * whose values are codes times scales are listed as unreadable values, because only their class can rebuild them, and
 * besides it their tensors, under the names that torchao gives them in safetensors.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "torch/pickle/pickle.h"

enum { FC_TORCHAO_MOST = 8 };

typedef struct fc_torchao {
    const char *keys[FC_TORCHAO_MOST]; /**< such as "qdata" and "scale"; in the pickle */
    fc_pv parts[FC_TORCHAO_MOST];      /**< dense tensors */
    size_t count;
} fc_torchao;

/** Finds out whether `v` is such a tensor, and its parts. */
bool fc_torchao_find(const fc_pickle *p, fc_pv v, fc_torchao *out);

/** @return the name of a part, such as "a._weight_qdata" for "a.weight"; NULL when out of memory. */
const char *fc_torchao_key(const char *name, const char *part, fc_arena *arena);
