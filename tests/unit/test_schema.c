/*
 * formats/schema: reading a schema, and everything that can be wrong in one.
 */
#include "fsdpckpt/format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char path[] = "/tmp/fsdpckpt-schema-XXXXXX";

static int make_file(void **state) {
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state) {
    (void)state;
    return unlink(path);
}

static fc_code open_bytes(const char *text, size_t size, fc_checkpoint **out, fc_error *err) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
    return fc_checkpoint_open(path, NULL, out, err);
}

static fc_checkpoint *open_good(const char *text) {
    fc_checkpoint *c = NULL;
    fc_error err = {FC_OK, ""};
    if (open_bytes(text, strlen(text), &c, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    assert_non_null(c);
    return c;
}

static void everything_is_read(void **state) {
    (void)state;
    fc_checkpoint *c =
        open_good("\xef\xbb\xbf {\"version\": 1, \"later\": {\"a\": [1, -2.5e+3, true, {}, []], \"b\": \"\"},\n"
                  "\"objects\": [{\"name\": \"optim.lr\", \"path\": [\"optim\", 0, \"lr\"], \"x\": null}],\n"
                  "\"tensors\": [{\"shape\": [2, 3], \"dtype\": \"bf16\", \"name\": \"a/\\u00e9\\ud83d\\ude00\\n\"},"
                  "{\"name\": \"s\", \"dtype\": \"float8_e4m3fn\", \"shape\": [ ]},"
                  "{\"name\": \"e\", \"dtype\": \"complex128\", \"shape\": [0, 9223372036854775807]}],"
                  "\"fsdpckpt\": \"schema\"}\r\n\t ");
    assert_string_equal(c->format->name, "schema");
    assert_true(c->format->layout_only);
    assert_int_equal(c->ntensors, 4);
    assert_int_equal(c->nfiles, 1);
    const fc_tensor *t = c->tensors;
    assert_string_equal(t[0].name, "optim.lr");
    assert_non_null(t[0].object);
    assert_int_equal(t[0].path.count, 3);
    assert_true(t[0].path.elements[1].is_index);
    assert_string_equal(t[0].path.elements[1].key, "0");
    assert_false(t[0].path.elements[2].is_index);
    assert_string_equal(t[1].name, "a/\xc3\xa9\xf0\x9f\x98\x80\n");
    assert_int_equal(t[1].dtype, FC_BF16);
    assert_int_equal(t[1].ndim, 2);
    assert_int_equal(t[1].shape[0], 2);
    assert_int_equal(t[1].shape[1], 3);
    assert_int_equal(t[1].nchunks, 0);
    assert_ptr_equal(t[1].path.elements[0].key, t[1].name);
    assert_int_equal(t[2].ndim, 0);
    assert_int_equal(t[2].dtype, FC_F8_E4M3FN);
    assert_int_equal(t[3].shape[1], INT64_MAX);
    fc_extent extent;
    fc_error err;
    assert_int_equal(fc_checkpoint_extent(c, &t[1], 0, &extent, &err), FC_EUSAGE);
    fc_checkpoint_close(c);
}

static void many_entries(void **state) {
    (void)state;
    enum { COUNT = 5000 };
    char *text = malloc(COUNT * 80 + 200), *at = text;
    assert_non_null(text);
    at += sprintf(at, "{\"fsdpckpt\":\"schema\",\"version\":1,\"tensors\":[");
    for (int i = 0; i < COUNT; i++) {
        at += sprintf(at, "%s{\"name\":\"{layers}.%d\",\"dtype\":\"u8\",\"shape\":[%d]}", i ? "," : "", i, i);
    }
    at += sprintf(at, "]}");
    fc_checkpoint *c = open_good(text);
    assert_int_equal(c->ntensors, COUNT);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(c->tensors[i].shape[0], i);
    }
    fc_checkpoint_close(c);
    free(text);
}

#define BEGIN "{\"fsdpckpt\": \"schema\", \"version\": 1, \"tensors\": ["
#define GOOD "{\"name\": \"w\", \"dtype\": \"f32\", \"shape\": [1]}"

#define ONES "1,1,1,1,1,1,1,1,"
#define TENSOR "{\"name\": \"w\", \"dtype\": \"f32\", \"shape\": "

static void wrong_files_are_refused_with_the_position(void **state) {
    (void)state;
    static const struct {
        const char *text;
        fc_code code;
        const char *message; /* after the path */
    } cases[] = {
        /* Invalid JSON: the message comes from jansson. */
        {BEGIN GOOD "]", FC_ECORRUPT, ":1:93: '}' expected near end of file"},
        {BEGIN GOOD, FC_ECORRUPT, ":1:92: ']' expected near end of file"},
        {BEGIN GOOD ",]}", FC_ECORRUPT, ":1:94: unexpected token near ']'"},
        {BEGIN GOOD "]} x", FC_ECORRUPT, ":1:96: end of file expected near 'x'"},
        {BEGIN "{\"name\": \"w\", \"name\": \"v\"}]}", FC_ECORRUPT, ":1:69: duplicate object key near '\"name\"'"},
        {BEGIN TENSOR "[9223372036854775808]}]}", FC_ECORRUPT, ":1:108: too big integer near '9223372036854775808'"},
        {BEGIN TENSOR "[01]}]}", FC_ECORRUPT, ":1:90: invalid token near '0'"},
        {BEGIN TENSOR "[1e]}]}", FC_ECORRUPT, ":1:91: invalid token near '1e'"},
        {BEGIN "{\"name\": \"a\\u0000b\"}]}", FC_ECORRUPT, ":1:68: \\u0000 cannot be part of a name"},
        {BEGIN "{\"a\\u0000b\": 1}]}", FC_ECORRUPT, ":1:60: \\u0000 cannot be part of a name"},
        {BEGIN "{\"name\": \"\\ud800x\"}]}", FC_ECORRUPT, ":1:67: invalid Unicode '\\uD800' near '\"\\ud800x\"'"},
        {BEGIN "{\"name\": \"\\x\"}]}", FC_ECORRUPT, ":1:61: invalid escape near '\"\\x'"},
        {BEGIN "{\"name\": \"\\u00\"}]}", FC_ECORRUPT, ":1:64: invalid escape near '\"\\u00\"'"},
        {BEGIN "{\"name\": \"\xff\"}]}", FC_ECORRUPT, ":1:59: unable to decode byte 0xff near '\"'"},
        {BEGIN "{\"name\": \"\xed\xa0\x80\"}]}", FC_ECORRUPT, ":1:59: unable to decode byte 0xed near '\"'"},
        {BEGIN "{\"name\": \"\xc3", FC_ECORRUPT, ":1:59: unable to decode byte 0xc3 near '\"'"},
        {BEGIN "{\"name\": \"a\nb\"}]}", FC_ECORRUPT, ":1:60: unexpected newline near '\"a'"},
        {BEGIN "{\"name\" \"w\"}]}", FC_ECORRUPT, ":1:60: ':' expected near '\"w\"'"},
        {BEGIN "{name: 1}]}", FC_ECORRUPT, ":1:54: string or '}' expected near 'name'"},
        {BEGIN "], \"tensors\": []}", FC_ECORRUPT, ":1:61: duplicate object key near '\"tensors\"'"},
        {BEGIN "], \"later\": nul}", FC_ECORRUPT, ":1:64: invalid token near 'nul'"},
        {BEGIN "], \"later\": [1 2]}", FC_ECORRUPT, ":1:65: ']' expected near '2'"},
        {BEGIN "], \"later\": {\"a\": 1, \"a\": 1}}", FC_ECORRUPT, ":1:73: duplicate object key near '\"a\"'"},
        {BEGIN "]} {}", FC_ECORRUPT, ":1:53: end of file expected near '{'"},
        {BEGIN "],\n\n \"later\": ]}", FC_ECORRUPT, ":3:11: unexpected token near ']'"},
        {"\xef\xbb\xbf" BEGIN "]} x", FC_ECORRUPT, ":1:53: end of file expected near 'x'"},
        /* Valid JSON that is not a schema. */
        {BEGIN "\n" GOOD "\n," GOOD "]}", FC_ECORRUPT, ": the name 'w' appears twice"},
        {BEGIN GOOD "], \"objects\": [{\"name\": \"w\"}]}", FC_ECORRUPT, ": the name 'w' appears twice"},
        {BEGIN "{\"name\": \"w\", \"shape\": [1]}]}", FC_ECORRUPT, ": tensor 'w' has no \"dtype\""},
        {BEGIN "{\"name\": \"w\", \"dtype\": \"f32\"}]}", FC_ECORRUPT, ": tensor 'w' has no \"shape\""},
        {BEGIN GOOD ", {\"dtype\": \"f32\", \"shape\": []}]}", FC_ECORRUPT, ": tensors[1] has no \"name\""},
        {BEGIN "{\"name\": \"\"}]}", FC_ECORRUPT, ": tensors[0]: the name is empty"},
        {BEGIN "{\"name\": 7}]}", FC_ECORRUPT, ": tensors[0]: \"name\" should be a name in quotation marks, not 7"},
        {BEGIN "7]}", FC_ECORRUPT, ": tensors[0] should be an object with a name, not 7"},
        {BEGIN "[\"w\", 1]]}", FC_ECORRUPT, ": tensors[0] should be an object with a name, not an array"},
        {BEGIN "\"a string of sixty-four characters, which no message is to repeat\"]}", FC_ECORRUPT,
         ": tensors[0] should be an object with a name, not a long string"},
        {BEGIN "{\"name\": \"w\", \"dtype\": \"f33\", \"shape\": []}]}", FC_EUNSUPPORTED,
         ": tensor 'w': unknown dtype 'f33'"},
        {BEGIN "{\"name\": \"w\", \"dtype\": null, \"shape\": []}]}", FC_ECORRUPT,
         ": tensor 'w': \"dtype\" should be a dtype such as \"bfloat16\", not null"},
        {BEGIN TENSOR "{}}]}", FC_ECORRUPT, ": tensor 'w': \"shape\" should be an array of sizes, not an object"},
        {BEGIN TENSOR "[1, 1.0]}]}", FC_ECORRUPT,
         ": tensor 'w': shape[1] should be a size: an integer of at least 0, not 1.0"},
        {BEGIN TENSOR "[-1]}]}", FC_ECORRUPT,
         ": tensor 'w': shape[0] should be a size: an integer of at least 0, not -1"},
        {BEGIN TENSOR "[true]}]}", FC_ECORRUPT,
         ": tensor 'w': shape[0] should be a size: an integer of at least 0, not true"},
        {BEGIN TENSOR "[4294967296, 4294967296]}]}", FC_ECORRUPT,
         ": tensor 'w': the product of the sizes exceeds 64 bits"},
        {BEGIN TENSOR "[" ONES ONES ONES ONES "1]}]}", FC_EUNSUPPORTED, ": tensor 'w': more than 32 dimensions"},
        {BEGIN TENSOR "[], \"path\": []}]}", FC_ECORRUPT, ": tensor 'w': the path is empty"},
        {BEGIN TENSOR "[], \"path\": \"w\"}]}", FC_ECORRUPT,
         ": tensor 'w': \"path\" should be an array of keys and indexes, not \"w\""},
        {BEGIN TENSOR "[], \"path\": [\"a\", null]}]}", FC_ECORRUPT,
         ": tensor 'w': path[1] should be a key (a string) or an index (an integer of at least 0), not null"},
        {BEGIN TENSOR "[], \"path\": [-1]}]}", FC_ECORRUPT,
         ": tensor 'w': path[0] should be a key (a string) or an index (an integer of at least 0), not -1"},
        {BEGIN TENSOR "[1152921504606846976]}]}", FC_ECORRUPT,
         ": tensor 'w': the product of the sizes exceeds 64 bits"},
        {BEGIN TENSOR "[], \"same_as\": 7}]}", FC_ECORRUPT,
         ": tensor 'w': \"same_as\" should be the name of a tensor, not 7"},
        {BEGIN "], \"order\": \"size\"}", FC_ECORRUPT, ": \"order\" should be \"model\" or absent, not \"size\""},
        {BEGIN "], \"order\": 7}", FC_ECORRUPT, ": \"order\" should be \"model\" or absent, not 7"},
        {BEGIN "], \"objects\": 7}", FC_ECORRUPT, ": \"objects\" should be an array, not 7"},
        {BEGIN "], \"objects\": [{\"path\": [\"a\"]}]}", FC_ECORRUPT, ": objects[0] has no \"name\""},
        {BEGIN "], \"objects\": [{\"name\": \"o\", \"path\": []}]}", FC_ECORRUPT, ": object 'o': the path is empty"},
        {"{\"fsdpckpt\": \"schema\", \"version\": 1, \"tensors\": {}}", FC_ECORRUPT,
         ": \"tensors\" should be an array, not an object"},
        {"{\"fsdpckpt\": \"schema\", \"version\": 1}", FC_ECORRUPT, ": the member \"tensors\" is missing"},
        {"{\"fsdpckpt\": \"schema\", \"tensors\": []}", FC_ECORRUPT, ": the member \"schema\" is missing"},
        {"{\"fsdpckpt\": \"schema\", \"schema\": 2, \"version\": 1, \"tensors\": []}", FC_EUNSUPPORTED,
         ": version 2 is not supported, only version 1; use a newer fsdpckpt"},
        {"{\"fsdpckpt\": \"schema\", \"schema\": [], \"tensors\": []}", FC_ECORRUPT,
         ": \"schema\" should be a number, not an array"},
        {"{\"kind\": \"fsdpckpt\", \"version\": 1, \"tensors\": []}", FC_ECORRUPT,
         ": the member \"fsdpckpt\" is missing"},
        {"{\"fsdpckpt\": \"schema\",\n\n \"version\": 2, \"tensors\": []}", FC_EUNSUPPORTED,
         ": version 2 is not supported, only version 1; use a newer fsdpckpt"},
        {"{\"fsdpckpt\": \"schema\", \"version\": \"1\", \"tensors\": []}", FC_ECORRUPT,
         ": \"version\" should be a number, not \"1\""},
        {"{\"fsdpckpt\": \"seal\"}", FC_EUNSUPPORTED, ": \"fsdpckpt\" should be \"schema\", not \"seal\""},
        {"{\"fsdpckpt\": 7}", FC_ECORRUPT, ": \"fsdpckpt\" should be \"schema\", not 7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_checkpoint *c = NULL;
        fc_error err = {FC_OK, ""};
        fc_code code = open_bytes(cases[i].text, strlen(cases[i].text), &c, &err);
        assert_null(c);
        if (code != cases[i].code || strncmp(err.message, path, strlen(path)) != 0 ||
            strcmp(err.message + strlen(path), cases[i].message) != 0) {
            fail_msg("case %zu: %d %s\nexpected: %d %s", i, code, err.message, cases[i].code, cases[i].message);
        }
    }
}

/* Every prefix of a good file, and every change of one byte, is read or refused without a crash. */
static void cut_and_changed_files(void **state) {
    (void)state;
    static const char good[] = BEGIN "{\"name\": \"\\u00e9\xc3\xa9\", \"path\": [\"a\", 3], \"dtype\": \"f32\", "
                                     "\"shape\": [1, 2]}], \"x\": [{}, -1e2]}";
    char text[sizeof good];
    for (size_t n = 0; n < sizeof good - 1; n++) {
        fc_checkpoint *c = NULL;
        fc_error err;
        assert_int_not_equal(open_bytes(good, n, &c, &err), FC_OK);
        assert_null(c);
        static const char others[] = "\0\"\\{}[],:u0\xff\n";
        for (size_t i = 0; i < sizeof others - 1; i++) {
            memcpy(text, good, sizeof good);
            text[n] = others[i];
            fc_code code = open_bytes(text, sizeof good - 1, &c, &err);
            assert_true(code == FC_OK || (err.message[0] != '\0' && !strchr(err.message, '\n')));
            fc_checkpoint_close(c);
            c = NULL;
        }
    }
}

/* jansson parses at most 2,048 levels. */
static void deep_nesting_is_refused(void **state) {
    (void)state;
    char text[3100] = BEGIN "], \"x\": ";
    fc_checkpoint *c = NULL;
    fc_error err;
    memset(text + strlen(text), '[', 3000);
    assert_int_equal(open_bytes(text, strlen(text), &c, &err), FC_EUNSUPPORTED);
    assert_null(c);
    assert_non_null(strstr(err.message, ":1:2105: maximum parsing depth reached near '['"));
}

static void long_paths_are_refused(void **state) {
    (void)state;
    enum { MOST = 256 };
    for (int n = MOST; n <= MOST + 1; n++) {
        char text[2000];
        int at = sprintf(text, BEGIN TENSOR "[], \"path\": [7");
        for (int i = 1; i < n; i++) {
            at += sprintf(text + at, ",\"k\"");
        }
        sprintf(text + at, "]}]}");
        fc_checkpoint *c = NULL;
        fc_error err;
        fc_code code = open_bytes(text, strlen(text), &c, &err);
        assert_int_equal(code, n == MOST ? FC_OK : FC_EUNSUPPORTED);
        if (code == FC_OK) {
            assert_int_equal(c->tensors[0].path.count, MOST);
        } else {
            assert_non_null(strstr(err.message, ": tensor 'w': the path has more than 256 elements"));
        }
        fc_checkpoint_close(c);
    }
}

static void other_json_is_not_a_checkpoint(void **state) {
    (void)state;
    static const char *const others[] = {"{}", "[]", "{\"tensors\": []}", " ", "\"fsdpckpt\""};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        fc_checkpoint *c = NULL;
        fc_error err;
        assert_int_equal(open_bytes(others[i], strlen(others[i]), &c, &err), FC_ECORRUPT);
        assert_non_null(strstr(err.message, "not a checkpoint"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_is_read),
        cmocka_unit_test(many_entries),
        cmocka_unit_test(wrong_files_are_refused_with_the_position),
        cmocka_unit_test(cut_and_changed_files),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(long_paths_are_refused),
        cmocka_unit_test(other_json_is_not_a_checkpoint),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
