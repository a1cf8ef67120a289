/*
 * Views: libhdf5 reads tensors with any cuts and strides through external and virtual datasets.
 */
#include "fsdpckpt/view.h"

#include "fake_format.h"
#include "fsdpckpt/read.h"

/* A fake checkpoint and the path of a view of it. */
typedef struct fixture {
    fake *f;
    char path[128];
    fc_view_report report;
    fc_error err;
} fixture;

static int setup(void **state) {
    fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    x->f = fake_new();
    x->f->strided = true;
    snprintf(x->path, sizeof x->path, "%s/view.h5", x->f->directory);
    *state = x;
    return 0;
}

static int teardown(void **state) {
    fixture *x = *state;
    unlink(x->path);
    fake_free(x->f);
    free(x);
    return 0;
}

static fc_code make_view(fixture *x) {
    const fc_view_options options = {.force = true};
    return fc_view(&x->f->checkpoint, x->path, &options, &x->report, &x->err);
}

/* Checks that libhdf5 reads the right data of every tensor through the view. */
static void assert_seen(fixture *x) {
    const fc_open_options follow = {.follow_external = true};
    fc_checkpoint *view = NULL;
    if (make_view(x) != FC_OK || fc_checkpoint_open(x->path, &follow, &view, &x->err) != FC_OK) {
        fail_msg("%s", x->err.message);
    }
    assert_int_equal(view->ntensors, x->f->checkpoint.ntensors);
    for (size_t i = 0; i < view->ntensors; i++) {
        const fc_tensor *seen = &view->tensors[i];
        const fake_tensor *truth = &x->f->details[i];
        const int64_t origin[FC_MAX_DIMS] = {0};
        const fc_box whole = {seen->ndim, origin, seen->shape};
        size_t size = (size_t)truth->numel * fc_dtype_size(seen->dtype);
        unsigned char *bytes = calloc(1, size + 1);
        assert_non_null(bytes);
        assert_string_equal(seen->name, truth->name);
        assert_int_equal(seen->dtype, x->f->tensors[i].dtype);
        if (fc_read_box(view, seen, &whole, seen->dtype, bytes, &x->err) != FC_OK) {
            fail_msg("%s", x->err.message);
        }
        assert_memory_equal(bytes, truth->truth, size);
        free(bytes);
    }
    fc_checkpoint_close(view);
}

static void any_cuts_and_strides(void **state) {
    fixture *x = *state;
    static const fc_dtype dtypes[] = {FC_F32, FC_BF16, FC_BOOL, FC_C128, FC_F8_E4M3FN, FC_I64};
    srand(7);
    for (int i = 0; i < 60; i++) {
        int64_t shape[FAKE_DIMS];
        int ndim = i % (FAKE_DIMS + 1);
        for (int d = 0; d < ndim; d++) {
            shape[d] = i == 59 ? 0 : 1 + rand() % 7;
        }
        fake_add(x->f, dtypes[i % 6], ndim, shape, rand() % 5);
    }
    assert_seen(x);
    assert_int_equal(x->report.copied, 0);
    assert_int_equal(x->report.copied_bytes, 0);
    assert_true(x->report.external > 5);
    assert_true(x->report.assembled > 20);
}

static void small_tensors_without_a_view_are_copied(void **state) {
    fixture *x = *state;
    x->f->strided = false; /* any codec and byte order */
    srand(8);
    for (int i = 0; i < 40; i++) {
        int64_t shape[FAKE_DIMS] = {1 + rand() % 9, 1 + rand() % 9, 1 + rand() % 9};
        fake_add(x->f, FC_F32, i % 4, shape, rand() % 3);
    }
    assert_seen(x);
    assert_true(x->report.copied > 10);
    assert_true(x->report.copied_bytes > 0);
    assert_true(x->report.external + x->report.assembled > 2);
}

/* Replaces the single chunk of tensor `t` by `bytes` with these strides. */
static void restore(fixture *x, size_t t, const int64_t *strides, const void *bytes, size_t size) {
    fc_extent *e = &x->f->details[t].details[0].extent;
    *e = (fc_extent){.codec = FC_CODEC_RAW, .length = size, .decoded = size};
    e->offset = fake_append(x->f, 0, bytes, size);
    memcpy(e->strides, strides, (size_t)x->f->tensors[t].ndim * sizeof *strides);
}

static void repeated_elements(void **state) {
    fixture *x = *state;
    static const int64_t shape[] = {3, 2, 4}, strides[] = {0, 4, 1}, strides_inner[] = {2, 1, 0};
    unsigned char bytes[24];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)(3 * i);
    }
    size_t outer = fake_add(x->f, FC_U8, 3, shape, 0), inner = fake_add(x->f, FC_U8, 3, shape, 0);
    restore(x, outer, strides, bytes, 8);
    restore(x, inner, strides_inner, bytes, 6);
    for (size_t i = 0; i < 24; i++) {
        x->f->details[outer].truth[i] = bytes[i % 8];
        x->f->details[inner].truth[i] = bytes[i / 4];
    }
    assert_seen(x);
    assert_int_equal(x->report.assembled, 2);
}

static void too_many_segments_are_refused(void **state) {
    fixture *x = *state;
    static const int64_t shape[] = {5000, 5000}, strides[] = {1, 5000}, few[] = {40, 25000}, few_strides[] = {1, 40};
    for (size_t t = 0; t < 2; t++) {
        x->f->only_raw = true;
        size_t at = fake_add(x->f, FC_U8, 2, (const int64_t[]){2, 2}, 0);
        fake_tensor *d = &x->f->details[at];
        memcpy(d->shape, t ? few : shape, sizeof shape);
        memcpy(d->details[0].dims + 2, t ? few : shape, sizeof shape);
        memcpy(d->details[0].extent.strides, t ? few_strides : strides, sizeof strides);
        d->details[0].extent.length = d->details[0].extent.decoded = (uint64_t)(t ? 1000000 : 25000000);
    }
    assert_int_equal(make_view(x), FC_EUNSUPPORTED);
    assert_non_null(strstr(x->err.message, "'layers.0.weight' (strided in its storage"));
    assert_null(strstr(x->err.message, "layers.1.weight"));
    assert_int_equal(access(x->path, F_OK), -1);
}

static void large_tensors_have_several_segments(void **state) {
    fixture *x = *state;
    x->f->only_raw = true;
    size_t t = fake_add(x->f, FC_U8, 2, (const int64_t[]){2, 2}, 0);
    fake_tensor *d = &x->f->details[t];
    const int64_t shape[] = {3 << 10, 1 << 20}; /* 3 GiB */
    memcpy(d->shape, shape, sizeof shape);
    memcpy(d->details[0].dims + 2, shape, sizeof shape);
    d->details[0].extent.strides[0] = 1 << 20;
    d->details[0].extent.length = d->details[0].extent.decoded = UINT64_C(3) << 30;
    assert_int_equal(make_view(x), FC_OK);
    assert_int_equal(x->report.external, 1);
    assert_int_equal(x->report.viewed_bytes, UINT64_C(3) << 30);
    FILE *file = fopen(x->path, "rb");
    unsigned char bytes[8192];
    assert_non_null(file);
    size_t n = fread(bytes, 1, sizeof bytes, file), found = 0;
    fclose(file);
    const uint64_t segment = UINT64_C(1) << 30;
    for (size_t i = 0; i + 8 <= n; i++) {
        found += memcmp(bytes + i, &segment, 8) == 0;
    }
    assert_int_equal(found, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(any_cuts_and_strides, setup, teardown),
        cmocka_unit_test_setup_teardown(small_tensors_without_a_view_are_copied, setup, teardown),
        cmocka_unit_test_setup_teardown(repeated_elements, setup, teardown),
        cmocka_unit_test_setup_teardown(too_many_segments_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(large_tensors_have_several_segments, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
