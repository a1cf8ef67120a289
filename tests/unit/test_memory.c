/*
 * Checkpoints in memory, written by one process that holds everything and by ranks with one shard each, and read back.
 */
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { ROWS = 10, COLUMNS = 7 };

static char directory[] = "/tmp/fsdpckpt-memory-XXXXXX";
static const int64_t shape[] = {ROWS, COLUMNS};
static const fc_path_element nested[] = {{.key = "model"}, {.key = "w"}};

static int setup(void **state) {
    (void)state;
    return !mkdtemp(directory);
}

static void remove_target(const char *name) {
    char path[256], file[600];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        snprintf(file, sizeof file, "%s/%s", path, e->d_name);
        unlink(file);
    }
    if (dir) {
        closedir(dir);
        rmdir(path);
    }
    unlink(path);
}

static int teardown(void **state) {
    (void)state;
    return rmdir(directory);
}

static float value(int64_t row, int64_t column) {
    return (float)(row * 100 + column) / 8;
}

/*
 * Makes "model.w", an empty tensor, and a number that all ranks hold. This rank holds the rows of "model.w" that
 * torch.chunk gives it; a single rank holds all rows, transposed.
 */
static fc_code make(int rank, int ranks, float *data, const int64_t *step, fc_checkpoint **out, fc_error *err) {
    int64_t dims[8][4], strides[] = {1, ROWS};
    fc_memory_chunk chunks[8], one = {NULL, NULL, NULL, step};
    for (int r = 0; r < ranks; r++) {
        int64_t offset, length;
        fc_shard_range(ROWS, ranks, r, &offset, &length);
        memcpy(dims[r], (int64_t[]){offset, 0, length, COLUMNS}, sizeof dims[r]);
        chunks[r] = (fc_memory_chunk){dims[r], dims[r] + 2, ranks == 1 ? strides : NULL, r == rank ? data : NULL};
        for (int64_t i = 0; r == rank && i < length * COLUMNS; i++) {
            int64_t row = offset + i / COLUMNS, column = i % COLUMNS;
            data[ranks == 1 ? column * ROWS + row : i] = value(row, column);
        }
    }
    static const int64_t none[] = {0};
    const fc_memory_tensor tensors[] = {
        {"model.w", {nested, 2}, FC_F32, 2, shape, chunks, (size_t)ranks},
        {"empty", {NULL, 0}, FC_BF16, 1, none, NULL, 0},
        {"step", {NULL, 0}, FC_I64, 0, NULL, &one, 1},
    };
    return fc_checkpoint_in_memory("this test", tensors, 3, out, err);
}

typedef struct job {
    fc_mesh mesh;
    bool own_shards;
    const fc_mesh *target_mesh; /* NULL: `mesh` */
    bool lost;                  /* all ranks have the data of rank 0 */
    int compress;
    char target[128];
} job;

static fc_code write_rank(fc_comm *comm, void *context, fc_error *err) {
    const job *j = context;
    fc_checkpoint *source = NULL;
    float data[ROWS * COLUMNS];
    int64_t step = 42;
    int dp = comm ? (int)j->mesh.sizes[j->mesh.ndim - 1]
                  : 1; /* the last mesh dimension shards, the one before it replicates */
    fc_convert_options how = {.format = fc_format_find("h5"),
                              .selection = {.mesh = j->target_mesh ? j->target_mesh
                                                    : j->mesh.ndim ? &j->mesh
                                                                   : NULL,
                                            .compress = j->compress},
                              .comm = comm,
                              .own_shards = j->own_shards};
    fc_code rc = make(comm && !j->lost ? comm->rank % dp : 0, dp, data, &step, &source, err);
    rc = rc == FC_OK ? fc_convert(source, j->target, &how, NULL, err) : rc;
    fc_checkpoint_close(source);
    return rc;
}

static void check_target(const char *path) {
    fc_checkpoint *read;
    fc_error err = {FC_OK, ""};
    float got[ROWS][COLUMNS] = {{0}};
    int64_t step = 0;
    fc_code rc = fc_checkpoint_open(path, NULL, &read, &err);
    assert_string_equal(err.message, "");
    assert_int_equal(rc, FC_OK);
    assert_int_equal(read->ntensors, 3);
    for (size_t i = 0; i < 3; i++) {
        const fc_tensor *t = &read->tensors[i];
        static const int64_t zeros[2];
        fc_box box = {t->ndim, zeros, t->shape};
        if (strcmp(t->name, "model.w") == 0) {
            assert_int_equal(t->path.count, 2);
            assert_int_equal(fc_read_box(read, t, &box, FC_F32, got, &err), FC_OK);
        } else if (strcmp(t->name, "step") == 0) {
            assert_int_equal(fc_read_box(read, t, &box, FC_I64, &step, &err), FC_OK);
        } else {
            assert_int_equal(t->dtype, FC_BF16);
        }
    }
    fc_checkpoint_close(read);
    assert_int_equal(step, 42);
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            assert_true(got[r][c] == value(r, c));
        }
    }
}

static void one_process_writes_everything(void **state) {
    (void)state;
    job j = {0};
    fc_error err = {FC_OK, ""};
    snprintf(j.target, sizeof j.target, "%s/one.h5", directory);
    assert_int_equal(write_rank(NULL, &j, &err), FC_OK);
    check_target(j.target);
    remove_target("one.h5");
    j.mesh = (fc_mesh){.ndim = 1, .sizes = {3}, .names = {"dp"}};
    assert_int_equal(write_rank(NULL, &j, &err), FC_EUSAGE); /* a directory under the name of a file */
    assert_non_null(strstr(err.message, "names a file"));
    snprintf(j.target, sizeof j.target, "%s/one", directory);
    assert_int_equal(write_rank(NULL, &j, &err), FC_OK);
    check_target(j.target);
    remove_target("one");
}

static void ranks_write_their_shards(void **state) {
    (void)state;
    static const fc_mesh meshes[] = {
        {.ndim = 1, .sizes = {1}, .names = {"dp"}},
        {.ndim = 1, .sizes = {3}, .names = {"dp"}},
        {.ndim = 1, .sizes = {8}, .names = {"dp"}}, /* 10 rows on 8 ranks: three ranks have none */
        {.ndim = 2, .sizes = {2, 3}, .names = {"replicate", "dp"}},
    };
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        job j = {.mesh = meshes[i], .own_shards = true};
        fc_error err = {FC_OK, ""};
        snprintf(j.target, sizeof j.target, "%s/parts", directory);
        fc_code rc = fc_comm_run_local((int)fc_mesh_ranks(&j.mesh), write_rank, &j, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        check_target(j.target);
        remove_target("parts");
    }
}

/* The layout of the target need not be that of the data. */
static void ranks_write_other_layouts(void **state) {
    (void)state;
    static const fc_mesh meshes[] = {
        {.ndim = 1, .sizes = {3}, .names = {"dp"}},
        {.ndim = 0},
    };
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        job j = {.mesh = {.ndim = 1, .sizes = {5}, .names = {"dp"}}, .own_shards = true, .target_mesh = &meshes[i]};
        fc_error err = {FC_OK, ""};
        snprintf(j.target, sizeof j.target, "%s/other%s", directory, meshes[i].ndim ? "" : ".h5");
        fc_code rc = fc_comm_run_local(5, write_rank, &j, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        check_target(j.target);
        remove_target(meshes[i].ndim ? "other" : "other.h5");
    }
}

static void bad_calls_are_refused(void **state) {
    (void)state;
    job j = {.mesh = {.ndim = 1, .sizes = {3}, .names = {"dp"}}};
    fc_error err = {FC_OK, ""};
    snprintf(j.target, sizeof j.target, "%s/bad", directory);
    /* Splitting by bytes would assign data to a rank that does not hold it. */
    assert_int_equal(fc_comm_run_local(3, write_rank, &j, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "is in the memory of another rank"));
    j.own_shards = j.lost = true;
    assert_int_equal(fc_comm_run_local(3, write_rank, &j, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "tensor model.w: no rank has the data of chunk 1"));
    j.lost = false;
    j.compress = 1;
    assert_int_equal(fc_comm_run_local(3, write_rank, &j, &err), FC_EUSAGE);
    assert_non_null(
        strstr(err.message, "this test: with its data in the memory of 3 ranks, the target must be uncompressed"));
    assert_int_not_equal(access(j.target, F_OK), 0);

    fc_checkpoint *made;
    static const int64_t outside[] = {4, 0, 7, 7};
    const fc_memory_chunk chunk = {outside, outside + 2, NULL, NULL};
    fc_memory_tensor two[] = {{"a", {NULL, 0}, FC_F32, 2, shape, NULL, 0}, {"a", {NULL, 0}, FC_F32, 2, shape, NULL, 0}};
    assert_int_equal(fc_checkpoint_in_memory("x", two, 2, &made, &err), FC_EUSAGE);
    assert_string_equal(err.message, "x: tensor a: the name is used twice");
    two[0].chunks = &chunk;
    two[0].nchunks = 1;
    assert_int_equal(fc_checkpoint_in_memory("x", two, 1, &made, &err), FC_EUSAGE);
    assert_string_equal(err.message, "x: tensor a: chunk 0 is outside the tensor's shape");
    assert_null(made);

    static const int64_t seven[] = {7};
    const fc_memory_tensor opaque = {.name = "o", .dtype = FC_OPAQUE, .ndim = 1, .shape = seven};
    assert_int_equal(fc_checkpoint_in_memory("x", &opaque, 1, &made, &err), FC_EUSAGE);
    assert_string_equal(err.message, "x: tensor o: an object is opaque and has one dimension and one chunk");
    static const int64_t none[] = {0};
    const fc_memory_chunk bytes = {none, seven, NULL, "1234567"};
    fc_memory_tensor object = opaque;
    object.chunks = &bytes;
    object.nchunks = 1;
    object.encoding = "another";
    assert_int_equal(fc_checkpoint_in_memory("x", &object, 1, &made, &err), FC_EUSAGE);
    assert_string_equal(err.message, "x: object o: its encoding 'another' is unknown");
}

/* Two tensors that look alike are not taken for tied ones, which torch.save files store once. */
static void tensors_that_look_alike_are_not_tied(void **state) {
    (void)state;
    static const int64_t two[] = {2}, none[] = {0};
    static const float a[] = {1, 2}, b[] = {3, 4};
    const fc_memory_chunk in_a = {none, two, NULL, a}, in_b = {none, two, NULL, b};
    const fc_memory_tensor tensors[] = {
        {.name = "a", .dtype = FC_F32, .ndim = 1, .shape = two, .chunks = &in_a, .nchunks = 1},
        {.name = "b", .dtype = FC_F32, .ndim = 1, .shape = two, .chunks = &in_b, .nchunks = 1},
    };
    fc_checkpoint *made;
    fc_error err;
    assert_int_equal(fc_checkpoint_in_memory("x", tensors, 2, &made, &err), FC_OK);
    const fc_tensor *all[] = {&made->tensors[0], &made->tensors[1]};
    size_t same_as[2];
    assert_int_equal(fc_find_ties(made, all, 2, same_as, &err), FC_OK);
    assert_int_equal(same_as[1], 1);
    fc_checkpoint_close(made);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_process_writes_everything),
        cmocka_unit_test(ranks_write_their_shards),
        cmocka_unit_test(ranks_write_other_layouts),
        cmocka_unit_test(bad_calls_are_refused),
        cmocka_unit_test(tensors_that_look_alike_are_not_tied),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
