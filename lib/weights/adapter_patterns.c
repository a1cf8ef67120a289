/*
 * Finds the first pattern that matches each module: see adapter_patterns.h.
 *
 * A dot of a plain pattern matches any character, which is mostly a dot. Patterns of one length with dots at the same
 * places have one form. The end of a module, with dots put in these places, is looked up in a table of patterns.
 */
#include "weights/adapter_patterns.h"

#include "base/name_table.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <ctype.h>
#include <regex.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The most steps: of a look-up, and sixteen for each 64 characters that a regular expression compares. Together they
 * take a few seconds. Real adapters need less than a hundredth. */
enum { MOST_STEPS = 1 << 24, REGEX_STEPS = 16, REGEX_CHARACTERS = 64 };

/* A form of patterns. */
typedef struct form {
    const char *example;
    size_t len;
} form;

typedef struct matcher {
    const char *path;
    const fc_adapter_pattern *patterns;
    size_t count;
    fc_name_table *plain; /* the first pattern of each text */
    form *forms;          /* by length */
    size_t nforms;
    size_t longest;
    size_t *first; /* per length, up to longest + 1: the first form that is at least as long */
    uint64_t steps;
    fc_arena *arena;
    fc_error *err;
} matcher;

bool fc_adapter_pattern_is_plain(const char *text) {
    const char *at = text;
    while (isalnum((unsigned char)*at) || *at == '_' || *at == '-' || *at == '.') {
        at++;
    }
    return *text && !*at;
}

/* Counts steps. */
static fc_code count_steps(matcher *m, uint64_t steps) {
    m->steps += steps;
    return m->steps <= MOST_STEPS
               ? FC_OK
               : fc_fail(m->err, FC_EUNSUPPORTED, "%s: has too many patterns (%zu) for the modules of the adapter",
                         m->path, m->count);
}

/* ---- plain patterns ---- */

/* @return the text with only its dots left, so that patterns of one form have the same. */
static char *form_of(const char *text, size_t len, fc_arena *arena) {
    char *out = fc_arena_strndup(arena, text, len);
    for (size_t i = 0; out && i < len; i++) {
        out[i] = (char)(out[i] == '.' ? '.' : 'x');
    }
    return out;
}

static int compare_form_lengths(const void *a, const void *b) {
    const form *x = a, *y = b;
    return (x->len > y->len) - (x->len < y->len);
}

/* Lists the plain patterns in a table, and their forms. */
static fc_code list_plain(matcher *m) {
    fc_name_table *seen = fc_name_table_new(m->arena, m->count + 1);
    m->plain = fc_name_table_new(m->arena, m->count + 1);
    m->forms = fc_arena_calloc(m->arena, m->count + 1, sizeof *m->forms);
    FC_NEED(seen && m->plain && m->forms, m->err, m->path);
    for (size_t i = 0; i < m->count; i++) {
        const char *text = m->patterns[i].text;
        if (m->patterns[i].regex) {
            continue;
        }
        const size_t len = strlen(text);
        const char *dots = form_of(text, len, m->arena);
        FC_NEED(dots, m->err, m->path);
        fc_name_table_put(m->plain, text, len, i);
        if (fc_name_table_put(seen, dots, len, i) == i) {
            m->forms[m->nforms++] = (form){text, len};
            m->longest = len > m->longest ? len : m->longest;
        }
    }
    fc_sort_items(m->forms, m->nforms, sizeof *m->forms, compare_form_lengths);
    m->first = fc_arena_calloc(m->arena, m->longest + 2, sizeof *m->first);
    for (size_t len = 0, at = 0; m->first && len < m->longest + 2; len++) {
        while (at < m->nforms && m->forms[at].len < len) {
            at++;
        }
        m->first[len] = at;
    }
    return m->first ? FC_OK : fc_no_memory(m->err, m->path);
}

/* Looks up the end of a module's name. @param text a buffer for its characters. */
static fc_code find_end(matcher *m, const char *end, char *text, size_t *best) {
    const size_t len = strlen(end);
    if (len > m->longest) {
        return FC_OK;
    }
    for (size_t f = m->first[len]; f < m->first[len + 1]; f++) {
        FC_TRY(count_steps(m, 1 + len / REGEX_CHARACTERS));
        for (size_t i = 0; i < len; i++) {
            text[i] = (char)(m->forms[f].example[i] == '.' ? '.' : end[i]);
        }
        const size_t at = fc_name_table_find(m->plain, text, len);
        *best = at < *best ? at : *best;
    }
    return FC_OK;
}

static fc_code find_plain(matcher *m, const char *module, char *text, size_t *best) {
    FC_TRY(find_end(m, module, text, best));
    for (const char *dot = strchr(module, '.'); dot; dot = strchr(dot + 1, '.')) {
        FC_TRY(count_steps(m, 1));
        FC_TRY(find_end(m, dot + 1, text, best));
    }
    return FC_OK;
}

/* ---- regular expressions ---- */

/* Compares all modules with one expression, unless an earlier pattern matches them. */
static fc_code compare_all(matcher *m, size_t index, const char *const *modules, size_t nmodules, size_t *best) {
    regex_t compiled;
    const char *regex = m->patterns[index].regex;
    FC_TRY(count_steps(m, REGEX_STEPS * (1 + strlen(regex) / REGEX_CHARACTERS)));
    const int bad = regcomp(&compiled, regex, REG_EXTENDED | REG_NOSUB);
    if (bad != 0) {
        return bad == REG_ESPACE ? fc_no_memory(m->err, m->path)
                                 : fc_fail(m->err, FC_EUSAGE, "%s: the pattern %s is malformed", m->path, regex);
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < nmodules; i++) {
        if (best[i] > index) {
            rc = count_steps(m, REGEX_STEPS * (1 + strlen(modules[i]) / REGEX_CHARACTERS));
            best[i] = rc == FC_OK && regexec(&compiled, modules[i], 0, NULL, 0) == 0 ? index : best[i];
        }
    }
    regfree(&compiled);
    return rc;
}

static fc_code apply(matcher *m, const char *const *modules, size_t nmodules, double *values) {
    size_t *best = fc_arena_alloc(m->arena, (nmodules + 1) * sizeof *best);
    FC_TRY(list_plain(m));
    char *text = fc_arena_alloc(m->arena, m->longest + 1);
    FC_NEED(best && text, m->err, m->path);
    for (size_t i = 0; i < nmodules; i++) {
        best[i] = FC_NO_NAME;
        FC_TRY(find_plain(m, modules[i], text, &best[i]));
    }
    for (size_t i = 0; i < m->count; i++) {
        if (m->patterns[i].regex) {
            FC_TRY(compare_all(m, i, modules, nmodules, best));
        }
    }
    for (size_t i = 0; i < nmodules; i++) {
        values[i] = best[i] != FC_NO_NAME ? m->patterns[best[i]].value : values[i];
    }
    return FC_OK;
}

fc_code fc_adapter_patterns_apply(const char *path, const fc_adapter_pattern *patterns, size_t count,
                                  const char *const *modules, size_t nmodules, double *values, fc_error *err) {
    matcher m = {.path = path, .patterns = patterns, .count = count, .err = err};
    if (count == 0) {
        return FC_OK;
    }
    m.arena = fc_arena_new();
    const fc_code rc = m.arena ? apply(&m, modules, nmodules, values) : fc_no_memory(err, path);
    fc_arena_free(m.arena);
    return rc;
}
