/*
 * Compares GPU kernels with the processor, bit for bit: strided boxes, casts between all floating-point dtypes (every
 * value of those with 8 and 16 bits), sums, quotients and products of every dtype, powers, streams and events.
 */
#include "gpu.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { MOST_BYTES = 8 << 20, GUARD = 64 /* bytes after a result, which must not change */ };

static fc_device *cpu, *gpu;
static unsigned char *on_host_a, *on_host_b, *expected, *found, *on_gpu_a, *on_gpu_b;
static fc_error err;

static uint64_t next_random(void) {
    static uint64_t x = 88172645463325252u;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

static void fill_random(unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        bytes[i] = (unsigned char)(next_random() >> 24);
    }
}

static void to_gpu(unsigned char *there, const unsigned char *here, size_t bytes) {
    must(gpu->copy(gpu, there, here, bytes, NULL, &err), &err, "copy to the GPU");
}

static void from_gpu(unsigned char *here, const unsigned char *there, size_t bytes) {
    must(gpu->copy(gpu, here, there, bytes, NULL, &err), &err, "copy from the GPU");
    must(gpu->synchronize(gpu, NULL, &err), &err, "synchronize");
}

static void fail(const char *what, fc_dtype a, fc_dtype b, size_t at) {
    fprintf(stderr, "%s, %s and %s: element %zu differs from the processor's\n", what, fc_dtype_get(a)->torch_name,
            fc_dtype_get(b)->torch_name, at);
    exit(1);
}

/* ---- boxes ---- */

/* Makes two random boxes of equal sizes in random arrays, with dimensions in random order. @return elements spanned. */
static int64_t random_layout(fc_strided_box *box) {
    int order[5] = {0};
    int64_t span = 1;
    for (int i = 0; i < box->ndim; i++) {
        int j = (int)(next_random() % (unsigned)(i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < box->ndim; i++) {
        box->strides[order[i]] = span;
        span *= box->sizes[order[i]] + (int64_t)(next_random() % 3);
    }
    box->first = (int64_t)(next_random() % 5);
    return span + box->first;
}

static void test_boxes(void) {
    for (int round = 0; round < 400; round++) {
        fc_strided_box from = {.ndim = (int)(next_random() % 5)}, to;
        uint32_t element = 1u << next_random() % 5;
        for (int d = 0; d < from.ndim; d++) {
            from.sizes[d] = 1 + (int64_t)(next_random() % (round % 10 == 0 ? 19 : 9));
        }
        to = from;
        size_t src = (size_t)random_layout(&from) * element, dst = (size_t)random_layout(&to) * element;
        if (src > MOST_BYTES || dst > MOST_BYTES) {
            continue;
        }
        fill_random(on_host_a, src);
        fill_random(expected, dst);
        to_gpu(on_gpu_a, on_host_a, src);
        to_gpu(on_gpu_b, expected, dst);
        must(cpu->copy_box(cpu, expected, &to, on_host_a, &from, element, NULL, &err), &err, "copy_box");
        must(gpu->copy_box(gpu, on_gpu_b, &to, on_gpu_a, &from, element, NULL, &err), &err, "copy_box");
        from_gpu(found, on_gpu_b, dst);
        if (memcmp(found, expected, dst) != 0) {
            fail("copy_box", FC_U8, FC_U8, (size_t)round);
        }
    }
}

/* ---- casts ---- */

/* Writes all values of a small dtype, or random values of all magnitudes. @return their number. */
static size_t make_values(fc_dtype dtype, unsigned char *to) {
    size_t size = fc_dtype_size(dtype), count = size == 1 ? 256 : size == 2 ? 65536 : 400000;
    fill_random(to, count * size);
    for (size_t i = 0; i < count && size <= 2; i++) {
        memcpy(to + i * size, &i, size);
    }
    for (size_t i = 0; i < count && size == 8; i += 3) { /* most random float64 overflow in other dtypes */
        double x = (double)(float)(next_random() % 100000) * (next_random() % 2 ? 1e-6 : -3e3) * (i % 2 ? 1 : 1e-40);
        memcpy(to + i * 8, &x, 8);
    }
    return count;
}

static void test_casts(void) {
    fill_random(on_host_b, MOST_BYTES);
    for (int from = FC_F64; from <= FC_F8_E8M0FNU; from++) {
        for (int to = FC_F64; to <= FC_F8_E8M0FNU; to++) {
            size_t count = make_values((fc_dtype)from, on_host_a), a = fc_dtype_size((fc_dtype)from);
            size_t b = fc_dtype_size((fc_dtype)to);
            for (size_t skip = 0; skip < 3; skip++) { /* aligned, unaligned, and float64 aligned to 16 bytes only */
                size_t n = count - 3 * skip;
                to_gpu(on_gpu_a, on_host_a, count * a);
                to_gpu(on_gpu_b, on_host_b, count * b + GUARD);
                fc_cast((fc_dtype)from, on_host_a + skip * a, (fc_dtype)to, expected, n);
                must(gpu->cast(gpu, (fc_dtype)from, on_gpu_a + skip * a, (fc_dtype)to, on_gpu_b + skip * b, n, NULL,
                               &err),
                     &err, "cast");
                from_gpu(found, on_gpu_b + skip * b, n * b + GUARD / 2);
                if (memcmp(found + n * b, on_host_b + skip * b + n * b, GUARD / 2) != 0) {
                    fail("cast, behind the end", (fc_dtype)from, (fc_dtype)to, n);
                }
                for (size_t i = 0; i < n; i++) {
                    if (memcmp(found + i * b, expected + i * b, b) != 0) {
                        fail("cast", (fc_dtype)from, (fc_dtype)to, i);
                    }
                }
            }
        }
    }
}

/* ---- arithmetic ---- */

/* Which of two NaNs the processor keeps depends on the compiler. */
static bool two_nans(fc_dtype dtype, const unsigned char *a, const unsigned char *b) {
    double x, y;
    if (fc_dtype_get(dtype)->cls != FC_CLASS_FLOAT) {
        return false;
    }
    fc_cast(dtype, a, FC_F64, &x, 1);
    fc_cast(dtype, b, FC_F64, &y, 1);
    if (dtype == FC_F64) {
        memcpy(&x, a, sizeof x);
        memcpy(&y, b, sizeof y);
    }
    return x != x && y != y;
}

static void compare(const char *what, fc_dtype of, size_t components, const unsigned char *a, const unsigned char *b) {
    size_t size = fc_dtype_size(of);
    if (memcmp(found + components * size, a + components * size, GUARD) != 0) {
        fail(what, of, of, components);
    }
    for (size_t i = 0; i < components; i++) {
        if (memcmp(found + i * size, expected + i * size, size) != 0 && !two_nans(of, a + i * size, b + i * size)) {
            fail(what, of, of, i);
        }
    }
}

static fc_dtype component_of(fc_dtype dtype, size_t *parts) {
    *parts = fc_dtype_get(dtype)->cls == FC_CLASS_COMPLEX ? 2 : 1;
    return dtype == FC_C128 ? FC_F64 : dtype == FC_C64 ? FC_F32 : dtype == FC_C32 ? FC_F16 : dtype;
}

static void test_arithmetic(void) {
    enum { N = 100003 };
    static const double divisors[] = {3, 1024, 0.1, 0};
    for (int t = 0; t < FC_DTYPE_COUNT; t++) {
        fc_dtype dtype = (fc_dtype)t;
        size_t size = fc_dtype_size(dtype), parts;
        fc_dtype of = component_of(dtype, &parts);
        fill_random(on_host_a, N * size + GUARD);
        fill_random(on_host_b, N * size);
        for (size_t i = 0; dtype == FC_BOOL && i < N; i++) {
            on_host_a[i] &= 1;
            on_host_b[i] &= 1;
        }
        memcpy(expected, on_host_a, N * size);
        to_gpu(on_gpu_a, on_host_a, N * size + GUARD);
        to_gpu(on_gpu_b, on_host_b, N * size);
        fc_code rc = cpu->add(cpu, dtype, expected, on_host_b, N, NULL, NULL);
        if (rc != gpu->add(gpu, dtype, on_gpu_a, on_gpu_b, N, NULL, NULL)) {
            fail("whether there is a sum", dtype, dtype, 0);
        }
        if (rc == FC_OK) {
            from_gpu(found, on_gpu_a, N * size + GUARD);
            compare("add", of, N * parts, on_host_a, on_host_b);
        }
        for (size_t d = 0; d < sizeof divisors / sizeof *divisors; d++) {
            memcpy(expected, on_host_a, N * size);
            to_gpu(on_gpu_a, on_host_a, N * size + GUARD);
            rc = cpu->divide(cpu, dtype, expected, divisors[d], N, NULL, NULL);
            if (rc != gpu->divide(gpu, dtype, on_gpu_a, divisors[d], N, NULL, NULL)) {
                fail("whether there is a quotient", dtype, dtype, 0);
            }
            if (rc == FC_OK) {
                from_gpu(found, on_gpu_a, N * size + GUARD);
                compare("divide", of, N * parts, on_host_a, on_host_a);
            }
        }
    }
}

static void test_products(void) {
    enum { N = 100003 };
    static const double factors[] = {3, 0.1, 0, INFINITY};
    for (int t = 0; t < FC_DTYPE_COUNT; t++) {
        fc_dtype dtype = (fc_dtype)t;
        size_t size = fc_dtype_size(dtype), parts;
        fc_dtype of = component_of(dtype, &parts);
        fill_random(on_host_a, N * size + GUARD);
        for (size_t f = 0; f < sizeof factors / sizeof *factors; f++) {
            memcpy(expected, on_host_a, N * size);
            to_gpu(on_gpu_a, on_host_a, N * size + GUARD);
            fc_code rc = cpu->multiply(cpu, dtype, expected, factors[f], N, NULL, NULL);
            if (rc != gpu->multiply(gpu, dtype, on_gpu_a, factors[f], N, NULL, NULL)) {
                fail("whether there is a product", dtype, dtype, 0);
            }
            if (rc == FC_OK) {
                from_gpu(found, on_gpu_a, N * size + GUARD);
                compare("multiply", of, N * parts, on_host_a, on_host_a);
            }
        }
    }
}

/* Adds up the partial sums, or takes their maximum. */
static double result_of(const double *sums, double p) {
    double result = 0;
    for (int i = 0; i < FC_POWER_SUMS; i++) {
        result = !isinf(p) ? result + sums[i] : sums[i] > result || isnan(sums[i]) ? sums[i] : result;
    }
    return result;
}

/* From one element to more than there are threads; the GPU adds in another order than the processor. */
static void test_powers(void) {
    static const double powers[] = {1, 2, 3.5, INFINITY};
    static const size_t counts[] = {0, 1, 5, 100003, 400001};
    static const fc_dtype dtypes[] = {FC_F32, FC_BF16, FC_F16, FC_F64};
    static double here[FC_POWER_SUMS], there[FC_POWER_SUMS];
    static double values[400001];
    void *sums;
    must(gpu->alloc(gpu, sizeof there, &sums, &err), &err, "sums");
    for (int i = 0; i < 400001; i++) {
        values[i] = (double)(i % 2003 * 7919 % 2003 - 1001) / 64;
    }
    for (size_t k = 0; k < 4 * 5 * 4; k++) {
        fc_dtype dtype = dtypes[k % 4];
        size_t count = counts[k / 4 % 5];
        double p = powers[k / 20];
        memset(here, 0, sizeof here);
        fc_cast(FC_F64, values, dtype, on_host_a, count);
        to_gpu(on_gpu_a, on_host_a, count * fc_dtype_size(dtype) + 1);
        must(gpu->zero(gpu, sums, sizeof there, NULL, &err), &err, "zero");
        for (int twice = 0; twice < 2; twice++) {
            must(gpu->powers(gpu, dtype, on_gpu_a, p, 0.25, count, sums, NULL, &err), &err, "powers");
            must(cpu->powers(cpu, dtype, on_host_a, p, 0.25, count, here, NULL, &err), &err, "powers");
        }
        from_gpu((unsigned char *)there, sums, sizeof there);
        double a = result_of(here, p), b = result_of(there, p);
        if (!(fabs(a - b) <= (isinf(p) ? 0 : 1e-12 * a))) {
            fail("powers", dtype, dtype, count);
        }
    }
    gpu->release(gpu, sums);
}

/* ---- order ---- */

/* Page-locked memory is copied to the GPU on one stream. The other stream waits for it with an event. */
static void test_streams(void) {
    enum { N = 1 << 20 };
    fc_stream *up, *down;
    fc_event *arrived;
    void *staging;
    must(gpu->synchronize(gpu, NULL, &err), &err, "synchronize"); /* no other stream waits for the default one */
    must(gpu->stream_new(gpu, &up, &err), &err, "stream");
    must(gpu->stream_new(gpu, &down, &err), &err, "stream");
    must(gpu->event_new(gpu, &arrived, &err), &err, "event");
    must(gpu->alloc_staging(gpu, N * 4, &staging, &err), &err, "staging");
    for (int round = 0; round < 20; round++) {
        float *values = staging;
        for (int i = 0; i < N; i++) {
            values[i] = (float)(i % 1000 + round);
        }
        must(gpu->zero(gpu, on_gpu_a, N * 4, up, &err), &err, "zero");
        must(gpu->copy(gpu, on_gpu_a, staging, N * 4, up, &err), &err, "copy");
        must(gpu->record(gpu, arrived, up, &err), &err, "record");
        must(gpu->wait(gpu, down, arrived, &err), &err, "wait");
        must(gpu->add(gpu, FC_F32, on_gpu_a, on_gpu_a, 0, down, &err), &err, "add");
        must(gpu->divide(gpu, FC_F32, on_gpu_a, 2, N, down, &err), &err, "divide");
        must(gpu->copy(gpu, staging, on_gpu_a, N * 4, down, &err), &err, "copy");
        must(gpu->synchronize(gpu, down, &err), &err, "synchronize");
        for (int i = 0; i < N; i++) {
            if (values[i] != (float)(i % 1000 + round) / 2) {
                fail("streams", FC_F32, FC_F32, (size_t)i);
            }
        }
    }
    gpu->release_staging(gpu, staging);
    gpu->event_free(gpu, arrived);
    gpu->stream_free(gpu, up);
    gpu->stream_free(gpu, down);
}

int main(void) {
    gpu = gpu_open(0);
    must(fc_device_cpu(&cpu, &err), &err, "cpu");
    on_host_a = malloc(MOST_BYTES);
    on_host_b = malloc(MOST_BYTES);
    expected = malloc(MOST_BYTES);
    found = malloc(MOST_BYTES);
    must(gpu->alloc(gpu, MOST_BYTES, (void **)&on_gpu_a, &err), &err, "alloc");
    must(gpu->alloc(gpu, MOST_BYTES, (void **)&on_gpu_b, &err), &err, "alloc");
    test_boxes();
    test_casts();
    test_arithmetic();
    test_products();
    test_powers();
    test_streams();
    gpu->release(gpu, on_gpu_a);
    gpu->release(gpu, on_gpu_b);
    gpu->destroy(gpu);
    cpu->destroy(cpu);
    free(on_host_a);
    free(on_host_b);
    free(expected);
    free(found);
    puts("good");
    return 0;
}
