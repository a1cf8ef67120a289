/*
 * Objects of other formats in a pickle. PyTorch cannot read their bytes, so write.c writes a dict of the encoding, the
 * decoded value and the bytes. This finds such a dict, so that the object becomes again what it was.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "torch/pickle/pickle.h"

typedef struct fc_torch_kept {
    const char *encoding;       /**< fc_object.encoding; NULL: the value is no such dict */
    const unsigned char *bytes; /**< of the object; in the pickle */
    size_t size;
    const char *json; /**< the object for people, if its bytes are not JSON; in the arena. Else NULL */
} fc_torch_kept;

/**
 * Finds out whether `v` is such a dict. It is not if a program changed its value: then its members are values like any
 * others, and nothing is lost.
 * @param spent receives the work in bytes of the pickle, for a limit on shared values.
 * @return FC_ENOMEM.
 */
fc_code fc_torch_find_kept(const fc_pickle *p, fc_pv v, fc_arena *arena, fc_torch_kept *out, uint64_t *spent,
                           fc_error *err);
