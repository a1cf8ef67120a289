/*
 * formats/hdf5, writing: extents, refusals, failed system calls, file size. tests/oracle/h5_write.py reads the files
 * with other programs.
 */
#include "checkpoint/path.h"
#include "h5_make.h"
#include "hdf5/writer/tree.h"
#include "io/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64];
static const uint64_t no_digests[128]; /* for tests that do not check the digests in index.h5 */

static const char *in_dir(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static int new_dir(void **state) {
    (void)state;
    strcpy(dir, "/tmp/test_h5_writer.XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static void empty_folder(const char *path) {
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        char name[600];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlink(name) != 0) {
            empty_folder(name);
            rmdir(name);
        }
    }
    if (d) {
        closedir(d);
    }
}

static int remove_dir(void **state) {
    (void)state;
    empty_folder(dir);
    return rmdir(dir);
}

static unsigned char *slurp(const char *path, size_t *size) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    *size = (size_t)st.st_size;
    unsigned char *bytes = malloc(*size + 1);
    assert_int_equal(fc_pread_full(fd, bytes, *size, 0, path, NULL), FC_OK);
    close(fd);
    return bytes;
}

static void assert_same_files(const char *a, const char *b) {
    size_t na, nb;
    unsigned char *x = slurp(a, &na), *y = slurp(b, &nb);
    assert_int_equal(na, nb);
    assert_memory_equal(x, y, na);
    free(x);
    free(y);
}

static int open_descriptors(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) {
        n++;
    }
    if (d) {
        closedir(d);
    }
    return n;
}

static int by_offset(const void *a, const void *b) {
    const fc_target_item *x = a, *y = b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

/* Checks that extents are aligned, do not overlap, and are after the headers and within the file. */
static void check_extents(const h5_made *made, const fc_target_file *file) {
    struct stat st;
    assert_int_equal(stat(file->path, &st), 0);
    fc_target_item *sorted = calloc(file->nitems + 1, sizeof *sorted);
    memcpy(sorted, file->items, file->nitems * sizeof *sorted);
    qsort(sorted, file->nitems, sizeof *sorted, by_offset);
    uint64_t end = 96;
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_tensor *t = made->tensors[sorted[i].tensor].source;
        fc_box box = {t->ndim, sorted[i].dims, sorted[i].dims + t->ndim};
        uint64_t bytes = (uint64_t)fc_box_volume(&box) * fc_dtype_size(t->dtype);
        if (!sorted[i].owned || bytes == 0) {
            assert_int_equal(sorted[i].offset, 0);
            continue;
        }
        assert_true(sorted[i].offset >= end);
        assert_int_equal(sorted[i].offset % (bytes >= 65536 ? 4096 : 64), 0);
        end = sorted[i].offset + bytes;
    }
    assert_true(end <= (uint64_t)st.st_size);
    free(sorted);
}

static void extents_are_apart_and_files_closed(void **state) {
    (void)state;
    const int64_t sizes[] = {2, 2, 2};
    h5_made made;
    h5_made_begin(&made, 3, (const char *const[]){"replicate", "dp", "tp"}, sizes);
    h5_made_zoo(&made);
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    fc_error err = {0};
    int before = open_descriptors();
    assert_int_equal(format->writer.create(&made.target, dir, &writer, &err), FC_OK);
    for (int64_t rank = 0; rank < 8; rank++) {
        fc_target_file file = h5_made_file(&made, rank);
        assert_int_equal(format->writer.reserve(&writer, &file, &err), FC_OK);
        char name[64];
        snprintf(name, sizeof name, "shard-%05d-of-00008.h5", (int)rank);
        assert_string_equal(file.path, in_dir(name));
        check_extents(&made, &file);
        assert_int_equal(open_descriptors(), before);
        assert_int_equal(h5_made_fill(&made, &file, &err), FC_OK);
        assert_int_equal(format->writer.finish_file(&writer, &file, &err), FC_OK);
        assert_int_equal(open_descriptors(), before);
    }
    assert_int_equal(access(in_dir("index.h5"), F_OK), -1);
    assert_int_equal(format->writer.finish(&writer, no_digests, &err), FC_OK);
    assert_int_equal(access(in_dir("index.h5"), F_OK), 0);
    assert_int_equal(open_descriptors(), before);
    format->writer.destroy(&writer);
    h5_made_end(&made);
}

static void same_input_same_bytes(void **state) {
    (void)state;
    fc_error err;
    for (int run = 0; run < 2; run++) {
        h5_made made;
        h5_made_begin(&made, 0, NULL, NULL);
        h5_made_zoo(&made);
        /* Uninitialized memory must not reach the file. */
        memset(fc_arena_alloc(made.arena, 1 << 16), run ? 0xff : 0, 1 << 16);
        assert_int_equal(h5_made_write(&made, in_dir(run ? "b.h5" : "a.h5"), &err), FC_OK);
        h5_made_end(&made);
    }
    assert_same_files(in_dir("a.h5"), in_dir("b.h5"));
}

static void expect_refusal(const char *first, const char *second, const char *word) {
    const int64_t shape[] = {3};
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_add(&made, first, FC_F32, 1, shape, -1);
    h5_made_add(&made, second, FC_F32, 1, shape, -1);
    assert_int_equal(h5_made_write(&made, in_dir("refused.h5"), &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, made.tensors[0].name));
    assert_non_null(strstr(err.message, made.tensors[1].name));
    assert_non_null(strstr(err.message, word));
    assert_int_equal(access(in_dir("refused.h5"), F_OK), -1);
    h5_made_end(&made);
}

static void conflicting_names_are_refused(void **state) {
    (void)state;
    expect_refusal("model|a", "model|a|b", "group");
    expect_refusal("model|a|b", "model|a", "group");
    expect_refusal("x", "x|y|z", "group");
    expect_refusal("model|a", "model|a", "same path");
    expect_refusal("model|#0", "model|0", "list or a dict");
    expect_refusal("model|#0", "model|a", "list or a dict");
    expect_refusal("#0", "a", "list or a dict");
}

/* Similar names that do not conflict: both names of every pair are stored. */
static void similar_names_are_kept(void **state) {
    (void)state;
    const int64_t shape[] = {3};
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    static const char *const paths[] = {"a/b", "a|b", "a%2Fb", ".", "..", "~", "%", "a.b", "%2E", "b|~", "b|.|~|c"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        h5_made_add(&made, paths[i], FC_F32, 1, shape, -1);
    }
    assert_int_equal(h5_made_write(&made, in_dir("kept.h5"), &err), FC_OK);
    h5_made_end(&made);
}

static void names_and_paths_of_the_tree(void **state) {
    (void)state;
    h5_made made;
    fc_error err = {0};
    fc_h5_tree tree;
    h5_made_begin(&made, 0, NULL, NULL);
    fc_target_tensor *t = h5_made_add(&made, "model|a/b|.|w", FC_F32, 0, NULL, -1);
    assert_int_equal(fc_h5_tree_build(&made.target, made.arena, &tree, &err), FC_OK);
    assert_int_equal(tree.count, 5);
    assert_int_equal(tree.depth, 4);
    assert_string_equal(fc_h5_tree_path(&tree, tree.leaves[0], made.arena), "/model/a%2Fb/%2E/w");
    assert_string_equal(fc_h5_tree_path(&tree, 0, made.arena), "/");
    assert_true(fc_path_spells(&t->path, t->name));
    static const char *const other[] = {"model.a/b...", "model.a/b...w.", "model.a/b...x", "odel.a/b...w", "", "model"};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        t->name = other[i];
        assert_false(fc_path_spells(&t->path, t->name));
    }
    h5_made_end(&made);
}

/* Each group is written completely, with members in the order of their first occurrence. */
static void interleaved_groups_are_written_depth_first(void **state) {
    (void)state;
    static const char *const paths[] = {"z|a|1", "top", "b|x", "z|c", "z|a|0", "b|w", "z|b|y"};
    static const uint32_t expected[] = {0, 4, 3, 6, 1, 2, 5};
    h5_made made;
    fc_error err = {0};
    fc_h5_tree tree;
    h5_made_begin(&made, 0, NULL, NULL);
    for (size_t i = 0; i < 7; i++) {
        h5_made_add(&made, paths[i], FC_F32, 0, NULL, -1);
    }
    assert_int_equal(fc_h5_tree_build(&made.target, made.arena, &tree, &err), FC_OK);
    assert_memory_equal(tree.order, expected, sizeof expected);
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    assert_int_equal(format->writer.create(&made.target, in_dir("order.h5"), &writer, &err), FC_OK);
    fc_target_file file = h5_made_file(&made, 0);
    assert_int_equal(format->writer.reserve(&writer, &file, &err), FC_OK);
    for (size_t i = 0; i < 7; i++) {
        assert_int_equal(file.items[i].tensor, i);
        assert_int_equal(file.items[expected[i]].offset, file.items[0].offset + 64 * i);
    }
    format->writer.destroy(&writer);
    h5_made_end(&made);
}

static void an_existing_file_is_not_touched(void **state) {
    (void)state;
    const char *path = in_dir("there.h5");
    FILE *f = fopen(path, "w");
    fputs("precious", f);
    fclose(f);
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_zoo(&made);
    assert_int_equal(h5_made_write(&made, path, &err), FC_EIO);
    assert_non_null(strstr(err.message, path));
    assert_non_null(strstr(err.message, strerror(EEXIST)));
    assert_int_equal(h5_made_write(&made, in_dir("no/such.h5"), &err), FC_EIO);
    assert_non_null(strstr(err.message, strerror(ENOENT)));
    size_t size;
    unsigned char *bytes = slurp(path, &size);
    assert_int_equal(size, 8);
    assert_memory_equal(bytes, "precious", 8);
    free(bytes);
    h5_made_end(&made);
}

/*
 * The disk is full after any number of bytes. The error is one line, libhdf5 does not crash (its own driver would),
 * nothing stays open, and the next file works.
 */
static void a_full_disk_is_one_line(void **state) {
    (void)state;
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    h5_made made;
    const int64_t sizes[] = {2};
    h5_made_begin(&made, 1, (const char *const[]){"dp"}, sizes);
    h5_made_zoo(&made);
    int before = open_descriptors(), failed = 0;
    for (rlim_t bytes = 0; bytes < 600000; bytes += 7919) {
        fc_error err = {0};
        limit = (struct rlimit){bytes, old.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        fc_code rc = h5_made_write(&made, dir, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        if (rc != FC_OK) {
            failed++;
            assert_int_equal(rc, FC_EIO);
            assert_non_null(strstr(err.message, strerror(EFBIG)));
            assert_non_null(strstr(err.message, dir));
            assert_null(strchr(err.message, '\n'));
        }
        assert_int_equal(open_descriptors(), before);
        empty_folder(dir);
    }
    assert_true(failed > 50);
    fc_error err;
    assert_int_equal(h5_made_write(&made, dir, &err), FC_OK);
    signal(SIGXFSZ, SIG_DFL);
    h5_made_end(&made);
}

/* If the headers fit but the data do not, reserve fails, so the engine never gets a file shorter than its extents. */
static void a_file_that_cannot_grow_is_not_reserved(void **state) {
    (void)state;
    const int64_t shape[] = {1000000};
    struct rlimit old;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_add(&made, "large", FC_U8, 1, shape, -1);
    const fc_format *format = fc_format_find("h5");
    for (rlim_t bytes = 999999; bytes < 1100000; bytes += 100000) {
        fc_writer writer = {format, NULL};
        struct rlimit limit = {bytes, old.rlim_max};
        fc_target_file file = h5_made_file(&made, 0);
        assert_int_equal(format->writer.create(&made.target, in_dir("grow.h5"), &writer, &err), FC_OK);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        fc_code rc = format->writer.reserve(&writer, &file, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        struct stat st;
        assert_int_equal(stat(in_dir("grow.h5"), &st), 0);
        if (bytes < 1000000) {
            assert_int_equal(rc, FC_EIO);
            assert_non_null(strstr(err.message, strerror(EFBIG)));
        } else {
            assert_int_equal(rc, FC_OK);
            assert_int_equal(st.st_size, file.items[0].offset + 1000000);
        }
        unlink(in_dir("grow.h5"));
        format->writer.destroy(&writer);
    }
    signal(SIGXFSZ, SIG_DFL);
    h5_made_end(&made);
}

static fc_code no_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                       fc_error *err) {
    (void)checkpoint, (void)object, (void)arena, (void)json;
    return fc_fail(err, FC_ECORRUPT, "the pickle ends early");
}

static void an_unreadable_object_is_named(void **state) {
    (void)state;
    static const fc_format broken = {
        .name = "broken",
        .reader = {.object_json = no_json},
    };
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_object(&made, "state|step", 10, "1");
    made.source.format = &broken;
    assert_int_equal(h5_made_write(&made, in_dir("x.h5"), &err), FC_ECORRUPT);
    assert_string_equal(err.message, "tensor \"state.step\": the pickle ends early");
    h5_made_end(&made);
}

/* The file of ten thousand small tensors is not much larger than its data and begins with all headers. */
static void ten_thousand_tensors(void **state) {
    (void)state;
    const int64_t shape[] = {16, 16};
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 0, NULL, NULL);
    for (int i = 0; i < 10000; i++) {
        char path[80];
        snprintf(path, sizeof path, "model|model.layers.%d.self_attn.q_proj.weight", i);
        h5_made_add(&made, path, FC_F32, 2, shape, -1);
    }
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    assert_int_equal(format->writer.create(&made.target, in_dir("many.h5"), &writer, &err), FC_OK);
    fc_target_file file = h5_made_file(&made, 0);
    assert_int_equal(format->writer.reserve(&writer, &file, &err), FC_OK);
    check_extents(&made, &file);
    struct stat st;
    assert_int_equal(stat(file.path, &st), 0);
    const int64_t data = 10000 * 1024;
    assert_true(st.st_size < data + 10000 * (512 + 256)); /* of headers and tables */
    assert_true(file.items[9999].offset == file.items[0].offset + 9999 * 1024);
    format->writer.destroy(&writer);
    h5_made_end(&made);
}

/* For 4096 ranks the index has one mapping per distinct box, not per rank, and creates no shard files. */
static void index_of_many_ranks(void **state) {
    (void)state;
    const int64_t sizes[] = {64, 32, 2}, shape[] = {640, 8};
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 3, (const char *const[]){"replicate", "dp", "tp"}, sizes);
    for (int i = 0; i < 100; i++) {
        char path[80];
        snprintf(path, sizeof path, "layers.%d.weight", i);
        h5_made_add(&made, path, FC_BF16, 2, shape, 1);
    }
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    assert_int_equal(format->writer.create(&made.target, dir, &writer, &err), FC_OK);
    assert_int_equal(format->writer.finish(&writer, no_digests, &err), FC_OK);
    struct stat st;
    assert_int_equal(stat(in_dir("index.h5"), &st), 0);
    /* 64 mappings of about 110 bytes per tensor; one per rank would be 4096. */
    assert_true(st.st_size > 100 * 64 * 50 && st.st_size < 100 * 64 * 250);
    format->writer.destroy(&writer);
    h5_made_end(&made);
}

static void tensors_of_terabytes_cost_nothing(void **state) {
    (void)state;
    const int64_t shape[] = {1 << 20, 1 << 20}, ranks[] = {4};
    h5_made made;
    fc_error err = {0};
    h5_made_begin(&made, 1, (const char *const[]){"dp"}, ranks);
    h5_made_add(&made, "huge", FC_BF16, 2, shape, -1);
    h5_made_add(&made, "after", FC_F32, 1, shape, -1);
    const fc_format *format = fc_format_find("h5");
    fc_writer writer = {format, NULL};
    assert_int_equal(format->writer.create(&made.target, dir, &writer, &err), FC_OK);
    fc_target_file file = h5_made_file(&made, 3);
    assert_int_equal(format->writer.reserve(&writer, &file, &err), FC_OK);
    check_extents(&made, &file);
    assert_true(file.items[1].offset >= (uint64_t)1 << 39);
    struct stat st;
    assert_int_equal(stat(file.path, &st), 0);
    assert_true(st.st_size > (off_t)1 << 39);
    assert_true(st.st_blocks < 256);
    assert_int_equal(format->writer.finish(&writer, no_digests, &err), FC_OK);
    format->writer.destroy(&writer);
    h5_made_end(&made);
}

int main(void) {
#define IN_NEW_DIR(test) cmocka_unit_test_setup_teardown(test, new_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        IN_NEW_DIR(extents_are_apart_and_files_closed),
        IN_NEW_DIR(same_input_same_bytes),
        IN_NEW_DIR(conflicting_names_are_refused),
        IN_NEW_DIR(similar_names_are_kept),
        cmocka_unit_test(names_and_paths_of_the_tree),
        IN_NEW_DIR(interleaved_groups_are_written_depth_first),
        IN_NEW_DIR(an_existing_file_is_not_touched),
        IN_NEW_DIR(a_full_disk_is_one_line),
        IN_NEW_DIR(a_file_that_cannot_grow_is_not_reserved),
        IN_NEW_DIR(an_unreadable_object_is_named),
        IN_NEW_DIR(ten_thousand_tensors),
        IN_NEW_DIR(index_of_many_ranks),
        IN_NEW_DIR(tensors_of_terabytes_cost_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
