/*
 * formats/pt: input that torch.save would never write, and damaged files, made here byte by byte by the writers of
 * formats/torch. tests/oracle/pt.py and pt_ranks.py compare real files with PyTorch.
 */
#include "fsdpckpt/move.h"
#include "torch/pickle/write.h"
#include "torch/zip/write.h"

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

typedef struct fixture {
    char directory[64];
    char path[128]; /* the tested file */
    fc_torch_pickler w;
    fc_error err;
    fc_checkpoint *checkpoint;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    strcpy(f->directory, "/tmp/fsdpckpt-pt-XXXXXX");
    assert_non_null(mkdtemp(f->directory));
    snprintf(f->path, sizeof f->path, "%s/x.pt", f->directory);
    fc_torch_pickle_begin(&f->w, 2);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    char command[128];
    fc_checkpoint_close(f->checkpoint);
    fc_torch_pickle_free(&f->w);
    snprintf(command, sizeof command, "rm -rf %s", f->directory);
    assert_int_equal(system(command), 0);
    free(f);
    return 0;
}

/* Puts the pickle into an archive with a data record of `bytes` bytes and opens it. */
static fc_code open_pickle(fixture *f, uint64_t bytes) {
    fc_torch_zip zip = {0};
    uint64_t offset;
    assert_int_equal(fc_torch_pickle_end(&f->w, &f->err), FC_OK);
    assert_int_equal(fc_torch_zip_begin(&zip, "x", f->w.bytes, f->w.size, &f->err), FC_OK);
    assert_int_equal(fc_torch_zip_add_data(&zip, bytes, &offset, &f->err), FC_OK);
    assert_int_equal(fc_torch_zip_end(&zip, &f->err), FC_OK);
    FILE *file = fopen(f->path, "wb");
    assert_non_null(file);
    assert_int_equal(fc_torch_zip_write(&zip, fileno(file), f->path, 0, &f->err), FC_OK);
    fclose(file);
    fc_torch_zip_free(&zip);
    f->err.message[0] = '\0';
    return fc_checkpoint_open(f->path, NULL, &f->checkpoint, &f->err);
}

static void says(const fixture *f, const char *text) {
    if (!strstr(f->err.message, text)) {
        fail_msg("not \"%s\" but: %s", text, f->err.message);
    }
}

static void key(fixture *f, const char *name) {
    fc_torch_pickle_str(&f->w, name);
}

static void begin_dict(fixture *f) {
    fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_DICT);
    fc_torch_pickle_op(&f->w, FC_PICKLE_MARK);
}

static void end_dict(fixture *f) {
    fc_torch_pickle_op(&f->w, FC_PICKLE_SETITEMS);
}

static void tensor(fixture *f, int ndim, const int64_t *sizes, const int64_t *strides, uint64_t numel) {
    fc_torch_tensor_out out = {.dtype = FC_F32, .numel = numel, .ndim = ndim, .sizes = sizes, .strides = strides};
    fc_torch_pickle_tensor(&f->w, &out);
}

/* {"t": a tensor} */
static fc_code open_tensor(fixture *f, int ndim, const int64_t *sizes, const int64_t *strides, uint64_t numel,
                           uint64_t bytes) {
    begin_dict(f);
    key(f, "t");
    tensor(f, ndim, sizes, strides, numel);
    end_dict(f);
    return open_pickle(f, bytes);
}

static void a_tensor_within_its_storage(void **state) {
    fixture *f = *state;
    static const int64_t sizes[] = {2, 3}, strides[] = {1, 2};
    assert_int_equal(open_tensor(f, 2, sizes, strides, 6, 24), FC_OK);
    fc_extent e;
    assert_int_equal(f->checkpoint->ntensors, 1);
    assert_int_equal(fc_checkpoint_extent(f->checkpoint, &f->checkpoint->tensors[0], 0, &e, &f->err), FC_OK);
    assert_int_equal(e.strides[1], 2);
    assert_int_equal(e.length, 24);
    assert_int_equal(e.offset % 64, 0);
}

static void a_tensor_beyond_its_storage(void **state) {
    fixture *f = *state;
    static const int64_t sizes[] = {2, 3}, strides[] = {1, 3};
    assert_int_equal(open_tensor(f, 2, sizes, strides, 6, 24), FC_ECORRUPT);
    says(f, "outside its storage");
}

static void a_storage_shorter_than_its_pickle_says(void **state) {
    fixture *f = *state;
    static const int64_t sizes[] = {6};
    assert_int_equal(open_tensor(f, 1, sizes, NULL, 6, 20), FC_ECORRUPT);
    says(f, "has 20 bytes, but the pickle says 24");
}

static void zero_strides_make_no_memory(void **state) {
    fixture *f = *state;
    static const int64_t sizes[] = {INT64_C(1) << 42}, strides[] = {0};
    assert_int_equal(open_tensor(f, 1, sizes, strides, 1, 4), FC_OK);
    assert_int_equal(f->checkpoint->tensors[0].shape[0], INT64_C(1) << 42);
    assert_true(fc_arena_size(f->checkpoint->arena) < 1 << 20);
}

static void a_size_that_overflows(void **state) {
    fixture *f = *state;
    static const int64_t sizes[] = {INT64_C(1) << 40, INT64_C(1) << 40}, strides[] = {0, 0};
    assert_int_equal(open_tensor(f, 2, sizes, strides, 1, 4), FC_ECORRUPT);
    says(f, "its size is invalid");
}

/* Each level holds the next twice: 2^60 leaves in a few hundred bytes. The outer dicts come first. */
static void doubling_dicts(void **state) {
    fixture *f = *state;
    for (int i = 0; i < 60; i++) {
        fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_DICT);
        fc_torch_pickle_put(&f->w);
        fc_torch_pickle_op(&f->w, FC_PICKLE_MARK);
        key(f, "x");
    }
    fc_torch_pickle_int(&f->w, 1);
    for (uint32_t i = 60; i-- > 0;) {
        if (i < 59) {
            key(f, "y");
            fc_torch_pickle_get(&f->w, i + 1);
        }
        end_dict(f);
    }
    assert_int_equal(open_pickle(f, 0), FC_EUNSUPPORTED);
    says(f, "share values");
}

/* The same with lists and no tensor is one small object. */
static void doubling_lists(void **state) {
    fixture *f = *state;
    begin_dict(f);
    key(f, "list");
    for (int i = 0; i < 60; i++) {
        fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_LIST);
        fc_torch_pickle_put(&f->w);
        fc_torch_pickle_op(&f->w, FC_PICKLE_MARK);
    }
    fc_torch_pickle_int(&f->w, 1);
    for (uint32_t i = 60; i-- > 0;) {
        if (i < 59) {
            fc_torch_pickle_get(&f->w, i + 1);
        }
        fc_torch_pickle_op(&f->w, FC_PICKLE_APPENDS);
    }
    end_dict(f);
    assert_int_equal(open_pickle(f, 0), FC_OK);
    const fc_tensor *object = &f->checkpoint->tensors[0];
    const char *json;
    assert_true(object->object && object->shape[0] < 4096);
    assert_int_equal(fc_checkpoint_object_json(f->checkpoint, object, f->checkpoint->arena, &json, &f->err), FC_OK);
    assert_true(strlen(json) < 1 << 20);
}

static void a_dict_that_contains_itself(void **state) {
    fixture *f = *state;
    fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_DICT);
    uint32_t self = fc_torch_pickle_put(&f->w);
    key(f, "me");
    fc_torch_pickle_get(&f->w, self);
    fc_torch_pickle_op(&f->w, FC_PICKLE_SETITEM);
    assert_int_equal(open_pickle(f, 0), FC_EUNSUPPORTED);
    says(f, "nested more than");
}

/* A list that contains itself is a valid object: Python pickles it, and so do we. */
static void a_list_that_contains_itself(void **state) {
    fixture *f = *state;
    begin_dict(f);
    key(f, "list");
    fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_LIST);
    uint32_t self = fc_torch_pickle_put(&f->w);
    fc_torch_pickle_get(&f->w, self);
    fc_torch_pickle_op(&f->w, FC_PICKLE_APPEND);
    end_dict(f);
    assert_int_equal(open_pickle(f, 0), FC_OK);
    assert_int_equal(f->checkpoint->ntensors, 1);
}

static void a_million_levels(void **state) {
    fixture *f = *state;
    begin_dict(f);
    key(f, "deep");
    for (int i = 0; i < 1000000; i++) {
        fc_torch_pickle_op(&f->w, FC_PICKLE_EMPTY_LIST);
    }
    for (int i = 1; i < 1000000; i++) {
        fc_torch_pickle_op(&f->w, FC_PICKLE_APPEND);
    }
    end_dict(f);
    fc_extent extent;
    assert_int_equal(open_pickle(f, 0), FC_OK); /* is listed, so that other values can be read */
    assert_int_equal(f->checkpoint->ntensors, 1);
    assert_int_equal(fc_checkpoint_extent(f->checkpoint, &f->checkpoint->tensors[0], 0, &extent, &f->err),
                     FC_EUNSUPPORTED);
    says(f, "nested too deeply");
}

static void names_that_collide(void **state) {
    fixture *f = *state;
    static const int64_t one[] = {1};
    begin_dict(f);
    key(f, "1");
    tensor(f, 1, one, NULL, 1);
    fc_torch_pickle_int(&f->w, 1);
    tensor(f, 1, one, NULL, 1);
    end_dict(f);
    assert_int_equal(open_pickle(f, 4), FC_EUNSUPPORTED);
    says(f, "both get the name 1");
}

static void names_with_nul(void **state) {
    fixture *f = *state;
    static const int64_t one[] = {1};
    begin_dict(f);
    fc_torch_pickle_strn(&f->w, "a\0b", 3);
    tensor(f, 1, one, NULL, 1);
    end_dict(f);
    assert_int_equal(open_pickle(f, 4), FC_EUNSUPPORTED);
    says(f, "NUL");
}

/* ---- legacy files ---- */

static unsigned char *load_legacy(size_t *size) {
    FILE *file = fopen(FSDPCKPT_CORPUS "/pt/legacy.pt", "rb");
    assert_non_null(file);
    unsigned char *bytes = malloc(1 << 16);
    *size = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    return bytes;
}

static fc_code open_bytes(fixture *f, const unsigned char *bytes, size_t size) {
    FILE *file = fopen(f->path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
    fc_checkpoint_close(f->checkpoint);
    f->checkpoint = NULL;
    return fc_checkpoint_open(f->path, NULL, &f->checkpoint, &f->err);
}

static void legacy_files_that_end_early(void **state) {
    fixture *f = *state;
    size_t size;
    unsigned char *bytes = load_legacy(&size);
    assert_int_equal(open_bytes(f, bytes, size), FC_OK);
    assert_int_equal(f->checkpoint->ntensors, 4);
    for (size_t n = 0; n < size; n++) {
        assert_int_equal(open_bytes(f, bytes, n), FC_ECORRUPT);
    }
    free(bytes);
}

/* With any byte changed the file is read or refused, and every extent is within the file. */
static void legacy_files_with_a_wrong_byte(void **state) {
    fixture *f = *state;
    size_t size;
    unsigned char *bytes = load_legacy(&size);
    for (size_t i = 0; i < size; i++) {
        bytes[i] ^= 0x41;
        if (open_bytes(f, bytes, size) == FC_OK) {
            for (size_t t = 0; t < f->checkpoint->ntensors; t++) {
                const fc_tensor *tensor_ = &f->checkpoint->tensors[t];
                fc_extent e;
                if (tensor_->nchunks > 0 && !tensor_->object) {
                    assert_int_equal(fc_checkpoint_extent(f->checkpoint, tensor_, 0, &e, &f->err), FC_OK);
                    assert_true(e.offset + e.length <= size && e.first <= e.length);
                }
            }
        }
        bytes[i] ^= 0x41;
    }
    free(bytes);
}

/* ---- one file per rank ---- */

static fc_code reshard(fixture *f, const char *target, int64_t ranks) {
    fc_checkpoint *source;
    fc_mesh mesh;
    fc_layout_spec spec = {.dp = ranks};
    assert_int_equal(fc_checkpoint_open(FSDPCKPT_CORPUS "/pt/layout.pt", NULL, &source, &f->err), FC_OK);
    assert_int_equal(fc_layout_mesh(&spec, &mesh, &f->err), FC_OK);
    fc_convert_options options = {.format = fc_format_find("pt"), .selection = {.mesh = &mesh}};
    fc_code rc = fc_convert(source, target, &options, NULL, &f->err);
    fc_checkpoint_close(source);
    return rc;
}

static void files_with_wrong_names_are_refused(void **state) {
    fixture *f = *state;
    char target[128], a[256], b[256], c[256];
    snprintf(target, sizeof target, "%s/ranks", f->directory);
    assert_int_equal(reshard(f, target, 2), FC_OK);
    assert_int_equal(fc_checkpoint_open(target, NULL, &f->checkpoint, &f->err), FC_OK);
    assert_int_equal(f->checkpoint->ntensors, 4);
    assert_int_equal(f->checkpoint->mesh.sizes[0], 2);
    assert_int_equal(f->checkpoint->tensors[0].nchunks, 2);
    assert_int_equal(f->checkpoint->tensors[0].chunks[1].rank, 1);
    fc_checkpoint_close(f->checkpoint);
    snprintf(a, sizeof a, "%s/model_world_size_2_rank_0.pt", target);
    snprintf(b, sizeof b, "%s/model_world_size_2_rank_1.pt", target);
    snprintf(c, sizeof c, "%s/c", target);
    assert_true(rename(a, c) == 0 && rename(b, a) == 0 && rename(c, b) == 0);
    assert_int_equal(fc_checkpoint_open(target, NULL, &f->checkpoint, &f->err), FC_ECORRUPT);
    says(f, "its rank or its number of ranks differs");
    assert_int_equal(symlink(FSDPCKPT_CORPUS "/pt/layout.pt", c), 0);
    assert_true(rename(c, b) == 0);
    assert_int_equal(fc_checkpoint_open(target, NULL, &f->checkpoint, &f->err), FC_ECORRUPT);
    says(f, "symbolic link");
}

/* The same input gives the same bytes. If the target cannot be made, nothing is left behind. */
static void targets_are_deterministic(void **state) {
    fixture *f = *state;
    char a[128], b[128], command[400];
    snprintf(a, sizeof a, "%s/a", f->directory);
    snprintf(b, sizeof b, "%s/b", f->directory);
    assert_int_equal(reshard(f, a, 3), FC_OK);
    assert_int_equal(reshard(f, b, 3), FC_OK);
    snprintf(command, sizeof command, "diff -r %s %s", a, b);
    assert_int_equal(system(command), 0);
    assert_int_equal(reshard(f, b, 3), FC_EUSAGE);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_tensor_within_its_storage),
        TEST(a_tensor_beyond_its_storage),
        TEST(a_storage_shorter_than_its_pickle_says),
        TEST(zero_strides_make_no_memory),
        TEST(a_size_that_overflows),
        TEST(doubling_dicts),
        TEST(doubling_lists),
        TEST(a_dict_that_contains_itself),
        TEST(a_list_that_contains_itself),
        TEST(a_million_levels),
        TEST(names_that_collide),
        TEST(names_with_nul),
        TEST(legacy_files_that_end_early),
        TEST(legacy_files_with_a_wrong_byte),
        TEST(files_with_wrong_names_are_refused),
        TEST(targets_are_deterministic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
