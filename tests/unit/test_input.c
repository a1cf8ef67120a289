/*
 * lib/io/input.c: reads return the same bytes whether cached or not, at any offset, into any memory, also at the end of
 * the file and on file systems that refuse direct reads.
 */
#include "io/input.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
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

enum { SIZE = (3 << 20) + 777, WINDOW = 128 << 10 };

ssize_t pread(int fd, void *buf, size_t size, off_t at) {
    return direct_fs_allows(fd, buf, &size, at) ? syscall(SYS_pread64, fd, buf, size, at) : -1;
}

static char path[64];
static unsigned char *truth, *window, *out;

static int setup(void **state) {
    (void)state;
    strcpy(path, "/tmp/fc-input-XXXXXX");
    memset(&fs, 0, sizeof fs);
    truth = malloc(SIZE);
    window = aligned_alloc(FC_INPUT_BLOCK, FC_INPUT_ROOM(SIZE / 4096 * 4096 + 4096));
    out = aligned_alloc(FC_INPUT_BLOCK, SIZE / 4096 * 4096 + 3 * 4096);
    int fd = mkstemp(path);
    if (fd < 0 || !truth || !window || !out) {
        return -1;
    }
    for (size_t i = 0; i < SIZE; i++) {
        truth[i] = (unsigned char)(rand() >> 8);
    }
    return write(fd, truth, SIZE) == SIZE && fsync(fd) == 0 ? close(fd) : -1;
}

static int teardown(void **state) {
    (void)state;
    free(truth);
    free(window);
    free(out);
    return unlink(path);
}

/* Reads random ranges both ways, half of them after dropping them from the cache. */
static void read_ranges(fc_input *input, int count) {
    fc_error err;
    for (int i = 0; i < count; i++) {
        size_t at = (size_t)rand() % SIZE, most = SIZE - at, size = (size_t)rand() % most + 1;
        size = i % 5 == 0 ? most : size;
        at -= i % 3 == 0 ? at % 4096 : 0;
        unsigned char *to = out + (i % 4 == 0 ? 0 : rand() % 100);
        const unsigned char *found = NULL;
        if (i % 2 == 0) {
            assert_int_equal(posix_fadvise(input->fd, 0, 0, POSIX_FADV_DONTNEED), 0);
        }
        memset(out, 0, SIZE);
        assert_int_equal(fc_input_read(input, to, size, at, window, WINDOW, &err), FC_OK);
        assert_memory_equal(to, truth + at, size);
        if (i % 2 == 0) {
            assert_int_equal(posix_fadvise(input->fd, 0, 0, POSIX_FADV_DONTNEED), 0);
        }
        memset(window, 0, SIZE);
        assert_int_equal(fc_input_read_near(input, window, size, at, &found, &err), FC_OK);
        assert_memory_equal(found, truth + at, size);
        assert_int_equal(fcntl(input->fd, F_GETFL) & O_DIRECT, 0);
    }
}

/* Returns whether the kernel reports the whole file as cached. cachestat(2) does not see the cache of overlayfs. */
static bool known_as_cached(int fd) {
    enum { CACHESTAT = 451, PAGE = 4096 };
    uint64_t range[2] = {0, SIZE}, pages[5] = {0};
    return syscall(CACHESTAT, fd, range, pages, 0) == 0 && pages[0] >= SIZE / PAGE;
}

static void random_ranges(void **state) {
    (void)state;
    fc_input input;
    fc_error err;
    srand(4);
    assert_int_equal(fc_input_open(&input, path, &err), FC_OK);
    posix_fadvise(input.fd, 0, 0, POSIX_FADV_DONTNEED);
    bool stays = known_as_cached(input.fd); /* tmpfs keeps files only in the cache */
    read_ranges(&input, 60);
    assert_true(fs.direct > 0 || input.cache_only || stays);
    fs.shorts = 4096 * 7;
    read_ranges(&input, 30);
    fs.shorts = 512 * 9;
    read_ranges(&input, 30);
    fc_input_close(&input);
}

static void refused_direct_reads_use_the_cache(void **state) {
    (void)state;
    fc_input input;
    fc_error err;
    srand(5);
    fs.refuse = EINVAL;
    assert_int_equal(fc_input_open(&input, path, &err), FC_OK);
    read_ranges(&input, 20);
    assert_int_equal(fs.direct, 0);
    fc_input_close(&input);
}

/* Cached data is copied from the cache. */
static void cached_data_is_copied(void **state) {
    (void)state;
    fc_input input;
    fc_error err;
    assert_int_equal(fc_input_open(&input, path, &err), FC_OK);
    assert_int_equal(syscall(SYS_pread64, input.fd, out, SIZE, 0), SIZE);
    if (!known_as_cached(input.fd)) {
        fc_input_close(&input);
        skip();
    }
    assert_int_equal(fc_input_read(&input, out, SIZE, 0, window, WINDOW, &err), FC_OK);
    assert_int_equal(fs.direct, 0);
    fc_input_close(&input);
}

static void truncated_file_is_reported(void **state) {
    (void)state;
    fc_input input;
    fc_error err;
    for (int cold = 0; cold < 2; cold++) {
        const unsigned char *found;
        assert_int_equal(fc_input_open(&input, path, &err), FC_OK);
        posix_fadvise(input.fd, 0, 0, cold ? POSIX_FADV_DONTNEED : POSIX_FADV_NORMAL);
        assert_int_equal(fc_input_read(&input, out, 1 << 20, SIZE - (1 << 19), window, WINDOW, &err), FC_ECORRUPT);
        assert_non_null(strstr(err.message, ": truncated: the file ends at offset 3146505"));
        assert_int_equal(fc_input_read_near(&input, window, 1 << 20, SIZE + 9, &found, &err), FC_ECORRUPT);
        fc_input_close(&input);
    }
}

static void missing_file_is_reported(void **state) {
    (void)state;
    fc_input input;
    fc_error err;
    assert_int_equal(fc_input_open(&input, "/tmp/fc-input-none/x", &err), FC_ECORRUPT);
    fc_input_close(&input);
    assert_int_equal(input.fd, -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(random_ranges, setup, teardown),
        cmocka_unit_test_setup_teardown(refused_direct_reads_use_the_cache, setup, teardown),
        cmocka_unit_test_setup_teardown(cached_data_is_copied, setup, teardown),
        cmocka_unit_test_setup_teardown(truncated_file_is_reported, setup, teardown),
        cmocka_unit_test_setup_teardown(missing_file_is_reported, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
