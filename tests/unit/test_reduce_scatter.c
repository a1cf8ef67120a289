/*
 * lib/comm: reduce_scatter and all_reduce of the backend "local", on 1 to 8 ranks.
 */
#include "comm_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "on_all_sizes.h"

static void scattered(void **state) {
    (void)state;
    on_all_sizes(case_reduce_scatter);
}

static void everywhere(void **state) {
    (void)state;
    on_all_sizes(case_all_reduce);
}

static void rounded_once(void **state) {
    (void)state;
    on_all_sizes(case_rounding);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scattered),
        cmocka_unit_test(everywhere),
        cmocka_unit_test(rounded_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
