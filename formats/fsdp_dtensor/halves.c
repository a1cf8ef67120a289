/*
 * Finds the first matrices of gated MLPs, and makes the recipe that divides them: see halves.h. megatron-core divides
 * those that its handle_swiglu_in_state_dict finds by their names, if the model is of SwiGLU. The shapes tell whether a
 * matrix holds a gate: it then has twice as many rows as the second matrix has columns.
 */
#include "fsdp_dtensor/halves.h"

#include "base/name_table.h"
#include "derived/optim_name.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

static const char first[] = "linear_fc1.", digits[] = "0123456789";

typedef struct finding {
    const fc_target *target;
    fc_arena *arena;
    fc_name_table *values;   /* of the target: their indexes */
    fc_name_table *patterns; /* of first matrices: 1 if they hold a gate */
    json_t *rules;
    fc_error *err;
} finding;

/* Whether the `length` bytes that follow ".mlp." are those of a dense MLP, of shared experts or of one expert. */
static bool is_mlp(const char *module, size_t length) {
    static const char *const modules[] = {"", "experts.", "shared_experts."};
    static const char local[] = "experts.local_experts.";
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        if (length == strlen(modules[i]) && memcmp(module, modules[i], length) == 0) {
            return true;
        }
    }
    const size_t l = sizeof local - 1;
    return length > l + 1 && memcmp(module, local, l) == 0 && strspn(module + l, digits) == length - l - 1;
}

/* The place of "linear_fc1." in the name of a first matrix or its bias, or NULL. `*number` is that of its expert. */
static const char *find_first(const char *name, const char **number) {
    static const char mlp[] = ".mlp.";
    const char *module = strstr(name, mlp), *at = module ? strstr(module, first) : NULL;
    if (!at || !is_mlp(module + sizeof mlp - 1, (size_t)(at - module) - (sizeof mlp - 1))) {
        return NULL;
    }
    const char *leaf = at + sizeof first - 1;
    *number = strncmp(leaf, "weight", 6) == 0 ? leaf + 6 : strncmp(leaf, "bias", 4) == 0 ? leaf + 4 : NULL;
    return *number && (*number)[strspn(*number, digits)] == '\0' ? at : NULL;
}

/* Along the hidden dimension, a first matrix with a gate is twice as large as the second one. */
static fc_code find_gate(const finding *f, const fc_target_tensor *w, const char *at, const char *number, bool *gated) {
    const char *name = fc_arena_printf(f->arena, "%.*slinear_fc2.weight%s", (int)(at - w->name), w->name, number);
    FC_NEED(name, f->err, f->target->source->path);
    const size_t found = fc_name_table_find(f->values, name, strlen(name));
    const fc_tensor *other = found != FC_NO_NAME ? f->target->tensors[found].source : NULL, *own = w->source;
    if (!other || other->ndim != 2 || own->ndim < 1) {
        return fc_fail(f->err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s: without the matrix %.256s it is unclear whether it holds a gate (SwiGLU), "
                       "which fsdp_dtensor stores as a tensor of its own",
                       f->target->source->path, w->name, name);
    }
    *gated = own->shape[0] % 2 == 0 && own->shape[0] / 2 == other->shape[1];
    return FC_OK;
}

/* Makes the pattern of a name: numbers that are a whole element, and that of an expert, become variables. */
static const char *make_pattern(fc_arena *arena, const char *name, const char *number) {
    char *pattern = fc_arena_calloc(arena, 4, strlen(name) + 1); /* "7" becomes "{a}" */
    size_t n = 0, variables = 0;
    for (const char *p = name; pattern && *p;) {
        const size_t length = strspn(p, digits);
        const bool whole = (p == name || p[-1] == '.') && (p[length] == '.' || p[length] == '\0');
        if (length > 0 && (whole || p == number) && variables < 26) {
            n += (size_t)snprintf(pattern + n, 4, "{%c}", (char)('a' + variables++));
            p += length;
        } else {
            const size_t kept = length > 0 ? length : 1;
            memcpy(pattern + n, p, kept);
            n += kept;
            p += kept;
        }
    }
    if (pattern) {
        pattern[n] = '\0';
    }
    return pattern;
}

static fc_code add_rule(finding *f, const fc_target_tensor *w, const char *pattern, bool gated) {
    const size_t known = fc_name_table_find(f->patterns, pattern, strlen(pattern));
    if (known != FC_NO_NAME) {
        return known == gated
                   ? FC_OK
                   : fc_fail(f->err, FC_EUNSUPPORTED,
                             "%s: tensor %.256s: of the MLPs that are called alike, some hold a gate (SwiGLU), but not "
                             "all",
                             f->target->source->path, w->name);
    }
    FC_NEED(fc_name_table_put(f->patterns, pattern, strlen(pattern), gated) != FC_NO_NAME, f->err, NULL);
    if (!gated) {
        return FC_OK;
    }
    json_t *rule =
        json_pack("{sss[s+s+]s{si}}", "from", pattern, "to", pattern, "_w", pattern, "_v", "operations", "chunk", 0);
    return rule && json_array_append_new(f->rules, rule) == 0 ? FC_OK : fc_no_memory(f->err, NULL);
}

static fc_code find_halves(finding *f) {
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const char *name = f->target->tensors[i].name;
        FC_NEED(fc_name_table_put(f->values, name, strlen(name), i) != FC_NO_NAME, f->err, NULL);
    }
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        const bool state = w->source->object || fc_optim_name_of(w).kind != FC_OPTIM_NONE;
        const char *number, *at = state ? NULL : find_first(w->name, &number);
        bool gated = false;
        if (at) {
            FC_TRY(find_gate(f, w, at, number, &gated));
            const char *pattern = make_pattern(f->arena, w->name, number);
            FC_NEED(pattern, f->err, NULL);
            FC_TRY(add_rule(f, w, pattern, gated));
        }
    }
    return FC_OK;
}

fc_code fc_fsdp_dtensor_find_halves(const fc_target *target, fc_arena *arena, json_t **rules, fc_error *err) {
    finding f = {.target = target,
                 .arena = arena,
                 .values = fc_name_table_new(arena, target->ntensors + 1),
                 .patterns = fc_name_table_new(arena, 0),
                 .rules = json_array(),
                 .err = err};
    const fc_code rc = f.values && f.patterns && f.rules ? find_halves(&f) : fc_no_memory(err, target->source->path);
    if (rc != FC_OK) {
        json_decref(f.rules);
        f.rules = NULL;
    }
    *rules = f.rules;
    return rc;
}
