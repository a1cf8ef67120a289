/*
 * Patterns of names: text with variables in braces that stand for digits, such as "layers.{n}.attention.wq.weight". In
 * {n+61}, the digits are the sum.
 */
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_DIGITS = 20 }; /* of a number of 64 bits */

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
    *len = strcspn(open + 1, "+}");
    return open + 1;
}

/* @return the number after the '+' of a variable; 0 without one. */
static uint64_t offset_of(const char *variable, size_t len) {
    fc_recipe_binding b = {.digits = variable + len + 1};
    while (variable[len] == '+' && is_digit(b.digits[b.ndigits])) {
        b.ndigits++;
    }
    return fc_recipe_number_of(&b);
}

uint64_t fc_recipe_number_of(const fc_recipe_binding *binding) {
    uint64_t number = 0;
    for (size_t i = 0; i < binding->ndigits; i++) {
        number = number > UINT64_MAX / 10 - 1 ? UINT64_MAX : number * 10 + (uint64_t)(binding->digits[i] - '0');
    }
    return number == UINT64_MAX ? number : number - binding->offset;
}

fc_code fc_recipe_check_pattern(const char *label, const char *pattern, fc_error *err) {
    const char *at = pattern, *end = NULL, *name;
    size_t len, count = 0, braces = 0;
    for (const char *s = pattern; *s; s++) {
        braces += *s == '{' || *s == '}';
    }
    while ((name = fc_recipe_next_variable(&at, &len))) {
        if (len == 0 || memchr(name, '{', (size_t)(at - name)) || end == name - 1) {
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

static bool is_same_number(const fc_recipe_binding *a, const fc_recipe_binding *b) {
    return a->offset == b->offset ? a->ndigits == b->ndigits && memcmp(a->digits, b->digits, a->ndigits) == 0
                                  : fc_recipe_number_of(a) == fc_recipe_number_of(b);
}

/* Binds a variable; a second occurrence must stand for the same number. */
static bool bind(fc_recipe_bindings *b, const char *variable, size_t len, const char *digits, size_t ndigits) {
    fc_recipe_binding made = {variable, digits, (uint32_t)len, (uint32_t)ndigits, 0}; /* of patterns and names */
    const fc_recipe_binding *old = fc_recipe_bound(b, variable, len);
    const uint64_t offset = offset_of(variable, len);
    if (fc_recipe_number_of(&made) < offset) {
        return false;
    }
    made.offset = offset;
    if (old) {
        return is_same_number(old, &made);
    }
    b->all[b->count++] = made;
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

/* Spells the value of a variable of a pattern. @return its digits, which may be in `buffer`. */
static const char *spell_digits(const fc_recipe_binding *bound, uint64_t offset, char buffer[MOST_DIGITS + 1],
                                size_t *len) {
    if (bound->offset == offset) {
        *len = bound->ndigits;
        return bound->digits;
    }
    const uint64_t number = fc_recipe_number_of(bound);
    const int n =
        snprintf(buffer, MOST_DIGITS + 1, "%" PRIu64, number > UINT64_MAX - offset ? UINT64_MAX : number + offset);
    *len = n > 0 ? (size_t)n : 0;
    return buffer;
}

/* Spells a pattern at `to`, without a NUL. NULL: only counts. @return the number of bytes. */
static size_t spell_pattern(const char *pattern, const fc_recipe_bindings *b, char *to) {
    char buffer[MOST_DIGITS + 1];
    size_t total = 0;
    while (*pattern) {
        const char *at = pattern, *piece = pattern;
        size_t len = 0, npiece = 1;
        const char *variable = *pattern == '{' ? fc_recipe_next_variable(&at, &len) : NULL;
        const fc_recipe_binding *bound = variable ? fc_recipe_bound(b, variable, len) : NULL;
        if (bound) {
            piece = spell_digits(bound, offset_of(variable, len), buffer, &npiece);
        }
        if (to) {
            memcpy(to + total, piece, npiece);
        }
        total += npiece;
        pattern = bound ? at : pattern + 1;
    }
    return total;
}

const char *fc_recipe_spell(const char *pattern, const fc_recipe_bindings *b, fc_arena *arena) {
    char *out = fc_arena_alloc(arena, spell_pattern(pattern, b, NULL) + 1);
    if (out) {
        out[spell_pattern(pattern, b, out)] = '\0';
    }
    return out;
}

/* ---- offsets ---- */

/* Replaces the expression after the '+' of one variable. `known` receives whether all of its names are. */
static fc_code place_offset(const fc_recipe *recipe, const char *variable, size_t len, const char *close,
                            const char **out, bool *known, fc_arena *arena, fc_error *err) {
    const char *expression = fc_arena_strndup(arena, variable + len + 1, (size_t)(close - variable) - len - 1);
    const fc_recipe_binding literal = {.digits = variable, .ndigits = (uint32_t)strspn(variable, "0123456789")};
    int64_t value = 0;
    FC_NEED(expression, err, NULL);
    *out = expression;
    FC_TRY(fc_recipe_evaluate_known(recipe, expression, &value, known, err));
    if (!*known) {
        return FC_OK;
    }
    if (value < 0 || value > INT32_MAX) {
        return fc_fail(err, FC_EUSAGE, "%s: '%s' is %lld, which is not the number of a layer", recipe->label,
                       expression, (long long)value);
    }
    *out = literal.ndigits == len
               ? fc_arena_printf(arena, "%" PRIu64, fc_recipe_number_of(&literal) + (uint64_t)value)
               : fc_arena_printf(arena, value > 0 ? "{%.*s+%lld}" : "{%.*s}", (int)len, variable, (long long)value);
    return *out ? FC_OK : fc_no_memory(err, NULL);
}

/* Makes the rule apply only if all names of the expression are known. */
static fc_code require(fc_recipe_rule *rule, const char *expression, fc_arena *arena, fc_error *err) {
    rule->when = rule->when ? fc_arena_printf(arena, "(%s) * ((%s) == (%s))", rule->when, expression, expression)
                            : fc_arena_printf(arena, "(%s) == (%s)", expression, expression);
    return rule->when ? FC_OK : fc_no_memory(err, NULL);
}

static fc_code place_offsets(const fc_recipe *recipe, fc_recipe_rule *rule, const char **pattern, fc_arena *arena,
                             fc_error *err) {
    const char *at = *pattern, *variable;
    size_t len;
    while ((variable = fc_recipe_next_variable(&at, &len))) {
        const char *text = NULL;
        bool known = false;
        if (variable[len] != '+') {
            continue;
        }
        FC_TRY(place_offset(recipe, variable, len, at - 1, &text, &known, arena, err));
        if (!known) {
            FC_TRY(require(rule, text, arena, err));
            continue;
        }
        const char *front = fc_arena_printf(arena, "%.*s%s", (int)(variable - 1 - *pattern), *pattern, text);
        *pattern = front ? fc_arena_printf(arena, "%s%s", front, at) : NULL;
        FC_NEED(*pattern, err, NULL);
        at = *pattern + strlen(front);
    }
    return FC_OK;
}

static fc_code place_in_all(const fc_recipe *recipe, fc_recipe_rule *rule, const char *const **patterns, size_t count,
                            fc_arena *arena, fc_error *err) {
    const char **placed = fc_arena_calloc(arena, count + 1, sizeof *placed);
    FC_NEED(placed, err, NULL);
    for (size_t i = 0; i < count; i++) {
        placed[i] = (*patterns)[i];
        FC_TRY(place_offsets(recipe, rule, &placed[i], arena, err));
    }
    *patterns = placed;
    return FC_OK;
}

fc_code fc_recipe_place_offsets(fc_recipe *recipe, fc_arena *arena, fc_error *err) {
    for (size_t r = 0; r < recipe->nrules; r++) {
        fc_recipe_rule *rule = &recipe->rules[r];
        FC_TRY(place_in_all(recipe, rule, &rule->from, rule->nfrom, arena, err));
        FC_TRY(place_in_all(recipe, rule, &rule->to, rule->nto, arena, err));
    }
    return FC_OK;
}
