/*
 * NCCL with one thread per GPU of this machine (at most 8), started by the backend "local" and by a file. Compares each
 * collective with its definition, on numbers whose sums are exact.
 */
#include "gpu.h"

#include <string.h>
#include <unistd.h>

enum { MOST = 8, N = 10007 };

/* Copies numbers between the GPU and the host. */
static fc_code put(fc_device *gpu, float *there, const float *here, size_t count, fc_error *err) {
    return gpu->copy(gpu, there, here, count * sizeof *here, NULL, err);
}

static fc_code get(fc_device *gpu, float *here, const float *there, size_t count, fc_error *err) {
    fc_code rc = gpu->copy(gpu, here, there, count * sizeof *here, NULL, err);
    return rc == FC_OK ? gpu->synchronize(gpu, NULL, err) : rc;
}

static float number(int rank, size_t i) {
    return (float)((int)(i % 100) + rank);
}

static fc_code expect(const char *what, float got, float wanted, fc_error *err) {
    return got == wanted ? FC_OK : fc_fail(err, FC_EFOUND, "%s: %g instead of %g", what, (double)got, (double)wanted);
}

/* All of them with buffers `here` (host) and `a`, `b` (GPU), each of MOST × N numbers. */
static fc_code gathers(fc_comm *c, float *here, float *a, float *b, fc_error *err) {
    size_t counts[MOST], displs[MOST], all = 0;
    for (size_t i = 0; i < N; i++) {
        here[i] = number(c->rank, i);
    }
    fc_code rc = put(c->device, a, here, N, err);
    rc = rc == FC_OK ? fc_all_gather(c, a, b, N * sizeof *a, NULL, err) : rc;
    rc = rc == FC_OK ? get(c->device, here, b, N * (size_t)c->size, err) : rc;
    for (int r = 0; r < c->size; r++) {
        for (size_t i = 0; rc == FC_OK && i < N; i++) {
            rc = expect("all_gather", here[N * (size_t)r + i], number(r, i), err);
        }
        counts[r] = (r % 2 ? 0 : (size_t)(100 + r)) * sizeof *a;
        displs[r] = all;
        all += counts[r];
    }
    rc = rc == FC_OK ? fc_all_gather_v(c, a, b, counts, displs, NULL, err) : rc;
    rc = rc == FC_OK ? get(c->device, here, b, all / sizeof *a, err) : rc;
    for (int r = 0; r < c->size; r++) {
        for (size_t i = 0; rc == FC_OK && i < counts[r] / sizeof *a; i++) {
            rc = expect("all_gather_v", here[displs[r] / sizeof *a + i], number(r, i), err);
        }
    }
    return rc;
}

static fc_code reductions(fc_comm *c, float *here, float *a, float *b, fc_error *err) {
    float ranks = (float)(c->size * (c->size - 1) / 2);
    for (size_t i = 0; i < N * (size_t)c->size; i++) {
        here[i] = number(c->rank, i);
    }
    fc_code rc = put(c->device, a, here, N * (size_t)c->size, err);
    rc = rc == FC_OK ? fc_reduce_scatter(c, a, b, N, FC_F32, FC_REDUCE_SUM, NULL, err) : rc;
    rc = rc == FC_OK ? get(c->device, here, b, N, err) : rc;
    for (size_t i = 0; rc == FC_OK && i < N; i++) {
        float base = (float)((i + N * (size_t)c->rank) % 100);
        rc = expect("reduce_scatter", here[i], base * (float)c->size + ranks, err);
    }
    rc = rc == FC_OK ? fc_all_reduce(c, a, N, FC_F32, FC_REDUCE_MAX, NULL, err) : rc;
    rc = rc == FC_OK ? get(c->device, here, a, N, err) : rc;
    for (size_t i = 0; rc == FC_OK && i < N; i++) {
        rc = expect("all_reduce", here[i], number(c->size - 1, i), err);
    }
    if (rc == FC_OK && (fc_all_reduce(c, a, N, FC_I16, FC_REDUCE_SUM, NULL, NULL) != FC_EUNSUPPORTED ||
                        fc_all_reduce(c, a, N, FC_U64, FC_REDUCE_XOR, NULL, NULL) != FC_EUNSUPPORTED)) {
        rc = fc_fail(err, FC_EFOUND, "what NCCL cannot reduce was not refused");
    }
    return rc;
}

static fc_code others(fc_comm *c, float *here, float *a, fc_error *err) {
    fc_comm *half = NULL;
    *here = number(c->rank, 0);
    fc_code rc = put(c->device, a, here, 1, err);
    rc = rc == FC_OK ? fc_broadcast(c, a, sizeof *a, c->size - 1, NULL, err) : rc;
    rc = rc == FC_OK ? get(c->device, here, a, 1, err) : rc;
    rc = rc == FC_OK ? expect("broadcast", *here, number(c->size - 1, 0), err) : rc;
    rc = rc == FC_OK ? c->barrier(c, err) : rc;
    rc = rc == FC_OK ? c->split(c, -(c->rank % 2), &half, err) : rc;
    if (rc == FC_OK) {
        rc = half->size == (c->size + 1 - c->rank % 2) / 2 && half->rank == c->rank / 2
                 ? half->barrier(half, err)
                 : fc_fail(err, FC_EFOUND, "split: rank %d of %d", half->rank, half->size);
        half->free(half);
    }
    fc_error mine = {FC_OK, ""};
    if (rc == FC_OK && c->size > 1) {
        fc_code own = c->rank == c->size - 1 ? fc_fail(&mine, FC_EIO, "no luck") : FC_OK;
        rc = fc_comm_agree(c, own, &mine) == FC_EIO && strstr(mine.message, "no luck")
                 ? FC_OK
                 : fc_fail(err, FC_EFOUND, "agree: %s", mine.message);
    }
    return rc;
}

static fc_code run_cases(fc_comm *c, fc_error *err) {
    float *here = malloc(MOST * N * sizeof *here);
    void *a = NULL, *b = NULL;
    fc_code rc = here ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory");
    rc = rc == FC_OK ? c->device->alloc(c->device, MOST * N * sizeof *here, &a, err) : rc;
    rc = rc == FC_OK ? c->device->alloc(c->device, MOST * N * sizeof *here, &b, err) : rc;
    rc = rc == FC_OK ? gathers(c, here, a, b, err) : rc;
    rc = rc == FC_OK ? reductions(c, here, a, b, err) : rc;
    rc = rc == FC_OK ? others(c, here, a, err) : rc;
    c->device->release(c->device, a);
    c->device->release(c->device, b);
    free(here);
    return rc;
}

static fc_code work(fc_comm *bootstrap, void *context, fc_error *err) {
    const char *path = context;
    fc_device *gpu;
    fc_comm *c = NULL;
    fc_code rc = fc_device_cuda(bootstrap->rank, &gpu, err);
    if (rc != FC_OK) {
        return rc;
    }
    rc = path ? fc_comm_nccl_file(path, bootstrap->rank, bootstrap->size, 60, gpu, &c, err)
              : fc_comm_nccl(bootstrap, gpu, &c, err);
    if (rc == FC_OK) {
        rc = run_cases(c, err);
        c->free(c);
    }
    gpu->destroy(gpu);
    return rc;
}

int main(void) {
    fc_error err = {FC_OK, ""};
    int gpus = 1;
    fc_device *more = gpu_open(0);
    more->destroy(more);
    while (gpus < MOST && fc_device_cuda(gpus, &more, NULL) == FC_OK) {
        more->destroy(more);
        gpus++;
    }
    char path[64];
    snprintf(path, sizeof path, "/tmp/fsdpckpt-nccl-%ld", (long)getpid());
    must(fc_device_run_local(gpus, work, NULL, &err), &err, "bootstrapped by threads");
    must(fc_device_run_local(gpus, work, path, &err), &err, "bootstrapped by a file");
    printf("good with %d GPUs\n", gpus);
    return 0;
}
