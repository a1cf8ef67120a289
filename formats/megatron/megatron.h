/*
 * Reads Megatron's older `torch` format, which has one torch.save file per model-parallel rank.
 *
 * grid.c finds the files of the ranks, and args.c checks them against the arguments of the run. rules.c knows how
 * Megatron shards a parameter and numbers its layers. ranks.c reads each file (values.c) and gives its values the names
 * of the whole model (names.c, experts.c). gates.c finds the parameters with a gate. optimizer.c reads the state of the
 * optimizer, distributed.c that of the distributed optimizer. join.c joins the values of all ranks. megatron.c holds
 * the format table.
 */
#ifndef FSDPCKPT_FORMATS_MEGATRON_MEGATRON_H
#define FSDPCKPT_FORMATS_MEGATRON_MEGATRON_H

#include "fsdpckpt/format.h"
#include "torch/file/file.h"

/** Values of the member `args` of a file, and its iteration. A value that is not recorded is -1. */
typedef struct fc_mg_args {
    int64_t tp, stages, context, ep, expert_tp; /**< numbers of ranks */
    int64_t experts, layers, gated, untied;
    int64_t rank; /**< Global rank that wrote the file. */
    int64_t iteration;
} fc_mg_args;

/** The coordinates of a rank: its tensor-parallel rank, pipeline stage and expert-parallel rank. */
typedef struct fc_mg_place {
    int64_t tensor, stage, expert;
} fc_mg_place;

/** The directories of an iteration. Files 0 to count - 1 of checkpoint->files are those of the ranks. The files of the
 * distributed optimizer, if there are any, follow in the same order. */
typedef struct fc_mg_grid {
    size_t count;
    int nnumbers;           /**< How many numbers each name has. */
    const char **names;     /**< Names of the directories, e.g. "mp_rank_01_000". */
    fc_mg_place *places;    /**< Sorted by stage, expert, tensor. */
    int64_t tp, stages, ep; /**< Numbers of tensor-parallel ranks, stages and expert-parallel ranks. */
    int64_t expert_tp;      /**< Number of ranks that experts are sharded over; it divides tp. */
    size_t optimizers;      /**< Directories with a distrib_optim.pt; these are used only if all have one. */
} fc_mg_grid;

/** How many directories of ranks there are. */
bool fc_mg_has_ranks(const char *directory, fc_error *err);

/** Finds the files of all ranks; sets checkpoint->files. */
fc_code fc_mg_find_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_mg_grid *out, fc_error *err);

/** Assigns the numbers in the directory names to dimensions. Fails unless they fit `args` and no directory is missing.
 */
fc_code fc_mg_arrange(const fc_checkpoint *checkpoint, const fc_mg_args *args, fc_mg_grid *grid, fc_error *err);

/** How tensor parallelism shards a parameter. */
typedef enum fc_mg_rule {
    MG_UNKNOWN, /**< The name does not determine it. The parameter is readable only if all ranks have equal values. */
    MG_COPY,    /**< Every rank has the whole parameter. */
    MG_SHARD,   /**< It is sharded along `dim`. */
    MG_GATED    /**< Like MG_SHARD, but each rank has its shard of the gate followed by its shard of the rest. */
} fc_mg_rule;

typedef struct fc_mg_sharding {
    fc_mg_rule rule;
    int dim;
} fc_mg_sharding;

/** Returns the rule for a parameter by the end of its name. Never returns MG_GATED. */
fc_mg_sharding fc_mg_rule_of(const char *name);

/** Returns whether the value is an _extra_state of Transformer Engine, which differs between ranks. */
bool fc_mg_is_extra_state(const char *name);

/** Finds "linear_fc1" or an equivalent in the name of an MLP's first matrix; NULL for other names. `*second` is what
 * the name of the second matrix has there instead. */
const char *fc_mg_first_of_mlp(const char *name, const char **first, const char **second);

/** Splits "decoder.layers.3.mlp…" into the length of "decoder.layers." and the number. @return false if there is none.
 */
bool fc_mg_layer(const char *key, size_t *prefix, int64_t *number, size_t *end);

/** Which experts a parameter belongs to, by its name. */
typedef enum fc_mg_expert {
    MG_NO_EXPERT,
    MG_ONE_EXPERT,  /**< One expert, whose number is in the name. */
    MG_ALL_EXPERTS, /**< All experts of the rank, concatenated in one matrix (GroupedMLP). */
    MG_OTHER_EXPERT /**< Experts, in an unknown form. */
} fc_mg_expert;

/** Finds the expert's number in a name, or in an element of a path: the characters from `*digits` to `*end`. */
fc_mg_expert fc_mg_expert_of(const char *name, size_t *digits, size_t *end, int64_t *number);

/** A value of one rank's file, under its name in the whole model. */
typedef struct fc_mg_value {
    const char *name;
    fc_path path;
    uint32_t file;
    bool shared;                /**< A parameter or its state: the values of all ranks form one tensor. */
    const char *refusal;        /**< Why the value is unreadable; NULL if it is readable. */
    const torch_object *object; /**< The object; NULL for a tensor. */
    const torch_extent *extent; /**< The extent of the tensor; NULL for an object. */
    fc_dtype dtype;
    int ndim;
    const int64_t *sizes;
    fc_mg_sharding sharding;
    size_t chunk;    /**< The chunk of the model (virtual pipeline stage) that it belongs to. */
    bool expert;     /**< It is sharded over grid.expert_tp ranks, and each expert-parallel rank has other experts. */
    int64_t grouped; /**< MG_ALL_EXPERTS: number of experts in the matrix; else 0. */
} fc_mg_value;

/** The number of layers with one prefix, e.g. "decoder.layers.", in each chunk of the model. */
typedef struct fc_mg_layers {
    const char *prefix;
    int64_t *counts; /**< One per chunk, in the order of the layers. */
} fc_mg_layers;

/** A checkpoint while it is opened. */
typedef struct fc_mg_reader {
    fc_checkpoint *checkpoint;
    fc_mg_grid grid;
    fc_mg_args args;
    size_t chunks; /**< Chunks of the model per stage; 1 without virtual pipeline parallelism. */
    fc_mg_layers *layers;
    size_t nlayers, layers_capacity;
    int64_t local_experts; /**< Experts per layer that each rank has; 0 until known. */
    uint32_t experts_file; /**< The file that determined local_experts. */
    fc_mg_value *values;   /**< malloc'ed */
    size_t nvalues, capacity;
    torch_file f;              /**< The file that is being read. */
    uint32_t rank;             /**< Its number. */
    const char *unnamed;       /**< Why optimizer states keep their numbers as names; NULL if they get names. */
    uint32_t unnamed_file;     /**< The file for which that is so. */
    const char *undistributed; /**< Why the distributed optimizer's states are left out; NULL if they are read. */
    const char *differing;     /**< The first tensor whose copies differ between ranks, or NULL. */
    size_t ndiffering;         /**< Number of such tensors. */
    fc_progress *progress;     /**< may be NULL */
    fc_error *err;
} fc_mg_reader;

static inline fc_code fc_mg_no_memory(const fc_mg_reader *r) {
    return fc_no_memory(r->err, r->checkpoint->path);
}

/** Returns the path of a file, for messages. */
static inline const char *fc_mg_file(const fc_mg_reader *r, uint32_t file) {
    return r->checkpoint->files[file].path;
}

/** Lists the leaves of `v`, whose path is `prefix`. @param leaves the caller frees leaves->items. */
fc_code fc_mg_flatten(fc_mg_reader *r, const fc_path *prefix, fc_pv v, torch_leaves *leaves);

/** Counts the layer of a leaf among those of the chunk. */
fc_code fc_mg_count_layer(fc_mg_reader *r, const torch_leaf *leaf, size_t chunk);
/** Counts the experts of the current rank; `leaves` are those of a chunk. Fails if other ranks have another number. */
fc_code fc_mg_count_experts(fc_mg_reader *r, const torch_leaves *leaves);
/** Gives a leaf of a chunk its name in the whole model. */
fc_code fc_mg_rename(fc_mg_reader *r, torch_leaf *leaf, size_t chunk);

/** Sets MG_GATED for those of values[first] and later, the values of one file, that hold gates. */
fc_code fc_mg_find_gates(fc_mg_reader *r, size_t first);
/** Gives matrices of several experts a first dimension for the experts. */
fc_code fc_mg_ungroup(fc_mg_reader *r);

/** Adds the leaves of `v`, whose path is `prefix`. */
fc_code fc_mg_add(fc_mg_reader *r, const fc_path *prefix, fc_pv v);
/** Adds `v` as one value. @return NULL, with a message, on failure. */
fc_mg_value *fc_mg_add_leaf(fc_mg_reader *r, const char *name, const fc_path *path, fc_pv v);

/** Adds the optimizer of the current file. Its parameters are values[first] to values[end - 1]. */
fc_code fc_mg_read_optimizer(fc_mg_reader *r, fc_pv optimizer, size_t first, size_t end);

/** Adds the distributed optimizer's states of the parameters values[first] to values[end - 1] of the current rank. */
fc_code fc_mg_read_distributed(fc_mg_reader *r, size_t first, size_t end);

/** Returns whether the parameter belongs to optimizer `member` of a file with `members` optimizers. */
bool fc_mg_belongs(const fc_mg_reader *r, const fc_mg_value *parameter, size_t member, size_t members);

/** Returns whether a value of the model is a parameter and not a buffer. */
bool fc_mg_is_parameter(const fc_mg_value *v);
/** Sets name and path of "optim.state.<parameter>.<key>". @return false when out of memory. */
bool fc_mg_name_state(const fc_mg_reader *r, const fc_mg_value *parameter, const char *key, const char **name,
                      fc_path *path);

/** Builds the tensors of the checkpoint from the values of all files. */
fc_code fc_mg_join(fc_mg_reader *r);

/** Opens a checkpoint in the older format. */
fc_code fc_mg_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Reads the namespace `args` of a file. Without it, all values are -1. */
void fc_mg_read_args(const torch_file *f, fc_mg_args *out);
/** Fails if the current file's args show that it belongs to another checkpoint than the first file. */
fc_code fc_mg_check_alike(const fc_mg_reader *r, const fc_mg_args *args);
/** Fails unless the numbers of ranks are those in `args`. */
fc_code fc_mg_check_args(const fc_checkpoint *checkpoint, const fc_mg_args *args, const fc_mg_grid *grid,
                         fc_error *err);
/** Fails if a file i cannot have been written by global rank `wrote[i]`, which its args record. */
fc_code fc_mg_check_writers(const fc_mg_reader *r, const int64_t *wrote);

#endif
