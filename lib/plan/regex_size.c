/*
 * Counts the atoms of a regular expression with its repetitions expanded: see regex_size.h.
 */
#include "plan/regex_size.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_ATOMS = 20000, MOST_OPTIONAL = 500, MOST_NESTED = 64, SATURATED = 1000000 };

typedef struct atoms {
    uint64_t all;
    uint64_t optional; /* those that a match may skip or repeat */
} atoms;

/* Counts are far below 2^64: they are capped after each step, and a repetition multiplies them by less than 2^31. */
static atoms capped(atoms p) {
    return (atoms){p.all < SATURATED ? p.all : SATURATED, p.optional < SATURATED ? p.optional : SATURATED};
}

static atoms sum(atoms a, atoms b) {
    return capped((atoms){a.all + b.all, a.optional + b.optional});
}

/* `p` at least `least` times and at most `most` times; `endless`: or more often. */
static atoms repeated(atoms p, uint64_t least, uint64_t most, bool endless) {
    uint64_t times = most > least ? most : least;
    uint64_t skipped = times - least + endless;
    times += endless && least > 0;
    times = times > 0 ? times : 1;
    return capped((atoms){p.all * times, p.optional * times + skipped});
}

/* @return the end of a bracket expression that begins at `s`; the end of the text when it does not end. */
static const char *skip_bracket(const char *s) {
    s += s[1] == '^' ? 2 : 1;
    s += *s == ']';
    while (*s && *s != ']') {
        if (*s == '[' && (s[1] == ':' || s[1] == '.' || s[1] == '=')) {
            const char closing[] = {s[1], ']', '\0'};
            const char *end = strstr(s + 2, closing);
            s = end ? end + 2 : s + 1;
        } else {
            s++;
        }
    }
    return *s ? s + 1 : s;
}

static uint64_t read_count(const char **s) {
    uint64_t count = 0;
    for (; **s >= '0' && **s <= '9'; ++*s) {
        count = count < SATURATED ? count * 10 + (uint64_t)(**s - '0') : count;
    }
    return count;
}

/* Applies the repetition at `*s`, if there is one, to `p` and steps over it. */
static bool take_repetition(const char **s, atoms *p) {
    const char *at = *s;
    if (*at == '*' || *at == '?') {
        *p = repeated(*p, 0, 1, false);
        *s = at + 1;
        return true;
    }
    if (*at == '+') {
        *p = repeated(*p, 1, 1, true);
        *s = at + 1;
        return true;
    }
    if (*at != '{' || !((at[1] >= '0' && at[1] <= '9') || at[1] == ',')) {
        return false;
    }
    at++;
    uint64_t least = read_count(&at), most = least;
    bool comma = *at == ',';
    if (comma) {
        at++;
        most = read_count(&at);
    }
    *p = repeated(*p, least, most, comma && most == 0);
    *s = *at == '}' ? at + 1 : at;
    return true;
}

/* @return the end of the atom that begins at `s` and is not a group. */
static const char *skip_atom(const char *s) {
    if (*s == '[') {
        return skip_bracket(s);
    }
    return s + (s[0] == '\\' && s[1] ? 2 : 1);
}

bool fc_regex_is_small(const char *pattern) {
    atoms outer[MOST_NESTED], now = {0, 0};
    size_t depth = 0;
    for (const char *s = pattern; *s;) {
        atoms last = {1, 0};
        if (*s == '(') {
            if (depth == MOST_NESTED) {
                return false;
            }
            outer[depth++] = now;
            now = (atoms){0, 0};
            s++;
            continue;
        }
        bool closes = *s == ')' && depth > 0;
        if (closes) {
            last = sum(now, last);
            now = outer[--depth];
        }
        s = closes ? s + 1 : skip_atom(s);
        while (take_repetition(&s, &last)) {
        }
        now = sum(now, last);
    }
    while (depth > 0) { /* a group that does not end is an error, found after repetitions are written out */
        now = sum(outer[--depth], now);
    }
    return now.all <= MOST_ATOMS && now.optional <= MOST_OPTIONAL;
}
