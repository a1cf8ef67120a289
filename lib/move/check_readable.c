/*
 * Finds all values of a target that cannot be read, before anything is written. See check_readable.h.
 */
#include "move/check_readable.h"

#include "fsdpckpt/try.h"
#include "plan/left_out.h"

#include <stdio.h>
#include <stdlib.h>

enum { LISTED = 5 }; /* names of further values in the message */

/* Fails if a value cannot be read, as far as the manifest tells. A format that has no reason for it lists such a value
 * as an object of one byte, and asking for its extent fails with the reason. */
static fc_code check_value(const fc_checkpoint *source, const fc_tensor *t, fc_error *err) {
    fc_extent extent;
    const bool one_byte = t->object && t->nchunks == 1 && t->ndim == 1 && t->shape[0] == 1;
    FC_TRY(fc_check_readable(source, t, err));
    return one_byte ? fc_checkpoint_extent(source, t, 0, &extent, err) : FC_OK;
}

/* Divides the names of the target's values into readable and unreadable ones. */
static void divide(const fc_target *target, fc_name_list *kept, fc_name_list *left, fc_error *first) {
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_tensor *t = target->tensors[i].source;
        fc_error why;
        if (check_value(target->source, t, &why) != FC_OK) {
            left->names[left->count++] = t->name;
            *first = left->count == 1 ? why : *first;
        } else {
            kept->names[kept->count++] = t->name;
        }
    }
}

/* Whether the hint is to leave a value out. Any other hint makes all values readable that have the same problem. */
static bool leaves_out(fc_hint hint) {
    return hint == FC_HINT_NONE || hint == FC_HINT_EXCLUDE || hint == FC_HINT_FOLLOW_EXTERNAL;
}

/* Adds the names of the other values to the message of the first one. */
static fc_code fail_all(const fc_target *target, fc_name_list *kept, const fc_name_list *left, const fc_error *first,
                        fc_error *err) {
    char more[400] = "";
    size_t used = 0;
    const char *globs = NULL;
    fc_arena *arena = fc_arena_new();
    for (size_t i = 1; i < left->count && i <= LISTED; i++) {
        const int n = snprintf(more + used, sizeof more - used, "%s%.60s", i > 1 ? ", " : "", left->names[i]);
        used += n > 0 && used + (size_t)n < sizeof more ? (size_t)n : 0;
    }
    if (left->count > LISTED + 1) {
        snprintf(more + used, sizeof more - used, " and %zu more", left->count - LISTED - 1);
    }
    const bool exclude = leaves_out(first->hint);
    fc_code rc;
    FC_TRY_GOTO(arena ? FC_OK : fc_no_memory(err, target->source->path), rc, out);
    FC_TRY_GOTO(exclude ? fc_list_globs(kept, left, arena, &globs, err) : FC_OK, rc, out);
    rc = fc_fail(err, first->code, "%.500s; these are unreadable, too: %s", first->message, more);
    rc = exclude ? fc_advise(err, rc, FC_HINT_EXCLUDE_EACH, globs) : fc_advise(err, rc, first->hint, first->about);
out:
    fc_arena_free(arena);
    return rc;
}

fc_code fc_check_all_readable(const fc_target *target, fc_error *err) {
    fc_name_list kept = {calloc(target->ntensors + 1, sizeof *kept.names), 0};
    fc_name_list left = {calloc(target->ntensors + 1, sizeof *left.names), 0};
    fc_error first = {.code = FC_OK};
    fc_code rc;
    FC_TRY_GOTO(kept.names && left.names ? FC_OK : fc_no_memory(err, target->source->path), rc, out);
    divide(target, &kept, &left, &first);
    if (left.count == 1) {
        rc = fc_advise(err, fc_fail(err, first.code, "%s", first.message), first.hint, first.about);
    } else if (left.count > 1) {
        rc = fail_all(target, &kept, &left, &first, err);
    }
out:
    free((void *)kept.names);
    free((void *)left.names);
    return rc;
}
