/*
 * The structs behind the public types of fsdp.h, and the functions that the files of train/ share.
 */
#pragma once

#include "fsdpckpt/train/fsdp.h"
#include "gather/pool.h"

enum { NOT_IN_ORDER = -1 };

struct fc_fsdp_handle {
    fc_fsdp_unit *unit;
    fc_fsdp_handle *next; /* the next flat parameter of the unit */
    fc_flat_layout layout;
    fc_param_extension *extensions; /* one per parameter */
    fc_handle_state state;
    fc_dtype compute_dtype; /* dtype of unsharded parameters and their gradients (_fwd_bwd_param_dtype) */
    fc_dtype reduce_dtype;  /* dtype in which gradients are reduced */
    fc_dtype low_dtype;     /* dtype of gradients between steps */
    fc_array local_shard;   /* in full precision; on the host if parameters are offloaded */
    fc_block *ready_shard;  /* the shard to gather if it had to be cast or copied from the host; else NULL */
    fc_block *full;         /* the padded unsharded flat parameter; NULL if freed */
    fc_event *unsharded;    /* happens when `full` is complete */
    bool use_unsharded;     /* whether flat_param.data is the unsharded parameter */
    bool registered;        /* whether post-backward is registered */
    bool post_backward_called;
    fc_block *fresh;     /* the unsharded gradient of this backward */
    fc_block *grad;      /* the sum of unsharded gradients since the last reduction */
    fc_dtype grad_dtype; /* dtype of `grad` */
    fc_array grad_shard; /* the reduced gradient in full precision */
    fc_array host_grad;  /* the reduced gradient on the host, if parameters are offloaded */
    fc_array low_grad;   /* the reduced gradient in low_dtype, with keep_low_precision_grads */
    bool has_saved;      /* whether there is a _saved_grad_shard, to which the next reduction adds */
    fc_array saved;
    bool has_sharded_grad; /* whether there is a gradient for the optimizer (.grad) */
    fc_array sharded_grad;
    bool *is_grad_none; /* one per parameter: set by fc_fsdp_set_grad_none */
    void *staging[3];   /* page-locked host memory of local_shard, host_grad and low_grad; owned */
};

struct fc_fsdp_unit {
    fc_fsdp *fsdp;
    fc_fsdp_unit *next; /* in the order of fc_fsdp_add_unit, which is the same on all ranks */
    char *name;
    fc_fsdp_unit_options options; /* complete: what the unit does not set is the instance's */
    double predivide, postdivide; /* of the average over the ranks of the unit */
    fc_fsdp_handle *handles, **last_handle;
    fc_fsdp_buffer *buffers;
    bool has_input_dtype; /* with fp32_inputs: whether an input of this forward was cast, and from what */
    fc_dtype input_dtype;
    int64_t index;
    fc_training_state state;
    bool prefetched, needs_pre_forward_unshard, needs_pre_backward_unshard, ran_pre_backward;
    int64_t pre_forward_index, post_forward_index; /* NOT_IN_ORDER if it has not run */
};

/* A growing list of units. */
typedef struct fc_unit_list {
    fc_fsdp_unit **units;
    int64_t count;
    size_t capacity;
} fc_unit_list;

typedef enum fc_order_warning { FC_ORDER_FINE, FC_ORDER_WARNING, FC_ORDER_WARNED } fc_order_warning;

struct fc_fsdp {
    fc_comm *shard, *replicate;
    fc_device *device, *host; /* the device of the computation, and host memory; equal on the processor */
    bool owns_host;
    fc_fsdp_options options;
    fc_arena *arena;
    fc_pool pool;
    fc_stream *streams[FC_STREAM_COUNT];
    fc_event *marks[FC_STREAM_COUNT];
    fc_stream *copies; /* of state dicts to the host; NULL until the first */
    fc_event *copied;  /* the end of the copies */
    bool copying;      /* whether the compute stream has not waited for them yet */
    bool owns_stream[FC_STREAM_COUNT];
    fc_fsdp_unit *units, **last_unit;
    int64_t nunits;
    bool sync_gradients, grad_enabled;
    bool failed;          /* whether a call has failed halfway, so that other ranks may wait for this one */
    bool callback_queued; /* whether a backward has begun and not ended */
    bool has_hook;
    fc_comm_hook hook;
    /* exec_order.c */
    int64_t iteration, current_index;
    fc_unit_list pre_forward_order, post_forward_order;
    fc_order_warning warning;
};

static inline bool fc_fsdp_is_sharded(const fc_fsdp_unit *unit) {
    return unit->options.strategy != FC_NO_SHARD;
}
static inline bool fc_fsdp_is_hybrid(const fc_fsdp_unit_options *options) {
    return options->strategy == FC_HYBRID_SHARD || options->strategy == FC_HYBRID_SHARD_ZERO2;
}
static inline bool fc_fsdp_reshards_after_forward(const fc_fsdp_unit *unit) {
    return unit->options.strategy == FC_FULL_SHARD || unit->options.strategy == FC_HYBRID_SHARD;
}
/* Returns the elements of the unsharded flat parameter, with padding. */
static inline int64_t fc_fsdp_padded(const fc_fsdp_handle *h) {
    return h->layout.shard_numel * h->layout.world_size;
}

/* fsdp.c: remembers a failure for fc_fsdp_free. Every public function that gives work to streams returns through it.
 * @return `rc`. */
fc_code fc_fsdp_note(fc_fsdp *fsdp, fc_code rc);
/* Call it before memory of the device, or page-locked memory, is released: that waits for all work of the device. */
void fc_fsdp_end_work(fc_fsdp *fsdp);
/* Calls options.trace if it is set. */
void fc_fsdp_trace(const fc_fsdp_handle *handle, fc_fsdp_action action, fc_fsdp_stream stream);
/* Makes `stream` wait for the work that `other` has so far (wait_stream). */
fc_code fc_fsdp_wait(fc_fsdp *fsdp, fc_fsdp_stream stream, fc_fsdp_stream other, fc_error *err);
fc_code fc_fsdp_expect_state(const fc_fsdp_unit *unit, fc_training_state wanted, fc_error *err);
const char *fc_handle_state_name(fc_handle_state state);
/* Makes a 1-D array over a block of the pool. */
fc_array fc_fsdp_over(const fc_fsdp *fsdp, const fc_block *block, fc_dtype dtype, int64_t count);

/* state_dict.c: makes the compute stream wait until the shards are copied to the host. */
fc_code fc_fsdp_wait_copies(fc_fsdp *fsdp, fc_error *err);

/* unshard.c */
fc_code fc_fsdp_unshard(fc_fsdp_unit *unit, fc_error *err);
fc_code fc_fsdp_reshard(fc_fsdp_handle *handle, bool free_unsharded, fc_error *err);
/* Gathers the flat parameter in full precision into new memory. The unit is idle. */
fc_code fc_fsdp_gather_full(fc_fsdp_handle *handle, fc_array *out, fc_error *err);
/* Returns whether post-backward frees the unsharded parameter (_should_free_in_backward). */
bool fc_fsdp_should_free_in_backward(const fc_fsdp_handle *handle);
/* Makes the compute stream wait for the unsharded parameters of the unit. */
fc_code fc_fsdp_wait_unsharded(fc_fsdp_unit *unit, fc_error *err);

/* exec_order.c */
fc_code fc_order_pre_forward(fc_fsdp_unit *unit, bool training, fc_error *err);
fc_code fc_order_post_forward(fc_fsdp_unit *unit, fc_error *err);
void fc_order_next_iteration(fc_fsdp *fsdp);
void fc_order_free(fc_fsdp *fsdp);

/* prefetch.c: gathers the parameters of the next units, according to the options and the state of `unit`. */
fc_code fc_fsdp_prefetch(fc_fsdp_unit *unit, fc_error *err);

/* reduce.c: reduces the unsharded gradient of `handle` and adds it to that of the shard. */
fc_code fc_fsdp_reduce_grad(fc_fsdp_handle *handle, fc_error *err);

/* grad.c */
fc_code fc_fsdp_add_fresh(fc_fsdp_handle *handle, fc_error *err);
fc_code fc_fsdp_prepare_for_backward(fc_fsdp_handle *handle, fc_error *err);
fc_code fc_fsdp_prepare_for_optim(fc_fsdp_handle *handle, fc_error *err);
fc_code fc_fsdp_accumulate(fc_fsdp_handle *handle, const fc_array *reduced, fc_fsdp_stream stream, fc_error *err);
