/*
 * formats/hdf5: object headers as bytes. Known values of the checksum, and malicious headers. tests/oracle/digest.py
 * tests the digests in our own files.
 */
#include "hdf5/object_header.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SIZE = 400 };

/* A file in memory. Reads return a copy of exactly the requested size, so that sanitizers detect overruns. */
typedef struct memory {
    unsigned char bytes[SIZE];
    unsigned char *copy;
} memory;

static const unsigned char *view(void *context, uint64_t at, uint64_t size) {
    memory *m = context;
    if (at > SIZE || size > SIZE - at) {
        return NULL;
    }
    free(m->copy);
    m->copy = malloc(size + !size);
    assert_non_null(m->copy);
    memcpy(m->copy, m->bytes + at, size);
    return m->copy;
}

/* Makes a header at 48 whose continuation at 200 holds the attribute "crc64". */
static void make(memory *m) {
    static const unsigned char super[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n', 2, 8, 8, 0};
    static const unsigned char header[] = {'O', 'H', 'D', 'R', 2, 0x20};
    static const unsigned char attribute[] = {
        12, 9 + 6 + 2 + 1 + 8, 0, 0, 3, 0, 6, 0, 2, 0, 1, 0, 0, 'c', 'r', 'c', '6', '4', 0};
    memset(m, 0, sizeof *m);
    memcpy(m->bytes, super, sizeof super);
    m->bytes[36] = 48;
    memcpy(m->bytes + 48, header, sizeof header);
    m->bytes[70] = 20; /* bytes of messages, after the times */
    m->bytes[71] = 16; /* a continuation */
    m->bytes[72] = 16;
    m->bytes[75] = 200;
    m->bytes[83] = 60;
    memcpy(m->bytes + 200, "OCHK", 4);
    memcpy(m->bytes + 204, attribute, sizeof attribute);
}

static bool find(memory *m, fc_h5_field *field) {
    const fc_h5_view v = {view, m};
    uint64_t root;
    bool found = fc_h5_find_root(&v, &root) && fc_h5_find_field(&v, root, "crc64", field);
    free(m->copy);
    m->copy = NULL;
    return found;
}

static void known_checksums(void **state) {
    (void)state;
    static const char text[] = "Four score and seven years ago";
    assert_int_equal(fc_h5_checksum((const unsigned char *)text, 30), 0x17770551);
    assert_int_equal(fc_h5_checksum((const unsigned char *)"", 0), 0xdeadbeef);
}

static void attribute_in_a_continuation_is_found(void **state) {
    (void)state;
    memory m;
    fc_h5_field field;
    make(&m);
    assert_true(find(&m, &field));
    assert_int_equal(field.value, 204 + 4 + 9 + 6 + 2 + 1);
    assert_int_equal(field.start, 200);
    assert_int_equal(field.check, 256);
    m.bytes[217] = 'C'; /* another name */
    assert_false(find(&m, &field));
}

/* With any damage the attribute is found within the file or not found. The search ends and stays inside the file. */
static void damaged_headers_are_survived(void **state) {
    (void)state;
    srand(12);
    for (int i = 0; i < 20000; i++) {
        memory m;
        fc_h5_field field;
        make(&m);
        for (int n = 1 + rand() % 3; n > 0; n--) {
            m.bytes[rand() % 300] = (unsigned char)(rand() % 4 ? rand() : 0xff);
        }
        if (find(&m, &field)) {
            assert_true(field.start <= field.value && field.value + 8 <= field.check && field.value + 8 <= SIZE);
        }
    }
    memory loop;
    fc_h5_field field;
    make(&loop);
    loop.bytes[75] = 48; /* the continuation points to itself */
    assert_false(find(&loop, &field));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_checksums),
        cmocka_unit_test(attribute_in_a_continuation_is_found),
        cmocka_unit_test(damaged_headers_are_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
