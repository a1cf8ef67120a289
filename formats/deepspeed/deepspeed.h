/*
 * Reads DeepSpeed checkpoints. The manifest holds the weights that deepspeed's zero_to_fp32.py computes, and the state
 * of the optimizer. Each rank has one file with flat partitions of the fp32 masters and their Adam state.
 *
 * files.c finds the files. model.c reads the model's file: shapes, buffers, frozen and shared parameters. optimizer.c
 * reads the partitions of the ranks, and universal.c what ds_to_universal.py derived from them. others.c reads
 * everything else in the optimizer's files. build.c builds the tensors. devices.c detects files that were renamed.
 * deepspeed.c holds the format table.
 */
#ifndef FSDPCKPT_FORMATS_DEEPSPEED_DEEPSPEED_H
#define FSDPCKPT_FORMATS_DEEPSPEED_DEEPSPEED_H

#include "fsdpckpt/format.h"
#include "torch/file/file.h"

/** A file of a universal checkpoint, which holds one value of one parameter. */
typedef struct fc_ds_value {
    const char *param, *key; /**< The key of the master is "fp32". */
    uint32_t file;           /**< Index of fc_checkpoint.files. */
} fc_ds_value;

/** The files of one checkpoint, in the arena. File numbers are indexes of fc_checkpoint.files. */
typedef struct fc_ds_files {
    const char *directory; /**< The directory of the step. */
    fc_file *files;
    size_t nfiles;
    uint32_t *models; /**< The model's files: one (up to ZeRO-2), or one per rank (ZeRO-3). */
    size_t nmodels;
    uint32_t *optims; /**< The optimizer's files: one per rank; none without ZeRO or if `universal`. */
    size_t noptims;
    bool universal;            /**< ds_to_universal.py wrote the checkpoint. The members below are set only then. */
    size_t model_parallel;     /**< Number of model-parallel ranks; only the first rank's file is read. */
    uint32_t optimizer;        /**< The file optimizer_state.pt. */
    const fc_ds_value *values; /**< Sorted by parameter and key. */
    size_t nvalues;
} fc_ds_files;

/** fc_format_reader.list: the directory is a step, or has a folder for each step. */
fc_code fc_ds_list_steps(const char *directory, fc_listing *out, fc_error *err);

/** Returns whether the directory is that of a universal checkpoint. */
bool fc_ds_is_universal(const char *directory, fc_error *err);
/** Adds the files of a universal checkpoint other than those of the model. (universal.c) */
fc_code fc_ds_find_universal(fc_arena *arena, fc_ds_files *files, fc_error *err);

/** Finds the files of the checkpoint at `path`. (files.c) */
fc_code fc_ds_find_files(fc_arena *arena, const char *path, fc_ds_files *out, fc_error *err);

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

/** Reads the ZeRO stage and the number of ranks from the first file of the optimizer. (optimizer.c) */
fc_code fc_ds_read_stage(fc_ds_builder *b);
/** Reads the whole checkpoint, beginning with the model's files. (model.c) */
fc_code fc_ds_read_model(fc_ds_builder *b);
/** Adds shared parameters under their other names. All tensors must be known. @param shared `shared_params`. (shared.c)
 */
fc_code fc_ds_add_shared_names(fc_ds_builder *b, const torch_file *f, fc_pv shared);
/** Reads the optimizer's files of all ranks. (optimizer.c) */
fc_code fc_ds_read_optimizer(fc_ds_builder *b);
/** Sorts the parameters by group and name, for fc_ds_check_mapping. (mapping.c) */
fc_code fc_ds_sort_params(fc_ds_builder *b);
/**
 * ZeRO-1 and 2: fails if the file of `rank` was renamed. By its name, its partition has elements [start, start + count)
 * of the group. (mapping.c)
 */
fc_code fc_ds_check_mapping(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, size_t rank, size_t group,
                            int64_t start, int64_t count);
/** Adds the hyperparameters of the groups, and the rest of `state_dict` and of its file. (others.c) */
fc_code fc_ds_add_others(fc_ds_builder *b, const torch_file *f, fc_pv state_dict, fc_pv groups);
/** Reads the stage from a state dict. BF16_Optimizer, which partitions like ZeRO-1, does not record one. */
fc_code fc_ds_stage_of(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, int *stage);

/* Universal checkpoints (universal.c). */

/** Reads the stage and the number of ranks. */
fc_code fc_ds_read_universal_stage(fc_ds_builder *b);
/** Adds the master and the state of the parameter `name`. @param param NULL if only its file records its shape. */
fc_code fc_ds_add_universal(fc_ds_builder *b, const char *name, const fc_ds_param *param);
/** Returns whether the parameter `name` has files. */
bool fc_ds_has_universal(const fc_ds_files *files, const char *name);
/** Reads the state that all parameters share. */
fc_code fc_ds_read_universal_state(fc_ds_builder *b);

/** Returns the number in a location such as "cuda:3", or -1. */
int64_t fc_ds_device(const torch_file *f, const fc_torch_tensor *t);
/** Finds the first rank whose device suggests that files were renamed. @return false if there is none. */
bool fc_ds_devices_disorder(const int64_t *devices, size_t ranks, size_t *rank);

#endif
