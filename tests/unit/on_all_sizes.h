/*
 * Runs a case of tests/support/comm_cases.h on 1 to 8 ranks, which are threads. Include it after cmocka.h.
 */
#pragma once

#include "fsdpckpt/gather/device_comm.h"

static inline void on_all_sizes(fc_code (*run)(fc_comm *, void *, fc_error *)) {
    for (int size = 1; size <= 8; size++) {
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_device_run_local(size, run, NULL, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
    }
}
