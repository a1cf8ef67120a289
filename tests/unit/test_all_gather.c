/*
 * lib/comm: all_gather and all_gather_v of the backend "local", on 1 to 8 ranks.
 */
#include "comm_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "on_all_sizes.h"

static void blocks_of_equal_size(void **state) {
    (void)state;
    on_all_sizes(case_all_gather);
}

static void blocks_of_different_sizes(void **state) {
    (void)state;
    on_all_sizes(case_all_gather_v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_equal_size),
        cmocka_unit_test(blocks_of_different_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
