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
static fc_code (*real_all_reduce)(fc_comm *, void *, size_t, fc_dtype, fc_reduce, fc_error *);

static fc_code gated_all_reduce(fc_comm *comm, void *data, size_t count, fc_dtype dtype, fc_reduce op, fc_error *err) {
    while (!atomic_load(&is_open)) {
        usleep(1000);
    }
    return real_all_reduce(comm, data, count, dtype, op, err);
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

typedef struct scene {
    state_model model;
    fc_comm *ranks;
    fc_fsdp_saver *saver;
    char first[64], second[64];
} scene;

static fc_code start(scene *s, const char *path, bool refuse_second, bool force, fc_error *err) {
    const fc_fsdp_save_options options = {
        .format = fc_format_find("dcp"), .refuse_second = refuse_second, .force = force};
    return fc_fsdp_save_start(s->saver, &s->model.state, FC_FULL_STATE_DICT, path, &options, err);
}

/* The first save waits at the gate. */
static fc_code second_is_refused(scene *s, fc_error *err) {
    char expected[128];
    fc_error refused = {FC_OK, ""};
    snprintf(expected, sizeof expected, "%s is still being saved: wait for it, or save less often", s->first);
    FC_TRY(start(s, s->first, true, false, err));
    fc_code rc = start(s, s->second, true, false, &refused);
    FC_TRY(expect(rc == FC_EUSAGE && strcmp(refused.message, expected) == 0, refused.message, err));
    FC_TRY(expect(!fc_fsdp_save_is_done(s->saver), "the first save is done", err));
    FC_TRY(s->ranks->barrier(s->ranks, err));
    atomic_store(&is_open, true);
    FC_TRY(fc_fsdp_save_wait(s->saver, err));
    FC_TRY(expect(access(s->first, F_OK) == 0, "the first save was lost", err));
    FC_TRY(expect(access(s->second, F_OK) != 0, "the second save was not refused", err));
    return fc_fsdp_save_wait(s->saver, err); /* nothing runs */
}

static fc_code second_waits(scene *s, fc_error *err) {
    FC_TRY(start(s, s->second, true, false, err));
    FC_TRY(start(s, s->first, false, true, err));
    FC_TRY(expect(access(s->second, F_OK) == 0, "the save was not waited for", err));
    return fc_fsdp_save_wait(s->saver, err);
}

/* A save that waits for one that fails returns its error, and starts nothing. */
static fc_code second_returns_the_error(scene *s, fc_error *err) {
    fc_error failed = {FC_OK, ""};
    FC_TRY(start(s, s->first, false, false, err)); /* it exists */
    fc_code rc = start(s, s->second, false, true, &failed);
    FC_TRY(expect(rc == FC_EUSAGE && strstr(failed.message, "first: exists"), failed.message, err));
    return expect(fc_fsdp_save_wait(s->saver, err) == FC_OK, "a save was started after an error", err);
}

static fc_code second_on_rank(fc_comm *ranks, void *context, fc_error *err) {
    scene s = {.ranks = ranks};
    fc_comm gated = *ranks; /* shares the state of the backend */
    (void)context;
    gated.split = gated_split;
    snprintf(s.first, sizeof s.first, "%s/first", directory);
    snprintf(s.second, sizeof s.second, "%s/second", directory);
    FC_TRY(state_model_open(&s.model, ranks, &(state_model_options){0}, err));
    FC_TRY(fc_fsdp_saver_new(&gated, &s.saver, err));
    fc_code rc = second_is_refused(&s, err);
    atomic_store(&is_open, true);
    rc = rc == FC_OK ? second_waits(&s, err) : rc;
    rc = rc == FC_OK ? second_returns_the_error(&s, err) : rc;
    fc_fsdp_saver_free(s.saver);
    state_model_close(&s.model);
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
    assert_int_equal(fc_device_run_local(1, note_functions, NULL, &err), FC_OK);
    fc_device_run_local(RANKS, second_on_rank, NULL, &err);
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
    assert_int_equal(fc_device_run_local(RANKS, sequential_on_rank, NULL, &err), FC_EUNSUPPORTED);
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
