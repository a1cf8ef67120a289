/*
 * State dicts of the FSDP step: model, optimizer and other values, written to any format that fc_convert writes, and
 * loaded from any layout and format. No tensor is gathered, neither on the device nor on the host: each rank copies its
 * shards to the host and writes them to where they belong in the files of the target.
 *
 * Names are those of torch.distributed.checkpoint.state_dict.get_state_dict: "model.<fqn>" and
 * "optim.state.<fqn>.exp_avg".
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/train/fsdp.h"

FC_BEGIN_DECLS

/** StateDictType of torch. */
typedef enum fc_state_dict_type {
    FC_FULL_STATE_DICT,    /**< a full target: each tensor is whole in one file */
    FC_SHARDED_STATE_DICT, /**< one file per rank with its rows of each tensor: Shard(0) over the ranks of the shard */
    FC_LOCAL_STATE_DICT    /**< flat parameters "<unit>._flat_param" of one dimension, without padding at the end */
} fc_state_dict_type;

/** A state of the optimizer for the parameters of one flat parameter, such as exp_avg. */
typedef struct fc_fsdp_optim_state {
    fc_fsdp_handle *handle;
    const char *name;
    const fc_array *shard; /**< one dimension, with as many elements as fc_fsdp_local_shard; any dtype */
} fc_fsdp_optim_state;

/** A value that is equal on all ranks, such as a buffer or the number of steps. */
typedef struct fc_fsdp_value {
    fc_path path;
    const fc_array *array; /**< contiguous */
} fc_fsdp_value;

/** Everything to save or to load. All pointers are borrowed for the call. All ranks list the same. */
typedef struct fc_fsdp_state {
    fc_fsdp *fsdp;         /**< its parameters are part of the state */
    const char *model_key; /**< first key of the parameters; NULL: "model"; "": none */
    const char *optim_key; /**< first key of the optimizer's states; NULL: "optim"; "": none */
    const fc_fsdp_optim_state *optim;
    size_t noptim;
    const fc_fsdp_value *values;
    size_t nvalues;
} fc_fsdp_state;

/** A copy of the state of this rank on the host, as a checkpoint in memory that describes the tensors of all ranks. */
typedef struct fc_fsdp_state_dict fc_fsdp_state_dict;

/**
 * Makes a state dict. Collective over `ranks`. On a GPU the shards are copied to page-locked memory on a stream of
 * their own, so the computation goes on. The copies are complete after fc_fsdp_state_dict_wait. Until then the shards
 * must not change: fc_fsdp_post_backward_final makes the compute stream wait, so an optimizer that works on that stream
 * between this function and zero_grad is safe. Call it between steps, and free the result before the instance.
 * @param ranks all ranks of the mesh (replicas × shard × tensor parallelism), with a host device.
 * @return FC_EUSAGE within a step, for a state with another number of elements, or a number of ranks that does not fit;
 * for LOCAL_STATE_DICT also with NO_SHARD, several flat parameters in a unit, or tensor parallelism, as in torch.
 * FC_EUNSUPPORTED for a unit with communicators of its own that lack some ranks, as those of experts do; for
 * LOCAL_STATE_DICT for any communicators of its own.
 */
fc_code fc_fsdp_state_dict_new(const fc_fsdp_state *state, fc_state_dict_type type, fc_comm *ranks,
                               fc_fsdp_state_dict **out, fc_error *err);
void fc_fsdp_state_dict_free(fc_fsdp_state_dict *dict);

/** Waits until the copies are complete. Another thread may call it. */
fc_code fc_fsdp_state_dict_wait(fc_fsdp_state_dict *dict, fc_error *err);

/** Returns the state dict as the source of fc_convert with own_shards: keep_layout gives a sharded target. */
const fc_checkpoint *fc_fsdp_state_dict_checkpoint(const fc_fsdp_state_dict *dict);

/** How to write a state dict. All zero but `format` are the defaults. */
typedef struct fc_fsdp_save_options {
    const fc_format *format; /**< from fc_format_find */
    bool force;              /**< replace an existing target */
    fc_reporter reporter;    /**< as in fc_convert_options */
    fc_work_options work;
    bool refuse_second; /**< fc_fsdp_save_start fails (FC_EUSAGE) while a save runs, instead of waiting for it */
} fc_fsdp_save_options;

/** Saves: makes a state dict, waits and writes it. Collective over `ranks`, and all return the same code. */
fc_code fc_fsdp_save(const fc_fsdp_state *state, fc_state_dict_type type, const char *path,
                     const fc_fsdp_save_options *options, fc_comm *ranks, fc_error *err);

/** Saves in the background, one save at a time. */
typedef struct fc_fsdp_saver fc_fsdp_saver;

/**
 * Makes a saver. Collective over `ranks`. It splits `ranks` to make a communicator for its thread.
 * @return FC_EUNSUPPORTED if two threads may not use communicators of this kind at the same time (MPI without
 * MPI_THREAD_MULTIPLE).
 */
fc_code fc_fsdp_saver_new(fc_comm *ranks, fc_fsdp_saver **out, fc_error *err);

/**
 * Starts a save: returns when the copies of the shards are queued. A thread then writes and commits. If a save runs, it
 * waits for that first, and returns its error without starting another. Collective.
 */
fc_code fc_fsdp_save_start(fc_fsdp_saver *saver, const fc_fsdp_state *state, fc_state_dict_type type, const char *path,
                           const fc_fsdp_save_options *options, fc_error *err);

/** Returns whether no save runs, so that fc_fsdp_save_wait does not wait. It is not collective. */
bool fc_fsdp_save_is_done(const fc_fsdp_saver *saver);

/** Waits for the save, if one runs, and returns its outcome, which is the same on all ranks. Every call after that
 *  returns FC_OK until another save is started. */
fc_code fc_fsdp_save_wait(fc_fsdp_saver *saver, fc_error *err);

/** Interrupts a save that runs, which leaves no target, and frees the saver. All ranks call it, before fc_fsdp_free. */
void fc_fsdp_saver_free(fc_fsdp_saver *saver);

/**
 * Loads a state from a checkpoint of any layout and format. Each rank reads only the elements of its shards; other
 * dtypes are cast. Padding keeps its values. Unsharded parameters that were kept are dropped. Not collective.
 * @param type LOCAL_STATE_DICT if the checkpoint has flat parameters, of any number of ranks; else the type is ignored.
 * @return FC_ECORRUPT with the name of a tensor that is missing or has another shape, before anything is changed.
 */
fc_code fc_fsdp_load(const fc_fsdp_state *state, fc_state_dict_type type, const fc_checkpoint *from, fc_error *err);

FC_END_DECLS
