/*
 * The FSDP step with NCCL and one rank per GPU (at most 8). The shards after some steps equal those of the same steps
 * on the processor, with prefetching, mixed precision, accumulation, offloading, and groups of their own for some
 * units. With three ranks or more, NCCL may round a sum after each rank, and the processor rounds it once; then they
 * equal within that rounding.
 */
#include "gpu.h"

#include "fsdp_model.h"

#include <math.h>
#include <string.h>

enum { MOST = 8, LARGEST = 2 * MODEL_NUMEL };

typedef struct setting {
    const char *name;
    fc_fsdp_options options;
    fc_fsdp_unit_options unit;
    const char *steps; /* s: synchronise and optimize, n: accumulate */
    double clip;       /* the largest norm of the gradients; 0: any */
    bool groups;       /* whether unit 1 has a group of its own, and unit 2 is hybrid */
} setting;

typedef struct outcome {
    float shards[MOST][MODEL_UNITS][LARGEST];
} outcome;

typedef struct job {
    const setting *setting;
    outcome *out;
    bool on_gpu;
} job;

/* Splits an even number of ranks into two halves. With an odd number, the half is all of them. */
static fc_code split(fc_comm *comm, fc_comm **half, fc_comm **across, fc_error *err) {
    int64_t halves = comm->size % 2 == 0 ? 2 : 1;
    fc_mesh mesh = {.ndim = 2, .sizes = {halves, comm->size / halves}};
    fc_code rc = fc_comm_split_mesh(comm, &mesh, 1, half, err);
    return rc == FC_OK ? fc_comm_split_mesh(comm, &mesh, 0, across, err) : rc;
}

static fc_code run_steps(fc_comm *comm, const setting *s, outcome *out, fc_error *err) {
    fsdp_model m = {0};
    fc_device *device = comm->device;
    fc_comm *half = NULL, *across = NULL;
    double norm;
    fc_fsdp_unit_options units[MODEL_UNITS] = {s->unit, s->unit, s->unit, s->unit};
    fc_code rc = s->groups ? split(comm, &half, &across, err) : FC_OK;
    units[1].shard = units[2].shard = half;
    units[2].replicate = across;
    units[2].strategy = across ? FC_HYBRID_SHARD : units[2].strategy;
    rc = rc == FC_OK ? model_open_each(&m, comm, NULL, comm->rank, s->options, units, err) : rc;
    for (const char *step = s->steps; rc == FC_OK && *step; step++) {
        fc_fsdp_set_sync_gradients(m.fsdp, *step == 's');
        rc = model_forward(&m, NULL, err);
        rc = rc == FC_OK ? model_backward(&m, NULL, err) : rc;
        if (rc == FC_OK && *step == 's' && s->clip > 0) {
            rc = fc_fsdp_clip_grad_norm(m.fsdp, s->clip, 2, &norm, err);
        }
        rc = rc == FC_OK && *step == 's' ? model_optimize(&m, err) : rc;
    }
    for (int i = 0; rc == FC_OK && i < MODEL_UNITS; i++) {
        const fc_array *shard = fc_fsdp_local_shard(m.handles[i]);
        rc = device->copy(device, out->shards[comm->rank][i], shard->data, fc_array_bytes(shard), NULL, err);
    }
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    model_close(&m);
    if (half) {
        half->free(half);
    }
    if (across) {
        across->free(across);
    }
    return rc;
}

static fc_code on_rank(fc_comm *comm, void *context, fc_error *err) {
    const job *j = context;
    fc_device *gpu = NULL;
    fc_comm *nccl = NULL;
    if (!j->on_gpu) {
        return run_steps(comm, j->setting, j->out, err);
    }
    fc_code rc = fc_device_cuda(comm->rank, &gpu, err);
    rc = fc_comm_agree(comm, rc, err);
    rc = rc == FC_OK ? fc_comm_nccl(comm, gpu, &nccl, err) : rc;
    rc = rc == FC_OK ? run_steps(nccl, j->setting, j->out, err) : rc;
    if (nccl) {
        nccl->free(nccl);
    }
    if (gpu) {
        gpu->destroy(gpu);
    }
    return rc;
}

/* Returns the rounding of the dtype in which the setting reduces gradients, relative to the largest number. */
static double rounding_of(const setting *s) {
    fc_dtype dtype = s->unit.has_reduce_dtype  ? s->unit.reduce_dtype
                     : s->unit.has_param_dtype ? s->unit.param_dtype
                                               : FC_F32;
    return dtype == FC_BF16 ? 0x1p-8 : dtype == FC_F16 ? 0x1p-11 : 0x1p-24;
}

static bool are_close(const outcome *a, const outcome *b, double tolerance) {
    for (int i = 0; i < MODEL_UNITS; i++) {
        double largest = 0;
        for (int r = 0; r < MOST; r++) {
            for (int k = 0; k < LARGEST; k++) {
                largest = fmax(largest, fabs((double)a->shards[r][i][k]));
            }
        }
        for (int r = 0; r < MOST; r++) {
            for (int k = 0; k < LARGEST; k++) {
                if (!(fabs((double)a->shards[r][i][k] - (double)b->shards[r][i][k]) <= tolerance * largest)) {
                    return false;
                }
            }
        }
    }
    return true;
}

int main(void) {
    static const setting settings[] = {
        {"plain", {0}, {0}, "sss"},
        {"prefetch",
         {.backward_prefetch = FC_BACKWARD_PREFETCH_PRE, .forward_prefetch = true, .use_orig_params = true},
         {0},
         "sss"},
        {"bf16",
         {.backward_prefetch = FC_BACKWARD_PREFETCH_POST},
         {.has_param_dtype = true, .param_dtype = FC_BF16, .has_reduce_dtype = true, .reduce_dtype = FC_F32},
         "nsns"},
        {"offload", {0}, {.offload_params = true, .has_param_dtype = true, .param_dtype = FC_F16}, "sns"},
        {"kept", {0}, {.strategy = FC_SHARD_GRAD_OP}, "ss"},
        {"whole", {0}, {.strategy = FC_NO_SHARD, .has_param_dtype = true, .param_dtype = FC_BF16}, "ss"},
        {"groups", {.forward_prefetch = true}, {0}, "sns", .groups = true},
        {"registered", {.register_buffers = true, .forward_prefetch = true}, {0}, "sns", .groups = true},
        {"clipped", {0}, {0}, "ss", .clip = 8},
        {"clipped groups", {0}, {.offload_params = true}, "ss", .clip = 0.5, .groups = true},
    };
    static outcome cpu, gpu;
    fc_error err = {FC_OK, ""};
    int ranks = gpu_count(MOST), failures = 0;
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        job j = {&settings[i], &cpu, false};
        memset(&cpu, 0, sizeof cpu);
        memset(&gpu, 0, sizeof gpu);
        must(fc_device_run_local(ranks, on_rank, &j, &err), &err, settings[i].name);
        j.out = &gpu;
        j.on_gpu = true;
        must(fc_device_run_local(ranks, on_rank, &j, &err), &err, settings[i].name);
        bool same = memcmp(&cpu, &gpu, sizeof cpu) == 0;
        size_t steps = strlen(settings[i].steps);
        bool close = ranks > 2 && are_close(&cpu, &gpu, rounding_of(&settings[i]) * ranks * (double)steps);
        printf("%s on %d ranks: %s\n", settings[i].name, ranks, same ? "the same" : close ? "close" : "DIFFERENT");
        failures += !same && !close;
    }
    return failures > 0;
}
