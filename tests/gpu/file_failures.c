/*
 * Ranks of NCCL that met at a file, on two emulated GPUs. Every call of the CUDA runtime and of NCCL fails once on each
 * rank; ranks give up, leave too early and are killed. The other rank must end with an error that names the rank that
 * failed, long before its timeout, and the file must be gone. The test ends after a minute without progress.
 */
#include "emulate/emulate.h"
#include "gpu.h"

#include "fsdpckpt/try.h"

#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 2, MINUTE = 60, FLOATS = 64 };

typedef struct job {
    char path[64];
    enum { WORK, GIVE_UP, LEAVE_EARLY } way; /* of rank 1 */
    fc_code outcomes[RANKS];
    fc_error errors[RANKS];
} job;

static fc_code gather(fc_comm *comm, fc_error *err) {
    fc_device *gpu = comm->device;
    void *memory = NULL;
    fc_code rc;
    FC_TRY_GOTO(gpu->alloc(gpu, (RANKS + 1) * FLOATS * sizeof(float), &memory, err), rc, out);
    FC_TRY_GOTO(gpu->zero(gpu, memory, (RANKS + 1) * FLOATS * sizeof(float), NULL, err), rc, out);
    float *all = memory, *own = all + RANKS * FLOATS;
    FC_TRY_GOTO(fc_all_gather(comm, own, all, FLOATS * sizeof(float), NULL, err), rc, out);
    FC_TRY_GOTO(fc_all_reduce(comm, own, FLOATS, FC_F32, FC_REDUCE_SUM, NULL, err), rc, out);
    rc = fc_comm_wait(comm, NULL, err);
out:
    if (rc != FC_OK) {
        fc_comm_abort(comm);
    }
    gpu->release(gpu, memory);
    return rc;
}

static fc_code use(const job *j, fc_comm *world, fc_error *err) {
    fc_comm *part = NULL;
    FC_TRY(world->barrier(world, err));
    if (world->rank == 1 && j->way == GIVE_UP) {
        fc_comm_abort(world);
        return fc_fail(err, FC_EUSAGE, "no more data");
    }
    if (world->rank == 1 && j->way == LEAVE_EARLY) {
        return FC_OK;
    }
    FC_TRY(world->split(world, 0, &part, err));
    fc_code rc = gather(part, err);
    rc = rc == FC_OK ? gather(world, err) : rc;
    part->free(part);
    return rc;
}

static fc_code work(fc_comm *bootstrap, void *context, fc_error *err) {
    (void)err;
    job *j = context;
    const int rank = bootstrap->rank;
    fc_error *own = &j->errors[rank];
    fc_device *gpu = NULL;
    fc_comm *comm = NULL;
    *own = (fc_error){FC_OK, ""};
    fc_code rc = fc_comm_agree(bootstrap, fc_device_cuda(rank, &gpu, own), own);
    rc = rc == FC_OK ? fc_comm_nccl_file(j->path, rank, RANKS, 2 * MINUTE, gpu, &comm, own) : rc;
    rc = rc == FC_OK ? use(j, comm, own) : rc;
    if (comm) {
        if (rc != FC_OK) {
            fc_comm_abort(comm);
        }
        comm->free(comm);
    }
    if (gpu) {
        gpu->destroy(gpu);
    }
    j->outcomes[rank] = rc;
    return FC_OK;
}

static void run(job *j) {
    fc_error err = {FC_OK, ""};
    alarm(MINUTE);
    must(fc_device_run_local(RANKS, work, j, &err), &err, "the GPUs");
    alarm(0);
    must_be(access(j->path, F_OK) != 0, "the file where the ranks met is left");
}

/* @return whether the call exists. A failure after the last collective may concern one rank only. */
static bool fail_call(job *j, int gpu, long call) {
    char who[32];
    emulated_fail(gpu, call);
    run(j);
    const char *failed = emulated_failed();
    const int other = 1 - gpu;
    emulated_fail(0, 0);
    if (!failed) {
        must_be(j->outcomes[0] == FC_OK && j->outcomes[1] == FC_OK, "a rank failed though no call did");
        return false;
    }
    snprintf(who, sizeof who, "rank %d", gpu);
    if (j->outcomes[other] != FC_OK && !strstr(j->errors[other].message, who)) {
        fprintf(stderr, "call %ld on GPU %d, %s: rank %d does not name it: %s\n", call, gpu, failed, other,
                j->errors[other].message);
        exit(1);
    }
    return true;
}

static void expect_of_rank_0(job *j, int way, const char *message) {
    j->way = way;
    run(j);
    j->way = WORK;
    if (j->outcomes[0] != FC_EIO || strcmp(j->errors[0].message, message) != 0) {
        fprintf(stderr, "rank 0 returns %d, \"%s\", not \"%s\"\n", (int)j->outcomes[0], j->errors[0].message, message);
        exit(1);
    }
}

/* ---- processes ---- */

/* Joins, and prints the error, which is certain: ranks of an emulated NCCL must be threads of one process. */
static void join_alone(const job *j, int rank, int out) {
    fc_error err = {FC_OK, ""};
    fc_device *gpu = gpu_open(rank);
    fc_comm *comm = NULL;
    alarm(MINUTE);
    fc_comm_nccl_file(j->path, rank, RANKS, 2 * MINUTE, gpu, &comm, &err);
    if (write(out, err.message, strlen(err.message)) < 0) {
        _exit(1);
    }
    _exit(0);
}

static pid_t start(const job *j, int rank, int out) {
    pid_t pid = fork();
    must_be(pid >= 0, "fork");
    if (pid == 0) {
        join_alone(j, rank, out);
    }
    return pid;
}

/* Waits until both ranks have written to their slots of the file, which is then longer than header and first slot. */
static void wait_for_both(const job *j) {
    struct stat file;
    while (stat(j->path, &file) != 0 || file.st_size <= 1024) {
        usleep(1000);
    }
}

/* Rank `killed` is killed while both wait in ncclCommInitRank. */
static void notices_killed_rank(const job *j, int killed) {
    char message[1024] = "", expected[64];
    int ends[2];
    pid_t pids[RANKS];
    must_be(pipe(ends) == 0, "pipe");
    for (int rank = 0; rank < RANKS; rank++) {
        pids[rank] = start(j, rank, ends[1]);
    }
    wait_for_both(j);
    kill(pids[killed], SIGKILL);
    for (int rank = 0; rank < RANKS; rank++) {
        waitpid(pids[rank], NULL, 0);
    }
    close(ends[1]);
    must_be(read(ends[0], message, sizeof message - 1) > 0, "the other rank has no error");
    close(ends[0]);
    snprintf(expected, sizeof expected, "rank %d: its process has ended", killed);
    must_be(strcmp(message, expected) == 0, message);
    must_be(access(j->path, F_OK) != 0, "the file where the ranks met is left");
}

int main(void) {
    job j = {.way = WORK};
    long calls = 0;
    snprintf(j.path, sizeof j.path, "/tmp/fsdpckpt-nccl-%ld", (long)getpid());
    alarm(MINUTE);
    for (int rank = 0; rank < RANKS; rank++) {
        notices_killed_rank(&j, rank);
    }
    alarm(0);
    must_be(!fail_call(&j, 0, 0), "a call failed that should not");
    expect_of_rank_0(&j, GIVE_UP, "rank 1 has given up");
    expect_of_rank_0(&j, LEAVE_EARLY, "rank 1 has freed its communicator, and other ranks wait for it");
    for (int gpu = 0; gpu < RANKS; gpu++) {
        for (long call = 1; fail_call(&j, gpu, call); call++) {
            calls++;
        }
    }
    printf("%ld calls failed, and the other rank named the one that failed\n", calls);
    return 0;
}
