/*
 * Measures the bandwidth of the GPU kernels and of a device-to-device copy. Prints GB/s (bytes read and written) and
 * the percentage of the copy. Usage: gpu_bandwidth [GPU], with FSDPCKPT_MODULE_PATH set to the directory of the module.
 */
#include "fsdpckpt/gather/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 20 };
static const size_t bytes_each = (size_t)512 << 20;

typedef struct bench {
    fc_device *gpu;
    void *a, *b;
    double copy; /* GB/s */
} bench;

static void must(fc_code rc, const fc_error *err) {
    if (rc != FC_OK) {
        fprintf(stderr, "gpu_bandwidth: %s\n", err->message);
        exit(fc_exit_status(rc));
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A measured operation, which enqueues its work on the default stream. */
typedef fc_code (*measured)(bench *b, fc_error *err);

static fc_code copy(bench *b, fc_error *err) {
    return b->gpu->copy(b->gpu, b->b, b->a, bytes_each, NULL, err);
}

/* Shard 3 of 8 of a bfloat16 matrix of 16,384 columns. Rows are one run; columns are one run per row. */
static fc_code pack(bench *b, bool columns, bool back, fc_error *err) {
    const int64_t width = 16384, height = (int64_t)(bytes_each / 2) / width;
    int64_t rows = columns ? height : height / 8, cols = columns ? width / 8 : width;
    fc_strided_box piece = {2, {rows, cols}, {width, 1}, columns ? 3 * cols : 3 * rows * width};
    fc_strided_box packed = {2, {rows, cols}, {cols, 1}, 0};
    return back ? b->gpu->copy_box(b->gpu, b->a, &piece, b->b, &packed, 2, NULL, err)
                : b->gpu->copy_box(b->gpu, b->b, &packed, b->a, &piece, 2, NULL, err);
}

static fc_code pack_rows(bench *b, fc_error *err) {
    return pack(b, false, false, err);
}

static fc_code pack_columns(bench *b, fc_error *err) {
    return pack(b, true, false, err);
}

static fc_code unpack_columns(bench *b, fc_error *err) {
    return pack(b, true, true, err);
}

/* A tensor of experts, cut along its middle dimension and padded to an odd width: three axes, no wide vectors. */
static fc_code pack_odd(bench *b, fc_error *err) {
    const int64_t experts = 64, rows = 1024, width = 2047;
    fc_strided_box piece = {3, {experts, rows / 8, width}, {rows * width, width, 1}, rows / 8 * width};
    fc_strided_box packed = {3, {experts, rows / 8, width}, {rows / 8 * width, width, 1}, 0};
    return b->gpu->copy_box(b->gpu, b->b, &packed, b->a, &piece, 2, NULL, err);
}

static fc_code cast_down(bench *b, fc_error *err) {
    return b->gpu->cast(b->gpu, FC_F32, b->a, FC_BF16, b->b, bytes_each / 4, NULL, err);
}

static fc_code cast_up(bench *b, fc_error *err) {
    return b->gpu->cast(b->gpu, FC_BF16, b->a, FC_F32, b->b, bytes_each / 4, NULL, err);
}

static fc_code cast_fp8(bench *b, fc_error *err) {
    return b->gpu->cast(b->gpu, FC_BF16, b->a, FC_F8_E4M3FN, b->b, bytes_each / 2, NULL, err);
}

static fc_code add(bench *b, fc_error *err) {
    return b->gpu->add(b->gpu, FC_F32, b->b, b->a, bytes_each / 4, NULL, err);
}

static fc_code divide(bench *b, fc_error *err) {
    return b->gpu->divide(b->gpu, FC_BF16, b->b, 8, bytes_each / 2, NULL, err);
}

/* Measures one operation. A call reads and writes `moved` bytes. */
static void measure(bench *b, const char *name, measured call, double moved) {
    fc_error err;
    double best = 0;
    for (int i = 0; i < 5; i++) {
        must(b->gpu->synchronize(b->gpu, NULL, &err), &err);
        double start = now();
        for (int r = 0; r < ROUNDS; r++) {
            must(call(b, &err), &err);
        }
        must(b->gpu->synchronize(b->gpu, NULL, &err), &err);
        double rate = moved * ROUNDS / (now() - start) / 1e9;
        best = rate > best ? rate : best;
    }
    b->copy = call == copy ? best : b->copy;
    printf("%-32s %8.0f GB/s  %5.1f %%\n", name, best, 100 * best / b->copy);
}

int main(int argc, char **argv) {
    bench b = {0};
    fc_error err;
    double all = (double)bytes_each;
    must(fc_device_cuda(argc > 1 ? atoi(argv[1]) : 0, &b.gpu, &err), &err);
    must(b.gpu->alloc(b.gpu, bytes_each, &b.a, &err), &err);
    must(b.gpu->alloc(b.gpu, bytes_each, &b.b, &err), &err);
    must(b.gpu->zero(b.gpu, b.a, bytes_each, NULL, &err), &err);
    must(b.gpu->zero(b.gpu, b.b, bytes_each, NULL, &err), &err);
    measure(&b, "device-to-device copy", copy, 2 * all);
    measure(&b, "pack rows, 1 of 8", pack_rows, all / 4);
    measure(&b, "pack columns, 1 of 8", pack_columns, all / 4);
    measure(&b, "unpack columns, 1 of 8", unpack_columns, all / 4);
    measure(&b, "pack 3-D, odd width", pack_odd, 2.0 * 64 * 128 * 2047 * 2);
    measure(&b, "cast float32 to bfloat16", cast_down, 1.5 * all);
    measure(&b, "cast bfloat16 to float32", cast_up, 1.5 * all);
    measure(&b, "cast bfloat16 to float8_e4m3fn", cast_fp8, 1.5 * all);
    measure(&b, "add float32", add, 3 * all);
    measure(&b, "divide bfloat16", divide, 2 * all);
    b.gpu->release(b.gpu, b.a);
    b.gpu->release(b.gpu, b.b);
    b.gpu->destroy(b.gpu);
    return 0;
}
