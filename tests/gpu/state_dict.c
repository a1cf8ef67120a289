/*
 * State dicts of the FSDP step with one rank per GPU (at most 8): a step trains while its state is saved in the
 * background, and the file has the state of before. A second save waits. The state is loaded again.
 */
#include "gpu.h"

#include "fsdpckpt/try.h"
#include "state_model.h"

#include <string.h>
#include <unistd.h>

enum { MOST = 8 };

/* HDF5 is opened by a process that is forked. With AddressSanitizer of gcc 12, the child hangs if another rank, a
 * thread, is allocating memory at that moment. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FULL_FORMAT "dcp"
#else
#define FULL_FORMAT "h5"
#endif

typedef struct job {
    const char *directory;
    fc_state_dict_type type;
    const char *format;
    state_model_options model;
} job;

static fc_code save_while_training(state_model *m, const job *j, fc_comm *ranks, const char *path, fc_error *err) {
    const fc_fsdp_save_options options = {.format = fc_format_find(j->format), .force = true};
    fc_fsdp_saver *saver;
    fc_code rc;
    FC_TRY(fc_fsdp_saver_new(ranks, &saver, err));
    for (int i = 0; i < 3; i++) { /* each save waits for the last; that after no step is the one to load */
        FC_TRY_GOTO(i < 2 ? fc_fsdp_save_start(saver, &m->state, j->type, path, &options, err) : FC_OK, rc, out);
        FC_TRY_GOTO(state_model_step(m, err), rc, out);
    }
    FC_TRY_GOTO(fc_fsdp_save_wait(saver, err), rc, out);
    rc = fc_fsdp_save_is_done(saver) ? FC_OK : fc_fail(err, FC_EIO, "a save runs that was waited for");
out:
    fc_fsdp_saver_free(saver);
    return rc;
}

static fc_code load(state_model *m, const job *j, const char *path, int steps, fc_error *err) {
    fc_checkpoint *from = NULL;
    FC_TRY(state_model_clear(m, err));
    FC_TRY(fc_checkpoint_open(path, NULL, &from, err));
    fc_code rc = fc_fsdp_load(&m->state, j->type, from, err);
    fc_checkpoint_close(from);
    return rc == FC_OK ? state_model_check(m, steps, err) : rc;
}

static fc_code run(fc_comm *nccl, const job *j, fc_comm *ranks, fc_error *err) {
    state_model m;
    char path[256];
    snprintf(path, sizeof path, "%s/state%s", j->directory, strcmp(j->format, "h5") == 0 ? ".h5" : "");
    fc_code rc = state_model_open(&m, nccl, &j->model, err);
    rc = rc == FC_OK ? save_while_training(&m, j, ranks, path, err) : rc;
    rc = rc == FC_OK ? state_model_check(&m, 3, err) : rc;
    rc = rc == FC_OK ? load(&m, j, path, 1, err) : rc;
    state_model_close(&m);
    return rc;
}

static fc_code on_rank(fc_comm *ranks, void *context, fc_error *err) {
    fc_device *gpu = NULL;
    fc_comm *nccl = NULL;
    fc_code rc = fc_comm_agree(ranks, fc_device_cuda(ranks->rank, &gpu, err), err);
    rc = rc == FC_OK ? fc_comm_nccl(ranks, gpu, &nccl, err) : rc;
    rc = rc == FC_OK ? run(nccl, context, ranks, err) : rc;
    if (nccl) {
        nccl->free(nccl);
    }
    if (gpu) {
        gpu->destroy(gpu);
    }
    return rc;
}

int main(void) {
    char directory[] = "/tmp/fsdpckpt-state-XXXXXX", command[128];
    const job jobs[] = {
        {directory, FC_SHARDED_STATE_DICT, "dcp", {.fsdp = {.forward_prefetch = true}}},
        {directory, FC_FULL_STATE_DICT, FULL_FORMAT, {.unit = {.offload_params = true}}},
        {directory, FC_FULL_STATE_DICT, "dcp", {.unit = {.strategy = FC_NO_SHARD}}},
        {directory, FC_LOCAL_STATE_DICT, "dcp", {.unit = {.strategy = FC_SHARD_GRAD_OP}, .one_handle = true}},
    };
    fc_error err = {FC_OK, ""};
    const int ranks = gpu_count(MOST);
    must_be(mkdtemp(directory) != NULL, "mkdtemp");
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < sizeof jobs / sizeof *jobs; i++) {
        job j = jobs[i];
        rc = fc_device_run_local(ranks, on_rank, &j, &err);
        printf("%zu on %d ranks: %s\n", i, ranks, rc == FC_OK ? "equal" : err.message);
        snprintf(command, sizeof command, "rm -rf %s/*", directory);
        must_be(system(command) == 0, command);
    }
    rmdir(directory);
    return rc != FC_OK;
}
