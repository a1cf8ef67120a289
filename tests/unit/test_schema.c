/*
 * formats/schema and the JSON reader below it: what a schema says, and every way in which one can be wrong.
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

static void wrong_files_are_told_with_their_place(void **state) {
    (void)state;
    static const struct {
        const char *text;
        fc_code code;
        const char *message; /* after the path */
    } cases[] = {
        {BEGIN GOOD "]", FC_ECORRUPT, ":1:94: the file ends where ',' or '}' should be: it is incomplete"},
        {BEGIN GOOD, FC_ECORRUPT, ":1:93: the file ends where ',' or ']' should be: it is incomplete"},
        {BEGIN "\n" GOOD "\n," GOOD "]}", FC_ECORRUPT, ": the name 'w' is there twice"},
        {BEGIN GOOD ",]}", FC_ECORRUPT, ":1:94: an object with a name should be here, not ']'"},
        {BEGIN GOOD "]} x", FC_ECORRUPT, ":1:96: the end of the file should be here, not 'x'"},
        {BEGIN "{\"name\": \"w\", \"shape\": [1]}]}", FC_ECORRUPT, ":1:77: tensor 'w' has no \"dtype\""},
        {BEGIN "{\"name\": \"w\", \"dtype\": \"f32\"}]}", FC_ECORRUPT, ":1:79: tensor 'w' has no \"shape\""},
        {BEGIN "{\"dtype\": \"f32\", \"shape\": []}]}", FC_ECORRUPT, ":1:79: an entry without \"name\" ends here"},
        {BEGIN "{\"name\": \"\"}]}", FC_ECORRUPT, ":1:61: the name is empty"},
        {BEGIN "{\"name\": 7}]}", FC_ECORRUPT, ":1:59: a name in quotation marks should be here, not '7'"},
        {BEGIN "{\"name\": \"w\", \"name\": \"v\"}]}", FC_ECORRUPT, ":1:71: the member \"name\" is there twice"},
        {BEGIN "{\"dtype\": \"f33\"}]}", FC_EUNSUPPORTED, ":1:65: unknown dtype 'f33'"},
        {BEGIN "{\"shape\": [1.0]}]}", FC_ECORRUPT, ":1:61: a size: an integer of at least 0 should be here, not 1.0"},
        {BEGIN "{\"shape\": [-1]}]}", FC_ECORRUPT, ":1:61: a size: an integer of at least 0 should be here, not -1"},
        {BEGIN "{\"shape\": [9223372036854775808]}]}", FC_ECORRUPT,
         ":1:61: a size: an integer of at least 0 should be here, not 9223372036854775808"},
        {BEGIN "{\"shape\": [01]}]}", FC_ECORRUPT, ":1:63: a digit should be here, not ']'"},
        {BEGIN "{\"shape\": [1e]}]}", FC_ECORRUPT, ":1:63: a digit should be here, not ']'"},
        {BEGIN "{\"shape\": [4294967296, 4294967296]}]}", FC_ECORRUPT,
         ":1:84: the product of the sizes does not fit 64 bits"},
        {BEGIN "{\"shape\": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}]}", FC_EUNSUPPORTED,
         ":1:125: more than 32 dimensions"},
        {BEGIN "{\"path\": []}]}", FC_ECORRUPT, ":1:61: the path is empty"},
        {BEGIN "{\"path\": [null]}]}", FC_ECORRUPT,
         ":1:60: a key (a string) or an index (an integer) should be here, not 'n'"},
        {BEGIN "{\"name\": \"a\\u0000b\"}]}", FC_ECORRUPT, ":1:61: \\u0000 cannot be part of a name"},
        {BEGIN "{\"name\": \"\\ud800x\"}]}", FC_ECORRUPT, ":1:60: half of a surrogate pair"},
        {BEGIN "{\"name\": \"\\x\"}]}", FC_ECORRUPT, ":1:60: not an escape of JSON"},
        {BEGIN "{\"name\": \"\\u00\"}]}", FC_ECORRUPT, ":1:60: not an escape of JSON"},
        {BEGIN "{\"name\": \"\xff\"}]}", FC_ECORRUPT, ":1:60: not UTF-8"},
        {BEGIN "{\"name\": \"\xed\xa0\x80\"}]}", FC_ECORRUPT, ":1:60: not UTF-8"},
        {BEGIN "{\"name\": \"\xc3", FC_ECORRUPT, ":1:60: not UTF-8"},
        {BEGIN "{\"name\": \"a\nb\"}]}", FC_ECORRUPT, ":1:61: the end of the string should be here, not the byte 0x0a"},
        {BEGIN "{\"name\" \"w\"}]}", FC_ECORRUPT, ":1:58: ':' should be here, not '\"'"},
        {BEGIN "{name: 1}]}", FC_ECORRUPT, ":1:51: a member's name in quotation marks should be here, not 'n'"},
        {BEGIN "7]}", FC_ECORRUPT, ":1:50: an object with a name should be here, not '7'"},
        {BEGIN "], \"tensors\": []}", FC_ECORRUPT, ":1:63: the member \"tensors\" is there twice"},
        {BEGIN "], \"later\": nul}", FC_ECORRUPT, ":1:62: a value should be here, not 'n'"},
        {BEGIN "], \"later\": [1 2]}", FC_ECORRUPT, ":1:65: ',' or ']' should be here, not '2'"},
        {BEGIN "]} {}", FC_ECORRUPT, ":1:53: the end of the file should be here, not '{'"},
        {"{\"fsdpckpt\": \"schema\", \"version\": 1}", FC_ECORRUPT, ":1:37: the member \"tensors\" is missing"},
        {"{\"fsdpckpt\": \"schema\", \"tensors\": []}", FC_ECORRUPT, ":1:38: the member \"version\" is missing"},
        {"{\"fsdpckpt\": \"schema\",\n\n \"version\": 2, \"tensors\": []}", FC_EUNSUPPORTED,
         ":3:14: version 2; this fsdpckpt reads version 1: use a newer one"},
        {"{\"fsdpckpt\": \"seal\"}", FC_EUNSUPPORTED, ":1:20: a file of the kind 'seal', not \"schema\""},
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

/* Every prefix of a good file, and every good file with one byte changed, is read or refused, never more. */
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

static void deep_nesting_is_refused(void **state) {
    (void)state;
    char text[400] = BEGIN "], \"x\": ";
    fc_checkpoint *c = NULL;
    fc_error err;
    memset(text + strlen(text), '[', 100);
    assert_int_equal(open_bytes(text, strlen(text), &c, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "nested deeper than 64 levels"));
}

static void other_json_is_no_checkpoint(void **state) {
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
        cmocka_unit_test(wrong_files_are_told_with_their_place),
        cmocka_unit_test(cut_and_changed_files),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(other_json_is_no_checkpoint),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
