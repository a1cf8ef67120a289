/*
 * DeepSpeed checkpoints, read. What deepspeed's zero_to_fp32.py computes, and the optimizer's state, as a manifest: the
 * fp32 masters of a parameter and its Adam state lie in flat partitions, a file a rank, that know no rows.
 *
 * files.c finds the files; model.c reads what the model's file says (shapes, buffers, frozen and shared parameters);
 * optimizer.c the partitions of the ranks, or universal.c what ds_to_universal.py made of them; others.c everything
 * else that the optimizer's files hold; build.c makes tensors of it; devices.c notices
 * files that were renamed; deepspeed.c is the format's table.
 */
#ifndef FSDPCKPT_FORMATS_DEEPSPEED_DEEPSPEED_H
#define FSDPCKPT_FORMATS_DEEPSPEED_DEEPSPEED_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "torch/torch_file.h"

/** A file of a universal checkpoint: one value of one parameter. */
typedef struct ds_value {
    const char *param, *key; /**< key "fp32": the master itself */
    uint32_t file;
} ds_value;

/** The files of one checkpoint. Indexes are those of fc_checkpoint.files. */
typedef struct ds_files {
    const char *directory; /**< that of the step */
    fc_file *files;
    size_t nfiles;
    uint32_t *models; /**< one (ZeRO up to 2), or one a rank (ZeRO-3) */
    size_t nmodels;
    uint32_t *optims; /**< one a rank; none without ZeRO */
    size_t noptims;
    bool universal;         /**< made by ds_to_universal.py; then there are no optims but what follows */
    size_t model_parallel;  /**< ranks that had a file of the model, of which the first's are read */
    uint32_t optimizer;     /**< optimizer_state.pt */
    const ds_value *values; /**< sorted by parameter and key */
    size_t nvalues;
} ds_files;

/** Whether the directory holds a DeepSpeed checkpoint, or steps of one. */
bool fc_ds_probe(const fc_probe *probe);

/** Whether it is the directory of a universal checkpoint. */
bool fc_ds_is_universal(const char *directory);
/** Adds the files that a universal checkpoint has besides those of the model. */
fc_code fc_ds_find_universal(fc_arena *arena, ds_files *files, fc_error *err);
/** A file called `name` in the directory of the step. @return false: out of memory. */
bool fc_ds_keep_file(fc_arena *arena, const char *directory, const char *name, fc_file *out);

fc_code fc_ds_find_files(fc_arena *arena, const char *path, ds_files *out, fc_error *err);

/** A tensor of the checkpoint while its pieces are gathered. */
typedef struct ds_tensor {
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
} ds_tensor;

/** A parameter that was trained: where it lies in its group's partitions. */
typedef struct ds_param {
    const char *name;
    int ndim;
    const int64_t *shape;
    int64_t numel;
    size_t group;
    int64_t start; /**< ZeRO up to 2: its first element in the group, all ranks' partitions behind each other.
                        ZeRO-3: in the partitions of one rank, all groups' behind each other */
    size_t first;  /**< its tensors, one for each of ds_building.keys of its group */
} ds_param;

/** A kind of value that an optimizer has for each element, or for each parameter. "" is the master itself. */
typedef struct ds_key {
    size_t group;
    const char *name;
    bool flat;    /**< a number an element: cut like the masters */
    int64_t next; /**< ZeRO up to 2: elements that the ranks before had */
} ds_key;

typedef struct ds_building {
    fc_checkpoint *checkpoint;
    ds_files files;
    int stage;
    size_t ranks;
    ds_param *params; /* in the arena, in the order of the groups */
    size_t nparams;
    size_t *group_params; /* ngroups + 1: where each group's params start */
    size_t ngroups;
    ds_key *keys; /* malloc'ed; of all groups, ascending */
    size_t nkeys, keys_capacity;
    ds_tensor *tensors; /* malloc'ed */
    size_t ntensors, tensors_capacity;
    int64_t *devices;      /* malloc'ed; ZeRO-3: the number of the device that each rank was on, -1: not known */
    fc_progress *progress; /* may be NULL */
    const char *absent;    /* a name of the module without data, or NULL */
    size_t nabsent;
    fc_error *err;
} ds_building;

static inline fc_code fc_ds_no_memory(const ds_building *b) {
    return fc_fail(b->err, FC_ENOMEM, "%s: out of memory", b->checkpoint->path);
}

/** The value of a dict, or FC_PV_ABSENT where `v` is none or has no such key. */
fc_pv fc_ds_get(const fc_pickle *p, fc_pv v, const char *key);
/** Likewise for an integer key. */
fc_pv fc_ds_get_number(const fc_pickle *p, fc_pv v, int64_t key);
/** The items of a list or tuple; count 0 for anything else. */
const fc_pv *fc_ds_list(const fc_pickle *p, fc_pv v, size_t *count);
/** An integer, also one that is wrapped in an enumeration. */
bool fc_ds_int(const fc_pickle *p, fc_pv v, int64_t *out);

/** A new tensor called `name` with the path of `count` elements. NULL: out of memory. */
ds_tensor *fc_ds_add_tensor(ds_building *b, const char *name, const fc_path_element *elements, size_t count);
/** A new tensor or object from the value `v`, whole. */
fc_code fc_ds_add_value(ds_building *b, const torch_file *f, const fc_path_element *elements, size_t count, fc_pv v);
/** Likewise all that is in `v`, a dict or list taken apart. */
fc_code fc_ds_add_values(ds_building *b, const torch_file *f, const fc_path_element *elements, size_t count, fc_pv v);
/** Elements [first, first + count) of the parameter, which are those of the flat tensor `piece` from `at` on. */
fc_code fc_ds_add_run(const ds_building *b, ds_tensor *t, const torch_extent *piece, int64_t at, int64_t first,
                      int64_t count, uint32_t rank);
/** Decodes a flat tensor. */
fc_code fc_ds_flat(const ds_building *b, const torch_file *f, const char *what, fc_pv v, fc_torch_tensor *t,
                   torch_extent **piece);

/** How many ranks there are and how they cut: from the optimizer's first file. */
fc_code fc_ds_read_stage(ds_building *b);
/** The model's files: shapes of parameters, buffers, what was not trained; then calls the two below. */
fc_code fc_ds_read_model(ds_building *b);
/** The optimizer's files of all ranks. */
fc_code fc_ds_read_optimizer(ds_building *b);
/** Hyperparameters of the groups, and the rest of `state_dict` and of the file that holds it. */
fc_code fc_ds_add_others(ds_building *b, const torch_file *f, fc_pv state_dict, fc_pv groups);
/** The stage of a file's state dict; BF16_Optimizer, which cuts like ZeRO-1, does not name one. */
fc_code fc_ds_stage_of(const ds_building *b, const torch_file *f, fc_pv state_dict, int *stage);

/** Universal: the stage, and how many ranks there were. */
fc_code fc_ds_read_universal_stage(ds_building *b);
/** Universal: masters and state of the parameter `name`. @param param NULL: its file alone says its shape. */
fc_code fc_ds_add_universal(ds_building *b, const char *name, const ds_param *param);
/** Universal: whether there are files of the parameter `name`. */
bool fc_ds_has_universal(const ds_files *files, const char *name);
/** Universal: what all parameters share. */
fc_code fc_ds_read_universal_state(ds_building *b);

/** The number in "cuda:3", or -1. */
int64_t fc_ds_device(const torch_file *f, const fc_torch_tensor *t);
/** The first rank whose device shows that files of ranks were renamed. @return false: there is none, or it is not
 * known.
 */
bool fc_ds_devices_disorder(const int64_t *devices, size_t ranks, size_t *rank);

#endif
