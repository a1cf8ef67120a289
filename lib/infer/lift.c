/*
 * Names that are not those of a rule, but nearly: all have something before them, or the layers are called otherwise.
 */
#include "infer/propose.h"

#include <string.h>

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* Whether a part of a name begins at `at` that is a number. */
static bool is_numbered(const char *name, size_t at) {
    const size_t len = strspn(name + at, "0123456789");
    return (at == 0 || name[at - 1] == '.') && len > 0 && (name[at + len] == '.' || !name[at + len]);
}

/* Where the number of the layer is in a pattern that has something before and after it; 0: nowhere. */
static size_t find_layer(const char *pattern) {
    const char *open = strchr(pattern, '{');
    const char *close = open ? strchr(open, '}') : NULL;
    return close && open > pattern && open[-1] == '.' && close[1] == '.' && !memchr(open, '+', (size_t)(close - open))
               ? (size_t)(open - pattern)
               : 0;
}

fc_lift fc_lift_name(const char *pattern, const char *name) {
    fc_recipe_bindings bindings;
    if (fc_recipe_match(pattern, name, &bindings)) {
        return (fc_lift){FC_LIFT_SAME, 0, 0};
    }
    const size_t layer = find_layer(pattern);
    for (size_t at = 0; name[at]; at++) {
        if (is_numbered(name, at)) {
            return layer && fc_recipe_match(pattern + layer, name + at, &bindings)
                       ? (fc_lift){FC_LIFT_LAYERS, at, layer}
                       : (fc_lift){FC_LIFT_NONE, 0, 0};
        }
        if (at > 0 && name[at - 1] == '.' && !is_digit(name[at]) && fc_recipe_match(pattern, name + at, &bindings)) {
            return (fc_lift){FC_LIFT_FRONT, at, 0};
        }
    }
    return (fc_lift){FC_LIFT_NONE, 0, 0};
}

bool fc_lift_rule(const fc_recipe_rule *rule, const fc_lift *lift, const char *name, fc_recipe_rule *out,
                  fc_arena *arena) {
    const char **from = fc_arena_calloc(arena, rule->nfrom + 1, sizeof *from);
    *out = *rule;
    for (size_t i = 0; i < rule->nfrom && from; i++) {
        const bool fits = strncmp(rule->from[i], rule->from[0], lift->cut) == 0;
        from[i] =
            fits ? fc_arena_printf(arena, "%.*s%s", (int)lift->front, name, rule->from[i] + lift->cut) : rule->from[i];
        from = from[i] ? from : NULL;
    }
    out->from = from;
    return from != NULL;
}
