/*
 * Files on servers in the reader process for HDF5: what it asks for is what it gets, and wrong questions do no harm.
 * The file is one of this machine with the name of one on a server, so there is no fetcher.
 */
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/lend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static const char name[] = "s3://bucket/x.h5";

enum { SIZE = 3 << 20 };

static unsigned char byte_at(uint64_t at) {
    return (unsigned char)(at * 7 ^ at >> 11);
}

/* A file that a process is given. */
typedef struct lent_file {
    int fd, given;
    uint64_t size; /* that the process says */
    unsigned char question[64];
    size_t question_size;
} lent_file;

static bool is_same(fc_h5_asking *asking, uint64_t at, size_t size) {
    unsigned char *bytes = malloc(size);
    bool same = bytes && fc_h5_ask(asking, at, size, bytes);
    for (size_t i = 0; same && i < size; i++) {
        same = bytes[i] == byte_at(at + i);
    }
    free(bytes);
    return same;
}

/* Reads small and large parts of the file within a record, and some parts twice. @return 0 if all were right */
static int read_parts(void *context, int out, fc_h5_shared *shared) {
    const lent_file *file = context;
    fc_h5_sink sink = {.fd = out};
    fc_h5_asking *asking = fc_h5_asking_new(&sink, file->given, file->size);
    bool good = true;
    (void)shared;
    fc_h5_begin(&sink, FC_H5_DATA);
    fc_h5_end(&sink);
    fc_h5_begin(&sink, FC_H5_DATA);
    fc_h5_put_u64(&sink, 1);
    for (uint64_t at = 0; at < 1 << 20 && good; at += 1000) {
        good = is_same(asking, at, 900);
    }
    fc_h5_put_u64(&sink, 2);
    good = good && is_same(asking, (64 << 10) - 5, 10) && is_same(asking, 0, 1) && is_same(asking, SIZE - 1, 1) &&
           is_same(asking, 1 << 20, 2 << 20) && is_same(asking, SIZE - 70000, 64 << 10);
    fc_h5_put_u64(&sink, 3);
    fc_h5_end(&sink);
    fc_h5_flush(&sink);
    fc_h5_asking_free(asking);
    return good ? 0 : 7;
}

static int send_question(void *context, int out, fc_h5_shared *shared) {
    const lent_file *file = context;
    (void)shared;
    return write(out, file->question, file->question_size) != (ssize_t)file->question_size;
}

/* Asks for the first byte again and again. @return 0 if this ends, as it must */
static int ask_forever(void *context, int out, fc_h5_shared *shared) {
    const lent_file *file = context;
    fc_h5_sink sink = {.fd = out};
    unsigned char byte;
    (void)shared;
    do {
        fc_h5_put_want(&sink, &(fc_h5_part){0, 1}, 1);
    } while (!sink.failed && read(file->given, &byte, 1) == 1);
    return sink.failed;
}

/* @return 0 if the process cannot write to the socket */
static int write_back(void *context, int out, fc_h5_shared *shared) {
    const lent_file *file = context;
    (void)out, (void)shared;
    return write(file->given, "x", 1) != -1;
}

/* Runs a process with the file, up to the end of its records. @return what fc_h5_next returned last */
static int run(int (*child_runs)(void *, int, fc_h5_shared *), lent_file *file, fc_h5_in *in, uint64_t *last,
               fc_code *ended) {
    fc_h5_child child;
    fc_h5_loan loan;
    fc_h5_record record;
    fc_error err;
    int found;
    file->fd = memfd_create("test", MFD_CLOEXEC);
    unsigned char *bytes = malloc(SIZE);
    assert_non_null(bytes);
    for (uint64_t i = 0; i < SIZE; i++) {
        bytes[i] = byte_at(i);
    }
    assert_int_equal(write(file->fd, bytes, SIZE), SIZE);
    free(bytes);
    assert_int_equal(fc_h5_loan_begin(&loan, name, file->fd, SIZE, &file->given, &err), FC_OK);
    assert_int_not_equal(file->given, file->fd);
    const fc_h5_job job = {
        .run = child_runs, .context = file, .keep = &file->given, .nkeep = 1, .not_confined = child_runs == write_back};
    assert_int_equal(fc_h5_child_start(&child, &job, &err), FC_OK);
    fc_h5_loan_given(&loan, file->given);
    *in = (fc_h5_in){.child = &child, .budget = UINT64_MAX, .path = name, .loan = &loan};
    while ((found = fc_h5_next(in, &record)) == 1) {
        assert_int_not_equal(record.tag, FC_H5_WANT);
        *last = 0;
        for (uint64_t i = 1; record.at < record.size && !record.bad; i++) {
            *last = fc_h5_get_u64(&record);
            assert_int_equal(*last, i);
        }
    }
    fc_h5_loan_end(&loan);
    fc_h5_in_free(in);
    *ended = fc_h5_child_finish(&child, name, &err);
    close(file->fd);
    return found;
}

static void the_bytes_are_those_of_the_file(void **state) {
    lent_file file = {.size = SIZE};
    fc_h5_in in;
    fc_code ended;
    uint64_t last = 0;
    (void)state;
    assert_int_equal(run(read_parts, &file, &in, &last, &ended), 0);
    assert_int_equal(ended, FC_OK);
    assert_int_equal(last, 3); /* the record that was begun before the questions is whole */
    assert_int_equal(in.unlent.code, FC_OK);
    assert_true(in.lent < 2 * SIZE); /* a thousand small reads are few questions, none of them twice */
}

static void wrong_questions_end_the_records(void **state) {
    static const uint64_t wrong[][2] = {{SIZE, 1}, {SIZE - 1, 2}, {UINT64_MAX, 2}, {0, 0}, {0, FC_H5_MOST_LENT + 1}};
    fc_h5_in in;
    fc_code ended;
    uint64_t last = 0;
    (void)state;
    for (size_t i = 0; i <= sizeof wrong / sizeof *wrong; i++) {
        const bool is_short = i == sizeof wrong / sizeof *wrong;
        const uint32_t head[2] = {FC_H5_WANT, is_short ? 8 : 16};
        lent_file file = {.question_size = sizeof head + head[1]};
        memcpy(file.question, head, sizeof head);
        memcpy(file.question + sizeof head, wrong[is_short ? 0 : i], head[1]);
        assert_int_equal(run(send_question, &file, &in, &last, &ended), -1);
    }
}

static void questions_without_an_end_are_an_error(void **state) {
    lent_file file = {.size = SIZE};
    fc_h5_in in;
    fc_code ended;
    uint64_t last = 0;
    (void)state;
    assert_int_equal(run(ask_forever, &file, &in, &last, &ended), 0);
    assert_int_equal(ended, FC_OK);
    assert_int_equal(in.unlent.code, FC_ECORRUPT);
    assert_non_null(strstr(in.unlent.message, "takes more than twice its size and 64 MiB"));
}

static void the_process_can_only_read_the_socket(void **state) {
    lent_file file = {.size = SIZE};
    fc_h5_in in;
    fc_code ended;
    uint64_t last = 0;
    (void)state;
    assert_int_equal(run(write_back, &file, &in, &last, &ended), 0);
    assert_int_equal(ended, FC_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bytes_are_those_of_the_file),
        cmocka_unit_test(wrong_questions_end_the_records),
        cmocka_unit_test(questions_without_an_end_are_an_error),
        cmocka_unit_test(the_process_can_only_read_the_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
