/*
 * Unit tests of the memory that the fetcher shares.
 */
#include "base/pages.h"
#include "net/shared.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { MIB = 1 << 20, COUNT = 300 };

/* Buffers never overlap, are used again, and come from elsewhere when there is no shared memory left. */
static void test_buffers(void **state) {
    unsigned char *buffers[COUNT] = {NULL};
    size_t size, shared = 0;
    (void)state;
    assert_int_equal(fc_shared_offset(buffers, 1), FC_NOT_SHARED);
    unsigned char *memory = fc_shared_make(&size);
    assert_non_null(memory);
    for (int round = 0; round < 3; round++) {
        shared = 0;
        for (int i = 0; i < COUNT; i++) {
            const size_t wanted = MIB - (size_t)i;
            buffers[i] = fc_shared_new(wanted);
            assert_non_null(buffers[i]);
            const uint64_t at = fc_shared_offset(buffers[i], wanted);
            shared += at != FC_NOT_SHARED;
            assert_true(at == FC_NOT_SHARED || (at % 4096 == 0 && memory + at == buffers[i]));
            memset(buffers[i], i, wanted);
        }
        for (int i = 0; i < COUNT; i += 1 + round) { /* holes in the second and third round */
            const size_t wanted = MIB - (size_t)i;
            assert_int_equal(buffers[i][0], (unsigned char)i);
            assert_int_equal(buffers[i][wanted - 1], (unsigned char)i);
            fc_shared_free(buffers[i], wanted);
            buffers[i] = NULL;
        }
        for (int i = 0; i < COUNT; i++) {
            if (buffers[i]) {
                assert_int_equal(buffers[i][MIB - i - 1], (unsigned char)i);
                fc_shared_free(buffers[i], MIB - (size_t)i);
            }
        }
    }
    assert_int_equal(shared, size / MIB);
    assert_int_equal(fc_shared_offset(memory + size - MIB, MIB), size - MIB);
    assert_int_equal(fc_shared_offset(memory + size - MIB + 1, MIB), FC_NOT_SHARED);
}

/* A process that was forked has the same fetcher, but not the same buffers. */
static void test_fork(void **state) {
    size_t size;
    (void)state;
    assert_non_null(fc_shared_make(&size));
    unsigned char *mine = fc_shared_new(MIB);
    mine[0] = 1;
    const pid_t pid = fork();
    if (pid == 0) {
        unsigned char *other = fc_shared_new(MIB);
        const int good = other && fc_shared_offset(other, MIB) == FC_NOT_SHARED;
        if (other) {
            memset(other, 2, MIB);
            fc_shared_free(other, MIB);
        }
        _exit(good ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(mine[0], 1);
    fc_shared_free(mine, MIB);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_buffers), cmocka_unit_test(test_fork)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
