/*
 * Reductions on the host. Each block of elements is converted to the type of the computation, folded in the order of
 * the inputs, and converted back.
 *
 * Blocks have a fixed size because gcc -O2 vectorises a loop only if it knows the trip count. The last block computes
 * the full size; elements after the end are thrown away.
 */
#include "comm/arith.h"

#include "fsdpckpt/cast.h"

#include <string.h>

enum { BLOCK = 512 };

typedef union block {
    float f32[BLOCK];
    double f64[BLOCK];
    int64_t i64[BLOCK];
    int32_t i32[BLOCK];
    int16_t i16[BLOCK];
    int8_t i8[BLOCK];
    uint64_t u64[BLOCK];
    uint32_t u32[BLOCK];
    uint16_t u16[BLOCK];
    uint8_t u8[BLOCK];
} block;

typedef void (*fold_fn)(block *restrict acc, const block *restrict x);

/* Integers are summed in the unsigned type, where overflow is defined. */
#define FOLD(name, member, expression)                                                                                 \
    static void name(block *restrict acc, const block *restrict x) {                                                   \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            __typeof__(acc->member[0]) a = acc->member[i], b = x->member[i];                                           \
            acc->member[i] = (__typeof__(a))(expression);                                                              \
        }                                                                                                              \
    }
#define FOLD_ORDERED(member)                                                                                           \
    FOLD(min_##member, member, b != b || b < a ? b : a)                                                                \
    FOLD(max_##member, member, b != b || b > a ? b : a)
#define FOLD_INTEGER(member)                                                                                           \
    FOLD(min_##member, member, b < a ? b : a)                                                                          \
    FOLD(max_##member, member, b > a ? b : a)

FOLD(sum_f32, f32, a + b)
FOLD(sum_f64, f64, a + b)
FOLD(sum_u64, u64, a + b)
FOLD(sum_u32, u32, a + b)
FOLD(sum_u16, u16, a + b)
FOLD(sum_u8, u8, a + b)
FOLD(or_u8, u8, a | b)
FOLD(xor_u64, u64, a ^ b)
FOLD(xor_u32, u32, a ^ b)
FOLD(xor_u16, u16, a ^ b)
FOLD(xor_u8, u8, a ^ b)
FOLD_ORDERED(f32)
FOLD_ORDERED(f64)
FOLD_INTEGER(i64)
FOLD_INTEGER(i32)
FOLD_INTEGER(i16)
FOLD_INTEGER(i8)
FOLD_INTEGER(u64)
FOLD_INTEGER(u32)
FOLD_INTEGER(u16)
FOLD_INTEGER(u8)

typedef struct folds {
    fold_fn sum, min, max, differ;
} folds;

/* How the elements of a dtype are computed. A complex number is two real components. */
typedef struct arithmetic {
    fc_dtype stored;   /* the dtype of a component in memory */
    fc_dtype compute;  /* the dtype in which components are folded */
    size_t components; /* per element */
    folds folds;
} arithmetic;

static arithmetic arithmetic_of(fc_dtype dtype) {
    static const folds f32 = {sum_f32, min_f32, max_f32, NULL}, f64 = {sum_f64, min_f64, max_f64, NULL};
    static const folds integers[FC_DTYPE_COUNT] = {
        [FC_I64] = {sum_u64, min_i64, max_i64, xor_u64}, [FC_I32] = {sum_u32, min_i32, max_i32, xor_u32},
        [FC_I16] = {sum_u16, min_i16, max_i16, xor_u16}, [FC_I8] = {sum_u8, min_i8, max_i8, xor_u8},
        [FC_U64] = {sum_u64, min_u64, max_u64, xor_u64}, [FC_U32] = {sum_u32, min_u32, max_u32, xor_u32},
        [FC_U16] = {sum_u16, min_u16, max_u16, xor_u16}, [FC_U8] = {sum_u8, min_u8, max_u8, xor_u8},
        [FC_BOOL] = {or_u8, min_u8, max_u8, xor_u8},
    };
    const fc_dtype_info *info = fc_dtype_get(dtype);
    if (info->cls != FC_CLASS_FLOAT && info->cls != FC_CLASS_COMPLEX) {
        return (arithmetic){dtype, dtype, 1, integers[dtype]};
    }
    bool wide = info->component == FC_F64;
    return (arithmetic){info->component, wide ? FC_F64 : FC_F32, info->cls == FC_CLASS_COMPLEX ? 2 : 1,
                        wide ? f64 : f32};
}

fc_dtype fc_arith_component(fc_dtype dtype, size_t *components) {
    arithmetic a = arithmetic_of(dtype);
    *components = a.components;
    return a.stored;
}

fc_code fc_arith_check(fc_dtype dtype, fc_reduce op, fc_error *err) {
    static const char *const names[] = {"sum", "avg", "min", "max", "xor"};
    if ((unsigned)op > FC_REDUCE_XOR || (unsigned)dtype >= FC_DTYPE_COUNT) {
        return fc_fail(err, FC_EUSAGE, "reduction operation %d of dtype %d does not exist", (int)op, (int)dtype);
    }
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    bool number = cls != FC_CLASS_PACKED && cls != FC_CLASS_OPAQUE;
    bool fractional = cls == FC_CLASS_FLOAT || cls == FC_CLASS_COMPLEX;
    bool ordered = cls != FC_CLASS_COMPLEX;
    if (!number || (op == FC_REDUCE_AVG && !fractional) || (op == FC_REDUCE_XOR && fractional) ||
        ((op == FC_REDUCE_MIN || op == FC_REDUCE_MAX) && !ordered)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the %s of %s elements is not defined", names[op],
                       fc_dtype_get(dtype)->torch_name);
    }
    return FC_OK;
}

static void load_block(const arithmetic *a, const unsigned char *from, size_t count, block *to) {
    if (a->stored == a->compute) {
        memcpy(to, from, count * fc_dtype_size(a->stored));
    } else {
        fc_cast(a->stored, from, a->compute, to, count);
    }
}

static void store_block(const arithmetic *a, const block *from, size_t count, unsigned char *to) {
    if (a->stored == a->compute) {
        memcpy(to, from, count * fc_dtype_size(a->stored));
    } else {
        fc_cast(a->compute, from, a->stored, to, count);
    }
}

static void divide_block(const arithmetic *a, block *b, double divisor) {
    if (a->compute == FC_F64) {
        for (int i = 0; i < BLOCK; i++) {
            b->f64[i] /= divisor;
        }
    } else {
        float by = (float)divisor;
        for (int i = 0; i < BLOCK; i++) {
            b->f32[i] /= by;
        }
    }
}

void fc_arith_reduce(fc_dtype dtype, fc_reduce op, const void *const *inputs, int n, void *out, size_t count) {
    arithmetic a = arithmetic_of(dtype);
    const fold_fn all[] = {a.folds.sum, a.folds.sum, a.folds.min, a.folds.max, a.folds.differ};
    fold_fn fold = all[op];
    size_t size = fc_dtype_size(a.stored);
    if (!fold) { /* fc_arith_check rejects these types */
        return;
    }
    block acc, x;
    memset(&acc, 0, sizeof acc);
    memset(&x, 0, sizeof x);
    for (size_t left = count * a.components, at = 0; left > 0;) {
        size_t filled = left < BLOCK ? left : BLOCK;
        load_block(&a, (const unsigned char *)inputs[0] + at * size, filled, &acc);
        for (int i = 1; i < n; i++) {
            load_block(&a, (const unsigned char *)inputs[i] + at * size, filled, &x);
            fold(&acc, &x);
        }
        if (op == FC_REDUCE_AVG) {
            divide_block(&a, &acc, n);
        }
        store_block(&a, &acc, filled, (unsigned char *)out + at * size);
        at += filled;
        left -= filled;
    }
}

static void multiply_block(const arithmetic *a, block *b, double factor) {
    if (a->compute == FC_F64) {
        for (int i = 0; i < BLOCK; i++) {
            b->f64[i] *= factor;
        }
    } else {
        float by = (float)factor;
        for (int i = 0; i < BLOCK; i++) {
            b->f32[i] *= by;
        }
    }
}

static void each_block(fc_dtype dtype, void (*change)(const arithmetic *a, block *b, double by), double by, void *data,
                       size_t count) {
    arithmetic a = arithmetic_of(dtype);
    size_t size = fc_dtype_size(a.stored);
    block b;
    memset(&b, 0, sizeof b);
    for (size_t left = count * a.components, at = 0; left > 0;) {
        size_t filled = left < BLOCK ? left : BLOCK;
        unsigned char *first = (unsigned char *)data + at * size;
        load_block(&a, first, filled, &b);
        change(&a, &b, by);
        store_block(&a, &b, filled, first);
        at += filled;
        left -= filled;
    }
}

void fc_arith_divide(fc_dtype dtype, double divisor, void *data, size_t count) {
    each_block(dtype, divide_block, divisor, data, count);
}

void fc_arith_multiply(fc_dtype dtype, double factor, void *data, size_t count) {
    each_block(dtype, multiply_block, factor, data, count);
}
