/*
 * lib/base: errors, the arena, growing lists, names, the dtype table.
 */
#include "fsdpckpt/arena.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include "base/grow.h"
#include "base/text.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void error_is_one_printable_line(void **state) {
    (void)state;
    fc_error err;
    assert_int_equal(fc_fail(&err, FC_ECORRUPT, "tensor %s", "a\nb\x1b[31m"), FC_ECORRUPT);
    assert_string_equal(err.message, "tensor a?b?[31m");
    assert_int_equal(fc_context(&err, err.code, "x/.metadata"), FC_ECORRUPT);
    assert_string_equal(err.message, "x/.metadata: tensor a?b?[31m");
    assert_int_equal(fc_fail_errno(&err, ENOSPC, "out.h5"), FC_EIO);
    assert_string_equal(err.message, "out.h5: No space left on device");
    assert_int_equal(fc_fail_errno(&err, ENOMEM, "x"), FC_ENOMEM);
    assert_int_equal(fc_exit_status(FC_ENOMEM), 4);
}

static void long_error_ends_in_dots(void **state) {
    (void)state;
    char text[3000];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    fc_error err;
    fc_fail(&err, FC_EIO, "%s", text);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
    assert_string_equal(err.message + strlen(err.message) - 4, "x...");
}

static void arena_keeps_allocations(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    assert_non_null(arena);
    uint64_t *small[1000];
    for (size_t i = 0; i < 1000; i++) {
        small[i] = fc_arena_alloc(arena, 8 + i % 40);
        assert_int_equal((uintptr_t)small[i] % 16, 0);
        *small[i] = i;
        if (i % 100 == 0) {
            assert_non_null(fc_arena_alloc(arena, 3 << 20));
        }
    }
    for (size_t i = 0; i < 1000; i++) {
        assert_int_equal(*small[i], i);
    }
    assert_null(fc_arena_alloc(arena, SIZE_MAX - 4));
    assert_null(fc_arena_calloc(arena, SIZE_MAX / 2, 3));
    assert_string_equal(fc_arena_printf(arena, "%s-%05d", "shard", 3), "shard-00003");
    assert_true(fc_arena_size(arena) > 10 * (3 << 20));
    fc_arena_free(arena);
}

static void lists_grow(void **state) {
    (void)state;
    uint32_t *list = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < 10000; i++) {
        assert_true(fc_grow(&list, &capacity, i + 1, sizeof *list));
        assert_true(capacity > i);
        list[i] = (uint32_t)i;
    }
    const uint32_t *before = list;
    size_t room = capacity;
    assert_true(fc_grow(&list, &capacity, room, sizeof *list));
    assert_false(fc_grow(&list, &capacity, SIZE_MAX / 2, sizeof *list)); /* the size overflows */
    assert_ptr_equal(list, before);
    assert_int_equal(capacity, room);
    for (size_t i = 0; i < 10000; i++) {
        assert_int_equal(list[i], i);
    }
    free(list);
}

static void names_are_text(void **state) {
    (void)state;
    assert_true(fc_is_plain_text("", 0));
    assert_true(fc_is_plain_text("w\xc3\xa4ight", 7));
    assert_false(fc_is_plain_text("a\0b", 3));
    assert_false(fc_is_plain_text("\xed\xa0\x80", 3)); /* a surrogate, which Python may use in file names */
    assert_false(fc_is_plain_text("\xc0\x80", 2));
    assert_false(fc_is_plain_text("w\xc3", 2));
}

static void dtype_names(void **state) {
    (void)state;
    fc_dtype d;
    assert_true(fc_dtype_find("bfloat16", 8, &d));
    assert_int_equal(d, FC_BF16);
    assert_true(fc_dtype_find("f8_e4m3fn", 9, &d));
    assert_int_equal(d, FC_F8_E4M3FN);
    assert_false(fc_dtype_find("object", 6, &d));
    assert_false(fc_dtype_find("bf", 2, &d));
    for (int i = 0; i < FC_DTYPE_COUNT; i++) {
        assert_non_null(fc_dtype_get((fc_dtype)i)->torch_name);
        assert_true(fc_dtype_size((fc_dtype)i) >= 1);
        const fc_dtype_info *info = fc_dtype_get((fc_dtype)i);
        if (info->cls == FC_CLASS_COMPLEX) {
            assert_int_equal(info->size, 2 * fc_dtype_size(info->component));
            assert_int_equal(fc_dtype_get(info->component)->cls, FC_CLASS_FLOAT);
        } else {
            assert_int_equal(info->component, i);
        }
        if (info->exponent_bits > 0) {
            assert_int_equal(1 + info->exponent_bits + info->mantissa_bits, 8 * info->size);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_is_one_printable_line),
        cmocka_unit_test(long_error_ends_in_dots),
        cmocka_unit_test(arena_keeps_allocations),
        cmocka_unit_test(lists_grow),
        cmocka_unit_test(names_are_text),
        cmocka_unit_test(dtype_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
