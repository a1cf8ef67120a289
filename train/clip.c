/*
 * clip_grad_norm_: the norm of all gradients as one vector, and gradients that are scaled to it. Each element counts
 * once, however many ranks hold it. Sums are in float64 and added in rank order, so all ranks get the same norm.
 */
#include "fsdpckpt/try.h"
#include "train/state.h"

#include "fsdpckpt/cast.h"

#include <math.h>
#include <stdlib.h>

/* The norm while it is computed. */
typedef struct norm {
    fc_fsdp *fsdp;
    double p;
    fc_block *device_sums; /* FC_POWER_SUMS numbers */
    double *host_sums;     /* as many, for gradients in host memory and for the result */
    bool has_dtype;
    fc_dtype dtype; /* the widest of the gradients */
} norm;

static fc_code check_norm(const fc_fsdp *fsdp, double norm_type, fc_error *err) {
    if (!fsdp->units) {
        return fc_fail(err, FC_EUSAGE, "the FSDP instance has no units: add the root first");
    }
    if (!(norm_type > 0)) {
        return fc_fail(err, FC_EUSAGE, "the type of a gradient norm must be a positive number or infinity, not %g",
                       norm_type);
    }
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        FC_TRY(fc_fsdp_expect_state(u, FC_STATE_IDLE, err));
    }
    return FC_OK;
}

/* Returns the number of ranks that hold the same gradient. */
static int copies(const fc_fsdp_unit *unit) {
    const fc_fsdp_unit_options *o = &unit->options;
    return !fc_fsdp_is_sharded(unit) ? o->shard->size : o->replicate ? o->replicate->size : 1;
}

/* torch.promote_types, for floating-point types. */
static fc_dtype wider(fc_dtype a, fc_dtype b) {
    size_t x = fc_dtype_size(a), y = fc_dtype_size(b);
    return a == b || x > y ? a : x < y ? b : FC_F32;
}

static fc_code add_gradient(norm *n, fc_fsdp_handle *h, fc_error *err) {
    fc_fsdp *fsdp = n->fsdp;
    const fc_array *grad = &h->sharded_grad;
    bool remote = grad->device != fsdp->device;
    double *sums = remote ? n->host_sums : n->device_sums->memory;
    fc_stream *stream = remote ? NULL : fsdp->streams[FC_STREAM_COMPUTE];
    n->dtype = n->has_dtype ? wider(n->dtype, grad->dtype) : grad->dtype;
    n->has_dtype = true;
    return grad->device->powers(grad->device, grad->dtype, grad->data, n->p, 1.0 / copies(h->unit),
                                (size_t)grad->sizes[0], sums, stream, err);
}

static double join_norms(const norm *n, double a, double b) {
    return !isinf(n->p) ? a + b : b > a || b != b ? b : a;
}

/* Adds up the sums of this rank. */
static fc_code local_sum(norm *n, double *out, fc_error *err) {
    fc_fsdp *fsdp = n->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    double sum = n->host_sums[0]; /* the processor has only one */
    FC_TRY(fc_comm_wait(fsdp->shard, compute, err));
    FC_TRY(fsdp->device->copy(fsdp->device, n->host_sums, n->device_sums->memory, sizeof sum * FC_POWER_SUMS, compute,
                              err));
    FC_TRY(fc_comm_wait(fsdp->shard, compute, err));
    for (int i = 0; i < FC_POWER_SUMS; i++) {
        sum = join_norms(n, sum, n->host_sums[i]);
    }
    *out = sum;
    return FC_OK;
}

/* Joins the numbers of the ranks of `comm`, in their order. */
static fc_code join_ranks(norm *n, fc_comm *comm, double *value, fc_error *err) {
    fc_fsdp *fsdp = n->fsdp;
    fc_device *device = fsdp->device;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    size_t bytes = sizeof *value * (size_t)comm->size;
    double *all = calloc((size_t)comm->size, sizeof *all);
    fc_block *block = NULL;
    fc_code rc;
    char *mine;
    FC_TRY_GOTO(all ? FC_OK : fc_no_memory(err, "a gradient norm"), rc, out);
    FC_TRY_GOTO(fc_pool_take(&fsdp->pool, bytes, compute, &block, err), rc, out);
    mine = (char *)block->memory + sizeof *value * (size_t)comm->rank;
    FC_TRY_GOTO(device->copy(device, mine, value, sizeof *value, compute, err), rc, out);
    FC_TRY_GOTO(fc_all_gather(comm, mine, block->memory, sizeof *value, compute, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(comm, compute, err), rc, out);
    FC_TRY_GOTO(device->copy(device, all, block->memory, bytes, compute, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(comm, compute, err), rc, out);
    *value = 0;
    for (int r = 0; r < comm->size; r++) {
        *value = join_norms(n, *value, all[r]);
    }
out:
    free(all);
    fc_code given = fc_pool_give(&fsdp->pool, &block, compute, rc == FC_OK ? err : NULL);
    return rc == FC_OK ? given : rc;
}

/* Computes the norm over all ranks of the root. */
static fc_code measure(norm *n, double *out, fc_error *err) {
    fc_fsdp *fsdp = n->fsdp;
    fc_stream *compute = fsdp->streams[FC_STREAM_COMPUTE];
    const fc_fsdp_unit_options *root = &fsdp->units->options;
    size_t bytes = sizeof(double) * FC_POWER_SUMS;
    double sum = 0;
    FC_TRY(fc_pool_take(&fsdp->pool, bytes, compute, &n->device_sums, err));
    FC_TRY(fsdp->device->zero(fsdp->device, n->device_sums->memory, bytes, compute, err));
    n->host_sums = calloc(FC_POWER_SUMS, sizeof *n->host_sums);
    FC_NEED(n->host_sums, err, "a gradient norm");
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = u->handles; h; h = h->next) {
            FC_TRY(h->has_sharded_grad ? add_gradient(n, h, err) : FC_OK);
        }
    }
    FC_TRY(local_sum(n, &sum, err));
    FC_TRY(join_ranks(n, root->shard, &sum, err));
    if (root->replicate) {
        FC_TRY(join_ranks(n, root->replicate, &sum, err));
    }
    *out = isinf(n->p) ? sum : n->p == 2 ? sqrt(sum) : pow(sum, 1 / n->p);
    return FC_OK;
}

/* Returns a float32 number rounded to `dtype`. */
static double rounded(float x, fc_dtype dtype) {
    unsigned char bits[sizeof(double)];
    float back;
    if (fc_dtype_size(dtype) >= sizeof x) {
        return x;
    }
    fc_cast(FC_F32, &x, dtype, bits, 1);
    fc_cast(dtype, bits, FC_F32, &back, 1);
    return back;
}

/* Multiplies all gradients by `factor`, rounded to their dtype. */
static fc_code scale(fc_fsdp *fsdp, float factor, fc_error *err) {
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = u->handles; h; h = h->next) {
            const fc_array *grad = &h->sharded_grad;
            fc_device *device = grad->device;
            fc_stream *stream = device == fsdp->device ? fsdp->streams[FC_STREAM_COMPUTE] : NULL;
            if (h->has_sharded_grad) {
                FC_TRY(device->multiply(device, grad->dtype, grad->data, rounded(factor, grad->dtype),
                                        (size_t)grad->sizes[0], stream, err));
            }
        }
    }
    return FC_OK;
}

static fc_code clip(norm *n, double max_norm, double *total, fc_error *err) {
    double exact = 0;
    FC_TRY(measure(n, &exact, err));
    /* The arithmetic of max_norm / (total_norm + 1e-6) on a float32 tensor. */
    float norm32 = (float)exact, factor = 1.0f / (norm32 + 1e-6f) * (float)max_norm;
    if (!(factor >= 1)) { /* also if it is NaN */
        FC_TRY(scale(n->fsdp, factor, err));
    }
    *total = rounded(norm32, n->has_dtype ? n->dtype : FC_F32);
    return FC_OK;
}

fc_code fc_fsdp_clip_grad_norm(fc_fsdp *fsdp, double max_norm, double norm_type, double *total_norm, fc_error *err) {
    norm n = {.fsdp = fsdp, .p = norm_type};
    FC_TRY(check_norm(fsdp, norm_type, err));
    fc_code rc = clip(&n, max_norm, total_norm, err);
    fc_code given =
        fc_pool_give(&fsdp->pool, &n.device_sums, fsdp->streams[FC_STREAM_COMPUTE], rc == FC_OK ? err : NULL);
    free(n.host_sums);
    return fc_fsdp_note(fsdp, rc == FC_OK ? given : rc);
}
