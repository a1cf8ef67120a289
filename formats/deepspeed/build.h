/*
 * A DeepSpeed checkpoint while it is opened, and its tensors (build.c).
 */
#pragma once

#include "deepspeed/files.h"

/** A tensor of the checkpoint while its chunks are collected. */
typedef struct fc_ds_tensor {
    const char *name;
    fc_path path;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t numel;
    fc_chunk *chunks; /* malloc'ed */
    size_t nchunks, capacity;
    const torch_object *object; /* NULL: a tensor */
    uint32_t object_file;
} fc_ds_tensor;

/** A trained parameter and its position in the partitions of its group. */
typedef struct fc_ds_param {
    const char *name;
    int ndim;
    const int64_t *shape;
    int64_t numel;
    size_t group;
    int64_t start; /**< Up to ZeRO-2: its first element in the concatenated partitions of all ranks. ZeRO-3: its first
                        element in the concatenated partitions of one rank. */
    size_t first;  /**< Index of its first tensor; it has one tensor per key of its group. */
} fc_ds_param;

/** A kind of value that the optimizer has per element or per parameter. The key of the master is "". */
typedef struct fc_ds_key {
    size_t group;
    const char *name;
    bool flat;    /**< There is one number per element, partitioned like the masters. */
    int64_t next; /**< Up to ZeRO-2: number of elements in the partitions of the ranks read so far. */
} fc_ds_key;

/** A checkpoint while it is opened. */
typedef struct fc_ds_builder {
    fc_checkpoint *checkpoint;
    fc_ds_files files;
    int stage;
    size_t ranks;
    fc_ds_param *params; /* in the arena, in the order of the groups */
    size_t nparams;
    const fc_ds_param **by_name; /* malloc'ed; sorted by group and name */
    size_t *group_params;        /* ngroups + 1 indexes of params: where each group starts */
    size_t ngroups;
    fc_ds_key *keys; /* malloc'ed; sorted by group */
    size_t nkeys, keys_capacity;
    fc_ds_tensor *tensors; /* malloc'ed */
    size_t ntensors, tensors_capacity;
    int64_t *devices;      /* malloc'ed; ZeRO-3: the device number of each rank, -1 if unknown */
    fc_progress *progress; /* may be NULL */
    const char *absent;    /* the first name of the module that has no data, or NULL */
    size_t nabsent;        /* number of such names */
    fc_error *err;
} fc_ds_builder;

static inline fc_code fc_ds_no_memory(const fc_ds_builder *b) {
    return fc_no_memory(b->err, b->checkpoint->path);
}

/** Returns the value of `key` in the dict `v`; FC_PV_ABSENT if `v` is not a dict or lacks the key. */
fc_pv fc_ds_get(const fc_pickle *p, fc_pv v, const char *key);

/** Returns the items of a list or tuple; NULL and a count of 0 for anything else. */
const fc_pv *fc_ds_list(const fc_pickle *p, fc_pv v, size_t *count);

/** Reads an integer, which may be wrapped in an enumeration. @return false if `v` is something else. */
bool fc_ds_int(const fc_pickle *p, fc_pv v, int64_t *out);

/** Copies a key into the arena. @return NULL, with an error, if it is not plain text. */
const char *fc_ds_text(fc_ds_builder *b, const torch_file *f, fc_pv v);

/** Adds a tensor without data. @return NULL when out of memory. */
fc_ds_tensor *fc_ds_add_tensor(fc_ds_builder *b, const char *name, const fc_path_element *elements, size_t count);

/** Adds the value `v` as one tensor or object. */
fc_code fc_ds_add_value(fc_ds_builder *b, const torch_file *f, const fc_path_element *elements, size_t count, fc_pv v);

/** Adds the leaves of `v`: dicts and lists are flattened. */
fc_code fc_ds_add_values(fc_ds_builder *b, const torch_file *f, const fc_path_element *elements, size_t count, fc_pv v);

/** Adds chunks for elements [first, first + count) of `t`, stored in the flat tensor `extent` from element `at` on. */
fc_code fc_ds_add_run(const fc_ds_builder *b, fc_ds_tensor *t, const torch_extent *extent, int64_t at, int64_t first,
                      int64_t count, uint32_t rank);

/** Reads the flat tensor `v`. Fails if it is not a contiguous tensor of one dimension. `what` names it in messages. */
fc_code fc_ds_flat(const fc_ds_builder *b, const torch_file *f, const char *what, fc_pv v, fc_torch_tensor *t,
                   torch_extent **extent);

/** Returns the number of elements of the flat tensor `v`; -1 for anything else. */
int64_t fc_ds_count_flat(const torch_file *f, fc_pv v);

/** Fails if an optimizer has an absurd number of values of each parameter: the tensors would be their product. */
fc_code fc_ds_check_keys(const fc_ds_builder *b, const torch_file *f, size_t count);

/** Reads the stage from a state dict. BF16_Optimizer, which partitions like ZeRO-1, does not record one. */
fc_code fc_ds_stage_of(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, int *stage);
