/*
 * Every call of the CUDA runtime and of NCCL fails once, on each of two emulated GPUs, in a job that makes
 * communicators, splits them, takes an FSDP step and gathers a tensor. Every rank must return an error, and none may
 * wait for ever: the test ends after a minute without progress.
 *
 * Before that, it shows that the GPU and the last error of the caller's thread stay as they were.
 */
#include "fail_call.h"

#include "fsdp_model.h"

#include <string.h>
#include <unistd.h>

enum { RANKS = 2 };

typedef struct job {
    fc_device *gpu;
    fc_comm *world, *shard, *replicate;
    fsdp_model model;
} job;

static fc_code join(job *j, fc_comm *bootstrap, fc_error *err) {
    fc_code rc = fc_comm_agree(bootstrap, fc_device_cuda(bootstrap->rank, &j->gpu, err), err);
    rc = rc == FC_OK ? fc_comm_nccl(bootstrap, j->gpu, &j->world, err) : rc;
    rc = rc == FC_OK ? j->world->split(j->world, 0, &j->shard, err) : rc;
    rc = rc == FC_OK ? j->world->split(j->world, bootstrap->rank, &j->replicate, err) : rc;
    return rc == FC_OK ? j->world->barrier(j->world, err) : rc;
}

static fc_code step(job *j, fc_error *err) {
    fc_fsdp_unit_options unit = {
        .strategy = FC_HYBRID_SHARD, .has_param_dtype = true, .param_dtype = FC_BF16, .offload_params = true};
    fc_code rc = model_open(&j->model, j->shard, j->replicate, j->world->rank,
                            (fc_fsdp_options){.check_order = true, .register_buffers = true}, unit, err);
    rc = rc == FC_OK ? model_forward(&j->model, NULL, err) : rc;
    rc = rc == FC_OK ? model_backward(&j->model, NULL, err) : rc;
    fc_array full = {0};
    rc = rc == FC_OK ? fc_fsdp_summon_full_params(j->model.handles[1], &full, err) : rc;
    fc_array_free(&full);
    return rc;
}

/* Gathers five rows of two ranks, three and two. */
static fc_code gather(job *j, fc_error *err) {
    const fc_mesh sizes = {.ndim = 2, .sizes = {RANKS, 1}};
    const fc_placement placements[] = {{FC_SHARD, 0, 0}, {FC_REPLICATE, 0, 0}};
    const int64_t shape[] = {5, 3}, local[] = {j->world->rank == 0 ? 3 : 2, 3};
    fc_device_mesh mesh = {0};
    fc_array rows = {0}, all = {0};
    fc_fsdp_tensor tensor;
    fc_code rc = fc_device_mesh_new(j->world, &sizes, &mesh, err);
    rc = rc == FC_OK ? fc_array_new(j->gpu, FC_F32, 2, local, &rows, err) : rc;
    rc = rc == FC_OK ? j->gpu->zero(j->gpu, rows.data, fc_array_bytes(&rows), NULL, err) : rc;
    rc = rc == FC_OK ? fc_dtensor_from_local(&rows, &mesh, placements, 2, shape, &tensor, err) : rc;
    rc = rc == FC_OK ? fc_all_gather_dtensor(&tensor, &mesh, NULL, &all, err) : rc;
    if (rc != FC_OK) {
        fc_comm_abort(j->world);
    }
    fc_array_free(&rows);
    fc_array_free(&all);
    fc_device_mesh_free(&mesh);
    return rc;
}

static void leave(job *j, fc_code rc) {
    fc_comm *comms[] = {j->replicate, j->shard, j->world};
    if (rc != FC_OK && j->world) {
        fc_comm_abort(j->world);
    }
    model_close(&j->model);
    for (int i = 0; i < 3; i++) {
        if (comms[i]) {
            comms[i]->free(comms[i]);
        }
    }
    if (j->gpu) {
        j->gpu->destroy(j->gpu);
    }
}

static fc_code work(fc_comm *bootstrap, void *context, fc_error *err) {
    fc_code *outcomes = context;
    job j = {0};
    fc_code rc = join(&j, bootstrap, err);
    rc = rc == FC_OK ? step(&j, err) : rc;
    rc = rc == FC_OK ? gather(&j, err) : rc;
    leave(&j, rc);
    outcomes[bootstrap->rank] = fc_comm_agree(bootstrap, rc, err); /* a rank may fail after the last collective */
    return outcomes[bootstrap->rank];
}

/* Rank 1 makes no more calls, as if its machine were lost. Rank 0 waits for a second. */
static fc_code wait_for_nobody(fc_comm *bootstrap, void *context, fc_error *err) {
    fc_code *outcomes = context;
    job j = {0};
    fc_code rc = join(&j, bootstrap, err);
    if (rc == FC_OK && bootstrap->rank == 0) {
        fc_error own = {FC_OK, ""};
        j.shard->timeout = 1;
        outcomes[0] = j.shard->barrier(j.shard, &own);
        rc = strstr(own.message, "did not answer in time") ? FC_OK : fc_fail(err, FC_EFOUND, "%s", own.message);
    }
    leave(&j, bootstrap->rank == 0 ? FC_EIO : FC_OK);
    return rc;
}

static fc_code join_nobody(fc_error *err) {
    char path[64];
    fc_device *gpu;
    fc_comm *comm = NULL;
    snprintf(path, sizeof path, "/tmp/fsdpckpt-nccl-%ld", (long)getpid());
    fc_code rc = fc_device_cuda(0, &gpu, err);
    rc = rc == FC_OK ? fc_comm_nccl_file(path, 0, 2, 1, gpu, &comm, err) : rc;
    gpu->destroy(gpu);
    return comm || access(path, F_OK) == 0 ? FC_EFOUND : rc;
}

static void waits_no_longer_than_asked(void) {
    fc_code outcomes[RANKS] = {FC_OK};
    fc_error err = {FC_OK, ""};
    emulated_fail(0, 0);
    alarm(MINUTE);
    must_be(join_nobody(&err) == FC_EIO && strstr(err.message, "did not answer in time"), err.message);
    fc_device_run_local(RANKS, wait_for_nobody, outcomes, &err);
    alarm(0);
    must_be(outcomes[0] == FC_EIO, err.message);
}

/* The caller uses GPU 1, and has had an error that it has not looked at yet. */
static void leaves_no_trace(void) {
    fc_error err = {FC_OK, ""};
    fc_device *gpu;
    void *memory;
    int current = -1;
    must_be(cudaSetDevice(1) == cudaSuccess && cudaSetDevice(99) != cudaSuccess, "GPU 1 cannot be chosen");
    must(fc_device_cuda(0, &gpu, &err), &err, "device");
    must(gpu->alloc(gpu, 64, &memory, &err), &err, "alloc");
    must(gpu->zero(gpu, memory, 64, NULL, &err), &err, "zero");
    must(gpu->add(gpu, FC_F32, memory, memory, 16, NULL, &err), &err, "an older error of the caller is reported");
    must(gpu->synchronize(gpu, NULL, &err), &err, "synchronize");
    gpu->release(gpu, memory);
    must_be(cudaGetLastError() == cudaErrorInvalidDevice, "the error of the caller is lost");
    emulated_fail(0, 1);
    must_be(gpu->alloc(gpu, 64, &memory, &err) != FC_OK, "cudaSetDevice did not fail");
    emulated_fail(0, 0);
    must_be(cudaGetLastError() == cudaSuccess, "an error that was reported is left for the caller to find");
    gpu->destroy(gpu);
    must_be(cudaGetDevice(&current) == cudaSuccess && current == 1, "the GPU of the caller has changed");
    must_be(cudaSetDevice(0) == cudaSuccess, "GPU 0 cannot be chosen");
}

int main(void) {
    long calls = 0;
    leaves_no_trace();
    waits_no_longer_than_asked();
    must_be(!fail_call(work, RANKS, 0, 0), "a call failed that should not");
    must_be(emulated_registered_gathers() > 0, "no all-gather used registered memory");
    for (int gpu = 0; gpu < RANKS; gpu++) {
        for (long call = 1; fail_call(work, RANKS, gpu, call); call++) {
            calls++;
        }
    }
    printf("%ld calls failed, and every rank noticed\n", calls);
    return 0;
}
