/*
 * Every call of the CUDA runtime and of NCCL fails once, on each of two emulated GPUs, while a state is saved in the
 * background and the step trains. No rank may wait for ever, all notice, and there is a complete target or
 * none: nothing half-written, and no staging directory.
 */
#include "emulate/emulate.h"
#include "gpu.h"

#include "fsdpckpt/try.h"
#include "state_model.h"

#include <dirent.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, MINUTE = 60 };

typedef struct job {
    char directory[64], path[128];
    int gpu; /* where a call fails */
    long call;
    fc_code outcomes[RANKS];
} job;

static fc_code save(const job *j, state_model *m, fc_comm *ranks, fc_error *err) {
    const fc_fsdp_save_options options = {.format = fc_format_find("dcp")};
    fc_fsdp_saver *saver;
    FC_TRY(fc_fsdp_saver_new(ranks, &saver, err));
    fc_code rc = fc_fsdp_save_start(saver, &m->state, FC_SHARDED_STATE_DICT, j->path, &options, err);
    rc = rc == FC_OK ? state_model_step(m, err) : rc;
    rc = rc == FC_OK ? fc_fsdp_save_wait(saver, err) : rc;
    fc_fsdp_saver_free(saver);
    return rc;
}

static fc_code work(fc_comm *ranks, void *context, fc_error *err) {
    job *j = context;
    fc_device *gpu = NULL;
    fc_comm *nccl = NULL;
    state_model m;
    const state_model_options options = {.unit = {.has_param_dtype = true, .param_dtype = FC_BF16}, .one_handle = true};
    FC_TRY(fc_comm_agree(ranks, fc_device_cuda(ranks->rank, &gpu, err), err));
    FC_TRY(fc_comm_nccl(ranks, gpu, &nccl, err));
    fc_code rc = state_model_open(&m, nccl, &options, err);
    FC_TRY(ranks->barrier(ranks, err));
    if (ranks->rank == 0) {
        emulated_fail(j->gpu, j->call);
    }
    FC_TRY(ranks->barrier(ranks, err));
    rc = rc == FC_OK ? save(j, &m, ranks, err) : rc;
    if (rc != FC_OK) {
        fc_comm_abort(nccl);
    }
    state_model_close(&m);
    nccl->free(nccl);
    gpu->destroy(gpu);
    j->outcomes[ranks->rank] = fc_comm_agree(ranks, rc, err); /* a rank may fail after the last collective */
    return j->outcomes[ranks->rank];
}

/* Returns the number of entries of the directory. */
static int count_entries(const char *path) {
    int count = 0;
    DIR *directory = opendir(path);
    for (struct dirent *e; directory && (e = readdir(directory));) {
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(directory);
    return count;
}

static void check_target(const job *j, const char *failed) {
    fc_error err = {FC_OK, ""};
    fc_checkpoint *target = NULL;
    const bool exists = access(j->path, F_OK) == 0;
    must_be(count_entries(j->directory) == exists, failed);
    if (exists) {
        must(fc_checkpoint_open(j->path, NULL, &target, &err), &err, failed);
        must_be(target->ntensors == 26, failed);
        fc_checkpoint_close(target);
    }
}

/* @return whether the call exists. */
static bool fail_call(job *j) {
    char command[192];
    fc_error err = {FC_OK, ""};
    alarm(MINUTE);
    fc_code rc = fc_device_run_local(RANKS, work, j, &err);
    alarm(0);
    const char *failed = emulated_failed();
    emulated_fail(0, 0);
    check_target(j, failed ? failed : "no call");
    must_be((j->outcomes[0] == FC_OK) == (j->outcomes[1] == FC_OK), "a rank did not notice");
    must_be(failed || rc == FC_OK, err.message);
    must_be(rc != FC_OK || access(j->path, F_OK) == 0, "a save succeeded without a target");
    snprintf(command, sizeof command, "rm -rf %s", j->path);
    must_be(system(command) == 0, command);
    return failed != NULL;
}

int main(void) {
    job j = {.directory = "/tmp/fsdpckpt-state-XXXXXX"};
    long calls = 0;
    must_be(mkdtemp(j.directory) != NULL, "mkdtemp");
    snprintf(j.path, sizeof j.path, "%s/target", j.directory);
    must_be(!fail_call(&j), "a call failed that should not");
    for (j.gpu = 0; j.gpu < RANKS; j.gpu++) {
        for (j.call = 1; fail_call(&j); j.call++) {
            calls++;
        }
    }
    rmdir(j.directory);
    printf("%ld calls failed, and every rank noticed\n", calls);
    return calls < 100;
}
