/*
 * Placements as text. Only our own output and torch's repr are accepted.
 */
#include "fsdpckpt/mesh.h"
#include "sharding/recorded.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const fc_placement all[] = {
    {FC_REPLICATE, 0, 0}, {FC_SHARD, 1, 0}, {FC_STRIDED_SHARD, 0, 16}, {FC_PARTIAL, 0, 0}};

static void round_trip(void **state) {
    (void)state;
    const char *want = "[Replicate(), Shard(1), _StridedShard(0, 16), Partial()]";
    char text[128];
    fc_placement read[4];
    assert_int_equal(fc_placements_format(4, all, text, sizeof text), strlen(want));
    assert_string_equal(text, want);
    assert_true(fc_placements_parse(text, 4, read));
    for (int i = 0; i < 4; i++) {
        assert_int_equal(read[i].kind, all[i].kind);
        assert_int_equal(read[i].dim, all[i].dim);
        assert_int_equal(read[i].split_factor, all[i].split_factor);
    }
    assert_int_equal(fc_placements_format(0, NULL, text, sizeof text), 2);
    assert_true(fc_placements_parse("[]", 0, read));
}

static void short_buffer_is_reported(void **state) {
    (void)state;
    char text[12];
    memset(text, 'x', sizeof text);
    assert_int_equal(fc_placements_format(2, all, text, 11), 23);
    assert_string_equal(text, "[Replicate");
    assert_int_equal(text[11], 'x');
    assert_int_equal(fc_placements_format(2, all, NULL, 0), 23);
}

static void reads_the_repr_of_torch(void **state) {
    (void)state;
    fc_placement read[3];
    assert_true(fc_placements_parse("[_StridedShard(dim=1, sf=2), Shard(dim=3), Partial(sum)]", 3, read));
    assert_int_equal(read[0].kind, FC_STRIDED_SHARD);
    assert_int_equal(read[0].dim, 1);
    assert_int_equal(read[0].split_factor, 2);
    assert_int_equal(read[1].dim, 3);
    assert_int_equal(read[2].kind, FC_PARTIAL);
}

static void other_text_is_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"",
                                      "[",
                                      "[Shard(0)",
                                      "[Shard(0)]x",
                                      "[Shard()]",
                                      "[Shard(-1)]",
                                      "[Shard(0),]",
                                      "[Shard(99999999999)]",
                                      "[Shard(0000000000000000000)]",
                                      "[_StridedShard(0)]",
                                      "[_StridedShard(0, 0)]",
                                      "[Replicate]",
                                      "[Shard(0), ]",
                                      "[Shard(0), Shard(0)]",
                                      "[]",
                                      "Shard(0)"};
    fc_placement read[2];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(fc_placements_parse(bad[i], 1, read));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(short_buffer_is_reported),
        cmocka_unit_test(reads_the_repr_of_torch),
        cmocka_unit_test(other_text_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
