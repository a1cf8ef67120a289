/*
 * Chooses the dtype of each value of a target: see dtypes.h.
 *
 * A cast of quantized codes, or of their scales, gives other weights, so it is refused.
 */
#include "plan/dtypes.h"

#include "fsdpckpt/try.h"
#include "plan/quantized.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>

/* The cast that the selection asks for, for one value. */
typedef struct wish {
    bool cast; /* to `dtype` */
    fc_dtype dtype;
} wish;

/* The last rule that matches decides; if none does, fc_selection.cast does. Sets `used` for all rules that match. */
static wish wish_for(const fc_selection *selection, const fc_tensor *tensor, bool *used) {
    wish w = {selection->cast && !tensor->keeps_dtype, selection->dtype};
    for (size_t i = 0; i < selection->ndtype_rules; i++) {
        const fc_dtype_rule *rule = &selection->dtype_rules[i];
        if (fnmatch(rule->glob, tensor->name, 0) == 0) {
            used[i] = true;
            w = (wish){!rule->keep, rule->dtype};
        }
    }
    return w;
}

/* The state of a search for codes and scales that a cast would change. */
typedef struct search {
    const fc_checkpoint *source;
    const fc_target_tensor **target_of; /* per value of the source; NULL: left out */
    bool *touched;                      /* per value of the source: a cast is asked for */
    fc_name_table *names;               /* of the source */
    const char *codes;                  /* the first pair */
    const fc_tensor *scales;
    size_t count;
} search;

/* A cast leaves packed codes alone, because they are not floating-point, but it would change their scales. */
static void note_codes(search *s, const fc_target_tensor *w) {
    const size_t index = (size_t)(w->source - s->source->tensors);
    const fc_quantized q = fc_quantized_find(s->source, s->names, index);
    if (!q.quantizer) {
        return;
    }
    bool is_float = fc_dtype_get(w->source->dtype)->cls == FC_CLASS_FLOAT;
    bool codes = is_float ? w->dtype != w->source->dtype : s->touched[index];
    const fc_target_tensor *scales = s->target_of[q.scales];
    if (!codes && !(scales && scales->dtype != scales->source->dtype)) {
        return;
    }
    if (s->count++ == 0) {
        s->codes = w->source->name;
        s->scales = &s->source->tensors[q.scales];
    }
}

static fc_code refuse(const search *s, fc_error *err) {
    char more[64] = "";
    if (s->count > 1) {
        snprintf(more, sizeof more, "; it is the first of %zu such tensors", s->count);
    }
    fc_code rc = fc_fail(err, FC_EUNSUPPORTED,
                         "%s: tensor %.256s holds quantized codes, and %.256s their scales: a cast of either would "
                         "change the weights%s",
                         s->source->path, s->codes, s->scales->name, more);
    return fc_advise(err, rc, FC_HINT_KEEP_DTYPE, NULL);
}

static fc_code check_scales(const fc_checkpoint *source, const fc_target_tensor *tensors, size_t count, bool *touched,
                            fc_error *err) {
    fc_arena *arena = fc_arena_new();
    search s = {.source = source, .touched = touched};
    s.names = arena ? fc_names_of(source, arena) : NULL;
    s.target_of = s.names ? fc_arena_calloc(arena, source->ntensors, sizeof *s.target_of) : NULL;
    if (!s.target_of) {
        fc_arena_free(arena);
        return fc_no_memory(err, source->path);
    }
    for (size_t i = 0; i < count; i++) {
        s.target_of[tensors[i].source - source->tensors] = &tensors[i];
    }
    for (size_t i = 0; i < count; i++) {
        note_codes(&s, &tensors[i]);
    }
    fc_code rc = s.count > 0 ? refuse(&s, err) : FC_OK;
    fc_arena_free(arena);
    return rc;
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
    fc_code rc;
    FC_TRY_GOTO(touched && used ? FC_OK : fc_no_memory(err, source->path), rc, out);
    for (size_t i = 0; i < count; i++) {
        const fc_tensor *t = tensors[i].source;
        const wish w = wish_for(selection, t, used);
        touched[t - source->tensors] = w.cast;
        tensors[i].dtype = w.cast && fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT ? w.dtype : t->dtype;
    }
    FC_TRY_GOTO(check_used(selection, used, tensors->source, source, err), rc, out);
    rc = check_scales(source, tensors, count, touched, err);
out:
    free(touched);
    free(used);
    return rc;
}
