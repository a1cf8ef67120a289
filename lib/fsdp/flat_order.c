/*
 * Whether the order of a checkpoint's tensors is that of its model. Formats that keep a dict in order say so; but ranks
 * may have written parts of it, and a program may have sorted it.
 */
#include "fsdp/parameters.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/unflatten.h"

#include <string.h>

/* A checkpoint of several ranks lists what rank 0 had first, in its order, then what others had. */
static const fc_tensor *first_of_others(const fc_checkpoint *c) {
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        bool found = t->object || t->nchunks == 0;
        for (size_t k = 0; k < t->nchunks && !found; k++) {
            found = t->chunks[k].rank == 0 || t->chunks[k].rank == FC_NO_RANK;
        }
        if (!found) {
            return t;
        }
    }
    return NULL;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/*
 * How `b` follows `a`: -1 where it comes before it in alphabetical order, 1 where it comes behind and a letter decides
 * that, 0 where a number does, or the end of a name: that is how lists come in any order.
 */
static int follows(const char *a, const char *b) {
    size_t i = 0;
    while (a[i] && a[i] == b[i]) {
        i++;
    }
    bool within = i > 0 && is_digit(a[i - 1]) && (is_digit(a[i]) || is_digit(b[i]));
    if (!a[i] || within || (is_digit(a[i]) && is_digit(b[i]))) {
        return 0;
    }
    return (unsigned char)b[i] < (unsigned char)a[i] ? -1 : 1;
}

/* Whether all names of a dtype are in alphabetical order, as programs sort them that keep none. It is by chance only in
 * a model of very few names. */
static bool is_sorted(const fc_checkpoint *c) {
    const char *last[FC_DTYPE_COUNT] = {NULL};
    size_t decided = 0;
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        if (t->object || fc_is_optimizer_state(t->name)) {
            continue;
        }
        int order = last[t->dtype] ? follows(last[t->dtype], t->name) : 0;
        if (order < 0) {
            return false;
        }
        decided += order > 0;
        last[t->dtype] = t->name;
    }
    return decided > 0;
}

bool fc_knows_model_order(const fc_checkpoint *checkpoint, const char **why) {
    const char *reason = NULL;
    if (checkpoint->format->layout_only) {
        reason = checkpoint->keeps_order ? NULL : "the schema does not say that its order is that of the model";
    } else if (!checkpoint->keeps_order) {
        reason = "the order of the model's parameters is not kept by this format";
    } else if (first_of_others(checkpoint)) {
        reason = "its tensors are in the order in which several ranks had them, which is not that of the model";
    } else if (is_sorted(checkpoint)) {
        reason = "its tensors are in alphabetical order, which is hardly that of the model";
    }
    if (why) {
        *why = reason;
    }
    return !reason;
}
