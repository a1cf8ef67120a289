/*
 * lib/io/output.c: runs of any length and offset are written completely, directly or not, and no other byte changes.
 * The test replaces the system call, to simulate file systems that refuse direct writes or fail in the middle.
 */
#include "io/output.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "../support/direct_fs.h"

enum { SIZE = 3 << 20 };

ssize_t pwrite(int fd, const void *buf, size_t size, off_t at) {
    return direct_fs_allows(fd, buf, &size, at) ? syscall(SYS_pwrite64, fd, buf, size, at) : -1;
}

static char path[64];
static unsigned char *truth, *bytes;

static int setup(void **state) {
    (void)state;
    strcpy(path, "/tmp/fc-output-XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0 || ftruncate(fd, SIZE) != 0) {
        return -1;
    }
    memset(&fs, 0, sizeof fs);
    truth = calloc(1, SIZE);
    bytes = aligned_alloc(FC_OUTPUT_BLOCK, SIZE + 2 * FC_OUTPUT_BLOCK);
    return close(fd) == 0 && truth && bytes ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    free(truth);
    free(bytes);
    return unlink(path);
}

static bool takes_direct(void) {
    int fd = open(path, O_WRONLY | O_DIRECT);
    return fd >= 0 && close(fd) == 0;
}

/* Writes `size` random bytes at `offset` from memory with the alignment of the file, plus `off` bytes. */
static fc_code put(fc_output *output, size_t size, uint64_t offset, size_t off, fc_error *err) {
    unsigned char *from = bytes + offset % FC_OUTPUT_BLOCK + off;
    for (size_t i = 0; i < size; i++) {
        from[i] = (unsigned char)(rand() >> 8);
    }
    memcpy(truth + offset, from, size);
    return fc_output_write(output, from, size, offset, err);
}

static void assert_arrived(void) {
    unsigned char *found = malloc(SIZE + 1);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(found, 1, SIZE + 1, f), SIZE);
    assert_memory_equal(found, truth, SIZE);
    fclose(f);
    free(found);
}

/* Writes the file as random runs in random order. The ends of a run share blocks with its neighbours. */
static void put_everything(fc_output *output) {
    enum { CUTS = 40 };
    size_t starts[CUTS + 1] = {0};
    int order[CUTS];
    for (int i = 1; i < CUTS; i++) {
        size_t step = (size_t)rand() % (2 * SIZE / CUTS) + 1;
        step = step > SIZE - starts[i - 1] ? SIZE - starts[i - 1] : step;
        starts[i] = starts[i - 1] + (rand() % 3 == 0 ? step / 4096 * 4096 : step);
    }
    starts[CUTS] = SIZE;
    for (int i = 0; i < CUTS; i++) {
        order[i] = i;
    }
    for (int i = CUTS - 1; i > 0; i--) {
        int j = rand() % (i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    fc_error err;
    for (int i = 0; i < CUTS; i++) {
        size_t from = starts[order[i]], size = starts[order[i] + 1] - from;
        assert_int_equal(put(output, size, from, rand() % 8 == 0, &err), FC_OK);
    }
}

static void random_runs(void **state) {
    (void)state;
    srand(3);
    for (int i = 0; i < 12; i++) {
        fc_output output;
        fc_error err;
        fs.shorts = i % 3 == 1 ? 512 * 5 : i % 3 == 2 ? 4096 * 3 : 0;
        assert_int_equal(fc_output_allocate(path, &err), FC_OK);
        assert_int_equal(fc_output_open(&output, path, false, &err), FC_OK);
        put_everything(&output);
        assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
        assert_arrived();
    }
    assert_true(fs.direct > 0 || !takes_direct());
}

static void cached_output_uses_the_cache(void **state) {
    (void)state;
    fc_output output;
    fc_error err;
    assert_int_equal(fc_output_open(&output, path, true, &err), FC_OK);
    put_everything(&output);
    assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
    assert_int_equal(fs.direct, 0);
    assert_arrived();
}

static void refused_direct_writes_use_the_cache(void **state) {
    (void)state;
    fc_output output;
    fc_error err;
    fs.refuse = EINVAL;
    assert_int_equal(fc_output_open(&output, path, false, &err), FC_OK);
    put_everything(&output);
    assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
    assert_int_equal(fs.direct, 0);
    assert_arrived();
}

static void failed_write_is_reported(void **state) {
    (void)state;
    fc_output output;
    fc_error err;
    if (!takes_direct()) {
        skip();
    }
    fs.refuse = ENOSPC;
    assert_int_equal(fc_output_open(&output, path, false, &err), FC_OK);
    assert_int_equal(put(&output, 1 << 20, 100, 0, &err), FC_EIO);
    assert_non_null(strstr(err.message, "writing at offset 4096: No space left on device"));
    assert_non_null(strstr(err.message, path));
    assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
}

/* Short runs and unaligned memory go through the page cache. */
static void small_and_unaligned(void **state) {
    (void)state;
    fc_output output;
    fc_error err;
    assert_int_equal(fc_output_open(&output, path, false, &err), FC_OK);
    assert_int_equal(put(&output, FC_OUTPUT_DIRECT_LEAST - 1, 4096, 0, &err), FC_OK);
    assert_int_equal(put(&output, FC_OUTPUT_DIRECT_LEAST + 4094, (1 << 20) + 1, 0, &err), FC_OK);
    assert_int_equal(put(&output, 1 << 20, 2 << 20, 8, &err), FC_OK);
    assert_int_equal(put(&output, 0, SIZE, 0, &err), FC_OK);
    assert_int_equal(fs.direct, 0);
    assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
    assert_arrived();
}

static void missing_file_is_reported(void **state) {
    (void)state;
    fc_output output;
    fc_error err;
    assert_int_equal(fc_output_open(&output, "/tmp/fc-output-none/x", false, &err), FC_EIO);
    assert_non_null(strstr(err.message, "/tmp/fc-output-none/x: cannot be written: No such file"));
    assert_int_equal(fc_output_close(&output, FC_OK, &err), FC_OK);
    assert_int_equal(fc_output_allocate("/tmp/fc-output-none/x", &err), FC_EIO);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(random_runs, setup, teardown),
        cmocka_unit_test_setup_teardown(cached_output_uses_the_cache, setup, teardown),
        cmocka_unit_test_setup_teardown(refused_direct_writes_use_the_cache, setup, teardown),
        cmocka_unit_test_setup_teardown(failed_write_is_reported, setup, teardown),
        cmocka_unit_test_setup_teardown(small_and_unaligned, setup, teardown),
        cmocka_unit_test_setup_teardown(missing_file_is_reported, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
