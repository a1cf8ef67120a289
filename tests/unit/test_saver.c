/*
 * Saves in the background: a second one while the first runs, and a communicator that two threads cannot use. A gate in
 * the collectives of the first save keeps it from ending.
 */
#include "fsdpckpt/try.h"
#include "state_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3 };

static atomic_bool is_open;
static char directory[] = "/tmp/fsdpckpt-saver-XXXXXX";

/* Those of the backend `local`. */
static fc_code (*real_split)(fc_comm *, int, fc_comm **, fc_error *);
static fc_code (*real_all_reduce)(fc_comm *, void *, size_t, fc_dtype, fc_reduce, fc_stream *, fc_error *);

static fc_code gated_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op,
                                fc_stream *stream, fc_error *err) {
    while (!atomic_load(&is_open)) {
        usleep(1000);
    }
    return real_all_reduce(comm, data, count, dtype, op, stream, err);
}

/* The communicator of the thread that writes. */
static fc_code gated_split(fc_comm *comm, int color, fc_comm **out, fc_error *err) {
    FC_TRY(real_split(comm, color, out, err));
    (*out)->all_reduce = gated_all_reduce;
    return FC_OK;
}

static fc_code expect(bool is_true, const char *what, fc_error *err) {
    return is_true ? FC_OK : fc_fail(err, FC_EFOUND, "%s", what);
}

/* The first save waits at the gate. */
static fc_code save_twice(state_model *m, fc_comm *ranks, fc_fsdp_saver *saver, fc_error *err) {
    char first[64], second[64], expected[128];
    fc_fsdp_save_options options = {.format = fc_format_find("dcp"), .refuse_second = true};
    fc_error refused = {FC_OK, ""};
    snprintf(first, sizeof first, "%s/first", directory);
    snprintf(second, sizeof second, "%s/second", directory);
    snprintf(expected, sizeof expected, "%s is still being saved: wait for it, or save less often", first);
    FC_TRY(fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, first, &options, err));
    fc_code rc = fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, second, &options, &refused);
    FC_TRY(expect(rc == FC_EUSAGE && strcmp(refused.message, expected) == 0, refused.message, err));
    FC_TRY(expect(!fc_fsdp_save_is_done(saver), "the first save is done", err));
    FC_TRY(ranks->barrier(ranks, err));
    atomic_store(&is_open, true);
    FC_TRY(fc_fsdp_save_wait(saver, err));
    FC_TRY(expect(access(first, F_OK) == 0, "the first save was lost", err));
    FC_TRY(expect(access(second, F_OK) != 0, "the second save was not refused", err));
    FC_TRY(fc_fsdp_save_wait(saver, err)); /* nothing runs */
    FC_TRY(fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, second, &options, err));
    options.refuse_second = false; /* the next save waits for it, and returns its error: this one has none */
    options.force = true;
    FC_TRY(fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, first, &options, err));
    FC_TRY(expect(access(second, F_OK) == 0, "the save was not waited for", err));
    FC_TRY(fc_fsdp_save_wait(saver, err));

    options.force = false; /* the target exists */
    FC_TRY(fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, first, &options, err));
    rc = fc_fsdp_save_start(saver, &m->state, FC_FULL_STATE_DICT, second, &options, &refused);
    FC_TRY(expect(rc == FC_EUSAGE && strstr(refused.message, "first: exists"), refused.message, err));
    return expect(fc_fsdp_save_wait(saver, err) == FC_OK, "a save was started after an error", err);
}

static fc_code second_on_rank(fc_comm *ranks, void *context, fc_error *err) {
    state_model m;
    fc_fsdp_saver *saver = NULL;
    fc_comm gated = *ranks; /* shares the state of the backend */
    (void)context;
    gated.split = gated_split;
    FC_TRY(state_model_open(&m, ranks, &(state_model_options){0}, err));
    FC_TRY(fc_fsdp_saver_new(&gated, &saver, err));
    fc_code rc = save_twice(&m, ranks, saver, err);
    atomic_store(&is_open, true);
    fc_fsdp_saver_free(saver);
    state_model_close(&m);
    return rc;
}

static fc_code note_functions(fc_comm *ranks, void *context, fc_error *err) {
    (void)context;
    (void)err;
    real_split = ranks->split;
    real_all_reduce = ranks->all_reduce;
    return FC_OK;
}

static void second_save_waits_or_is_refused(void **state) {
    fc_error err = {FC_OK, ""};
    (void)state;
    assert_int_equal(fc_comm_run_local(1, note_functions, NULL, &err), FC_OK);
    fc_comm_run_local(RANKS, second_on_rank, NULL, &err);
    assert_string_equal(err.message, "");
}

/* As with MPI without MPI_THREAD_MULTIPLE, on one rank: all refuse. */
static fc_code sequential_on_rank(fc_comm *ranks, void *context, fc_error *err) {
    fc_fsdp_saver *saver = NULL;
    fc_comm sequential = *ranks;
    (void)context;
    sequential.concurrent = ranks->rank != 1;
    fc_code rc = fc_fsdp_saver_new(&sequential, &saver, err);
    return saver ? fc_fail(err, FC_EFOUND, "there is a saver") : rc;
}

static void communicators_of_one_thread_are_refused(void **state) {
    fc_error err = {FC_OK, ""};
    (void)state;
    assert_int_equal(fc_comm_run_local(RANKS, sequential_on_rank, NULL, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "local: two threads cannot use communicators at the same time"));
}

static int make_directory(void **state) {
    (void)state;
    return !mkdtemp(directory);
}

static int remove_directory(void **state) {
    char command[64];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", directory);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(second_save_waits_or_is_refused),
        cmocka_unit_test(communicators_of_one_thread_are_refused),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
