/*
 * Chooses the dtype of each value of a target: see dtypes.h.
 *
 * A cast of quantized codes, or of their scales, gives other weights, so it is refused.
 */
#include "plan/dtypes.h"

#include "fsdpckpt/try.h"
#include "plan/quantized_values.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The cast that the selection asks for, for one value. */
typedef struct wanted_cast {
    bool cast; /* to `dtype` */
    fc_dtype dtype;
} wanted_cast;

/* The last rule that matches decides; if none does, fc_selection.cast does. Sets `used` for all rules that match. */
static wanted_cast find_cast(const fc_selection *selection, const fc_tensor *tensor, bool *used) {
    wanted_cast w = {selection->cast && !tensor->keeps_dtype, selection->dtype};
    for (size_t i = 0; i < selection->ndtype_rules; i++) {
        const fc_dtype_rule *rule = &selection->dtype_rules[i];
        if (fnmatch(rule->glob, tensor->name, 0) == 0) {
            used[i] = true;
            w = (wanted_cast){!rule->keep, rule->dtype};
        }
    }
    return w;
}

/* Whether a cast would change a value that quantized weights consist of. Codes that are not floating-point stay as they
 * are, but a cast that is about them is about the weight. */
static bool changes_weight(const fc_quantized_values *values, size_t index, const fc_target_tensor *w, bool touched) {
    const size_t codes = values->of[index].codes;
    const bool is_float = fc_dtype_get(w->source->dtype)->cls == FC_CLASS_FLOAT;
    return codes != FC_NO_NAME && (is_float || codes != index ? w->dtype != w->source->dtype : touched);
}

/* Fails if a cast would change quantized weights. `touched`: per value of the source, whether a cast is asked for. */
static fc_code check_quantized(const fc_checkpoint *source, const fc_target_tensor *tensors, size_t count,
                               const bool *touched, fc_arena *arena, fc_error *err) {
    fc_quantized_values values;
    size_t first = FC_NO_NAME, found = 0;
    char why[128] = "a cast of either would change the weights";
    FC_TRY(fc_quantized_values_find(source, arena, &values, err));
    bool *counted = fc_arena_calloc(arena, source->ntensors + 1, sizeof *counted);
    FC_NEED(counted, err, source->path);
    for (size_t i = 0; i < count; i++) {
        const size_t index = (size_t)(tensors[i].source - source->tensors);
        if (changes_weight(&values, index, &tensors[i], touched[index]) && !counted[values.of[index].codes]) {
            counted[values.of[index].codes] = true;
            first = found++ == 0 ? index : first;
        }
    }
    if (found == 0) {
        return FC_OK;
    }
    if (found > 1) {
        snprintf(why + strlen(why), sizeof why - strlen(why), "; it is the first of %zu such tensors", found);
    }
    const bool known = fc_quantized_can_be_computed(source, &values, arena);
    return fc_advise(err, fc_quantized_refuse(source, &values, first, why, err), FC_HINT_KEEP_DTYPE,
                     known ? NULL : FC_DEQUANTIZE_ELSEWHERE);
}

static fc_code check_used(const fc_selection *selection, const bool *used, const fc_tensor *example,
                          const fc_checkpoint *source, fc_error *err) {
    for (size_t i = 0; i < selection->ndtype_rules; i++) {
        if (!used[i]) {
            return fc_fail(err, FC_EUSAGE, "%s: the glob '%s' with a dtype matches none of the names; one is '%s'",
                           source->path, selection->dtype_rules[i].glob, example->name);
        }
    }
    return FC_OK;
}

fc_code fc_choose_dtypes(const fc_checkpoint *source, const fc_selection *selection, fc_target_tensor *tensors,
                         size_t count, fc_error *err) {
    if (!selection->cast && selection->ndtype_rules == 0) {
        for (size_t i = 0; i < count; i++) {
            tensors[i].dtype = tensors[i].source->dtype;
        }
        return FC_OK;
    }
    bool *touched = calloc(source->ntensors + 1, sizeof *touched);
    bool *used = calloc(selection->ndtype_rules + 1, sizeof *used);
    fc_arena *arena = fc_arena_new();
    fc_code rc;
    FC_TRY_GOTO(arena && touched && used ? FC_OK : fc_no_memory(err, source->path), rc, out);
    for (size_t i = 0; i < count; i++) {
        const fc_tensor *t = tensors[i].source;
        const wanted_cast w = find_cast(selection, t, used);
        touched[t - source->tensors] = w.cast;
        tensors[i].dtype = w.cast && fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT ? w.dtype : t->dtype;
    }
    FC_TRY_GOTO(check_used(selection, used, tensors->source, source, err), rc, out);
    rc = check_quantized(source, tensors, count, touched, arena, err);
out:
    fc_arena_free(arena);
    free(touched);
    free(used);
    return rc;
}
