/*
 * Text output: hostile names, widths, sizes and JSON.
 */
#include "output/json_out.h"
#include "output/text.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static text_out out; /* static because it is too large for the stack under sanitizers */
static char written[4096];

static void start(void) {
    text_out_init(&out, -1);
}

/* Returns the text written so far. Without a descriptor it all stays in the buffer. */
static const char *finish(void) {
    assert_int_equal(out.error, 0);
    assert_true(out.used < sizeof written);
    memcpy(written, out.buf, out.used);
    written[out.used] = '\0';
    return written;
}

static void check_name(const char *name, const char *expected, size_t width) {
    start();
    text_name(&out, name);
    assert_string_equal(finish(), expected);
    assert_int_equal(text_name_width(name), width);
}

static void hostile_names_are_escaped(void **state) {
    (void)state;
    check_name("plain.name-1", "plain.name-1", 12);
    check_name("a\x1b[2Jb\nc\x7f", "a\\x1b[2Jb\\x0ac\\x7f", 18);
    check_name("\xc2\x9b"
               "31m",
               "\\u009b31m", 9);                    /* the one-character CSI */
    check_name("\xe2\x80\xaegpj", "\\u202egpj", 9); /* right-to-left override */
    check_name("bad\xff\xc0\x80", "bad\\xff\\xc0\\x80", 15);
    check_name("cut\xe6\x97", "cut\\xe6\\x97", 11);
    check_name("\xed\xa0\x80", "\\xed\\xa0\\x80", 12);   /* UTF-8 has no surrogates */
    check_name("\xf3\xa0\x80\xa1x", "\\U000e0021x", 11); /* tag characters are invisible */
    check_name("", "", 0);
}

/* What would be a command at the start of a line of a log, or anywhere in it. */
static void commands_in_logs_are_escaped(void **state) {
    (void)state;
    check_name("::error::x", "\\x3a:error::x", 13);
    check_name("  ::error::x", "  \\x3a:error::x", 15);
    check_name("\u00a0\u3000::e", "\u00a0\u3000\\x3a:e", 9);
    check_name("a::b: c", "a::b: c", 7);
    check_name("##[error]x", "#\\x23[error]x", 13);
    check_name("a ##vso[b]", "a #\\x23vso[b]", 13);
    check_name("###[a]#b # c", "#\\x23\\x23[a]#b # c", 18);
    check_name("#\xff#", "#\\xff#", 6);
}

static void check_html(const char *name, const char *expected) {
    start();
    text_html(&out, name);
    assert_string_equal(finish(), expected);
}

static void hostile_names_are_text_in_html(void **state) {
    (void)state;
    check_html("layers.0.wq", "layers.0.wq");
    check_html("</script><b a='\"'>&", "&#60;/script&#62;&#60;b a=&#39;&#34;&#39;&#62;&#38;");
    check_html("\xe2\x80\xaegpj\x01 日本", "\\u202egpj\\x01 日本");
    check_html("\xff<", "\\xff&#60;");
    check_html("", "");
}

static void widths_of_scripts(void **state) {
    (void)state;
    check_name("ünï", "ünï", 3);
    check_name("日本", "日本", 4);
    check_name("🙂", "🙂", 2);
    check_name("e\xcc\x81", "e\xcc\x81", 1); /* combining accent */
    start();
    text_name_padded(&out, "日本", 6);
    text_puts(&out, "|");
    assert_string_equal(finish(), "日本  |");
}

static void sizes_for_people(void **state) {
    (void)state;
    char buf[TEXT_SIZE_MAX];
    assert_string_equal(text_bytes(buf, 0), "0 bytes");
    assert_string_equal(text_bytes(buf, 1), "1 byte");
    assert_string_equal(text_bytes(buf, 999), "999 bytes");
    assert_string_equal(text_bytes(buf, 1000), "1.00 kB");
    assert_string_equal(text_bytes(buf, 999999), "1.00 MB");
    assert_string_equal(text_bytes(buf, 16060000000), "16.1 GB");
    assert_string_equal(text_bytes(buf, UINT64_MAX), "18.4 EB");
    assert_string_equal(text_count(buf, 0), "0");
    assert_string_equal(text_count(buf, 1234567), "1,234,567");
    assert_string_equal(text_count(buf, UINT64_MAX), "18,446,744,073,709,551,615");
    assert_string_equal(text_params(buf, 512), "512");
    assert_string_equal(text_params(buf, 124439808), "124 million");
    assert_string_equal(text_params(buf, 8030261248), "8.03 billion");
    const int64_t shape[] = {64, 32, 3};
    char small[8];
    assert_string_equal(text_shape(buf, sizeof buf, 3, shape), "64×32×3");
    assert_string_equal(text_shape(buf, sizeof buf, 0, shape), "scalar");
    assert_string_equal(text_shape(small, sizeof small, 3, shape), "64×…");
}

static void output_larger_than_the_buffer(void **state) {
    (void)state;
    int fds[2];
    char *big = malloc(200001), *got = calloc(1, 300000);
    size_t n = 0;
    char path[] = "/tmp/fsdpckpt-test-XXXXXX";
    fds[0] = mkstemp(path);
    assert_true(fds[0] >= 0);
    assert_non_null(big);
    assert_non_null(got);
    memset(big, 'x', 200000);
    big[200000] = '\0';
    text_out_init(&out, fds[0]);
    text_puts(&out, "start ");
    text_printf(&out, "%s|", big);
    text_write(&out, big, 65536);
    text_puts(&out, " end");
    assert_int_equal(text_flush(&out), 0);
    fds[1] = open(path, O_RDONLY);
    for (ssize_t k; (k = read(fds[1], got + n, 300000 - n)) > 0;) {
        n += (size_t)k;
    }
    assert_int_equal(n, 6 + 200001 + 65536 + 4);
    assert_memory_equal(got, "start x", 7);
    assert_memory_equal(got + n - 5, "x end", 5);
    assert_int_equal(got[6 + 200000], '|');
    close(fds[0]);
    close(fds[1]);
    unlink(path);
    free(big);
    free(got);
}

static void the_first_error_stays(void **state) {
    (void)state;
    int fd = open("/dev/full", O_WRONLY);
    if (fd < 0) {
        skip();
    }
    text_out_init(&out, fd);
    text_puts(&out, "x");
    assert_int_equal(text_flush(&out), ENOSPC);
    close(fd);
    text_puts(&out, "y");
    assert_int_equal(text_flush(&out), ENOSPC);
}

static void json_is_json(void **state) {
    (void)state;
    const int64_t ints[] = {0, INT64_MIN, INT64_MAX};
    json_out j;
    start();
    jw_document(&j, &out, 1, "test");
    JSON_MEMBER(&j, string, "a\"b\\\n\x7f\xc2\x9b", "x\xffy日");
    JSON_MEMBER(&j, string, "none", NULL);
    jw_key(&j, "list");
    jw_ints(&j, 3, ints);
    jw_key(&j, "empty");
    jw_open(&j, '[');
    jw_close(&j, ']');
    JSON_MEMBER(&j, uint, "n", UINT64_MAX);
    JSON_MEMBER(&j, bool, "yes", true);
    JSON_MEMBER(&j, raw, "raw", "{\"k\xe2\x80\xae\": \"\xc2\x9b\xf3\xa0\x80\x81日\"}");
    JSON_MEMBER(&j, number, "s", 0.25);
    jw_end_document(&j);
    assert_string_equal(finish(), "{\n"
                                  "  \"fsdpckpt\": \"test\",\n"
                                  "  \"schema\": 1,\n"
                                  "  \"a\\\"b\\\\\\u000a\\u007f\\u009b\": \"x\xef\xbf\xbdy日\",\n"
                                  "  \"none\": null,\n"
                                  "  \"list\": [0, -9223372036854775808, 9223372036854775807],\n"
                                  "  \"empty\": [],\n"
                                  "  \"n\": 18446744073709551615,\n"
                                  "  \"yes\": true,\n"
                                  "  \"raw\": {\"k\\u202e\": \"\\u009b\\udb40\\udc01日\"},\n"
                                  "  \"s\": 0.25\n"
                                  "}\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_names_are_escaped),
        cmocka_unit_test(commands_in_logs_are_escaped),
        cmocka_unit_test(hostile_names_are_text_in_html),
        cmocka_unit_test(widths_of_scripts),
        cmocka_unit_test(sizes_for_people),
        cmocka_unit_test(output_larger_than_the_buffer),
        cmocka_unit_test(the_first_error_stays),
        cmocka_unit_test(json_is_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
