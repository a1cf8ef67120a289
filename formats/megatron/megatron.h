/*
 * What the parts of the reader of Megatron's older `torch` format share: a torch.save file for each model-parallel
 * rank.
 *
 * grid.c finds the ranks' files, args.c knows of what run they are; rules.c knows how Megatron cuts a parameter and
 * numbers its layers; ranks.c reads each file (values.c) under the names that its values have in the whole model
 * (names.c, experts.c), gates.c finds the parameters with a gate; optimizer.c reads the state of the optimizer,
 * distributed.c that of the distributed one; join.c puts the ranks' values together. megatron.c is the format's table.
 */
#ifndef FSDPCKPT_FORMATS_MEGATRON_MEGATRON_H
#define FSDPCKPT_FORMATS_MEGATRON_MEGATRON_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "torch/torch_file.h"

/** What `args` says, and of what iteration the file is; -1 where it says nothing. */
typedef struct mg_args {
    int64_t tp, stages, context, ep, expert_tp; /**< numbers of ranks */
    int64_t experts, layers, gated, untied;
    int64_t rank; /**< that wrote the file, among all of the run */
    int64_t iteration;
} mg_args;

/** A rank's numbers: among the tensor-parallel ones, the stages, the expert-parallel ones. */
typedef struct mg_place {
    int64_t tensor, stage, expert;
} mg_place;

/** The directories of an iteration. Files 0 to count - 1 of checkpoint->files are those of the ranks; if there are,
 * those of the distributed optimizer follow in the same order. */
typedef struct mg_grid {
    size_t count;
    int parts;              /**< how many numbers the names have */
    const char **names;     /**< of the directories, "mp_rank_01_000" */
    mg_place *places;       /**< sorted by stage, expert, tensor */
    int64_t tp, stages, ep; /**< numbers of ranks, ep of expert-parallel ones */
    int64_t expert_tp;      /**< of ranks over which experts are cut; it divides tp */
    size_t optimizers;      /**< how many have a distrib_optim.pt; they are files only where all have */
} mg_grid;

/** How many directories of ranks there are. */
bool fc_mg_has_ranks(const char *directory, fc_error *err);

/** Finds the files of all ranks; sets checkpoint->files. */
fc_code fc_mg_find_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, mg_grid *out, fc_error *err);

/** Finds out what the numbers in the directories' names mean. Fails unless they are what `args` says and all there. */
fc_code fc_mg_arrange(const fc_checkpoint *checkpoint, const mg_args *args, mg_grid *grid, fc_error *err);

/** How tensor parallelism cuts a parameter. */
typedef enum mg_rule {
    MG_UNKNOWN, /**< the names say nothing: equal on all ranks, or it cannot be read */
    MG_COPY,    /**< every rank has all of it */
    MG_CUT,     /**< rank after rank along `dim` */
    MG_GATED    /**< likewise, but a rank has its part of the gate and behind it its part of what is gated */
} mg_rule;

typedef struct mg_cut {
    mg_rule rule;
    int dim;
} mg_cut;

/** The rule for a parameter, by the last parts of its name. Never MG_GATED. */
mg_cut fc_mg_rule(const char *name);

/** Whether it is what a layer of Transformer Engine keeps for itself, and each rank otherwise. */
bool fc_mg_is_extra_state(const char *name);

/** Where the name of a first matrix of an MLP has "linear_fc1" or its like; NULL for any other. `*second` is what the
 *  second matrix has there. */
const char *fc_mg_first_of_mlp(const char *name, const char **first, const char **second);

/** Splits "decoder.layers.3.mlp…": the length of "decoder.layers." and the number. False where no layer is numbered. */
bool fc_mg_layer(const char *key, size_t *prefix, int64_t *number, size_t *end);

/** What the name of a parameter says of experts. */
typedef enum mg_expert {
    MG_NO_EXPERT,
    MG_ONE_EXPERT,  /**< it is of one, whose number is in the name */
    MG_ALL_EXPERTS, /**< a matrix of all that the rank has, one behind the other (GroupedMLP) */
    MG_OTHER_EXPERT /**< it is below them, in a way that is not known */
} mg_expert;

/** Finds the expert's number in a name, or a part of one: from `*digits` to `*end`. */
mg_expert fc_mg_expert(const char *name, size_t *digits, size_t *end, int64_t *number);

/** A value of one rank's file, under the name it has in the whole. */
typedef struct mg_value {
    const char *name;
    fc_path path;
    uint32_t file;
    bool shared;                /**< a parameter, or a state of one: the ranks' values are one tensor */
    const char *refusal;        /**< why it cannot be had; NULL: it can */
    const torch_object *object; /**< of what is no tensor */
    const torch_extent *piece;  /**< of a tensor */
    fc_dtype dtype;
    int ndim;
    const int64_t *sizes;
    mg_cut cut;
    size_t chunk;    /**< of the model, which it is of */
    bool expert;     /**< it is cut over grid.expert_tp ranks, and each expert-parallel rank has others */
    int64_t grouped; /**< it holds as many experts, one behind the other; 0: it is no MG_ALL_EXPERTS */
} mg_value;

/** The layers of one kind, "decoder.layers.", and how many each chunk of the model has. */
typedef struct mg_layers {
    const char *prefix;
    int64_t *counts; /**< one a chunk, in the order of the layers */
} mg_layers;

typedef struct mg_reader {
    fc_checkpoint *checkpoint;
    mg_grid grid;
    mg_args args;
    size_t chunks; /**< of the model, a stage: those of virtual pipeline parallelism; 1 without */
    mg_layers *layers;
    size_t nlayers, layers_capacity;
    int64_t local_experts; /**< that each rank has, of a layer; 0: not yet known */
    uint32_t experts_file; /**< which said so */
    mg_value *values;      /* malloc'ed */
    size_t nvalues, capacity;
    torch_file f;              /* the current one */
    uint32_t rank;             /* its number */
    const char *unnamed;       /**< why states of the optimizer are kept under their numbers; NULL: they are not */
    uint32_t unnamed_file;     /**< of which rank that is so */
    const char *undistributed; /**< why the distributed optimizer's are left out; NULL: they are not */
    const char *differing;     /* a copy that is not the same on all ranks */
    size_t ndiffering;
    fc_progress *progress; /**< may be NULL */
    fc_error *err;
} mg_reader;

static inline fc_code fc_mg_no_memory(const mg_reader *r) {
    return fc_fail(r->err, FC_ENOMEM, "%s: out of memory", r->checkpoint->path);
}

/** The file's name for messages. */
static inline const char *fc_mg_file(const mg_reader *r, uint32_t file) {
    return r->checkpoint->files[file].path;
}

/** The leaves of `v`, which is the value at `prefix`. */
fc_code fc_mg_flatten(mg_reader *r, const fc_path *prefix, fc_pv v, torch_leaves *leaves);
/** The elements of a path with dots between them; NULL when out of memory. */
char *fc_mg_spell(fc_arena *arena, const fc_path *path);

/** Notes how many layers the chunk has, as far as this leaf of it tells. */
fc_code fc_mg_count_layer(mg_reader *r, const torch_leaf *leaf, size_t chunk);
/** Notes how many experts the rank has; `leaves` are those of a chunk. Fails where it is another number than others'.
 */
fc_code fc_mg_count_experts(mg_reader *r, const torch_leaves *leaves);
/** Gives a leaf of a chunk the name it has in the whole. */
fc_code fc_mg_rename(mg_reader *r, torch_leaf *leaf, size_t chunk);

/** Sets MG_GATED where the values from `first` on, those of a file, hold gates. */
fc_code fc_mg_find_gates(mg_reader *r, size_t first);
/** Matrices of several experts get a first dimension, the experts. */
fc_code fc_mg_ungroup(mg_reader *r);

/** Adds the value `v`, which dicts and lists below it make several of, under `prefix`. */
fc_code fc_mg_add(mg_reader *r, const fc_path *prefix, fc_pv v);
/** Adds one value, whole. @return NULL after a failure. */
mg_value *fc_mg_add_leaf(mg_reader *r, const char *name, const fc_path *path, fc_pv v);

/** Adds the optimizer of the current file. Its parameters are values[first] to values[end]. */
fc_code fc_mg_read_optimizer(mg_reader *r, fc_pv optimizer, size_t first, size_t end);

/** Adds the states of the current rank's distributed optimizer, of the parameters values[first] to values[end]. */
fc_code fc_mg_read_distributed(mg_reader *r, size_t first, size_t end);

/** Whether one of `members` optimizers, which a file has instead of one, has a parameter. */
bool fc_mg_belongs(const mg_reader *r, const mg_value *parameter, size_t member, size_t members);

/** Whether a value of the model is a parameter, not a buffer. */
bool fc_mg_is_parameter(const mg_value *v);
/** "optim.state.<parameter>.<key>". @return false when out of memory. */
bool fc_mg_name_state(const mg_reader *r, const mg_value *parameter, const char *key, const char **name, fc_path *path);

/** Makes the tensors of the checkpoint of the values of all files. */
fc_code fc_mg_join(mg_reader *r);

/** Reads the files of several ranks. */
fc_code fc_mg_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Reads the namespace `args` of a file; all -1 where it has none. */
void fc_mg_read_args(const torch_file *f, mg_args *out);
/** Fails where the current file's args are those of another checkpoint than the first file's. */
fc_code fc_mg_check_alike(const mg_reader *r, const mg_args *args);
/** Fails unless what `args` says of the numbers of ranks is what there is. */
fc_code fc_mg_check_args(const fc_checkpoint *checkpoint, const mg_args *args, const mg_grid *grid, fc_error *err);
/** Fails where a file cannot have been written by rank `wrote[i]` of the run, as its args say. */
fc_code fc_mg_check_writers(const mg_reader *r, const int64_t *wrote);

#endif
