/*
 * The processor as a device, with memory from malloc. A stream does its work at once. The host backends and CPU
 * training use it, and the tests compare GPU kernels with it.
 */
#include "comm/arith.h"
#include "gather/boxes.h"

#include "codec/strided.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGNMENT = 64, /* a cache line, and the widest vector register */
    POWER_BLOCK = 512
};

/* Streams and events have no state. They are allocated so that sanitizers see a leak or a double free. */
struct fc_stream {
    char unused;
};
struct fc_event {
    char unused;
};

static fc_code cpu_alloc(fc_device *device, size_t bytes, void **out, fc_error *err) {
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, bytes ? bytes : 1) != 0) {
        *out = NULL;
        return fc_fail(err, FC_ENOMEM, "%s: out of memory for %zu bytes", device->name, bytes);
    }
    *out = memory;
    return FC_OK;
}

static void cpu_release(fc_device *device, void *memory) {
    (void)device;
    free(memory);
}

static fc_code cpu_stream_new(fc_device *device, fc_stream **out, fc_error *err) {
    *out = calloc(1, sizeof **out);
    return *out ? FC_OK : fc_no_memory(err, device->name);
}

static void cpu_stream_free(fc_device *device, fc_stream *stream) {
    (void)device;
    free(stream);
}

static fc_code cpu_synchronize(fc_device *device, fc_stream *stream, fc_error *err) {
    (void)device;
    (void)stream;
    (void)err;
    return FC_OK;
}

static fc_code cpu_event_new(fc_device *device, fc_event **out, fc_error *err) {
    *out = calloc(1, sizeof **out);
    return *out ? FC_OK : fc_no_memory(err, device->name);
}

static void cpu_event_free(fc_device *device, fc_event *event) {
    (void)device;
    free(event);
}

static fc_code cpu_record(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err) {
    (void)event;
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_wait(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err) {
    (void)event;
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_copy(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream, fc_error *err) {
    if (bytes > 0) {
        memmove(dst, src, bytes);
    }
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_zero(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err) {
    if (bytes > 0) {
        memset(dst, 0, bytes);
    }
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_copy_box(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                            const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err) {
    fc_strided copy;
    bool empty;
    FC_TRY(fc_strided_box_check(to, from, element, &empty, err));
    if (empty) {
        return FC_OK;
    }
    if (!fc_strided_make(&copy, to->ndim, to->sizes, from->strides, to->strides, element)) {
        return fc_fail(err, FC_EUSAGE, "%s: the bytes of a box do not fit in 64 bits", device->name);
    }
    fc_strided_copy(&copy, (const unsigned char *)src + from->first * element,
                    (unsigned char *)dst + to->first * element);
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_cast(fc_device *device, fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                        fc_stream *stream, fc_error *err) {
    if (from != to && (fc_dtype_get(from)->cls != FC_CLASS_FLOAT || fc_dtype_get(to)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s cannot be cast to %s", device->name,
                       fc_dtype_get(from)->torch_name, fc_dtype_get(to)->torch_name);
    }
    fc_cast(from, src, to, dst, count);
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_add(fc_device *device, fc_dtype dtype, void *dst, const void *src, size_t count, fc_stream *stream,
                       fc_error *err) {
    const void *inputs[] = {dst, src};
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_SUM, err));
    fc_arith_reduce(dtype, FC_REDUCE_SUM, inputs, 2, dst, count);
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_divide(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count,
                          fc_stream *stream, fc_error *err) {
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_AVG, err));
    fc_arith_divide(dtype, divisor, data, count);
    return cpu_synchronize(device, stream, err);
}

static fc_code cpu_multiply(fc_device *device, fc_dtype dtype, void *data, double factor, size_t count,
                            fc_stream *stream, fc_error *err) {
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_AVG, err));
    fc_arith_multiply(dtype, factor, data, count);
    return cpu_synchronize(device, stream, err);
}

/* Returns Σ|x|^p, or max|x|. */
static double sum_powers(const double *x, size_t count, double p) {
    double total = 0;
    for (size_t i = 0; i < count; i++) {
        double a = fabs(x[i]);
        if (isinf(p)) {
            total = a > total || isnan(a) ? a : total;
        } else {
            total += p == 2 ? a * a : p == 1 ? a : pow(a, p);
        }
    }
    return total;
}

static fc_code cpu_powers(fc_device *device, fc_dtype dtype, const void *data, double p, double weight, size_t count,
                          double *sums, fc_stream *stream, fc_error *err) {
    if (fc_dtype_get(dtype)->cls != FC_CLASS_FLOAT) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s has no powers", device->name, fc_dtype_get(dtype)->torch_name);
    }
    double block[POWER_BLOCK];
    for (size_t at = 0; at < count; at += POWER_BLOCK) {
        size_t n = count - at < POWER_BLOCK ? count - at : POWER_BLOCK;
        fc_cast(dtype, (const char *)data + at * fc_dtype_size(dtype), FC_F64, block, n);
        double x = sum_powers(block, n, p);
        if (!isinf(p)) {
            *sums += weight * x;
        } else if (x > *sums || isnan(x)) {
            *sums = x;
        }
    }
    return cpu_synchronize(device, stream, err);
}

static void cpu_destroy(fc_device *device) {
    free(device);
}

fc_code fc_device_cpu(fc_device **out, fc_error *err) {
    static const fc_device cpu = {
        .name = "cpu",
        .is_host = true,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .alloc_staging = cpu_alloc,
        .release_staging = cpu_release,
        .stream_new = cpu_stream_new,
        .stream_free = cpu_stream_free,
        .synchronize = cpu_synchronize,
        .event_new = cpu_event_new,
        .event_free = cpu_event_free,
        .record = cpu_record,
        .wait = cpu_wait,
        .copy = cpu_copy,
        .zero = cpu_zero,
        .copy_box = cpu_copy_box,
        .cast = cpu_cast,
        .add = cpu_add,
        .divide = cpu_divide,
        .multiply = cpu_multiply,
        .powers = cpu_powers,
        .destroy = cpu_destroy,
    };
    *out = malloc(sizeof **out);
    FC_NEED(*out, err, "cpu");
    **out = cpu;
    return FC_OK;
}
