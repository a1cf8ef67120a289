/*
 * Boxes as text for messages. See box_text.h.
 */
#include "plan/box_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

fc_box_text fc_box_to_text(const fc_box *box) {
    fc_box_text text = {"["};
    size_t used = 1;
    for (int d = 0; d < box->ndim; d++) {
        char range[48];
        int n = snprintf(range, sizeof range, "%s%" PRId64 ":%" PRId64, d ? ", " : "", box->offsets[d],
                         (int64_t)((uint64_t)box->offsets[d] + (uint64_t)box->sizes[d]));
        if (used + (size_t)n + sizeof "...]" > sizeof text.s) {
            memcpy(text.s + used, "...", 3);
            used += 3;
            break;
        }
        memcpy(text.s + used, range, (size_t)n);
        used += (size_t)n;
    }
    memcpy(text.s + used, "]", 2);
    return text;
}
