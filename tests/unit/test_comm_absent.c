/*
 * A build without MPI, CUDA, NCCL and libcurl: the error says what to install. The test has copies of lib/comm/module.c
 * and lib/net/start.c that were compiled for such a build.
 */
#include "fsdpckpt/gather/device_comm.h"
#include "net/start.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void assert_says(const fc_error *err, const char *name, const char *library) {
    assert_memory_equal(err->message, name, strlen(name));
    assert_non_null(strstr(err->message, ": this build does not contain it: install "));
    assert_non_null(strstr(err->message, library));
}

static void errors_name_what_to_install(void **state) {
    fc_device *device = NULL;
    fc_comm *comm = NULL;
    fc_error err;
    (void)state;
    assert_int_equal(fc_comm_mpi(&comm, &err), FC_EUNSUPPORTED);
    assert_says(&err, "mpi", "libopenmpi-dev");
    assert_int_equal(fc_device_cuda(0, &device, &err), FC_EUNSUPPORTED);
    assert_says(&err, "cuda", "CUDA");
    assert_int_equal(fc_comm_nccl(NULL, NULL, &comm, &err), FC_EUNSUPPORTED);
    assert_says(&err, "nccl", "CUDA and NCCL");
}

/* The wheel is such a build. Its users have no build of their own. */
static void without_libcurl_files_can_be_downloaded(void **state) {
    fc_fetcher fetcher;
    fc_error err;
    (void)state;
    assert_int_equal(fc_fetcher_get(&fetcher, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "does not contain it: download the files first, or install libcurl"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(errors_name_what_to_install),
                                       cmocka_unit_test(without_libcurl_files_can_be_downloaded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
