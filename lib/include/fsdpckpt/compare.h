/*
 * Compares the values of two checkpoints of any formats and layouts, tensor by tensor: by the digests that they record,
 * by their bits, or within a tolerance.
 */
#pragma once

#include "fsdpckpt/read.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

/** The result for one name. FC_COMPARE_DIFFERENT and all later ones are differences. */
typedef enum fc_comparison {
    FC_COMPARE_SAME,             /**< no element differs */
    FC_COMPARE_SAME_DIGEST,      /**< the recorded digests are equal; the data was not read */
    FC_COMPARE_SAME_VALUE,       /**< objects with different bytes that decode to the same value */
    FC_COMPARE_CLOSE,            /**< elements differ, all within the tolerance */
    FC_COMPARE_UNREAD,           /**< not compared, because `quick` had found a difference before */
    FC_COMPARE_DIFFERENT,        /**< elements or objects differ */
    FC_COMPARE_DIFFERENT_DIGEST, /**< the recorded digests differ; the data was not read, because of `quick` */
    FC_COMPARE_SHAPE,
    FC_COMPARE_DTYPE, /**< different dtypes; with a tolerance, numbers are compared by value instead */
    FC_COMPARE_KIND,  /**< one is a tensor, the other an object */
    FC_COMPARE_ONLY_A,
    FC_COMPARE_ONLY_B
} fc_comparison;

/** How two tensors differ. Indexes count elements in row-major order. */
typedef struct fc_deviation {
    uint64_t different;                     /**< number of elements that are not equal */
    uint64_t first;                         /**< index of the first of them, if there is one */
    unsigned char first_a[16], first_b[16]; /**< its bytes on both sides */
    double max_abs;                         /**< the largest |a - b|; NaN is left out */
    double max_rel;                         /**< the largest |a - b| / |b|; NaN is left out; infinite where b is 0 */
    uint64_t max_abs_at, max_rel_at;        /**< indexes of both */
    uint64_t nan_both;                      /**< number of different elements that are NaN on both sides */
    uint64_t nan_one;                       /**< number of different elements that are NaN on one side */
} fc_deviation;

/** The comparison of one name. */
typedef struct fc_compared {
    const char *name;
    const fc_tensor *a, *b; /**< the value on each side; NULL if it does not exist */
    fc_comparison result;
    bool read;    /**< whether the data was read; `deviation` is valid only then */
    bool numbers; /**< whether the elements are numbers; max_abs and max_rel are valid only then */
    bool
        wrong_digest; /**< the data is equal but the recorded digests are not, so one of these is wrong: see `damage` */
    uint64_t elements; /**< number of elements */
    fc_deviation deviation;
    const char *json_a, *json_b; /**< readable forms of objects that differ; NULL if there is none */
} fc_compared;

typedef struct fc_compare_options {
    const fc_selection *selection; /**< only include, exclude (globs over names before or after renaming), strip_prefix
                                      and rename (for names on both sides) are used; NULL: everything, unchanged */
    bool tolerant; /**< elements are equal if |a - b| <= atol + rtol · |b|, as in numpy.isclose(a, b, rtol, atol,
                      equal_nan); otherwise if they have the same bits */
    double rtol, atol;
    bool equal_nan; /**< NaN equals NaN, whatever its bits */
    bool data;      /**< read the data even where recorded digests are enough */
    bool quick;     /**< stop at the first difference */
    /** Returns whether the caller knows that two tensors are equal, which are then not read. NULL: it knows none. */
    bool (*same)(const void *context, const fc_tensor *a, const fc_tensor *b);
    const void *context; /**< of `same` */
    fc_work_options work;
    fc_open_options open;       /**< for fc_compare_paths */
    const fc_checkpoint *model; /**< for fc_compare_paths: as in fc_checkpoint_open_model */
} fc_compare_options;

typedef struct fc_compare_report {
    fc_compared *items; /**< the names in the order of A, then those that only B has, in its order */
    size_t count;
    size_t same;      /**< number of names whose values are the same */
    size_t by_digest; /**< number of these that were compared by their recorded digests */
    size_t close;     /**< number of names that differ within the tolerance */
    size_t different; /**< number of names on both sides that differ */
    size_t only_a, only_b;
    size_t unread;            /**< number of names that were not compared, because of `quick` */
    size_t left_out;          /**< number of names that include and exclude left out, on both sides */
    const char *idle_exclude; /**< a line about a glob of exclude that matches no name; NULL: there is none */
    uint64_t bytes;           /**< bytes of data that were read, on both sides */
    fc_code damage; /**< FC_ECORRUPT if data that was read does not match what its checkpoint records (see `damaged`);
                       the items are compared all the same. Otherwise FC_OK */
    fc_error damaged;
} fc_compare_report;

/** Returns whether a result is a difference. */
static inline bool fc_compare_is_difference(fc_comparison result) {
    return result >= FC_COMPARE_DIFFERENT;
}

/**
 * Compares the values of `a` and `b`. A difference is not an error.
 *
 * Numbers are compared in float64, two integers exactly. Different dtypes are a difference, but with a tolerance only
 * values count. Packed types are compared by their bits. Objects are compared by their bytes, then by their readable
 * forms.
 * @param arena owns everything that `report` points to and that does not belong to the checkpoints.
 * @return FC_ECORRUPT for unreadable data, FC_EUSAGE for a schema.
 */
fc_code fc_compare(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options, fc_arena *arena,
                   fc_compare_report *report, fc_error *err);

/**
 * Opens two checkpoints and compares them. If digests decide everything, only headers are read.
 * @param a, b receive the checkpoints, also after a failure. The caller closes them after the last use of `report`.
 */
fc_code fc_compare_paths(const char *path_a, const char *path_b, const fc_compare_options *options, fc_arena *arena,
                         fc_checkpoint **a, fc_checkpoint **b, fc_compare_report *report, fc_error *err);

enum { FC_ELEMENT_TEXT = 96 };

/**
 * Writes the element at `bytes` as a person would: "0.1", "nan", "(1+2j)", "true", or "0x7f" for packed types. A number
 * is the shortest text that reads back as the same number.
 * @param buf has room for FC_ELEMENT_TEXT bytes.
 * @return buf.
 */
const char *fc_element_text(fc_dtype dtype, const void *bytes, char *buf);

/** Computes the index along each dimension of element `at` of a row-major array of `shape`. */
void fc_unravel(int ndim, const int64_t *shape, uint64_t at, int64_t *index);

FC_END_DECLS
