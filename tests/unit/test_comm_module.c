/*
 * lib/comm/module.c refuses a module that is missing, damaged or of another build, with the reason.
 */
#include "fsdpckpt/gather/device_comm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
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
    assert_int_equal(fc_comm_mpi(&comm, &err), FC_EUNSUPPORTED);
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

/* Every component of the path is judged: the module, its directory, and those above, also behind a link. */
static void modules_that_others_can_change_are_refused(void **state) {
    (void)state;
    char above[128], below[160], reason[200];
    make_modules("not a shared object");
    static const struct {
        mode_t mode;
        const char *reason;
    } files[] = {
        {0666, "can be written by every user"}, {0664, "can be written by its group"}, {0644, ": cannot be loaded: "}};
    for (size_t k = 0; k < sizeof files / sizeof *files; k++) {
        for (int i = 0; i < 3; i++) {
            assert_int_equal(chmod(module_path(names[i]), files[k].mode), 0);
        }
        all_refuse(files[k].reason);
    }
    static const struct {
        mode_t mode;
        const char *reason;
    } folders[] = {{0777, " can be written by every user"},
                   {0775, " can be written by its group"},
                   {01777, ": cannot be loaded: "}, /* like /tmp: only the owner can replace a file */
                   {01775, ": cannot be loaded: "},
                   {0755, ": cannot be loaded: "}};
    snprintf(above, sizeof above, "%s-above", directory);
    snprintf(below, sizeof below, "%s/below", above);
    assert_int_equal(mkdir(above, 0755), 0);
    for (size_t k = 0; k < sizeof folders / sizeof *folders; k++) {
        const bool good = folders[k].reason[0] == ':';
        assert_int_equal(chmod(directory, folders[k].mode), 0);
        snprintf(reason, sizeof reason, "%s%s", good ? "" : directory, folders[k].reason);
        all_refuse(reason);
        assert_int_equal(symlink(directory, below), 0); /* where the link leads counts */
        assert_int_equal(setenv("FSDPCKPT_MODULE_PATH", below, 1), 0);
        all_refuse(reason);
        assert_int_equal(unlink(below), 0);
        assert_int_equal(chmod(directory, 0755), 0);
        assert_int_equal(rename(directory, below), 0);
        assert_int_equal(chmod(above, folders[k].mode), 0);
        snprintf(reason, sizeof reason, "%s%s", good ? "" : above, folders[k].reason);
        all_refuse(reason);
        assert_int_equal(rename(below, directory), 0);
        assert_int_equal(setenv("FSDPCKPT_MODULE_PATH", directory, 1), 0);
    }
    assert_int_equal(rmdir(above), 0);
    remove_modules();
}

static void modules_of_other_users_are_refused(void **state) {
    (void)state;
    char reason[200];
    make_modules("not a shared object");
    if (geteuid() != 0 || chown(directory, 12345, (gid_t)-1) != 0) {
        remove_modules();
        skip();
    }
    snprintf(reason, sizeof reason, "%s belongs to another user", directory);
    all_refuse(reason);
    assert_int_equal(chmod(directory, 01777), 0);
    all_refuse(reason);
    assert_int_equal(chown(directory, 0, (gid_t)-1), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(chown(module_path(names[i]), 12345, (gid_t)-1), 0);
    }
    all_refuse(".so belongs to another user");
    assert_int_equal(chmod(directory, 0700), 0);
    all_refuse(".so belongs to another user");
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
        cmocka_unit_test(modules_that_others_can_change_are_refused),
        cmocka_unit_test(modules_of_other_users_are_refused),
        cmocka_unit_test(relative_paths_are_refused),
        cmocka_unit_test(other_libraries_are_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
