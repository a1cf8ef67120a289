/*
 * Comparing the values of two checkpoints of any formats and layouts, tensor by tensor: by the digests they record, by
 * their bits, or within a tolerance.
 */
#ifndef FSDPCKPT_COMPARE_H
#define FSDPCKPT_COMPARE_H

#include "fsdpckpt/move.h"
#include "fsdpckpt/select.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What became of one name. */
typedef enum fc_comparison {
    FC_COMPARE_SAME,             /**< no element differs */
    FC_COMPARE_SAME_DIGEST,      /**< the same recorded digests; the data was not read */
    FC_COMPARE_SAME_VALUE,       /**< an object of other bytes that decodes to the same */
    FC_COMPARE_CLOSE,            /**< elements differ, all within the tolerance */
    FC_COMPARE_UNREAD,           /**< not compared: another difference was found before (quick) */
    FC_COMPARE_DIFFERENT,        /**< the first result that counts as a difference */
    FC_COMPARE_DIFFERENT_DIGEST, /**< other recorded digests; the data was not read (quick) */
    FC_COMPARE_SHAPE,
    FC_COMPARE_DTYPE, /**< another dtype; with a tolerance the values decide instead, where they are numbers */
    FC_COMPARE_KIND,  /**< a tensor and an object */
    FC_COMPARE_ONLY_A,
    FC_COMPARE_ONLY_B
} fc_comparison;

/** The numbers of one tensor. Indexes count elements in row-major order. */
typedef struct fc_deviation {
    uint64_t different;                     /**< elements that are not equal */
    uint64_t first;                         /**< the first of them; if there is one */
    unsigned char first_a[16], first_b[16]; /**< its bytes on both sides */
    double max_abs;                         /**< the largest |a - b|, NaN aside */
    double max_rel;                         /**< the largest |a - b| / |b|, NaN aside; infinity where b is 0 */
    uint64_t max_abs_at, max_rel_at;
    uint64_t nan_both; /**< NaN on both sides, among `different` */
    uint64_t nan_one;  /**< NaN on one side */
} fc_deviation;

/** One name. */
typedef struct fc_compared {
    const char *name;
    const fc_tensor *a, *b; /**< NULL where there is none */
    fc_comparison result;
    bool read;         /**< the data was read, so `deviation` tells */
    bool numbers;      /**< its elements have values: max_abs and max_rel mean something */
    bool wrong_digest; /**< the recorded digests differ, the data does not: one of them is wrong, see `damage` */
    uint64_t elements;
    fc_deviation deviation;
    const char *json_a, *json_b; /**< of objects that differ, where they can be decoded */
} fc_compared;

typedef struct fc_compare_options {
    const fc_selection *selection; /**< include, exclude (globs over names, changed or not), and strip_prefix and rename
                                        (of both sides) are looked at; NULL: all as it is */
    bool tolerant; /**< equal is |a - b| <= atol + rtol · |b|, as numpy.isclose(a, b, rtol, atol, equal_nan); else
                        the same bits */
    double rtol, atol;
    bool equal_nan; /**< NaN equals NaN, whatever its bits */
    bool data;      /**< read the data also where digests answer */
    bool quick;     /**< only whether there is a difference: stop at the first */
    fc_move_options move;
    fc_open_options open;       /**< for fc_compare_paths */
    const fc_checkpoint *model; /**< for fc_compare_paths: as in fc_checkpoint_open_model */
} fc_compare_options;

typedef struct fc_compare_report {
    fc_compared *items; /**< in the order of A, then those that only B has in its order */
    size_t count;
    size_t same;      /**< all kinds of it */
    size_t by_digest; /**< of `same` */
    size_t close;
    size_t different; /**< in both, but not the same */
    size_t only_a, only_b;
    size_t unread;   /**< not compared (quick) */
    size_t left_out; /**< by include and exclude, on either side */
    uint64_t bytes;  /**< of data read, both sides together */
    fc_code damage;  /**< FC_ECORRUPT: data that was read is not what one of them records of it, as `damaged` says;
                          the items tell how it compares all the same. Else FC_OK */
    fc_error damaged;
} fc_compare_report;

/** Whether a result is a difference. */
static inline bool fc_compare_is_difference(fc_comparison result) {
    return result >= FC_COMPARE_DIFFERENT;
}

/**
 * Compares the values of `a` and `b`. That they differ is no error.
 *
 * Numbers are compared in float64, integers of both sides exactly. Without a tolerance other dtypes are a difference;
 * with one the values count, whatever their dtypes. Packed types and objects are compared by their bits, objects that
 * differ by what they decode to as well.
 * @param arena owns what `report` points to, but for what belongs to the checkpoints.
 * @return FC_ECORRUPT for data that cannot be read, FC_EUSAGE for a schema.
 */
fc_code fc_compare(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options, fc_arena *arena,
                   fc_compare_report *report, fc_error *err);

/**
 * Opens and compares. Where digests answer everything only headers are read.
 * @param a, b receive the checkpoints, to be closed after the last use of `report`, also after a failure.
 */
fc_code fc_compare_paths(const char *path_a, const char *path_b, const fc_compare_options *options, fc_arena *arena,
                         fc_checkpoint **a, fc_checkpoint **b, fc_compare_report *report, fc_error *err);

enum { FC_ELEMENT_TEXT = 96 };

/**
 * The element at `bytes` as a person writes it: "0.1", "nan", "(1+2j)", "true", "0x7f" for packed types. The shortest
 * text that reads back as the same number.
 * @return buf, of FC_ELEMENT_TEXT.
 */
const char *fc_element_text(fc_dtype dtype, const void *bytes, char *buf);

/** Row-major position `at` in `shape` as an index for each dimension. */
void fc_unravel(int ndim, const int64_t *shape, uint64_t at, int64_t *index);

#ifdef __cplusplus
}
#endif
#endif
