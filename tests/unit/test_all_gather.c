/*
 * lib/comm: all_gather and all_gather_v of the backend "local", on 1 to 8 ranks.
 */
#include "comm_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void on_all_sizes(fc_code (*run)(fc_comm *, void *, fc_error *)) {
    for (int size = 1; size <= 8; size++) {
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_comm_run_local(size, run, NULL, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
    }
}

static void even(void **state) {
    (void)state;
    on_all_sizes(case_all_gather);
}

static void uneven(void **state) {
    (void)state;
    on_all_sizes(case_all_gather_v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(even),
        cmocka_unit_test(uneven),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
