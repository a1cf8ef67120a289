/*
 * The FSDP training step as a state machine: what torch/distributed/fsdp/_runtime_utils.py does around the forward and
 * backward of each unit, for programs without autograd. The program computes; this library gathers parameters before
 * they are needed, frees them afterwards, reduces gradients, and orders the work on streams.
 *
 * A step, where the root is the unit that contains all others:
 *
 *   fc_fsdp_root_pre_forward
 *     for each unit in forward order:   fc_fsdp_pre_forward, compute with fc_fsdp_param, fc_fsdp_post_forward
 *   for each unit in backward order:    fc_fsdp_pre_backward, write fc_fsdp_grad, fc_fsdp_post_backward
 *   fc_fsdp_post_backward_final
 *   optimizer on fc_fsdp_local_shard and fc_fsdp_sharded_grad; fc_fsdp_zero_grad
 *
 * The root's pre-forward is first and its post-forward last; its pre-backward comes before the end of the backward. All
 * ranks make the same calls. Each object is used by one thread. After an error the step cannot continue.
 */
#pragma once

#include "fsdpckpt/gather/dtensor_data.h"
#include "fsdpckpt/train/flat_data.h"
#include "fsdpckpt/wrap_policy.h"

FC_BEGIN_DECLS

typedef struct fc_fsdp fc_fsdp;               /**< the root state: streams, order, all units */
typedef struct fc_fsdp_unit fc_fsdp_unit;     /**< a module that FSDP wraps */
typedef struct fc_fsdp_handle fc_fsdp_handle; /**< a flat parameter of a unit (FlatParamHandle) */

/** TrainingState: the state of a unit. */
typedef enum fc_training_state {
    FC_STATE_IDLE,
    FC_STATE_FORWARD_BACKWARD,
    FC_STATE_SUMMON_FULL_PARAMS
} fc_training_state;

/** HandleTrainingState: the state of a flat parameter. */
typedef enum fc_handle_state {
    FC_HANDLE_IDLE,
    FC_HANDLE_FORWARD,
    FC_HANDLE_BACKWARD_PRE,
    FC_HANDLE_BACKWARD_POST,
    FC_HANDLE_SUMMON_FULL_PARAMS
} fc_handle_state;

/** The streams of FSDP. The caller uses COMPUTE for its work. */
typedef enum fc_fsdp_stream {
    FC_STREAM_COMPUTE,
    FC_STREAM_UNSHARD,       /**< all-gathers */
    FC_STREAM_PRE_UNSHARD,   /**< copies from the host and casts before them */
    FC_STREAM_POST_BACKWARD, /**< reduce-scatters */
    FC_STREAM_ALL_REDUCE,    /**< all-reduces over replicas (HSDP) */
    FC_STREAM_COUNT
} fc_fsdp_stream;

/** Work that was given to a stream, or a decision; for tests and profiles. */
typedef enum fc_fsdp_action {
    FC_ACTION_WAIT,        /**< `stream` waits for the work that `other` has so far */
    FC_ACTION_PRE_UNSHARD, /**< copy from the host, or cast to the parameter dtype */
    FC_ACTION_ALL_GATHER,
    FC_ACTION_PREFETCH, /**< the unshard before this was a prefetch */
    FC_ACTION_FREE,     /**< an unsharded parameter is freed */
    FC_ACTION_CAST_GRAD,
    FC_ACTION_PRE_DIVIDE,
    FC_ACTION_REDUCE_SCATTER,
    FC_ACTION_ALL_REDUCE,
    FC_ACTION_POST_DIVIDE,
    FC_ACTION_COMM_HOOK,
    FC_ACTION_ACCUMULATE,
    FC_ACTION_OFFLOAD,
    FC_ACTION_REGISTER_POST_BACKWARD
} fc_fsdp_action;

typedef struct fc_fsdp_event {
    fc_fsdp_action action;
    const fc_fsdp_handle *handle; /**< NULL for waits */
    fc_fsdp_stream stream, other;
} fc_fsdp_event;

/** Return the name of an action or a stream for messages: "ALL_GATHER", "UNSHARD". */
const char *fc_fsdp_action_name(fc_fsdp_action action);
const char *fc_fsdp_stream_name(fc_fsdp_stream stream);

/**
 * A communication hook: reduces `grad`, the padded unsharded gradient (world size × chunk elements, which the hook may
 * change), into `shard` (one chunk), or in place if `shard` is NULL (NO_SHARD). It also divides: by `predivide` before
 * and by `postdivide` after the reduction, which gives the average. All work goes to `stream`.
 */
typedef struct fc_comm_hook {
    fc_code (*run)(const struct fc_comm_hook *hook, fc_comm *comm, fc_array *grad, fc_array *shard, fc_stream *stream,
                   fc_error *err);
    double predivide, postdivide; /**< set for the ranks of the unit before each call of `run` */
    /** LOW_PRECISION_HOOKS: the hook gets gradients in `dtype`, cast directly from the dtype of the computation. If
     *  false, it gets them in the reduce dtype. */
    bool low_precision;
    fc_dtype dtype;
    void *state; /**< the caller's */
} fc_comm_hook;

/** allreduce_hook and reduce_scatter_hook: reduce like the step without a hook. */
fc_comm_hook fc_reduce_scatter_hook(void);
/** fp16_compress_hook and bf16_compress_hook: reduce in `dtype`. */
fc_comm_hook fc_compress_hook(fc_dtype dtype);

/** The options of an instance. All zero is torch's default. */
typedef struct fc_fsdp_options {
    bool use_orig_params;                   /**< aligns parameters in the flat ones, see fc_flat_layout_new */
    fc_backward_prefetch backward_prefetch; /**< a unit can have its own, see fc_fsdp_unit_options */
    bool forward_prefetch;
    int backward_prefetch_limit, forward_prefetch_limit; /**< units ahead; 0 means 1 */
    /** limit_all_gathers: how many freed parameters may still be in use before a gather waits for the memory of the
     *  oldest; until then it gets new memory. 0 means 2, as in torch. The host never waits. */
    int limit_all_gathers;
    /** Takes the memory for unsharded parameters and gradients from the communicator `shard`
     * (fc_device_collectives.alloc): NCCL registers it, which can save copies. Communicators without such memory ignore
     * it. */
    bool register_buffers;
    /** torch.distributed's debug level DETAIL: in the first iteration, ranks that run units in different orders are an
     *  error; later, `warn` is called once for an order that differs from that of the first iteration. */
    bool check_order;
    void (*warn)(void *context, const char *message); /**< required with check_order */
    void (*trace)(void *context, const fc_fsdp_event *event);
    void *context; /**< of warn and trace */
} fc_fsdp_options;

/** The options of a unit. All zero is FULL_SHARD in the precision of the parameters. */
typedef struct fc_fsdp_unit_options {
    bool is_root; /**< true for exactly one unit, the first */
    fc_sharding_strategy strategy;
    bool has_param_dtype, has_reduce_dtype; /**< mixed precision; the reduce dtype defaults to the param dtype */
    fc_dtype param_dtype, reduce_dtype;
    bool has_buffer_dtype; /**< cast the floating-point buffers of this unit */
    fc_dtype buffer_dtype;
    /** For a module that mixed precision leaves out, such as a batch norm: cast its inputs to float32, and its outputs
     *  back (fc_fsdp_cast_outputs). */
    bool fp32_inputs;
    bool keep_low_precision_grads;
    bool cast_forward_inputs;         /**< cast the inputs of this unit to its param dtype */
    bool no_cast_root_forward_inputs; /**< do not cast the inputs of the root, which is the default */
    bool offload_params;              /**< keep shards and their gradients in host memory between uses */
    bool has_prefetch;                /**< whether the next two are used, instead of those of the instance */
    fc_backward_prefetch backward_prefetch;
    bool forward_prefetch; /**< has no effect unless the root has it too, as in torch */
    /** The ranks of this unit, or NULL for those of the instance. Borrowed. A unit of experts has the ranks with the
     *  same experts. A unit with a hybrid strategy needs both, others only `shard`. They must come from the same
     *  communicator as those of the instance (`split`), so that a failure in one ends the others. */
    fc_comm *shard, *replicate;
} fc_fsdp_unit_options;

/** gradient_predivide_factor: returns the power of two that splits a division by `world_size` into two. */
double fc_gradient_predivide_factor(int64_t world_size);

/**
 * Starts an FSDP instance.
 * @param shard      the ranks that share a parameter; borrowed. All computation is on its device.
 * @param replicate  the ranks with the same shard (HSDP), or NULL; borrowed. Units may have ranks of their own.
 * @param compute    the stream of the caller's computation; borrowed.
 */
fc_code fc_fsdp_new(fc_comm *shard, fc_comm *replicate, fc_stream *compute, const fc_fsdp_options *options,
                    fc_fsdp **out, fc_error *err);
void fc_fsdp_free(fc_fsdp *fsdp);

/** Adds a unit without parameters. The root must be the first. `name` is copied. */
fc_code fc_fsdp_add_unit(fc_fsdp *fsdp, const char *name, const fc_fsdp_unit_options *options, fc_fsdp_unit **out,
                         fc_error *err);

/** A buffer of a unit. */
typedef struct fc_fsdp_buffer {
    const char *fqn;
    fc_dtype dtype; /**< its own, in which a checkpoint has it */
    fc_array array; /**< its values in the dtype of the computation, which the program may change; owned */
    struct fc_fsdp_buffer *next;
} fc_fsdp_buffer;

/** Copies a buffer, and casts it if it is floating-point and the unit has a buffer dtype. `fqn` is copied. */
fc_code fc_fsdp_add_buffer(fc_fsdp_unit *unit, const char *fqn, const fc_array *values, fc_fsdp_buffer **out,
                           fc_error *err);

/** Returns a buffer in its own dtype, as torch's state_dict has it, in new memory that the caller frees. */
fc_code fc_fsdp_saved_buffer(const fc_fsdp *fsdp, const fc_fsdp_buffer *buffer, fc_array *out, fc_error *err);

/** A parameter of a unit. */
typedef struct fc_fsdp_param_init {
    const char *fqn;
    const fc_fsdp_tensor *tensor; /**< on the compute device, with the same values on all ranks; copied */
    bool requires_grad;
    int64_t shared_with; /**< index of the earlier parameter in this list with which it shares its data, or -1 */
} fc_fsdp_param_init;

/**
 * Flattens parameters into one flat parameter of `unit` and keeps this rank's shard. A unit usually has one flat
 * parameter. It has several if the dtype or requires_grad of its parameters differ.
 */
fc_code fc_fsdp_add_handle(fc_fsdp_unit *unit, const fc_fsdp_param_init *params, size_t count, fc_fsdp_handle **out,
                           fc_error *err);

/** The units of a wrap policy, to be made by fc_fsdp_add_planned. */
typedef struct fc_fsdp_plan {
    const fc_module_tree *tree;
    const fc_units *units; /**< from fc_wrap_units, after the checks of wrap_policy.h */
    /** Gets the values of a parameter or buffer, on the compute device. The tensors of one unit are loaded, flattened
     * and then freed with fc_array_free, so the whole model need not fit on the device. */
    fc_code (*load)(void *context, const fc_parameter *parameter, fc_fsdp_tensor *out, fc_error *err);
    fc_fsdp_buffer **buffers; /**< receives the buffers, one place per parameter of the tree; NULL: do not add them */
    /** Sets what a plan does not have, such as the communicators of a unit. NULL: nothing. */
    fc_code (*adjust)(void *context, const fc_unit *unit, fc_fsdp_unit_options *options, fc_error *err);
    void *context;
} fc_fsdp_plan;

/**
 * Adds all units of a plan with their flat parameters.
 * @param units    receives plan->units->count units, in the order of the plan.
 * @param handles  receives their flat parameters; NULL for a unit without parameters.
 * @return FC_EUSAGE if use_orig_params of a unit is not that of the instance, which torch refuses, too.
 */
fc_code fc_fsdp_add_planned(fc_fsdp *fsdp, const fc_fsdp_plan *plan, fc_fsdp_unit **units, fc_fsdp_handle **handles,
                            fc_error *err);

/** Replaces the reduction of gradients. @return FC_EUSAGE for a hook without `run`, or with a hybrid strategy. */
fc_code fc_fsdp_register_comm_hook(fc_fsdp *fsdp, const fc_comm_hook *hook, fc_error *err);

/** no_sync: while false, each rank sums its unsharded gradients without communication. True at first. */
void fc_fsdp_set_sync_gradients(fc_fsdp *fsdp, bool sync);

/** torch.set_grad_enabled: while false, forward does not prepare a backward. True at first. */
void fc_fsdp_set_grad_enabled(fc_fsdp *fsdp, bool enabled);

/**
 * The root's pre-forward: side streams wait for the compute stream (the optimizer's step), forward prefetch may gather
 * every unit again, and floating-point inputs are cast to the root's param dtype.
 * @param inputs a cast input is replaced by a new array, which the caller frees with fc_array_free.
 */
fc_code fc_fsdp_root_pre_forward(fc_fsdp *fsdp, fc_array *inputs, size_t ninputs, fc_error *err);

/**
 * Pre-forward of a unit: unshards its parameters for later work on the compute stream, prefetches the next unit if
 * requested, registers post-backward once, and casts the inputs if requested: to the param dtype with
 * cast_forward_inputs, to float32 with fp32_inputs.
 * @param training false for a forward in eval mode, whose order is not checked.
 */
fc_code fc_fsdp_pre_forward(fc_fsdp_unit *unit, bool training, fc_array *inputs, size_t ninputs, fc_error *err);

/**
 * Casts the floating-point outputs of a unit with fp32_inputs back to the dtype that its inputs had (the last one that
 * was cast), if one was cast. Other units are left alone. Call it between the computation and fc_fsdp_post_forward.
 * @param outputs a cast output is replaced by a new array, which the caller frees with fc_array_free.
 */
fc_code fc_fsdp_cast_outputs(fc_fsdp_unit *unit, fc_array *outputs, size_t noutputs, fc_error *err);

/** Post-forward: frees the parameters unless the strategy or the root's role keeps them. */
fc_code fc_fsdp_post_forward(fc_fsdp_unit *unit, fc_error *err);

/** Pre-backward: unshards, prefetches, and sets the existing gradient aside. A second call in a step does nothing. */
fc_code fc_fsdp_pre_backward(fc_fsdp_unit *unit, fc_error *err);

/**
 * Post-backward of a flat parameter, called when its gradient is complete. Frees the unsharded parameters and
 * prefetches. If gradients are synchronised, it reduces the gradient: cast to the reduce dtype, pad to world size ×
 * chunk, pre-divide, reduce-scatter, (HSDP: all-reduce,) post-divide, cast back, add to the gradient of the shard,
 * offload. A flat parameter that requires no gradient is only freed.
 */
fc_code fc_fsdp_post_backward(fc_fsdp_handle *handle, fc_error *err);

/** Ends a backward: waits for the reductions and makes the gradients available to the optimizer. */
fc_code fc_fsdp_post_backward_final(fc_fsdp *fsdp, fc_error *err);

/** Drops all gradients like optimizer.zero_grad(set_to_none=True), including those of no_sync. */
fc_code fc_fsdp_zero_grad(fc_fsdp *fsdp, fc_error *err);

/** Returns the unsharded parameter `param`; valid between pre- and post-forward, and pre- and post-backward. */
fc_code fc_fsdp_param(fc_fsdp_handle *handle, size_t param, fc_fsdp_tensor *out, fc_error *err);

/**
 * Returns the memory to which the backward adds the gradient of parameter `param`, in the dtype of the unsharded
 * parameters. It is zero at the first call in a backward, and holds only this backward's gradient: FSDP accumulates.
 */
fc_code fc_fsdp_grad(fc_fsdp_handle *handle, size_t param, fc_array *out, fc_error *err);

/** Returns the shard of this rank in full precision (layout->shard_numel elements), which the optimizer changes. */
fc_array *fc_fsdp_local_shard(fc_fsdp_handle *handle);

/** Returns the gradient of the shard after fc_fsdp_post_backward_final, or NULL if there is none. */
fc_array *fc_fsdp_sharded_grad(fc_fsdp_handle *handle);

/** Returns the part of parameter `param` in the shard of this rank as a 1-D view, like a parameter of use_orig_params.
 */
fc_code fc_fsdp_param_shard(fc_fsdp_handle *handle, size_t param, fc_array *out, fc_error *err);

/** Returns its gradient as a 1-D view of fc_fsdp_sharded_grad. `*has` is false if torch's .grad is None: the parameter
 * is outside of the shard, frozen or set to none, or there is no gradient. */
fc_code fc_fsdp_param_grad(fc_fsdp_handle *handle, size_t param, fc_array *out, bool *has, fc_error *err);

/**
 * FSDP.clip_grad_norm_: computes the norm of all gradients as one vector and, if it is above `max_norm`, multiplies
 * them by max_norm / (norm + 1e-6). All ranks call it, between steps; the host waits. Unlike torch, it counts each
 * gradient once when hybrid units stand next to others.
 * @param norm_type   2, another positive number, or INFINITY.
 * @param total_norm  receives the norm: float32, rounded to the widest dtype of the gradients.
 */
fc_code fc_fsdp_clip_grad_norm(fc_fsdp *fsdp, double max_norm, double norm_type, double *total_norm, fc_error *err);

/** param.grad = None for one parameter: writes zeros to the flat gradient. fc_fsdp_param_grad returns none until the
 * next gradient is computed. */
fc_code fc_fsdp_set_grad_none(fc_fsdp_handle *handle, size_t param, fc_error *err);

/**
 * summon_full_params: returns the unsharded flat parameter in full precision, in new memory. Call it only between
 * steps.
 */
fc_code fc_fsdp_summon_full_params(fc_fsdp_handle *handle, fc_array *out, fc_error *err);

/** How to summon full parameters. All zero is torch's default. */
typedef struct fc_fsdp_summon_options {
    bool no_recurse;     /**< only this unit; else also those within it: all for the root, else by their names */
    bool no_writeback;   /**< changes are lost, except with NO_SHARD, whose parameters are always whole */
    bool rank0_only;     /**< only rank 0 of the shard has them */
    bool offload_to_cpu; /**< they are in host memory */
} fc_fsdp_summon_options;

/** Parameters that are whole in full precision for a while. */
typedef struct fc_fsdp_summoned fc_fsdp_summoned;

/**
 * FSDP.summon_full_params: gathers the parameters of a unit for the program to read or change, between a step's forward
 * and backward or between steps. Collective over the ranks of the shard. No forward until fc_fsdp_summon_end.
 * @return FC_EUNSUPPORTED as in torch: rank0_only with writeback, offload_to_cpu with NO_SHARD. FC_EUSAGE in a forward
 * or backward, or if the parameters are summoned already.
 */
fc_code fc_fsdp_summon(fc_fsdp_unit *unit, const fc_fsdp_summon_options *options, fc_fsdp_summoned **out,
                       fc_error *err);

/** Returns parameter `param`, valid until fc_fsdp_summon_end. @return FC_EUSAGE if this rank does not have it. */
fc_code fc_fsdp_summoned_param(fc_fsdp_summoned *summoned, const fc_fsdp_handle *handle, size_t param,
                               fc_fsdp_tensor *out, fc_error *err);

/** Writes changes back to the shards, after the work so far on the compute stream, and frees the parameters. Each rank
 *  writes what its own copy has in its shard. NULL is allowed. */
fc_code fc_fsdp_summon_end(fc_fsdp_summoned *summoned, fc_error *err);

/** Return the layout of a flat parameter, and the name of its unit. */
const fc_flat_layout *fc_fsdp_layout(const fc_fsdp_handle *handle);
const char *fc_fsdp_unit_name(const fc_fsdp_handle *handle);

/** Return the state of a unit, and the common state of its flat parameters: FC_EUSAGE if they differ. */
fc_training_state fc_fsdp_unit_state(const fc_fsdp_unit *unit);
fc_code fc_fsdp_handles_state(const fc_fsdp_unit *unit, fc_handle_state *out, fc_error *err);

/** Returns the bytes of device memory that unsharded parameters and temporary gradients use, and the most so far. */
size_t fc_fsdp_memory(const fc_fsdp *fsdp, size_t *peak);

FC_END_DECLS
