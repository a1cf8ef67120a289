/*
 * The struct behind fc_fsdp_state_dict, for the files that make and write state dicts.
 */
#pragma once

#include "train/state_list.h"

/** Page-locked memory for copies of arrays. To allocate or release it takes long, and waits for the GPU. */
typedef struct fc_staging {
    fc_fsdp *fsdp;
    void **memory; /* NULL: none yet */
    size_t *bytes;
    fc_device **devices; /* each releases its memory */
    size_t count;
} fc_staging;

void fc_staging_free(fc_staging *staging);

struct fc_fsdp_state_dict {
    fc_fsdp *fsdp;
    fc_state_dict_type type;
    fc_state_list list;
    void **memory; /* the arrays of the list on the host: those of the staging memory, or owned */
    bool borrows;  /* the arrays are in host memory, and `memory` points to them */
    fc_staging staging;
    fc_checkpoint *checkpoint;
};

/**
 * fc_fsdp_state_dict_new.
 * @param may_borrow whether arrays in host memory may be used where they are.
 * @param spare      memory of an earlier state dict, which this one takes; may be NULL.
 */
fc_code fc_state_dict_make(const fc_fsdp_state *state, fc_state_dict_type type, bool may_borrow, fc_staging *spare,
                           fc_comm *ranks, fc_fsdp_state_dict **out, fc_error *err);

/** Waits for the copies in the thread of the instance. If the ranks have failed, it ends them. */
void fc_state_dict_settle(fc_fsdp_state_dict *dict);
