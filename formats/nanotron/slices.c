/*
 * Reads the texts of nanotron's TensorMetadata: see slices.h.
 */
#include "nanotron/slices.h"

#include "base/file_name.h"

#include <string.h>

enum { MOST_SIZE = INT32_MAX };

int fc_nano_shape(const char *text, int64_t shape[FC_MAX_DIMS]) {
    int ndim = 0;
    if (!fc_take_text(&text, "(")) {
        return -1;
    }
    while (*text != ')') {
        const bool named = fc_take_text(&text, "np.int64(");
        const int64_t size = fc_take_number(&text, MOST_SIZE);
        if (size < 0 || ndim == FC_MAX_DIMS || (named && !fc_take_text(&text, ")"))) {
            return -1;
        }
        shape[ndim++] = size;
        if (!fc_take_text(&text, ", ") && !fc_take_text(&text, ",") && *text != ')') {
            return -1;
        }
    }
    return strcmp(text, ")") == 0 ? ndim : -1;
}

/* A number, or `other` for None; -1: it is neither. */
static int64_t take_bound(const char **at, int64_t other) {
    return fc_take_text(at, "None") ? other : fc_take_number(at, MOST_SIZE);
}

/* Reads slices such as "0,24,None|None,None,None" of an array with these sizes. Steps other than 1 are not taken. */
static bool take_slices(const char **at, int ndim, const int64_t *sizes, int64_t *offsets, int64_t *lengths) {
    for (int d = 0; d < ndim; d++) {
        if (d > 0 && !fc_take_text(at, "|")) {
            return false;
        }
        const int64_t start = take_bound(at, 0);
        const bool more = fc_take_text(at, ",");
        const int64_t stop = more ? take_bound(at, sizes[d]) : -1;
        if (!fc_take_text(at, ",") || take_bound(at, 1) != 1 || start < 0 || stop < start || stop > sizes[d]) {
            return false;
        }
        offsets[d] = start;
        lengths[d] = stop - start;
    }
    return true;
}

bool fc_nano_take_pair(const char **at, int ndim, const int64_t *shard, const int64_t *whole, fc_nano_pair *out) {
    int64_t sizes[FC_MAX_DIMS] = {0};
    const bool good = take_slices(at, ndim, shard, out->local, out->sizes) && fc_take_text(at, "#") &&
                      take_slices(at, ndim, whole, out->global, sizes) && (fc_take_text(at, ";") || **at == '\0');
    return good && memcmp(sizes, out->sizes, (size_t)ndim * sizeof *sizes) == 0;
}
