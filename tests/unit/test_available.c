/*
 * lib/read/available.c: the memory that is left, by the machine and by the control groups of both versions, with or
 * without a limit, in a group, above it, or in a container that sees only its own mount.
 */
#include "fsdpckpt/read.h"
#include "read/available.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char root[64];

/* Writes a file below the root, and makes the folders above it. */
static void put(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')); at++) {
        *at = '\0';
        mkdir(path, 0700);
        *at = '/';
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state) {
    (void)state;
    strcpy(root, "/tmp/fc-available-XXXXXX");
    if (!mkdtemp(root)) {
        return -1;
    }
    put("proc/meminfo", "MemTotal:       4000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n");
    return 0;
}

static int teardown(void **state) {
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -r '%s'", root);
    return system(command);
}

static void the_machine(void **state) {
    (void)state;
    assert_int_equal(fc_available_memory(root), 1000 * 1024);
    put("proc/self/cgroup", "0::/\n");
    assert_int_equal(fc_available_memory(root), 1000 * 1024);
    assert_int_equal(fc_available_memory("/nothing"), 0);
}

static void groups_of_version_2(void **state) {
    (void)state;
    put("proc/self/cgroup", "0::/jobs/7\n");
    put("sys/fs/cgroup/jobs/7/memory.max", "max\n");
    assert_int_equal(fc_available_memory(root), 1000 * 1024);
    put("sys/fs/cgroup/jobs/memory.max", "500000\n");
    assert_int_equal(fc_available_memory(root), 500000);
    put("sys/fs/cgroup/jobs/memory.current", "300000\n");
    assert_int_equal(fc_available_memory(root), 200000);
    put("sys/fs/cgroup/jobs/memory.stat", "anon 200000\nfile 100000\nfile_mapped 5\n");
    assert_int_equal(fc_available_memory(root), 300000);
    put("sys/fs/cgroup/jobs/7/memory.max", "250000\n");
    assert_int_equal(fc_available_memory(root), 250000);
    put("sys/fs/cgroup/jobs/7/memory.current", "250001\n");
    assert_int_equal(fc_available_memory(root), 0);
}

static void groups_of_version_1(void **state) {
    (void)state;
    put("proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/1f\n0::/\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n"); /* a container sees its group as the mount */
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n");
    put("sys/fs/cgroup/memory/memory.stat", "cache 1\ntotal_cache 50000\n");
    assert_int_equal(fc_available_memory(root), 450000);
    put("sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(fc_available_memory(root), 450000);
}

static void only_what_fits_is_cached(void **state) {
    (void)state;
    assert_true(fc_fits_cache(0));
    assert_false(fc_fits_cache(UINT64_MAX));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_machine, setup, teardown),
        cmocka_unit_test_setup_teardown(groups_of_version_2, setup, teardown),
        cmocka_unit_test_setup_teardown(groups_of_version_1, setup, teardown),
        cmocka_unit_test(only_what_fits_is_cached),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
