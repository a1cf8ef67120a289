/*
 * lib/comm/module.c refuses a module that is missing, damaged or of another build, with the reason.
 */
#include "fsdpckpt/comm.h"

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

static char directory[] = "/tmp/fsdpckpt-modules-XXXXXX";

static int setup(void **state) {
    (void)state;
    return !mkdtemp(directory) || setenv("FSDPCKPT_MODULE_PATH", directory, 1) != 0;
}

static int teardown(void **state) {
    (void)state;
    return rmdir(directory);
}

static const char *module_path(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/libfsdpckpt-comm-%s.so", directory, name);
    return path;
}

/* Checks that every loader gives the same reason. */
static void all_refuse(const char *reason) {
    fc_error err;
    fc_device *cpu, *gpu;
    fc_comm *comm;
    assert_int_equal(fc_device_cpu(&cpu, NULL), FC_OK);
    assert_int_equal(fc_comm_mpi(cpu, &comm, &err), FC_EUNSUPPORTED);
    assert_null(comm);
    assert_non_null(strstr(err.message, reason));
    assert_int_equal(fc_device_cuda(0, &gpu, &err), FC_EUNSUPPORTED);
    assert_null(gpu);
    assert_non_null(strstr(err.message, reason));
    assert_int_equal(fc_comm_nccl(NULL, cpu, &comm, &err), FC_EUNSUPPORTED);
    assert_null(comm);
    assert_non_null(strstr(err.message, reason));
    assert_int_equal(fc_comm_nccl_file("/nowhere", 0, 1, 1, cpu, &comm, &err), FC_EUNSUPPORTED);
    assert_null(comm);
    assert_non_null(strstr(err.message, reason));
    cpu->destroy(cpu);
}

static const char *const names[] = {"mpi", "cuda", "nccl"};

static void missing_modules_are_refused(void **state) {
    (void)state;
    fc_error err;
    fc_device *gpu;
    assert_int_equal(fc_device_cuda(0, &gpu, &err), FC_EUNSUPPORTED);
    /* The reason depends on the build. */
    assert_true(strstr(err.message, directory) || strstr(err.message, "does not contain it"));
}

static void make_modules(const char *text) {
    for (int i = 0; i < 3; i++) {
        FILE *f = fopen(module_path(names[i]), "w");
        assert_non_null(f);
        fputs(text, f);
        fclose(f);
    }
}

static void remove_modules(void) {
    for (int i = 0; i < 3; i++) {
        assert_int_equal(unlink(module_path(names[i])), 0);
    }
}

/* A module is code, so it must not be one that everybody can replace. */
static void modules_that_everybody_can_write_are_refused(void **state) {
    (void)state;
    make_modules("not a shared object");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(chmod(module_path(names[i]), 0666), 0);
    }
    all_refuse("every user may write to it");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(chmod(module_path(names[i]), 0644), 0);
    }
    assert_int_equal(chmod(directory, 0777), 0);
    all_refuse("every user may write to it");
    assert_int_equal(chmod(directory, 01777), 0); /* like /tmp: only the owner can replace a file */
    all_refuse(": cannot be loaded: ");
    assert_int_equal(chmod(directory, 0700), 0);
    remove_modules();
}

static void relative_paths_are_refused(void **state) {
    (void)state;
    char before[256];
    make_modules("not a shared object");
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(directory), 0);
    assert_int_equal(setenv("FSDPCKPT_MODULE_PATH", ".", 1), 0);
    all_refuse("only from absolute paths");
    assert_int_equal(setenv("FSDPCKPT_MODULE_PATH", directory, 1), 0);
    assert_int_equal(chdir(before), 0);
    remove_modules();
}

static void damaged_modules_are_refused(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        FILE *f = fopen(module_path(names[i]), "w");
        assert_non_null(f);
        fputs("not a shared object", f);
        fclose(f);
    }
    all_refuse(": cannot be loaded: ");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(unlink(module_path(names[i])), 0);
    }
}

/* A shared library that is not a module. */
static void other_libraries_are_refused(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(symlink(FSDPCKPT_SOME_LIBRARY, module_path(names[i])), 0);
    }
    all_refuse(": belongs to another build than this fsdpckpt ");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(unlink(module_path(names[i])), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_modules_are_refused),
        cmocka_unit_test(damaged_modules_are_refused),
        cmocka_unit_test(modules_that_everybody_can_write_are_refused),
        cmocka_unit_test(relative_paths_are_refused),
        cmocka_unit_test(other_libraries_are_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
