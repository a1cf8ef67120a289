/*
 * The comparison of a target with its source before the commit (lib/move/check_target.c): a writer that exchanges two
 * tensors, a plan that takes one for another, and a source that says that two tensors are the same bytes are noticed,
 * and nothing is left behind.
 */
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { TENSORS = 3, COUNT = 4096 };

static char directory[] = "/tmp/fsdpckpt-check-target-XXXXXX";
static float data[TENSORS][COUNT];
static const fc_format *honest; /* the format whose writer is called */

static int setup(void **state) {
    (void)state;
    for (int t = 0; t < TENSORS; t++) {
        for (int i = 0; i < COUNT; i++) {
            data[t][i] = (float)(t * COUNT + i);
        }
    }
    return !mkdtemp(directory);
}

static int teardown(void **state) {
    (void)state;
    return rmdir(directory); /* fails if a test left something */
}

static fc_checkpoint *make_source(void) {
    static const int64_t none[] = {0, 0}, shape[] = {64, COUNT / 64};
    static const char *const names[TENSORS] = {"a", "b", "c"};
    fc_memory_chunk chunks[TENSORS];
    fc_memory_tensor tensors[TENSORS];
    fc_checkpoint *made = NULL;
    for (int t = 0; t < TENSORS; t++) {
        chunks[t] = (fc_memory_chunk){none, shape, NULL, data[t]};
        tensors[t] = (fc_memory_tensor){
            .name = names[t], .dtype = FC_F32, .ndim = 2, .shape = shape, .chunks = &chunks[t], .nchunks = 1};
    }
    assert_int_equal(fc_checkpoint_in_memory("source", tensors, TENSORS, &made, NULL), FC_OK);
    return made;
}

/* Converts and expects that the difference is noticed: status FC_EIO, the tensor named, no target. */
static void expect_noticed(const fc_checkpoint *source, const fc_format *format, const fc_selection *selection,
                           const char *tensor) {
    char path[256], named[64];
    fc_error err;
    snprintf(path, sizeof path, "%s/target", directory);
    snprintf(named, sizeof named, "tensor %s of the target", tensor);
    const fc_convert_options options = {.format = format, .selection = *selection};
    const fc_code rc = fc_convert(source, path, &options, NULL, &err);
    if (rc != FC_EIO || !strstr(err.message, named) || access(path, F_OK) == 0) {
        fail_msg("%s: code %d: %s", format->name, (int)rc, rc == FC_OK ? "converted" : err.message);
    }
}

static fc_code reserve_exchanged(fc_writer *writer, fc_target_file *file, fc_error *err) {
    const fc_code rc = honest->writer.reserve(writer, file, err);
    const uint64_t first = file->items[0].offset;
    file->items[0].offset = file->items[1].offset;
    file->items[1].offset = first;
    return rc;
}

/* The digests are those of what was moved for each name, so only reading the target shows it. */
static void exchanged_places_are_noticed(void **state) {
    (void)state;
    static const char *const names[] = {"safetensors", "pt", "dcp", "h5"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        fc_checkpoint *source = make_source();
        honest = fc_format_find(names[i]);
        fc_format lying = *honest;
        lying.writer.reserve = reserve_exchanged;
        expect_noticed(source, &lying, &(fc_selection){0}, "a");
        fc_checkpoint_close(source);
    }
}

static fc_code exchange_sources(void *context, fc_target_tensor *tensors, size_t count, fc_error *err) {
    const fc_tensor *first = tensors[1].source;
    (void)context;
    (void)err;
    assert_int_equal(count, TENSORS);
    tensors[1].source = tensors[2].source;
    tensors[2].source = first;
    return FC_OK;
}

static void a_plan_of_another_tensor_is_noticed(void **state) {
    (void)state;
    const fc_selection selection = {.arrange = exchange_sources};
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        fc_checkpoint *source = make_source();
        /* The names of accelerate and of formats with `adapt` are not those of the source. */
        if (fc_format_writes(*f) && !(*f)->target.adapt && strcmp((*f)->name, "accelerate") != 0) {
            expect_noticed(source, *f, &selection, "b");
        }
        fc_checkpoint_close(source);
    }
}

/* A torch.save file stores values in the same place once. */
static void false_ties_are_noticed(void **state) {
    (void)state;
    fc_checkpoint *source = make_source();
    for (int t = 1; t < TENSORS; t++) {
        ((fc_chunk *)(uintptr_t)source->tensors[t].chunks)->place = fc_place_bytes(0, 4096, sizeof data[t]);
    }
    expect_noticed(source, fc_format_find("pt"), &(fc_selection){0}, "c");
    fc_checkpoint_close(source);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exchanged_places_are_noticed),
        cmocka_unit_test(a_plan_of_another_tensor_is_noticed),
        cmocka_unit_test(false_ties_are_noticed),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
