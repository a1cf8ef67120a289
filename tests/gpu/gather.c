/*
 * fc_all_gather_dtensors on emulated GPUs: tensors whose rows or columns are shared out evenly, nearly evenly or to few
 * of the ranks are gathered as a list and one by one. A list takes two collectives: the agreement, and the group.
 */
#include "emulate/emulate.h"
#include "gpu.h"

#include <fsdpckpt/gather/dtensor_data.h>

enum { TENSORS = 8, MOST = 512 };

typedef struct job {
    fc_comm *bootstrap, *world;
    fc_device *gpu;
    fc_device_mesh mesh;
    fc_fsdp_tensor shards[TENSORS];
} job;

/* The sizes of a tensor and the dimension that is sharded, for `n` ranks. */
static int sizes_of(int i, int n, int64_t *sizes) {
    const int64_t all[TENSORS][3] = {{2 * n, 3, 0}, {3 * n - 1, 2, 0}, {5, 3, 0}, {1, 4, 0},
                                     {0, 4, 0},     {4, 2 * n, 1},     {3, 5, 1}, {2, 3 * n - 1, 1}};
    sizes[0] = all[i][0];
    sizes[1] = all[i][1];
    return (int)all[i][2];
}

/* Shards a tensor whose elements are their own indices. */
static fc_code make_shard(job *j, int i, fc_error *err) {
    int64_t sizes[2], values[MOST];
    fc_placement placements[] = {{FC_SHARD, sizes_of(i, j->world->size, sizes), 0}, {FC_REPLICATE, 0, 0}};
    const fc_placement replicate[] = {{FC_REPLICATE, 0, 0}, {FC_REPLICATE, 0, 0}};
    fc_array whole = {0};
    fc_fsdp_tensor tensor;
    for (int64_t k = 0; k < MOST; k++) {
        values[k] = k;
    }
    fc_code rc = fc_array_new(j->gpu, FC_I64, 2, sizes, &whole, err);
    rc = rc == FC_OK ? j->gpu->copy(j->gpu, whole.data, values, fc_array_bytes(&whole), NULL, err) : rc;
    rc = rc == FC_OK ? fc_dtensor_from_local(&whole, &j->mesh, replicate, 2, sizes, &tensor, err) : rc;
    rc = rc == FC_OK ? fc_redistribute(&tensor, placements, NULL, &j->shards[i], err) : rc;
    fc_array_free(&whole);
    return rc;
}

static fc_code check(job *j, int i, fc_array *got, fc_error *err) {
    int64_t sizes[2], values[MOST];
    sizes_of(i, j->world->size, sizes);
    fc_code rc = j->gpu->copy(j->gpu, values, got->data, fc_array_bytes(got), NULL, err);
    rc = rc == FC_OK ? fc_comm_wait(j->world, NULL, err) : rc;
    for (int64_t k = 0; rc == FC_OK && k < sizes[0] * sizes[1]; k++) {
        if (values[k] != k) {
            rc = fc_fail(err, FC_EFOUND, "tensor %d: element %lld is that of %lld", i, (long long)k,
                         (long long)values[k]);
        }
    }
    if (rc == FC_OK && (got->sizes[0] != sizes[0] || got->sizes[1] != sizes[1])) {
        rc = fc_fail(err, FC_EFOUND, "tensor %d has other sizes", i);
    }
    fc_array_free(got);
    return rc;
}

static fc_code gather_list(job *j, fc_error *err) {
    fc_array got[TENSORS] = {{0}};
    long before = emulated_collectives();
    fc_code rc = j->bootstrap->barrier(j->bootstrap, err);
    rc = rc == FC_OK ? fc_all_gather_dtensors(j->shards, TENSORS, &j->mesh, NULL, got, err) : rc;
    rc = rc == FC_OK ? j->bootstrap->barrier(j->bootstrap, err) : rc;
    long made = emulated_collectives() - before;
    rc = rc == FC_OK ? j->bootstrap->barrier(j->bootstrap, err) : rc;
    if (rc == FC_OK && made != 2) {
        rc = fc_fail(err, FC_EFOUND, "a list took %ld collectives", made);
    }
    for (int i = 0; rc == FC_OK && i < TENSORS; i++) {
        rc = check(j, i, &got[i], err);
    }
    return rc;
}

static fc_code gather(job *j, fc_error *err) {
    const fc_mesh sizes = {.ndim = 2, .sizes = {j->world->size, 1}};
    fc_code rc = fc_device_mesh_new(j->world, &sizes, &j->mesh, err);
    for (int i = 0; rc == FC_OK && i < TENSORS; i++) {
        rc = make_shard(j, i, err);
    }
    rc = rc == FC_OK ? gather_list(j, err) : rc;
    for (int i = 0; rc == FC_OK && i < TENSORS; i++) {
        fc_array got = {0};
        rc = fc_all_gather_dtensor(&j->shards[i], &j->mesh, NULL, &got, err);
        rc = rc == FC_OK ? check(j, i, &got, err) : rc;
    }
    for (int i = 0; i < TENSORS; i++) {
        fc_array_free(&j->shards[i].local);
    }
    fc_device_mesh_free(&j->mesh);
    return rc;
}

static fc_code work(fc_comm *bootstrap, void *context, fc_error *err) {
    job j = {.bootstrap = bootstrap};
    (void)context;
    fc_code rc = fc_device_cuda(bootstrap->rank, &j.gpu, err);
    rc = rc == FC_OK ? fc_comm_nccl(bootstrap, j.gpu, &j.world, err) : rc;
    rc = rc == FC_OK ? gather(&j, err) : rc;
    if (j.world) {
        if (rc != FC_OK) {
            fc_comm_abort(j.world);
        }
        j.world->free(j.world);
    }
    if (j.gpu) {
        j.gpu->destroy(j.gpu);
    }
    return rc;
}

int main(void) {
    fc_error err = {FC_OK, ""};
    int gpus = 0;
    must_be(cudaGetDeviceCount(&gpus) == cudaSuccess, "no GPUs");
    must(fc_device_run_local(gpus, work, NULL, &err), &err, "gather");
    printf("good on %d GPUs\n", gpus);
    return 0;
}
