/*
 * The files of all ranks (grid.c), and the arguments of the run that they are checked against (args.c).
 */
#pragma once

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

/** Reads the namespace `args` of a file. Without it, all values are -1. */
void fc_mg_read_args(const torch_file *f, fc_mg_args *out);

/** Fails unless the numbers of ranks are those in `args`. */
fc_code fc_mg_check_args(const fc_checkpoint *checkpoint, const fc_mg_args *args, const fc_mg_grid *grid,
                         fc_error *err);
