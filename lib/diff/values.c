/*
 * The kernels of diff. See values.h. Runs with equal bits are skipped with memcmp. All others are converted to float64
 * block by block; integers are subtracted exactly.
 */
#include "diff/values.h"
#include "fsdpckpt/cast.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 512 };

typedef enum way { BY_BITS, BY_INTEGERS, BY_REALS, BY_COMPLEX } way;

static bool is_integer(fc_dtype dtype) {
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    return cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED || cls == FC_CLASS_BOOL;
}

static bool is_number(fc_dtype dtype) {
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    return cls != FC_CLASS_PACKED && cls != FC_CLASS_OPAQUE;
}

bool fc_values_are_numbers(fc_dtype a, fc_dtype b) {
    return is_number(a) && is_number(b);
}

static way way_of(fc_dtype a, fc_dtype b) {
    if (!fc_values_are_numbers(a, b)) {
        return BY_BITS;
    }
    if (fc_dtype_get(a)->cls == FC_CLASS_COMPLEX || fc_dtype_get(b)->cls == FC_CLASS_COMPLEX) {
        return BY_COMPLEX;
    }
    return is_integer(a) && is_integer(b) ? BY_INTEGERS : BY_REALS;
}

/* ---- loading ---- */

/* An integer as sign and magnitude: int64 and uint64 both fit. */
typedef struct integer {
    bool negative;
    uint64_t magnitude;
} integer;

static integer load_integer(fc_dtype dtype, const unsigned char *bytes) {
    uint64_t raw = 0;
    uint32_t size = fc_dtype_size(dtype);
    memcpy(&raw, bytes, size); /* little-endian, as everything here */
    if (fc_dtype_get(dtype)->cls != FC_CLASS_SIGNED) {
        return (integer){false, raw};
    }
    unsigned shift = 64 - 8 * size;
    int64_t value = (int64_t)(raw << shift) >> shift;
    return value < 0 ? (integer){true, 0 - (uint64_t)value} : (integer){false, (uint64_t)value};
}

static double integer_value(integer i) {
    return i.negative ? -(double)i.magnitude : (double)i.magnitude;
}

static double integer_distance(integer a, integer b) {
    if (a.negative != b.negative) {
        return (double)a.magnitude + (double)b.magnitude;
    }
    return a.magnitude > b.magnitude ? (double)(a.magnitude - b.magnitude) : (double)(b.magnitude - a.magnitude);
}

static fc_dtype part_of_complex(fc_dtype dtype) {
    return fc_dtype_get(dtype)->component;
}

/* Loads `count` elements as float64, at most BLOCK. */
static void load_reals(fc_dtype dtype, const unsigned char *bytes, size_t count, double *out) {
    if (fc_dtype_get(dtype)->cls == FC_CLASS_FLOAT) {
        fc_cast(dtype, bytes, FC_F64, out, count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        out[i] = integer_value(load_integer(dtype, bytes + i * fc_dtype_size(dtype)));
    }
}

/* Loads them as pairs of real and imaginary parts. */
static void load_complex(fc_dtype dtype, const unsigned char *bytes, size_t count, double *out) {
    if (fc_dtype_get(dtype)->cls == FC_CLASS_COMPLEX) {
        fc_cast(part_of_complex(dtype), bytes, FC_F64, out, 2 * count);
        return;
    }
    double reals[BLOCK];
    load_reals(dtype, bytes, count, reals);
    for (size_t i = 0; i < count; i++) {
        out[2 * i] = reals[i];
        out[2 * i + 1] = 0;
    }
}

/* ---- one element ---- */

/* A comparison of two elements as numbers. Without a tolerance the bits decide. */
typedef struct element {
    bool nan_a, nan_b;
    bool equal; /* as numbers */
    bool finite_b;
    double distance; /* NaN when either is NaN */
    double size_b;
} element;

static bool is_close(const fc_value_rule *rule, const element *e) {
    return e->equal || (e->finite_b && e->distance <= rule->atol + rule->rtol * e->size_b);
}

static void note_errors(const element *e, uint64_t at, fc_deviation *sum) {
    if (e->equal || isnan(e->distance)) {
        return;
    }
    double rel = e->distance / e->size_b; /* infinity when size_b is 0 */
    if (e->distance > sum->max_abs) {
        sum->max_abs = e->distance;
        sum->max_abs_at = at;
    }
    if (rel > sum->max_rel) {
        sum->max_rel = rel;
        sum->max_rel_at = at;
    }
}

static void note_different(const unsigned char *a, const unsigned char *b, size_t size_a, size_t size_b, uint64_t at,
                           fc_deviation *sum) {
    if (sum->different++ == 0) {
        sum->first = at;
        memcpy(sum->first_a, a, size_a);
        memcpy(sum->first_b, b, size_b);
    }
}

static element compare_reals(double a, double b) {
    return (element){.nan_a = isnan(a),
                     .nan_b = isnan(b),
                     .equal = a == b,
                     .finite_b = isfinite(b),
                     .distance = fabs(a - b),
                     .size_b = fabs(b)};
}

static element compare_complex(const double *a, const double *b) {
    return (element){.nan_a = isnan(a[0]) || isnan(a[1]),
                     .nan_b = isnan(b[0]) || isnan(b[1]),
                     .equal = a[0] == b[0] && a[1] == b[1],
                     .finite_b = isfinite(b[0]) && isfinite(b[1]),
                     .distance = hypot(a[0] - b[0], a[1] - b[1]),
                     .size_b = hypot(b[0], b[1])};
}

static element compare_integers(integer a, integer b) {
    bool zero = a.magnitude == 0 && b.magnitude == 0;
    return (element){.equal = zero || (a.negative == b.negative && a.magnitude == b.magnitude),
                     .finite_b = true,
                     .distance = integer_distance(a, b),
                     .size_b = (double)b.magnitude};
}

/* ---- runs ---- */

/* Up to BLOCK elements as numbers. */
typedef struct loaded {
    double a[2 * BLOCK], b[2 * BLOCK];
} loaded;

static element element_at(const fc_value_rule *rule, way how, const loaded *values, const unsigned char *a,
                          const unsigned char *b, size_t i) {
    switch (how) {
    case BY_REALS:
        return compare_reals(values->a[i], values->b[i]);
    case BY_COMPLEX:
        return compare_complex(values->a + 2 * i, values->b + 2 * i);
    default:
        return compare_integers(load_integer(rule->a, a), load_integer(rule->b, b));
    }
}

static void compare_block(const fc_value_rule *rule, way how, const unsigned char *a, const unsigned char *b,
                          size_t count, uint64_t start, fc_deviation *sum) {
    size_t size_a = fc_dtype_size(rule->a), size_b = fc_dtype_size(rule->b);
    loaded values;
    if (how == BY_REALS) {
        load_reals(rule->a, a, count, values.a);
        load_reals(rule->b, b, count, values.b);
    } else if (how == BY_COMPLEX) {
        load_complex(rule->a, a, count, values.a);
        load_complex(rule->b, b, count, values.b);
    }
    for (size_t i = 0; i < count; i++, a += size_a, b += size_b) {
        element e = element_at(rule, how, &values, a, b, i);
        bool both = e.nan_a && e.nan_b;
        bool same = (both && rule->equal_nan) || (rule->tolerant ? is_close(rule, &e) : memcmp(a, b, size_a) == 0);
        if (!same || rule->tolerant) {
            note_errors(&e, start + i, sum); /* also within the tolerance */
        }
        if (same) {
            continue;
        }
        sum->nan_both += both;
        sum->nan_one += e.nan_a != e.nan_b;
        note_different(a, b, size_a, size_b, start + i, sum);
    }
}

static void compare_bits(const unsigned char *a, const unsigned char *b, size_t size, size_t count, uint64_t start,
                         fc_deviation *sum) {
    for (size_t i = 0; i < count; i++) {
        if (memcmp(a + i * size, b + i * size, size) != 0) {
            note_different(a + i * size, b + i * size, size, size, start + i, sum);
        }
    }
}

/* Returns whether equal bits imply equal values. They do not when NaN must differ from itself. */
static bool same_bits_suffice(const fc_value_rule *rule, way how) {
    return rule->a == rule->b && (!rule->tolerant || rule->equal_nan || how == BY_INTEGERS || how == BY_BITS);
}

void fc_values_compare(const fc_value_rule *rule, const unsigned char *a, const unsigned char *b, size_t count,
                       fc_deviation *sum) {
    way how = way_of(rule->a, rule->b);
    size_t size_a = fc_dtype_size(rule->a), size_b = fc_dtype_size(rule->b);
    bool skip = same_bits_suffice(rule, how);
    if (skip && memcmp(a, b, count * size_a) == 0) {
        return;
    }
    for (size_t i = 0, n; i < count; i += n) {
        n = count - i < BLOCK ? count - i : BLOCK;
        const unsigned char *pa = a + i * size_a, *pb = b + i * size_b;
        if (skip && memcmp(pa, pb, n * size_a) == 0) {
            continue;
        }
        if (how == BY_BITS) {
            compare_bits(pa, pb, size_a, n, i, sum);
        } else {
            compare_block(rule, how, pa, pb, n, i, sum);
        }
    }
}

/* The index in a tensor of `shape` of the element that has index `at` in a box. */
static uint64_t index_in_tensor(const fc_box *box, const int64_t *shape, uint64_t at) {
    int64_t index[FC_MAX_DIMS];
    uint64_t found = 0;
    fc_unravel(box->ndim, box->sizes, at, index);
    for (int d = 0; d < box->ndim; d++) {
        found = found * (uint64_t)shape[d] + (uint64_t)(box->offsets[d] + index[d]);
    }
    return found;
}

void fc_deviation_place(fc_deviation *found, uint64_t times, const fc_box *box, const int64_t *shape) {
    found->different *= times;
    found->nan_both *= times;
    found->nan_one *= times;
    if (found->different > 0) {
        found->first = index_in_tensor(box, shape, found->first);
    }
    if (found->max_abs > 0) {
        found->max_abs_at = index_in_tensor(box, shape, found->max_abs_at);
    }
    if (found->max_rel > 0) {
        found->max_rel_at = index_in_tensor(box, shape, found->max_rel_at);
    }
}

void fc_deviation_add(fc_deviation *sum, const fc_deviation *other) {
    if (other->different > 0 && (sum->different == 0 || other->first < sum->first)) {
        sum->first = other->first;
        memcpy(sum->first_a, other->first_a, sizeof sum->first_a);
        memcpy(sum->first_b, other->first_b, sizeof sum->first_b);
    }
    sum->different += other->different;
    sum->nan_both += other->nan_both;
    sum->nan_one += other->nan_one;
    if (other->max_abs > sum->max_abs || (other->max_abs == sum->max_abs && other->max_abs_at < sum->max_abs_at)) {
        sum->max_abs = other->max_abs;
        sum->max_abs_at = other->max_abs_at;
    }
    if (other->max_rel > sum->max_rel || (other->max_rel == sum->max_rel && other->max_rel_at < sum->max_rel_at)) {
        sum->max_rel = other->max_rel;
        sum->max_rel_at = other->max_rel_at;
    }
}

/* ---- text ---- */

/*
 * Formats the shortest decimal that reads back as `value`. `narrow`: as float32, which holds the values of all shorter
 * types exactly.
 */
static int real_text(double value, bool narrow, char *buf, size_t size) {
    if (isnan(value)) {
        return snprintf(buf, size, "nan");
    }
    for (int digits = 1; digits < 17; digits++) {
        int n = snprintf(buf, size, "%.*g", digits, value);
        double back = strtod(buf, NULL);
        if (narrow ? (float)back == (float)value : back == value) {
            return n;
        }
    }
    return snprintf(buf, size, "%.17g", value);
}

const char *fc_element_text(fc_dtype dtype, const void *bytes, char *buf) {
    double parts[2];
    switch (fc_dtype_get(dtype)->cls) {
    case FC_CLASS_FLOAT:
        load_reals(dtype, bytes, 1, parts);
        real_text(parts[0], dtype != FC_F64, buf, FC_ELEMENT_TEXT);
        break;
    case FC_CLASS_COMPLEX: {
        load_complex(dtype, bytes, 1, parts);
        int n = 1;
        buf[0] = '(';
        n += real_text(parts[0], dtype != FC_C128, buf + n, FC_ELEMENT_TEXT - (size_t)n);
        n += snprintf(buf + n, FC_ELEMENT_TEXT - (size_t)n, "%s", signbit(parts[1]) && !isnan(parts[1]) ? "" : "+");
        n += real_text(parts[1], dtype != FC_C128, buf + n, FC_ELEMENT_TEXT - (size_t)n);
        snprintf(buf + n, FC_ELEMENT_TEXT - (size_t)n, "j)");
        break;
    }
    case FC_CLASS_SIGNED:
    case FC_CLASS_UNSIGNED: {
        integer i = load_integer(dtype, bytes);
        snprintf(buf, FC_ELEMENT_TEXT, "%s%" PRIu64, i.negative ? "-" : "", i.magnitude);
        break;
    }
    case FC_CLASS_BOOL: {
        unsigned char b = *(const unsigned char *)bytes;
        if (b > 1) {
            snprintf(buf, FC_ELEMENT_TEXT, "true (0x%02x)", b);
        } else {
            strcpy(buf, b ? "true" : "false");
        }
        break;
    }
    default:
        snprintf(buf, FC_ELEMENT_TEXT, "0x%02x", *(const unsigned char *)bytes);
    }
    return buf;
}

void fc_unravel(int ndim, const int64_t *shape, uint64_t at, int64_t *index) {
    for (int d = ndim - 1; d >= 0; d--) {
        uint64_t size = shape[d] > 0 ? (uint64_t)shape[d] : 1;
        index[d] = (int64_t)(at % size);
        at /= size;
    }
}
