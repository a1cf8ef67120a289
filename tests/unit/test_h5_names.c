/*
 * formats/hdf5/names: keys of a state dict ↔ HDF5 link names.
 */
#include "hdf5/names.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const struct {
    const char *key, *link;
} pairs[] = {
    {"layers.0.attn.wq.weight", "layers.0.attn.wq.weight"},
    {"", "%"},
    {".", "%2E"},
    {"..", ".."},
    {"...", "..."},
    {"a/b", "a%2Fb"},
    {"/", "%2F"},
    {"%", "%25"},
    {"%%", "%25%25"},
    {"%2E", "%252E"},
    {"%2F", "%252F"},
    {"100% done/so far", "100%25 done%2Fso far"},
    {"gewicht ü 重み", "gewicht ü 重み"},
    {" ", " "},
    {"a\\b\n", "a\\b\n"},
    {"./.", ".%2F."},
};

static void every_key_round_trips(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char *link = fc_h5_name_encode(arena, pairs[i].key, strlen(pairs[i].key));
        assert_string_equal(link, pairs[i].link);
        const char *key = NULL;
        fc_error err;
        assert_int_equal(fc_h5_name_decode(arena, link, &key, &err), FC_OK);
        assert_string_equal(key, pairs[i].key);
    }
    fc_arena_free(arena);
}

/* Every byte, alone and between others, comes back unchanged, and the link name is legal in HDF5. */
static void every_byte_round_trips(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    for (int c = 1; c < 256; c++) {
        char key[4] = {'a', (char)c, 'b', 0};
        for (int form = 0; form < 2; form++) {
            const char alone[2] = {(char)c, 0};
            const char *text = form ? key : alone;
            char *link = fc_h5_name_encode(arena, text, strlen(text));
            assert_null(strchr(link, '/'));
            assert_string_not_equal(link, ".");
            const char *back = NULL;
            assert_int_equal(fc_h5_name_decode(arena, link, &back, NULL), FC_OK);
            assert_string_equal(back, text);
        }
    }
    fc_arena_free(arena);
}

static void nul_is_written_and_refused(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    char *link = fc_h5_name_encode(arena, "a\0b", 3);
    assert_string_equal(link, "a%00b");
    const char *key = NULL;
    fc_error err;
    assert_int_equal(fc_h5_name_decode(arena, link, &key, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "NUL"));
    fc_arena_free(arena);
}

static void foreign_escapes_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"",     ".",  "a/b", "%2f", "%2e",       "%2Ea", "a%2E",
                                      "%41b", "a%", "%%",  "%2",  "100% done", "%25%"};
    fc_arena *arena = fc_arena_new();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *key = NULL;
        fc_error err;
        assert_int_equal(fc_h5_name_decode(arena, bad[i], &key, &err), FC_ECORRUPT);
        assert_null(strchr(err.message, '\n'));
    }
    fc_arena_free(arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_round_trips),
        cmocka_unit_test(every_byte_round_trips),
        cmocka_unit_test(nul_is_written_and_refused),
        cmocka_unit_test(foreign_escapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
