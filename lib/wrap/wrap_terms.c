/*
 * Policies as text: "size:100M+leaf:Attention+class:Embedding", on the command line and in policy files.
 */
#include "fsdpckpt/wrap_policy.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <string.h>

static const char *const prefixes[] = {"always", "size:", "class:", "name:"};
static const fc_wrap_kind kinds[] = {FC_WRAP_ALWAYS, FC_WRAP_SIZE, FC_WRAP_CLASS, FC_WRAP_NAME};
enum { KINDS = sizeof prefixes / sizeof *prefixes };

/* Finds the kind of a term. @return the length of its prefix, or 0. */
static size_t find_kind(const char *text, size_t len, fc_wrap_kind *kind) {
    for (int i = 0; i < KINDS; i++) {
        size_t n = strlen(prefixes[i]);
        bool whole = prefixes[i][n - 1] != ':';
        if (len >= n && strncmp(text, prefixes[i], n) == 0 && (!whole || len == n)) {
            *kind = kinds[i];
            return n;
        }
    }
    return 0;
}

bool fc_wrap_is_terms(const char *text) {
    fc_wrap_kind kind;
    return find_kind(text, strcspn(text, "+"), &kind) > 0;
}

/* Parses a number of elements such as "100M"; units are powers of 1000. */
static bool parse_count(const char *text, size_t len, int64_t *out) {
    static const char units[] = "KMBT";
    int64_t value = 0;
    size_t i = 0;
    for (; i < len && text[i] >= '0' && text[i] <= '9'; i++) {
        if (!fc_mul_i64(value, 10, &value) || !fc_add_i64(value, text[i] - '0', &value)) {
            return false;
        }
    }
    char letter = i < len ? (char)(text[i] >= 'a' && text[i] <= 'z' ? text[i] - 'a' + 'A' : text[i]) : '\0';
    const char *unit = letter ? strchr(units, letter == 'G' ? 'B' : letter) : NULL;
    for (long k = unit ? unit - units : -1; k >= 0; k--) {
        if (!fc_mul_i64(value, 1000, &value)) {
            return false;
        }
    }
    *out = value;
    return i > 0 && value > 0 && i + (unit != NULL) == len;
}

/* "A,B" → {"A", "B", NULL} */
static const char *const *split_names(const char *text, size_t len, fc_arena *arena) {
    size_t count = 1, n = 0;
    for (size_t i = 0; i < len; i++) {
        count += text[i] == ',';
    }
    const char **names = fc_arena_calloc(arena, count + 1, sizeof *names);
    for (size_t i = 0, end; names && i < len; i = end + 1) {
        for (end = i; end < len && text[end] != ','; end++) {
        }
        if (end > i && !(names[n++] = fc_arena_strndup(arena, text + i, end - i))) {
            return NULL;
        }
    }
    return names;
}

/* A text while it is parsed. */
typedef struct parser {
    const char *text;
    fc_arena *arena;
    fc_wrap_term *terms;
    size_t count;
    fc_error *err;
} parser;

static fc_code wrong(const parser *p, const char *why) {
    return fc_fail(p->err, FC_EUSAGE, "the policy '%.200s': %s", p->text, why);
}

/* "leaf:A" and "exclude:A" belong to the term before them. */
static fc_code parse_modifier(parser *p, const char *text, size_t len, size_t prefix, bool leaf) {
    if (p->count == 0) {
        return wrong(p, "leaf: and exclude: come after the policy to which they belong");
    }
    fc_wrap_term *term = &p->terms[p->count - 1];
    const char *const **list = leaf ? &term->leaf : &term->exclude;
    if (*list) {
        return wrong(p, "leaf: and exclude: are given once per policy, as in leaf:A,B");
    }
    *list = split_names(text + prefix, len - prefix, p->arena);
    return *list ? FC_OK : fc_no_memory(p->err, p->text);
}

static fc_code parse_term(parser *p, const char *text, size_t len) {
    fc_wrap_term *term = &p->terms[p->count];
    if (len >= 5 && strncmp(text, "leaf:", 5) == 0) {
        return parse_modifier(p, text, len, 5, true);
    }
    if (len >= 8 && strncmp(text, "exclude:", 8) == 0) {
        return parse_modifier(p, text, len, 8, false);
    }
    size_t prefix = find_kind(text, len, &term->kind);
    if (prefix == 0) {
        return wrong(p, "each part is always, size:N, class:NAME,..., name:PATTERN,..., leaf:CLASS,... or "
                        "exclude:CLASS,...");
    }
    p->count++;
    if (term->kind == FC_WRAP_SIZE) {
        return parse_count(text + prefix, len - prefix, &term->least)
                   ? FC_OK
                   : wrong(p, "size: needs a number of elements, such as size:100M");
    }
    if (term->kind == FC_WRAP_ALWAYS) {
        return FC_OK;
    }
    term->names = split_names(text + prefix, len - prefix, p->arena);
    FC_NEED(term->names, p->err, p->text);
    if (!term->names[0]) {
        return wrong(p, term->kind == FC_WRAP_CLASS ? "class: needs the name of a class, as in class:LlamaDecoderLayer"
                                                    : "name: needs a pattern of modules, as in name:layers.*");
    }
    return FC_OK;
}

fc_code fc_wrap_terms_parse(const char *text, fc_arena *arena, const fc_wrap_term **out, size_t *count, fc_error *err) {
    size_t most = 1;
    for (const char *s = text; *s; s++) {
        most += *s == '+';
    }
    parser p = {.text = text, .arena = arena, .err = err, .terms = fc_arena_calloc(arena, most, sizeof *p.terms)};
    FC_NEED(p.terms, err, text);
    for (const char *s = text;; s++) {
        size_t len = strcspn(s, "+");
        FC_TRY(parse_term(&p, s, len));
        s += len;
        if (!*s) {
            break;
        }
    }
    *out = p.terms;
    *count = p.count;
    return FC_OK;
}
