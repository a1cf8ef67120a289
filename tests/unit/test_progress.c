/*
 * The counters of a job: phases, and opening checkpoints of many files, which is counted and can be stopped.
 */
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/progress.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void note(void *context, const fc_progress *progress) {
    unsigned *begun = context;
    begun[atomic_load(&progress->phase)]++;
}

static void a_phase_may_have_several_parts(void **state) {
    (void)state;
    unsigned begun[FC_PHASE_COUNT] = {0};
    fc_error err;
    fc_progress p = {.began = note, .context = begun};
    assert_int_equal(fc_progress_look(&p).phase, FC_PHASE_NONE);
    fc_progress_begin(&p, FC_PHASE_OPENING, FC_COUNTED_FILES, 3);
    assert_int_equal(fc_progress_count(&p, 3, &err), FC_OK);
    const unsigned first = fc_progress_look(&p).number;
    fc_progress_begin(&p, FC_PHASE_OPENING, FC_COUNTED_FILES, 5); /* the second of two sources */
    fc_progress_state s = fc_progress_look(&p);
    assert_true(s.done == 3 && s.total == 8 && s.number == first);
    fc_progress_begin(&p, FC_PHASE_COPYING, FC_COUNTED_BYTES, 100);
    s = fc_progress_look(&p);
    assert_true(s.phase == FC_PHASE_COPYING && s.done == 0 && s.total == 100 && s.number != first);
    assert_true(begun[FC_PHASE_OPENING] == 1 && begun[FC_PHASE_COPYING] == 1);
    atomic_store(&p.cancel, true);
    assert_int_equal(fc_progress_count(&p, 1, &err), FC_EINTERRUPTED);
}

static void without_progress_nothing_happens(void **state) {
    (void)state;
    fc_progress_begin(NULL, FC_PHASE_OPENING, FC_COUNTED_FILES, 1);
    assert_int_equal(fc_progress_count(NULL, 1, NULL), FC_OK);
}

static void names_are_words(void **state) {
    (void)state;
    for (int i = 0; i < FC_PHASE_COUNT; i++) {
        assert_true(strlen(fc_phase_name((fc_phase)i)) > 3);
    }
    for (int i = 0; i < FC_COUNTED_COUNT; i++) {
        assert_true(strlen(fc_counted_name((fc_counted)i)) > 3);
    }
}

static const char *const of_many_files[] = {
    "good/dcp-torch2.15.0-fsdp2",  "dcp-ranks-torch2.15.0",
    "good/st-torch2.15.0-1d",      "good/st-torch2.15.0-index",
    "pt/fsdp2-torch2.15.0",        "deepspeed/0.19.8-zero2-bf16",
    "deepspeed/0.19.8-zero3-bf16", "deepspeed/0.19.8-zero1-bf16-universal",
    "megatron-ranks/tp2-gpt",      "megatron/torch_dist-0.16.1",
};

static void opening_counts_files(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof of_many_files / sizeof *of_many_files; i++) {
        char path[1024];
        fc_error err = {FC_OK, ""};
        fc_progress p = {.done = 0};
        const fc_open_options how = {.progress = &p};
        fc_checkpoint *checkpoint = NULL;
        snprintf(path, sizeof path, FSDPCKPT_CORPUS "/%s", of_many_files[i]);
        fc_code rc = fc_checkpoint_open(path, &how, &checkpoint, &err);
        if (rc != FC_OK) {
            fail_msg("%s: %s", path, err.message);
        }
        const fc_progress_state s = fc_progress_look(&p);
        assert_int_equal(s.phase, FC_PHASE_OPENING);
        assert_int_equal(s.unit, FC_COUNTED_FILES);
        if (s.done < 2 || s.done > s.total) {
            fail_msg("%s: %llu of %llu files", path, (unsigned long long)s.done, (unsigned long long)s.total);
        }
        fc_checkpoint_close(checkpoint);
    }
}

static void opening_can_be_stopped(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof of_many_files / sizeof *of_many_files; i++) {
        char path[1024];
        fc_error err = {FC_OK, ""};
        fc_progress p = {.cancel = true};
        const fc_open_options how = {.progress = &p};
        fc_checkpoint *checkpoint = NULL;
        snprintf(path, sizeof path, FSDPCKPT_CORPUS "/%s", of_many_files[i]);
        if (fc_checkpoint_open(path, &how, &checkpoint, &err) != FC_EINTERRUPTED) {
            fail_msg("%s: was not stopped: %s", path, err.message);
        }
        assert_string_equal(err.message, "interrupted");
        assert_null(checkpoint);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_phase_may_have_several_parts),
        cmocka_unit_test(without_progress_nothing_happens),
        cmocka_unit_test(names_are_words),
        cmocka_unit_test(opening_counts_files),
        cmocka_unit_test(opening_can_be_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
