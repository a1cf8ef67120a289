/*
 * Saves a state in the background with two ranks, and fails each system call, allocation and start of a thread of it in
 * turn: those of fc_fsdp_save_start, of the thread that writes and of fc_fsdp_save_wait. All ranks must return an
 * error, or the save succeeds. The target is the old one or a complete new one, nothing is left behind, neither memory
 * nor open files, and the next save succeeds.
 *
 *   save_tool FORMAT, with LD_PRELOAD=shim.so
 */
#include "fsdpckpt/try.h"

#include "state_model.h"

#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, MINUTE = 60 };

/* Those of shim.c. */
void fault_arm(long at, const char *family, int number) __attribute__((weak));
const char *fault_failed(void) __attribute__((weak));

typedef struct job {
    const char *family, *format;
    int number;
    long call;
    char directory[64], path[128];
    fc_code outcomes[RANKS];
    fc_error errors[RANKS];
    char failed[32];
} job;

static void must_be(bool is_true, const job *j, const char *what) {
    if (!is_true) {
        fprintf(stderr, "%s, call %ld (%s): %s; %s\n", j->family, j->call, j->failed, what, j->errors[0].message);
        exit(1);
    }
}

static int count_entries(const char *path) {
    int count = 0;
    DIR *directory = opendir(path);
    while (directory && readdir(directory)) {
        count++;
    }
    closedir(directory);
    return count;
}

static fc_code save(const job *j, state_model *m, fc_fsdp_saver *saver, fc_error *err) {
    const fc_fsdp_save_options options = {.format = fc_format_find(j->format), .force = true, .work = {.threads = 1}};
    fc_code rc = fc_fsdp_save_start(saver, &m->state, FC_SHARDED_STATE_DICT, j->path, &options, err);
    return rc == FC_OK ? fc_fsdp_save_wait(saver, err) : rc;
}

static fc_code load(const job *j, state_model *m, fc_error *err) {
    fc_checkpoint *from = NULL;
    FC_TRY(state_model_clear(m, err));
    FC_TRY(fc_checkpoint_open(j->path, NULL, &from, err));
    fc_code rc = fc_fsdp_load(&m->state, FC_SHARDED_STATE_DICT, from, err);
    fc_checkpoint_close(from);
    return rc == FC_OK ? state_model_check(m, 0, err) : rc;
}

static fc_code open_model(fc_comm *ranks, state_model *m, fc_fsdp_saver **saver, fc_error *err) {
    const state_model_options options = {.unit = {.has_param_dtype = true, .param_dtype = FC_BF16}};
    FC_TRY(state_model_open(m, ranks, &options, err));
    return fc_fsdp_saver_new(ranks, saver, err);
}

static fc_code fail_save(fc_comm *ranks, void *context, fc_error *err) {
    job *j = context;
    const int rank = ranks->rank;
    fc_fsdp_saver *saver;
    state_model m;
    FC_TRY(open_model(ranks, &m, &saver, err));
    FC_TRY(ranks->barrier(ranks, err));
    if (rank == 0) {
        fault_arm(j->call, j->family, j->number);
    }
    FC_TRY(ranks->barrier(ranks, err));
    j->errors[rank] = (fc_error){FC_OK, ""};
    j->outcomes[rank] = save(j, &m, saver, &j->errors[rank]);
    fc_fsdp_saver_free(saver);
    state_model_close(&m);
    return FC_OK;
}

/* Without a fault: the target has the values, and can be replaced. */
static fc_code check_target(fc_comm *ranks, void *context, fc_error *err) {
    job *j = context;
    fc_fsdp_saver *saver;
    state_model m;
    FC_TRY(open_model(ranks, &m, &saver, err));
    FC_TRY(load(j, &m, err));
    if (j->call % 16 == 1) {
        FC_TRY(save(j, &m, saver, err));
    }
    fc_fsdp_saver_free(saver);
    state_model_close(&m);
    return FC_OK;
}

/* @return whether the call exists. */
static bool fail_call(job *j) {
    fc_error err = {FC_OK, ""};
    const int files = count_entries("/proc/self/fd");
    alarm(MINUTE);
    fc_device_run_local(RANKS, fail_save, j, NULL); /* its outcome is that of the save, if a collective failed */
    snprintf(j->failed, sizeof j->failed, "%s", fault_failed() ? fault_failed() : "");
    fault_arm(0, "sys", 0);
    must_be(count_entries("/proc/self/fd") == files, j, "files are left open");
    must_be(count_entries(j->directory) == 3, j, "something is left behind");
    must_be(j->outcomes[0] == j->outcomes[1], j, "a rank did not notice");
    must_be(*j->failed || j->outcomes[0] == FC_OK, j, "failed without a fault");
    must_be(j->outcomes[0] == FC_OK || *j->errors[0].message, j, "no message");
    must_be(strcmp(j->failed, "pthread_create") != 0 || j->outcomes[0] == FC_OK, j, "it needs no thread");
    must_be(fc_device_run_local(RANKS, check_target, j, &err) == FC_OK, j, err.message);
    alarm(0);
    return *j->failed;
}

static void fail_all(job *j, const char *family, int number, int *failed) {
    j->family = family;
    j->number = number;
    j->call = 0;
    fail_call(j);
    const size_t before = mallinfo2().uordblks;
    for (j->call = 1; fail_call(j); j->call++) {
        *failed += j->outcomes[0] != FC_OK;
    }
    const size_t after = mallinfo2().uordblks;
    printf("%s: %ld calls failed in turn; %zu bytes allocated before, %zu after\n", family, j->call - 1, before, after);
    must_be(after <= before, j, "memory leaks");
}

int main(int argc, char **argv) {
    job j = {.directory = "/tmp/fsdpckpt-save-XXXXXX", .format = argc > 1 ? argv[1] : "dcp", .family = "none"};
    int failed = 0;
    if (!fault_arm) {
        puts("skipped: no shim in LD_PRELOAD");
        return 77;
    }
    mallopt(M_ARENA_MAX, 1);
    must_be(mkdtemp(j.directory) != NULL, &j, "mkdtemp");
    snprintf(j.path, sizeof j.path, "%s/target", j.directory);
    fail_call(&j);
    fail_all(&j, "sys", EIO, &failed);
    fail_all(&j, "mem", ENOMEM, &failed);
    fail_all(&j, "thread", EAGAIN, &failed);
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", j.directory);
    must_be(system(command) == 0, &j, command);
    printf("%d calls ended a save\n", failed);
    return failed < 20;
}
