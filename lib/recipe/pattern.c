/*
 * Patterns of names: text with variables in braces that stand for digits, such as "layers.{n}.attention.wq.weight".
 */
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"

#include <string.h>

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

const char *fc_recipe_next_variable(const char **at, size_t *len) {
    const char *open = strchr(*at, '{');
    const char *close = open ? strchr(open, '}') : NULL;
    if (!close) {
        return NULL;
    }
    *at = close + 1;
    *len = (size_t)(close - open - 1);
    return open + 1;
}

fc_code fc_recipe_check_pattern(const char *label, const char *pattern, fc_error *err) {
    const char *at = pattern, *end = NULL, *name;
    size_t len, count = 0, braces = 0;
    for (const char *s = pattern; *s; s++) {
        braces += *s == '{' || *s == '}';
    }
    while ((name = fc_recipe_next_variable(&at, &len))) {
        if (len == 0 || memchr(name, '{', len) || (end == name - 1)) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: pattern '%s': a variable is a name in braces, such as {n}, and text is "
                           "between two of them",
                           label, pattern);
        }
        end = at;
        count++;
    }
    if (braces != 2 * count || count > FC_RECIPE_VARIABLES || !*pattern) {
        return fc_fail(err, FC_EUSAGE, "%s: pattern '%s': %s", label, pattern,
                       !*pattern                     ? "it is empty"
                       : count > FC_RECIPE_VARIABLES ? "it has more than 4 variables"
                                                     : "its braces do not match");
    }
    return FC_OK;
}

const fc_recipe_binding *fc_recipe_bound(const fc_recipe_bindings *b, const char *variable, size_t len) {
    for (size_t i = 0; i < b->count; i++) {
        if (b->all[i].name_len == len && memcmp(b->all[i].name, variable, len) == 0) {
            return &b->all[i];
        }
    }
    return NULL;
}

/* Binds a variable; a second occurrence must stand for the same digits. */
static bool bind(fc_recipe_bindings *b, const char *variable, size_t len, const char *digits, size_t ndigits) {
    const fc_recipe_binding *old = fc_recipe_bound(b, variable, len);
    if (old) {
        return old->ndigits == ndigits && memcmp(old->digits, digits, ndigits) == 0;
    }
    b->all[b->count++] = (fc_recipe_binding){variable, digits, len, ndigits};
    return true;
}

bool fc_recipe_match(const char *pattern, const char *name, fc_recipe_bindings *out) {
    out->count = 0;
    while (*pattern) {
        if (*pattern != '{') {
            if (*pattern++ != *name++) {
                return false;
            }
            continue;
        }
        const char *digits = name;
        while (is_digit(*name)) {
            name++;
        }
        size_t len = 0;
        const char *variable = fc_recipe_next_variable(&pattern, &len);
        bool leading_zero = name - digits > 1 && *digits == '0';
        if (name == digits || leading_zero || !bind(out, variable, len, digits, (size_t)(name - digits))) {
            return false;
        }
    }
    return !*name;
}

bool fc_recipe_mentions(const char *pattern, const char *variable, size_t len) {
    const char *name;
    size_t n;
    while ((name = fc_recipe_next_variable(&pattern, &n))) {
        if (n == len && memcmp(name, variable, len) == 0) {
            return true;
        }
    }
    return false;
}

const char *fc_recipe_spell(const char *pattern, const fc_recipe_bindings *b, fc_arena *arena) {
    size_t size = strlen(pattern) + 1;
    for (size_t i = 0; i < b->count; i++) { /* a variable may occur several times */
        size += b->all[i].ndigits * (strlen(pattern) / 3 + 1);
    }
    char *out = fc_arena_alloc(arena, size), *to = out;
    while (out && *pattern) {
        const char *at = pattern;
        size_t len = 0;
        const char *variable = *pattern == '{' ? fc_recipe_next_variable(&at, &len) : NULL;
        const fc_recipe_binding *bound = variable ? fc_recipe_bound(b, variable, len) : NULL;
        if (bound) {
            memcpy(to, bound->digits, bound->ndigits);
            to += bound->ndigits;
            pattern = at;
        } else {
            *to++ = *pattern++;
        }
    }
    if (out) {
        *to = '\0';
    }
    return out;
}
