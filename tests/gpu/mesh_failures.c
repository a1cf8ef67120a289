/*
 * Failures while two communicators have collectives in flight, on a mesh of 2×2 emulated GPUs. A rank is lost while
 * collectives of both directions wait, one behind the other or on streams of their own. Then every call of the CUDA
 * runtime and of NCCL fails once, on each rank in turn, in an HSDP step with units that have ranks of their own and a
 * gather of a tensor that is sharded in both directions. Every rank must return an error. NCCL's abort waits (see
 * emulate/communicators.c), and the emulator ends the test ten seconds after it waits in vain.
 */
#include "fail_call.h"

#include "fsdp_model.h"
#include "fsdpckpt/try.h"

#include <fsdpckpt/gather/dtensor_data.h>

#include <string.h>
#include <unistd.h>

enum { SIDE = 2, RANKS = SIDE * SIDE, FLOATS = 64 };

typedef struct job {
    fc_device *gpu;
    fc_comm *world;
    fc_device_mesh mesh;
    fsdp_model model;
} job;

static fc_code join(job *j, fc_comm *bootstrap, fc_error *err) {
    const fc_mesh sizes = {.ndim = 2, .sizes = {SIDE, SIDE}};
    FC_TRY(fc_comm_agree(bootstrap, fc_device_cuda(bootstrap->rank, &j->gpu, err), err));
    FC_TRY(fc_comm_nccl(bootstrap, j->gpu, &j->world, err));
    FC_TRY(fc_device_mesh_new(j->world, &sizes, &j->mesh, err));
    return j->world->barrier(j->world, err);
}

static void leave(job *j, fc_code rc) {
    if (rc != FC_OK && j->world) {
        fc_comm_abort(j->world);
    }
    model_close(&j->model);
    fc_device_mesh_free(&j->mesh);
    if (j->world) {
        j->world->free(j->world);
    }
    if (j->gpu) {
        j->gpu->destroy(j->gpu);
    }
}

/* ---- a rank is lost ---- */

typedef struct loss {
    int lost, first; /* the rank, and the direction whose collective comes first */
    bool two_streams;
} loss;

/* Gives a collective of each direction to the GPU. With two streams, that of the rank opposite to the lost one may end.
 */
static fc_code reduce_both(job *j, const loss *l, float *numbers, fc_stream *other, fc_error *err) {
    fc_comm *first = j->mesh.groups[l->first], *second = j->mesh.groups[1 - l->first];
    fc_stream *stream = l->two_streams ? other : NULL;
    FC_TRY(j->gpu->zero(j->gpu, numbers, 2 * FLOATS * sizeof *numbers, NULL, err));
    FC_TRY(fc_all_reduce(first, numbers, FLOATS, FC_F32, FC_REDUCE_SUM, NULL, err));
    FC_TRY(fc_all_reduce(second, numbers + FLOATS, FLOATS, FC_F32, FC_REDUCE_SUM, stream, err));
    FC_TRY(fc_comm_wait(second, stream, err));
    FC_TRY(fc_comm_wait(first, NULL, err));
    return j->world->barrier(j->world, err);
}

/* Every communicator gives the error of the one that failed. */
static void check_broken(const job *j) {
    fc_comm *const comms[] = {j->world, j->mesh.groups[0], j->mesh.groups[1]};
    fc_error errors[3];
    for (int i = 0; i < 3; i++) {
        must_be(comms[i]->broken && comms[i]->barrier(comms[i], &errors[i]) == FC_EIO, "a communicator still works");
        must_be(strstr(errors[i].message, "aborted after an earlier error: ") != NULL, errors[i].message);
        must_be(strcmp(errors[i].message, errors[0].message) == 0, "the communicators give different errors");
    }
}

/* A rank may notice the loss in the barrier: the lost one can abort before the others have left it. */
static fc_code lose_rank(fc_comm *bootstrap, void *context, fc_error *err) {
    const loss *l = context;
    job j = {0};
    void *numbers = NULL;
    fc_stream *other = NULL;
    fc_code rc;
    FC_TRY_GOTO(join(&j, bootstrap, err), rc, out);
    FC_TRY_GOTO(j.gpu->alloc(j.gpu, 2 * FLOATS * sizeof(float), &numbers, err), rc, out);
    FC_TRY_GOTO(j.gpu->stream_new(j.gpu, &other, err), rc, out);
    FC_TRY_GOTO(j.world->barrier(j.world, err), rc, out);
    if (j.world->rank == l->lost) {
        fc_comm_abort(j.world);
        rc = FC_EIO;
    } else {
        rc = reduce_both(&j, l, numbers, other, err);
        must_be(rc != FC_OK, "a rank does not notice the loss of another");
    }
out:
    must_be(other != NULL, err->message);
    check_broken(&j);
    j.gpu->release(j.gpu, numbers);
    j.gpu->stream_free(j.gpu, other);
    leave(&j, FC_EIO);
    return rc;
}

static void lose_each_rank(void) {
    emulated_fail(0, 0);
    for (int i = 0; i < RANKS * 4; i++) {
        loss l = {.lost = i % RANKS, .first = i / RANKS % 2, .two_streams = i / RANKS / 2 == 1};
        alarm(MINUTE);
        must_be(fc_device_run_local(RANKS, lose_rank, &l, NULL) != FC_OK, "the loss of a rank is no error");
        alarm(0);
    }
}

/* ---- every call fails ---- */

static fc_code step(job *j, fc_error *err) {
    fc_comm *const *groups = j->mesh.groups;
    const fc_fsdp_unit_options hybrid = {.strategy = FC_HYBRID_SHARD, .has_param_dtype = true, .param_dtype = FC_BF16};
    fc_fsdp_unit_options units[MODEL_UNITS] = {hybrid, hybrid, hybrid, hybrid};
    units[2].strategy = FC_FULL_SHARD;
    units[2].shard = j->world;
    units[3].shard = groups[0];
    units[3].replicate = groups[1];
    FC_TRY(model_open_each(&j->model, groups[1], groups[0], j->world->rank, (fc_fsdp_options){0}, units, err));
    FC_TRY(model_forward(&j->model, NULL, err));
    return model_backward(&j->model, NULL, err);
}

static fc_code gather(job *j, fc_error *err) {
    const fc_placement placements[] = {{FC_SHARD, 0, 0}, {FC_SHARD, 1, 0}};
    const int64_t shape[] = {2 * SIDE, 3 * SIDE}, local[] = {2, 3};
    fc_array mine = {0}, all = {0};
    fc_fsdp_tensor tensor;
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(j->gpu, FC_F32, 2, local, &mine, err), rc, out);
    FC_TRY_GOTO(j->gpu->zero(j->gpu, mine.data, fc_array_bytes(&mine), NULL, err), rc, out);
    FC_TRY_GOTO(fc_dtensor_from_local(&mine, &j->mesh, placements, 2, shape, &tensor, err), rc, out);
    FC_TRY_GOTO(fc_all_gather_dtensor(&tensor, &j->mesh, NULL, &all, err), rc, out);
    rc = fc_comm_wait(j->world, NULL, err);
out:
    if (rc != FC_OK) {
        fc_comm_abort(j->world);
    }
    fc_array_free(&mine);
    fc_array_free(&all);
    return rc;
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

int main(void) {
    long calls = 0;
    lose_each_rank();
    must_be(!fail_call(work, RANKS, 0, 0), "a call failed that should not");
    while (fail_call(work, RANKS, (int)(calls % RANKS), calls + 1)) {
        calls++;
    }
    printf("%ld calls failed, and every rank noticed\n", calls);
    return calls < 100;
}
