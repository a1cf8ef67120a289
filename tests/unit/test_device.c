/*
 * lib/gather/device_cpu.c, the device that others are compared with: boxes element by element, sums and quotients
 * against the definition, refusals.
 */
#include "fsdpckpt/gather/device.h"
#include "fsdpckpt/move.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int setup(void **state) {
    fc_device *device;
    fc_code rc = fc_device_cpu(&device, NULL);
    *state = device;
    return rc != FC_OK;
}

static int teardown(void **state) {
    fc_device *device = *state;
    device->destroy(device);
    return 0;
}

static void memory_streams_events(void **state) {
    fc_device *device = *state;
    unsigned char *a, *b;
    fc_stream *stream;
    fc_event *event;
    assert_string_equal(device->name, "cpu");
    assert_true(device->is_host);
    assert_int_equal(device->alloc(device, 100, (void **)&a, NULL), FC_OK);
    assert_int_equal(device->alloc_staging(device, 0, (void **)&b, NULL), FC_OK);
    assert_non_null(b);
    device->release_staging(device, b);
    assert_int_equal(device->alloc(device, 100, (void **)&b, NULL), FC_OK);
    assert_int_equal(device->stream_new(device, &stream, NULL), FC_OK);
    assert_int_equal(device->event_new(device, &event, NULL), FC_OK);
    memset(b, 7, 100);
    assert_int_equal(device->zero(device, a, 100, stream, NULL), FC_OK);
    assert_int_equal(device->copy(device, a + 10, b, 80, stream, NULL), FC_OK);
    assert_int_equal(device->record(device, event, stream, NULL), FC_OK);
    assert_int_equal(device->wait(device, NULL, event, NULL), FC_OK);
    assert_int_equal(device->synchronize(device, stream, NULL), FC_OK);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(a[i], i >= 10 && i < 90 ? 7 : 0);
    }
    device->event_free(device, event);
    device->stream_free(device, stream);
    device->release(device, a);
    device->release(device, b);
}

/* Packs a box of a random array and unpacks it again. */
static void boxes_are_packed_and_unpacked(void **state) {
    fc_device *device = *state;
    srand(1);
    for (int round = 0; round < 300; round++) {
        int ndim = rand() % 5;
        int64_t shape[5], all = 1, volume = 1;
        fc_strided_box in = {.ndim = ndim}, packed = {.ndim = ndim};
        for (int d = ndim - 1; d >= 0; d--) {
            shape[d] = 1 + rand() % 7;
            int64_t offset = rand() % shape[d];
            in.sizes[d] = packed.sizes[d] = 1 + rand() % (shape[d] - offset);
            in.strides[d] = all;
            in.first += offset * all;
            packed.strides[d] = volume;
            volume *= in.sizes[d];
            all *= shape[d];
        }
        uint32_t element = 1u << rand() % 5;
        size_t size = (size_t)all * element, small = (size_t)volume * element;
        unsigned char *array = malloc(size), *back = calloc(1, size), *box = malloc(small);
        for (size_t i = 0; i < size; i++) {
            array[i] = (unsigned char)(1 + rand() % 255);
        }
        assert_int_equal(device->copy_box(device, box, &packed, array, &in, element, NULL, NULL), FC_OK);
        assert_int_equal(device->copy_box(device, back, &in, box, &packed, element, NULL, NULL), FC_OK);
        size_t found = 0;
        for (int64_t i = 0; i < all; i++) {
            int64_t rest = i - in.first, at = 0;
            bool inside = rest >= 0;
            for (int d = 0; d < ndim; d++) {
                int64_t place = i / in.strides[d] % shape[d], start = in.first / in.strides[d] % shape[d];
                inside = inside && place >= start && place < start + in.sizes[d];
                at += (place - start) * packed.strides[d];
            }
            for (uint32_t b = 0; b < element; b++) {
                unsigned char x = array[i * element + b];
                assert_int_equal(back[i * element + b], inside ? x : 0);
                if (inside) {
                    assert_int_equal(box[at * element + b], x);
                    found++;
                }
            }
        }
        assert_int_equal(found, small);
        free(array);
        free(back);
        free(box);
    }
}

static void bad_boxes_are_refused(void **state) {
    fc_device *device = *state;
    unsigned char a[16] = {0}, b[16] = {1};
    fc_strided_box good = {2, {2, 2}, {2, 1}, 0}, other = good;
#define REFUSED(change)                                                                                                \
    other = good;                                                                                                      \
    change;                                                                                                            \
    assert_int_equal(device->copy_box(device, a, &good, b, &other, 1, NULL, NULL), FC_EUSAGE);                         \
    assert_int_equal(device->copy_box(device, a, &other, b, &good, 1, NULL, NULL), FC_EUSAGE);
    REFUSED(other.ndim = 1)
    REFUSED(other.sizes[0] = 3)
    REFUSED(other.strides[1] = -1)
    REFUSED(other.first = -1)
    REFUSED(other.strides[0] = INT64_MAX)
    other = good;
    other.sizes[1] = good.sizes[1] = 0;
    assert_int_equal(device->copy_box(device, a, &good, b, &other, 1, NULL, NULL), FC_OK);
    assert_int_equal(a[0], 0);
}

static void casts(void **state) {
    fc_device *device = *state;
    float values[3] = {1, -0.5f, 3};
    uint16_t half[3], wanted[3] = {0x3c00, 0xb800, 0x4200};
    assert_int_equal(device->cast(device, FC_F32, values, FC_F16, half, 3, NULL, NULL), FC_OK);
    assert_memory_equal(half, wanted, sizeof wanted);
    fc_error err;
    assert_int_equal(device->cast(device, FC_F32, values, FC_I32, half, 1, NULL, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message, "cpu: float32 cannot be cast to int32");
}

/* In bfloat16, 1 + 1/256 is a tie and stays 1, and a third has the bits 3eab. */
static void sums_and_quotients(void **state) {
    fc_device *device = *state;
    enum { N = 1300 };
    static float x[N], y[N];
    for (int i = 0; i < N; i++) {
        x[i] = (float)i;
        y[i] = 0.25f * (float)i;
    }
    assert_int_equal(device->add(device, FC_F32, x, y, N, NULL, NULL), FC_OK);
    assert_int_equal(device->divide(device, FC_F32, x, 3, N, NULL, NULL), FC_OK);
    for (int i = 0; i < N; i++) {
        assert_true(x[i] == 1.25f * (float)i / 3);
    }
    uint16_t a[2] = {0x3f80, 0x3f81}, b[2] = {0x3b80, 0x3b80};
    assert_int_equal(device->add(device, FC_BF16, a, b, 2, NULL, NULL), FC_OK);
    assert_int_equal(a[0], 0x3f80);
    assert_int_equal(a[1], 0x3f82);
    a[0] = 0x3f80;
    assert_int_equal(device->divide(device, FC_BF16, a, 3, 1, NULL, NULL), FC_OK);
    assert_int_equal(a[0], 0x3eab);
    double d[2] = {1, 2};
    assert_int_equal(device->divide(device, FC_F64, d, 3, 2, NULL, NULL), FC_OK);
    assert_true(d[0] == 1.0 / 3 && d[1] == 2.0 / 3);
    uint8_t n[2] = {250, 1}, m[2] = {10, 1};
    assert_int_equal(device->add(device, FC_U8, n, m, 2, NULL, NULL), FC_OK);
    assert_int_equal(n[0], 4);
    assert_int_equal(device->add(device, FC_BOOL, m + 1, m + 1, 1, NULL, NULL), FC_OK);
    assert_int_equal(m[1], 1);
    assert_int_equal(device->divide(device, FC_U8, n, 2, 2, NULL, NULL), FC_EUNSUPPORTED);
    assert_int_equal(device->add(device, FC_OPAQUE, n, m, 2, NULL, NULL), FC_EUNSUPPORTED);
}

/* 3 and -4 have the norms 7, 5 and 4; what is there already is kept. A NaN stays. */
static void products_and_powers(void **state) {
    fc_device *device = *state;
    static double sums[FC_POWER_SUMS];
    float x[] = {3, -4};
    uint16_t h[] = {0x4040, 0xc080}, nan[] = {0x7fc0, 0x3f80};
    assert_int_equal(device->powers(device, FC_F32, x, 1, 1, 2, sums, NULL, NULL), FC_OK);
    assert_int_equal(device->powers(device, FC_BF16, h, 2, 0.5, 2, sums, NULL, NULL), FC_OK);
    assert_int_equal(device->powers(device, FC_F32, x, 3, 1, 2, sums, NULL, NULL), FC_OK);
    assert_int_equal(device->powers(device, FC_F32, x, 3, 1, 0, sums, NULL, NULL), FC_OK);
    assert_true(sums[0] == 7 + 12.5 + 91);
    sums[0] = 3.5;
    assert_int_equal(device->powers(device, FC_BF16, h, INFINITY, 0.5, 2, sums, NULL, NULL), FC_OK);
    assert_true(sums[0] == 4);
    assert_int_equal(device->powers(device, FC_BF16, nan, INFINITY, 1, 2, sums, NULL, NULL), FC_OK);
    assert_int_equal(device->powers(device, FC_BF16, h, INFINITY, 1, 2, sums, NULL, NULL), FC_OK);
    assert_true(isnan(sums[0]));
    assert_int_equal(device->powers(device, FC_I32, x, 2, 1, 2, sums, NULL, NULL), FC_EUNSUPPORTED);
    assert_int_equal(device->multiply(device, FC_F32, x, 0.1, 2, NULL, NULL), FC_OK);
    assert_true(x[0] == 3 * 0.1f && x[1] == -4 * 0.1f);
    assert_int_equal(device->multiply(device, FC_BF16, h, 1.0 / 3, 2, NULL, NULL), FC_OK);
    assert_true(h[0] == 0x3f80 && h[1] == 0xbfab);
    assert_int_equal(device->multiply(device, FC_U8, h, 2, 2, NULL, NULL), FC_EUNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_streams_events), cmocka_unit_test(boxes_are_packed_and_unpacked),
        cmocka_unit_test(bad_boxes_are_refused), cmocka_unit_test(casts),
        cmocka_unit_test(sums_and_quotients),    cmocka_unit_test(products_and_powers),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
