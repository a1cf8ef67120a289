/*
 * safetensors: headers that are refused, with their messages. Everything that the safetensors library (0.8) refuses is
 * refused here too. tests/oracle/safetensors_*.py compare valid files with the library.
 */
#include "base/base64.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char directory[] = "/tmp/fc-test-st-XXXXXX";
static char path[64];

static void put(const char *name, const char *header, size_t length, const char *data, size_t size) {
    char file[128];
    unsigned char bytes[8];
    snprintf(file, sizeof file, "%s/%s", directory, name);
    FILE *f = fopen(file, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)((uint64_t)length >> (8 * i));
    }
    fwrite(bytes, 1, 8, f);
    fwrite(header, 1, strlen(header), f);
    fwrite(data, 1, size, f);
    fclose(f);
}

static void forget(const char *name) {
    char file[128];
    snprintf(file, sizeof file, "%s/%s", directory, name);
    unlink(file);
}

#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"
#define ONE T("a", "U8", "[4]", "0", "4")

static const struct {
    const char *header; /* four bytes of data follow */
    fc_code code;
    const char *message; /* part of the message */
} refused[] = {
    {"", FC_ECORRUPT, "offset 8: a JSON object should start here"},
    {"[]", FC_ECORRUPT, "offset 8: a JSON object should start here"},
    {"\xef\xbb\xbf{}", FC_ECORRUPT, "offset 8"},
    {"{", FC_ECORRUPT, "offset 9: a name in quotation marks"},
    {"{" ONE, FC_ECORRUPT, "'}' or ','"},
    {"{" ONE ",}", FC_ECORRUPT, "a name in quotation marks"},
    {"{" ONE "} x", FC_ECORRUPT, "something follows"},
    {"{" ONE "," ONE "}", FC_ECORRUPT, "tensor a: the name appears twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", FC_ECORRUPT, "duplicate"},
    {"{\"a\":4}", FC_ECORRUPT, "tensor a: its entry in the header is not a JSON object"},
    {"{\"a\":{}}", FC_ECORRUPT, "tensor a: its dtype is missing"},
    {"{\"a\":{\"dtype\":\"U8\"}}", FC_ECORRUPT, "tensor a: its shape is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", FC_ECORRUPT, "tensor a: its data_offsets"},
    {"{" T("a", "C128", "[4]", "0", "4") "}", FC_EUNSUPPORTED, "tensor a: the dtype C128 is unknown"},
    {"{" T("a", "F6_E2M3", "[4]", "0", "3") "}", FC_EUNSUPPORTED, "no 6-bit dtypes"},
    {"{" T("a", "F4", "[3]", "0", "2") "}", FC_ECORRUPT, "do not fill the last byte"},
    {"{" T("a", "F4", "[8,1]", "0", "4") "}", FC_EUNSUPPORTED, "do not fill whole bytes"},
    {"{" T("a", "U8", "[-4]", "0", "4") "}", FC_ECORRUPT, "a size in its shape"},
    {"{" T("a", "U8", "[4.0]", "0", "4") "}", FC_ECORRUPT, "a size in its shape"},
    {"{" T("a", "U8", "[99999999999999999999]", "0", "4") "}", FC_ECORRUPT, "too big"},
    {"{" T("a", "U8", "[5]", "0", "4") "}", FC_ECORRUPT, "require 5 bytes, but its data_offsets span 4"},
    {"{" T("a", "F64", "[4611686018427387904,2]", "0", "0") "}", FC_ECORRUPT, "overflows"},
    {"{" T("a", "F64", "[1152921504606846976]", "0", "0") "}", FC_ECORRUPT, "overflows"},
    {"{" T("a", "U8", "[4]", "4", "0") "}", FC_ECORRUPT, "its data_offsets"},
    {"{" T("a", "U8", "[4]", "1", "5") "}", FC_ECORRUPT, "starts at byte 1 instead of 0"},
    {"{" T("a", "U8", "[2]", "0", "2") "," T("b", "U8", "[1]", "3", "4") "}", FC_ECORRUPT, "tensor b: its data starts"},
    {"{" T("a", "U8", "[3]", "0", "3") "," T("b", "U8", "[2]", "2", "4") "}", FC_ECORRUPT, "tensor b: its data starts"},
    {"{" T("a", "U8", "[3]", "0", "3") "}", FC_ECORRUPT, "1 bytes follow the data of the last tensor"},
    {"{" T("a", "U8", "[5]", "0", "5") "}", FC_ECORRUPT, "truncated"},
    {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4]", "0", "4") "}",
     FC_EUNSUPPORTED, "more than 32 dimensions"},
    {"{\"__metadata__\":4," ONE "}", FC_ECORRUPT, "__metadata__ is not a JSON object"},
    {"{\"__metadata__\":{\"k\":1}," ONE "}", FC_ECORRUPT, "the value of k is not a string"},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}," ONE "}", FC_ECORRUPT, "the key k appears twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}," ONE "}", FC_ECORRUPT, "__metadata__ appears twice"},
    {"{" T("a\\u0000b", "U8", "[4]", "0", "4") "}", FC_EUNSUPPORTED, "NUL"},
    {"{" T("\xff", "U8", "[4]", "0", "4") "}", FC_ECORRUPT, "decode byte 0xff"},
    /* fsdpckpt's own members of __metadata__ can be wrong as well. */
    {"{\"__metadata__\":{\"fsdpckpt.dtypes\":\"{\\\"b\\\":\\\"complex128\\\"}\"}," ONE "}", FC_ECORRUPT,
     "tensor b: the file has no tensor of that name"},
    {"{\"__metadata__\":{\"fsdpckpt.dtypes\":\"{\\\"a\\\":\\\"complex128\\\"}\"}," ONE "}", FC_ECORRUPT,
     "tensor a: the dtype does not fit"},
    {"{\"__metadata__\":{\"fsdpckpt.dtypes\":\"{\\\"a\\\":\\\"int8\\\"}\"}," ONE "}", FC_ECORRUPT,
     "tensor a: the dtype does not fit"},
    {"{\"__metadata__\":{\"fsdpckpt.paths\":\"{\\\"a\\\":[]}\"}," ONE "}", FC_ECORRUPT, "the path should be"},
    {"{\"__metadata__\":{\"fsdpckpt.paths\":\"{\\\"a\\\":[-1]}\"}," ONE "}", FC_ECORRUPT, "the path should be"},
    {"{\"__metadata__\":{\"fsdpckpt.paths\":\"{\"}," ONE "}", FC_ECORRUPT, "fsdpckpt.paths: at character 1"},
    {"{\"__metadata__\":{\"fsdpckpt.mesh\":\"{}\"}," ONE "}", FC_ECORRUPT, "fsdpckpt.mesh should be a mesh"},
    {"{\"__metadata__\":{\"fsdpckpt.crc64\":\"00\"}," ONE "}", FC_ECORRUPT, "16 hexadecimal digits"},
    {"{\"__metadata__\":{\"fsdpckpt.object.o\":\"{}\"}," ONE "}", FC_ECORRUPT,
     "fsdpckpt.object.o: encoding, data or json is missing"},
    {"{\"__metadata__\":{\"fsdpckpt.object.o\":\"{\\\"data\\\":\\\"AB\\\"}\"}," ONE "}", FC_ECORRUPT,
     "fsdpckpt.object.o: the value of data is invalid"},
    {"{\"__metadata__\":{\"fsdpckpt.object.a\":\"{\\\"encoding\\\":\\\"x\\\",\\\"json\\\":\\\"1\\\",\\\"data\\\":"
     "\\\"\\\"}\"}," ONE "}",
     FC_ECORRUPT, "the name a appears twice"},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[1]}}\"}," ONE "}", FC_ECORRUPT,
     "it is a shard, but the name of the file"},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,0]}}\"}," ONE "}", FC_ECORRUPT,
     "saved_offsets should have one number"},
};

static void hostile_headers_are_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        fc_checkpoint *c;
        fc_error err = {0};
        put("a.safetensors", refused[i].header, strlen(refused[i].header), "abcd", 4);
        fc_code rc = fc_checkpoint_open(path, NULL, &c, &err);
        if (rc != refused[i].code || !strstr(err.message, refused[i].message) ||
            strncmp(err.message, path, strlen(path)) != 0) {
            fail_msg("case %zu: %d: %s", i, rc, err.message);
        }
    }
}

static void wrong_lengths_are_refused(void **state) {
    static const uint64_t wrong[] = {UINT64_MAX, 100000001, 100000000, 1000};
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fc_checkpoint *c;
        fc_error err = {0};
        put("a.safetensors", "{}", (size_t)wrong[i], "", 0);
        assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
        assert_non_null(strstr(err.message, wrong[i] > 100000000 ? "100000000" : "truncated"));
    }
    put("a.safetensors", "{}", 2, "", 0);
    assert_int_equal(truncate(path, 5), 0);
    fc_checkpoint *c;
    fc_error err = {0};
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "truncated"));
}

/* A value for which jansson would build a tree of seventy times its size. */
static void large_values_cost_little_memory(void **state) {
    enum { SIZE = 4 << 20 };
    (void)state;
    char *header = malloc(SIZE + 64);
    assert_non_null(header);
    size_t n = (size_t)sprintf(header, "{\"a\":{\"shape\":[");
    while (n < SIZE) {
        n += (size_t)sprintf(header + n, "[],");
    }
    sprintf(header + n, "[]]}}");
    put("a.safetensors", header, strlen(header), "", 0);
    free(header);
    fc_checkpoint *c;
    fc_error err = {0};
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "more than 64 KiB"));
}

static fc_checkpoint *open_good(const char *header, const char *data, size_t size) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    put("a.safetensors", header, strlen(header), data, size);
    if (fc_checkpoint_open(path, NULL, &c, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    return c;
}

/* Leading blanks and null metadata, as the library accepts; empty tensors between others; data in another order. */
static void unusual_headers_are_accepted(void **state) {
    (void)state;
    fc_extent extent;
    fc_checkpoint *c =
        open_good(" \n{\"__metadata__\":null," T("e", "F32", "[0,3]", "4", "4") "," T("b", "U8", "[1]", "3", "4") "," T(
                      "", "U8", "[]", "2", "3") "," T("a", "U16", "[1]", "0", "2") "}  ",
                  "abcd", 4);
    assert_int_equal(c->ntensors, 4);
    assert_string_equal(c->tensors[0].name, "e");
    assert_int_equal(c->tensors[0].nchunks, 0);
    assert_int_equal(c->tensors[2].ndim, 0);
    assert_int_equal(fc_checkpoint_extent(c, &c->tensors[1], 0, &extent, NULL), FC_OK);
    assert_int_equal(extent.length, 1);
    assert_int_equal(extent.offset, c->tensors[3].chunks[0].place.offset + 3);
    fc_checkpoint_close(c);
    c = open_good("{}", "", 0);
    assert_int_equal(c->ntensors, 0);
    fc_checkpoint_close(c);
}

static void four_bit_dtypes_are_unreadable(void **state) {
    (void)state;
    fc_checkpoint *c = open_good("{" T("a", "F4", "[2,4]", "0", "4") "}", "abcd", 4);
    assert_int_equal(c->tensors[0].dtype, FC_F4_E2M1FN_X2);
    assert_int_equal(c->tensors[0].shape[1], 2);
    fc_checkpoint_close(c);
}

/* ---- several files ---- */

static fc_code open_directory(fc_error *err) {
    fc_checkpoint *c = NULL;
    fc_code rc = fc_checkpoint_open(directory, NULL, &c, err);
    fc_checkpoint_close(c);
    return rc;
}

static void put_text(const char *name, const char *text) {
    char file[128];
    snprintf(file, sizeof file, "%s/%s", directory, name);
    FILE *f = fopen(file, "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

#define INDEX "model.safetensors.index.json"

static void wrong_indexes_are_refused(void **state) {
    static const struct {
        const char *text, *message;
        fc_code code;
    } cases[] = {
        {"{\"metadata\":{},\"weight_map\":{\"a\":\"a.safetensors\"}}", NULL, FC_OK},
        {"{\"weight_map\":{\"a\":\"../a.safetensors\"}}", "hostile", FC_ECORRUPT},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "hostile", FC_ECORRUPT},
        {"{\"weight_map\":{\"a\":\"b.safetensors\"}}", "maps 1 tensor to it, for example a", FC_ECORRUPT},
        {"{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"a.safetensors\"}}", "says that tensor b is in a.safetensors",
         FC_ECORRUPT},
        {"{\"weight_map\":{\"b\":\"a.safetensors\"}}", "tensor a is in a.safetensors, but not", FC_ECORRUPT},
        {"{\"weight_map\":{\"a\":\"a.safetensors\",\"a\":\"a.safetensors\"}}", "appears twice", FC_ECORRUPT},
        {"{\"weight_map\":{}}", "the weight_map is missing", FC_ECORRUPT},
        {"{}", "the weight_map is missing", FC_ECORRUPT},
        {"{\"weight_map\":[]}", "a JSON object should start", FC_ECORRUPT},
        {"{\"weight_map\":{\"a\":1}}", "its file name is not a string", FC_ECORRUPT},
    };
    (void)state;
    put("a.safetensors", "{" ONE "}", strlen("{" ONE "}"), "abcd", 4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_error err = {0};
        put_text(INDEX, cases[i].text);
        fc_code rc = open_directory(&err);
        if (rc != cases[i].code || (rc != FC_OK && !strstr(err.message, cases[i].message))) {
            fail_msg("%s: %d: %s", cases[i].text, rc, err.message);
        }
    }
    forget(INDEX);
}

static void several_files(void **state) {
    static const char a[] = "{" ONE "}", b[] = "{" T("b", "U8", "[4]", "0", "4") "}";
    fc_error err = {0};
    (void)state;
    forget("a.safetensors");
    put("a-0.safetensors", a, strlen(a), "abcd", 4);
    put("a-1.safetensors", b, strlen(b), "abcd", 4);
    assert_int_equal(open_directory(&err), FC_OK);
    put("a-1.safetensors", a, strlen(a), "abcd", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "tensor a is in a-0.safetensors and in a-1.safetensors"));
    forget("a-1.safetensors");
    put("a-2.safetensors", b, strlen(b), "abcd", 4); /* 0 and 2 do not count */
    assert_int_equal(open_directory(&err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "a-0.safetensors (safetensors), a-2.safetensors (safetensors)"));
    forget("a-2.safetensors");
    forget("a-0.safetensors");
    put("m-00001-of-00003.safetensors", a, strlen(a), "abcd", 4);
    put("m-00003-of-00003.safetensors", b, strlen(b), "abcd", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "m-00002-of-00003.safetensors is missing"));
    forget("m-00001-of-00003.safetensors");
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "m-00001-of-00003.safetensors is missing"));
    forget("m-00003-of-00003.safetensors");
    put("m-00001-of-00003.safetensors", a, strlen(a), "abcd", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    forget("m-00001-of-00003.safetensors");
}

#define SHARD(offset)                                                                                                  \
    "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[" offset "]}}\"}," ONE "}"

static void shards(void **state) {
    static const char first[] = SHARD("0"), second[] = SHARD("4"), far[] = SHARD("9223372036854775807"),
                      none[] = "{" ONE "}";
    static const char one[] = "shard-00001-model-00001-of-00001.safetensors";
    static const char two[] = "shard-00002-model-00001-of-00001.safetensors";
    static const char three[] = "shard-00003-model-00001-of-00001.safetensors";
    fc_checkpoint *c;
    fc_error err = {0};
    (void)state;
    put(one, first, strlen(first), "abcd", 4);
    put(two, second, strlen(second), "efgh", 4);
    assert_int_equal(fc_checkpoint_open(directory, NULL, &c, &err), FC_OK);
    assert_int_equal(c->tensors[0].shape[0], 8);
    assert_int_equal(c->tensors[0].chunks[1].rank, 1);
    fc_checkpoint_close(c);
    put(two, far, strlen(far), "efgh", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "exceeds the tensor"));
    put(two, none, strlen(none), "efgh", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "DCP_SHARDING_INFO in __metadata__ lacks it"));
    forget(two);
    put(three, second, strlen(second), "efgh", 4);
    assert_int_equal(open_directory(&err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "no shard-00002-model-"));
    put("other.safetensors", none, strlen(none), "efgh", 4);
    assert_int_equal(open_directory(&err), FC_EUSAGE);
    forget("other.safetensors");
    forget(three);
    put("shard-00001-model-00003-of-00003.safetensors", first, strlen(first), "abcd", 4);
    assert_int_equal(open_directory(&err), FC_EUSAGE);
    forget("shard-00001-model-00003-of-00003.safetensors");
    forget(one);
}

static void base64(void **state) {
    static const char *const bad[] = {"A", "AB", "ABC", "AB=C", "A===", "AB==CD==", "AA\n=", "AB==", "AAB=", "=AAA"};
    unsigned char bytes[256], back[256];
    char text[400];
    size_t n;
    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)(i * 37);
    }
    for (size_t size = 0; size <= sizeof bytes; size++) {
        fc_base64_encode(bytes, size, text);
        assert_true(fc_base64_decode(text, fc_base64_length(size), back, &n));
        assert_int_equal(n, size);
        assert_memory_equal(back, bytes, size);
    }
    fc_base64_encode("foobar", 5, text);
    assert_memory_equal(text, "Zm9vYmE=", 8);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(fc_base64_decode(bad[i], strlen(bad[i]), back, &n));
    }
    assert_int_equal(fc_base64_length(SIZE_MAX), SIZE_MAX);
}

static int set_up(void **state) {
    (void)state;
    if (!mkdtemp(directory)) {
        return -1;
    }
    snprintf(path, sizeof path, "%s/a.safetensors", directory);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    unlink(path);
    return rmdir(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_headers_are_refused),
        cmocka_unit_test(wrong_lengths_are_refused),
        cmocka_unit_test(large_values_cost_little_memory),
        cmocka_unit_test(unusual_headers_are_accepted),
        cmocka_unit_test(four_bit_dtypes_are_unreadable),
        cmocka_unit_test(wrong_indexes_are_refused),
        cmocka_unit_test(several_files),
        cmocka_unit_test(shards),
        cmocka_unit_test(base64),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
