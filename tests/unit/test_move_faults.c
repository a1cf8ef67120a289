/*
 * lib/move: faults. Each one ends in one line that names its place, and no wrong byte is written.
 */
#include "fake_target.h"
#include "move/file.h"

#include <signal.h>
#include <sys/resource.h>

/* Moves one tensor of 200 × 300 bytes, stored raw in two chunks. The faults below are injected into it. */
typedef struct job {
    fake *f;
    fake_target *t;
    fc_progress progress;
    fc_move_options options;
    fc_error err;
} job;

static void job_start(job *j) {
    memset(j, 0, sizeof *j);
    srand(8);
    j->f = fake_new();
    j->f->only_raw = true;
    size_t a = fake_add(j->f, FC_U8, 2, (int64_t[]){200, 300}, 1);
    j->t = target_new(j->f);
    target_add_whole(j->t, a, 0);
    target_reserve(j->t);
    j->options = (fc_move_options){.work = {.threads = 2, .progress = &j->progress}};
}

static fc_code job_run(job *j) {
    return fc_move_file(&j->t->target, &j->t->file, &j->options, &j->err);
}

static void job_end(job *j) {
    target_free(j->t);
    fake_free(j->f);
}

static void truncated_source_is_reported(void **state) {
    (void)state;
    job j;
    job_start(&j);
    uint32_t file = j.f->details[0].details[1].extent.file;
    assert_int_equal(ftruncate(j.f->fds[file], (off_t)j.f->ends[file] - 10), 0);
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, "tensor layers.0.weight, chunk ["));
    assert_non_null(strstr(j.err.message, j.f->paths[file]));
    assert_non_null(strstr(j.err.message, ": truncated: the file ends at offset "));
    job_end(&j);
}

static void missing_source_is_reported(void **state) {
    (void)state;
    job j;
    job_start(&j);
    unlink(j.f->paths[j.f->details[0].details[0].extent.file]);
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, ": the file is missing"));
    job_end(&j);
}

static void strides_beyond_the_extent_are_refused(void **state) {
    (void)state;
    job j;
    static const int64_t bad[] = {301, (int64_t)1 << 40, INT64_MAX, INT64_MIN, -1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        job_start(&j);
        j.f->details[0].details[1].extent.strides[0] = bad[i];
        assert_int_equal(job_run(&j), FC_ECORRUPT);
        assert_non_null(strstr(j.err.message, "the elements exceed the"));
        job_end(&j);
    }
    job_start(&j);
    j.f->details[0].details[1].extent.first = UINT64_MAX - 3;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    job_end(&j);
}

static void hole_writes_nothing(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.f->tensors[0].nchunks = 1;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    assert_non_null(strstr(j.err.message, "are in no chunk"));
    assert_int_equal(atomic_load(&j.progress.done), 0);
    job_end(&j);
}

static void cancelled_job_stops(void **state) {
    (void)state;
    job j;
    job_start(&j);
    atomic_store(&j.progress.cancel, true);
    assert_int_equal(job_run(&j), FC_EINTERRUPTED);
    assert_int_equal(atomic_load(&j.progress.done), 0);
    job_end(&j);
}

static void missing_target_is_reported(void **state) {
    (void)state;
    job j;
    job_start(&j);
    unlink(j.t->path);
    assert_int_equal(job_run(&j), FC_EIO);
    assert_non_null(strstr(j.err.message, j.t->path));
    job_end(&j);
}

/* A file size limit stands in for a full disk: the write fails in the middle. */
static void full_disk_is_reported(void **state) {
    (void)state;
    job j;
    job_start(&j);
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 40000;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(truncate(j.t->path, 0), 0);
    setrlimit(RLIMIT_FSIZE, &small);
    fc_code rc = job_run(&j);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_int_equal(rc, FC_EIO);
    assert_non_null(strstr(j.err.message, j.t->path));
    assert_non_null(strstr(j.err.message, "writing at offset"));
    job_end(&j);
}

static void too_little_memory_is_reported(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.options.work.memory = 512000;
    assert_int_equal(job_run(&j), FC_EUSAGE);
    assert_string_equal(j.err.message, "512000 bytes of memory are too few: at least 1 MiB is needed");
    j.options.work.memory = 1 << 20;
    j.options.work.threads = 256;
    assert_int_equal(job_run(&j), FC_OK);
    target_check(j.f, j.t);
    job_end(&j);
}

static void chunk_above_the_memory_is_refused(void **state) {
    (void)state;
    job j;
    job_start(&j);
    fc_extent *extent = &j.f->details[0].details[0].extent;
    extent->codec = FC_CODEC_FORMAT;
    extent->decoded = (uint64_t)1 << 40;
    assert_int_equal(job_run(&j), FC_EUNSUPPORTED);
    assert_non_null(strstr(j.err.message, "decoding the chunk of 1099511627776 bytes needs"));
    assert_int_equal(j.err.hint, FC_HINT_MEMORY);
    job_end(&j);
}

/* One flipped bit in a deflated chunk: the message names the file and offset. */
static void damaged_chunk_is_named(void **state) {
    (void)state;
    job j;
    job_start(&j);
    fake_chunk *chunk = &j.f->details[0].details[0];
    unsigned char bytes[64] = {0x78, 0x01, 0xff, 0xff};
    chunk->extent.codec = FC_CODEC_FILTERED;
    chunk->extent.filters = (fc_filters){.items = {{.id = 1}}, .count = 1};
    chunk->extent.offset = fake_append(j.f, (int)chunk->extent.file, bytes, sizeof bytes);
    chunk->extent.length = sizeof bytes;
    assert_int_equal(job_run(&j), FC_ECORRUPT);
    char expected[300];
    snprintf(expected, sizeof expected,
             "tensor layers.0.weight, chunk [0:%d, 0:%d]: %s: offset %d: a chunk of 64 stored bytes: the compressed "
             "data is damaged "
             "after 0 of %d bytes",
             (int)chunk->dims[2], (int)chunk->dims[3], j.f->paths[chunk->extent.file], (int)chunk->extent.offset,
             (int)chunk->extent.decoded);
    assert_string_equal(j.err.message, expected);
    job_end(&j);
}

static void cast_of_integers_is_refused(void **state) {
    (void)state;
    job j;
    job_start(&j);
    j.t->tensors[0].dtype = FC_F32;
    assert_int_equal(job_run(&j), FC_EUSAGE);
    assert_string_equal(j.err.message, "tensor layers.0.weight: converting uint8 to float32 is not supported");
    job_end(&j);
}

/* More source files than descriptors: the least recently used file is closed. */
static void few_descriptors(void **state) {
    (void)state;
    job j;
    job_start(&j);
    struct rlimit before, small;
    getrlimit(RLIMIT_NOFILE, &before);
    small = before;
    small.rlim_cur = 16;
    setrlimit(RLIMIT_NOFILE, &small);
    fc_code rc = job_run(&j);
    setrlimit(RLIMIT_NOFILE, &before);
    assert_int_equal(rc, FC_OK);
    target_check(j.f, j.t);
    job_end(&j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(truncated_source_is_reported),
        cmocka_unit_test(missing_source_is_reported),
        cmocka_unit_test(strides_beyond_the_extent_are_refused),
        cmocka_unit_test(hole_writes_nothing),
        cmocka_unit_test(cancelled_job_stops),
        cmocka_unit_test(missing_target_is_reported),
        cmocka_unit_test(full_disk_is_reported),
        cmocka_unit_test(too_little_memory_is_reported),
        cmocka_unit_test(chunk_above_the_memory_is_refused),
        cmocka_unit_test(damaged_chunk_is_named),
        cmocka_unit_test(cast_of_integers_is_refused),
        cmocka_unit_test(few_descriptors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
