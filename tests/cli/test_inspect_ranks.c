/*
 * The lists of ranks that inspect prints, and the groups of ranks with the same content.
 */
#include "inspect/inspect.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void check_list(const char *expected, size_t size, size_t count, const uint32_t *ranks) {
    char buf[64];
    assert_in_range(size, 1, sizeof buf);
    assert_string_equal(inspect_rank_list(ranks, count, buf, size), expected);
    assert_in_range(strlen(buf), 0, size - 1);
}

static void consecutive_ranks_are_printed_as_a_range(void **state) {
    (void)state;
    check_list("rank 7", 64, 1, (const uint32_t[]){7});
    check_list("ranks 0, 4", 64, 2, (const uint32_t[]){0, 4});
    check_list("ranks 0, 1", 64, 2, (const uint32_t[]){0, 1});
    check_list("ranks 0-3, 8-10, 12", 64, 8, (const uint32_t[]){0, 1, 2, 3, 8, 9, 10, 12});
    check_list("ranks 1, 3, 5, 7, …", 24, 9, (const uint32_t[]){1, 3, 5, 7, 9, 11, 13, 15, 17});
}

static void ranks_with_equal_loads_are_one_group(void **state) {
    (void)state;
    rank_groups groups;
    rank_load loads[1024];
    for (size_t i = 0; i < 1024; i++) {
        loads[i] = (rank_load){1210000000, 291};
    }
    inspect_group_ranks(loads, 8, &groups);
    assert_int_equal(groups.count, 1);
    assert_string_equal(groups.text[0], "ranks 0-7: 1.21 GB, 291 tensors each");
    loads[3] = (rank_load){1000, 1};
    inspect_group_ranks(loads, 1024, &groups);
    assert_int_equal(groups.count, 2);
    assert_string_equal(groups.text[0], "ranks 0-2, 4-1023: 1.21 GB, 291 tensors each");
    assert_string_equal(groups.text[1], "rank 3: 1.00 kB, 1 tensor");
}

static void many_different_loads_are_printed_as_a_span(void **state) {
    (void)state;
    rank_groups groups;
    rank_load loads[1024];
    for (size_t i = 0; i < 1024; i++) {
        loads[i] = (rank_load){1000 * (i + 1), 5};
    }
    inspect_group_ranks(loads, 1024, &groups);
    assert_int_equal(groups.count, 1);
    assert_string_equal(groups.text[0], "ranks 0-1023: 1.00 kB to 1.02 MB, 5 tensors each");
    for (size_t i = 0; i < 1024; i++) {
        loads[i] = (rank_load){1000, i % 10};
    }
    inspect_group_ranks(loads, 1024, &groups);
    assert_int_equal(groups.count, 1);
    assert_string_equal(groups.text[0], "ranks 0-1023: 1.00 kB, 0 to 9 tensors each");
}

/* Every second rank is in the other group, so each list is longer than the buffer for it. */
static void long_lists_are_shortened(void **state) {
    (void)state;
    rank_groups groups;
    rank_load loads[1024];
    for (size_t i = 0; i < 1024; i++) {
        loads[i] = (rank_load){i % 2 ? 1000 : 2000, 5};
    }
    inspect_group_ranks(loads, 1024, &groups);
    assert_int_equal(groups.count, 2);
    assert_ptr_equal(strstr(groups.text[0], "ranks 0, 2, 4, "), groups.text[0]);
    assert_non_null(strstr(groups.text[0], ", …: 2.00 kB, 5 tensors each"));
    assert_non_null(strstr(groups.text[1], ", …: 1.00 kB, 5 tensors each"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(consecutive_ranks_are_printed_as_a_range),
        cmocka_unit_test(ranks_with_equal_loads_are_one_group),
        cmocka_unit_test(many_different_loads_are_printed_as_a_span),
        cmocka_unit_test(long_lists_are_shortened),
    };
    return cmocka_run_group_tests_name("inspect_ranks", tests, NULL, NULL);
}
