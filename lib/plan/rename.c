/*
 * Renames values. See rename.h. A rule is sed's `s` command: POSIX extended regular expressions, any delimiter, \1 … \9
 * and &, and the flags g and i.
 *
 * A name is the elements of a path joined by dots, so a rule changes both. Each character remembers its origin, and
 * each dot whether it separates two elements. A dot in a replacement separates elements if the dot that it replaces
 * did, counted from the right: s/^model\./net./ renames a level, s/^/net./ does not add one.
 */
#include "plan/rename.h"

#include "base/checked.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/regex_size.h"

#include <locale.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 10, LITERAL = -1 };

typedef struct rule {
    const char *text;        /* the whole rule; borrowed */
    const char *replacement; /* within `text`, up to `end` */
    const char *end;
    char delimiter;
    bool all; /* flag g */
    bool used;
    bool compiled;
    regex_t regex;
} rule;

/* A name while it is changed. */
typedef struct name_text {
    char *chars;     /* ends in NUL */
    int64_t *from;   /* per character: its index in the source's name, or LITERAL */
    bool *separates; /* per character: whether it is a dot between two elements of the path */
    size_t size, capacity;
} name_text;

struct fc_rename {
    const char *prefix;
    bool prefix_used;
    rule *rules;
    size_t nrules;
    locale_t locale; /* UTF-8, so that a regex sees whole characters */
    name_text now, next;
};

/* ---- rules ---- */

static fc_code bad_rule(const char *text, const char *why, fc_error *err) {
    return fc_fail(err, FC_EUSAGE, "rename rule '%s': %s; a rule is 's/regex/replacement/' with optional flags g and i",
                   text, why);
}

/* @return the next delimiter without a backslash before it, or NULL. */
static const char *find_delimiter(const char *s, char delimiter) {
    while (*s && *s != delimiter) {
        s += s[0] == '\\' && s[1] ? 2 : 1;
    }
    return *s ? s : NULL;
}

/* Unescapes the delimiter. A delimiter that is special in a regex stays escaped, because it is meant literally. */
static char *copy_pattern(const char *from, const char *to, char delimiter) {
    char *pattern = malloc((size_t)(to - from) + 1), *at = pattern;
    bool special = strchr(".[]{}()*+?|^$", delimiter) != NULL;
    for (; pattern && from < to; from++) {
        if (from[0] == '\\' && from + 1 < to) {
            if (from[1] != delimiter || special) {
                *at++ = *from;
            }
            from++;
        }
        *at++ = *from;
    }
    if (pattern) {
        *at = '\0';
    }
    return pattern;
}

static fc_code parse_flags(rule *r, const char *flags, int *how, fc_error *err) {
    for (; *flags; flags++) {
        if (*flags == 'g') {
            r->all = true;
        } else if (*flags == 'i' || *flags == 'I') {
            *how |= REG_ICASE;
        } else {
            return bad_rule(r->text, "it ends in an unknown flag", err);
        }
    }
    return FC_OK;
}

static fc_code check_groups(const rule *r, fc_error *err) {
    for (const char *s = r->replacement; s < r->end; s++) {
        if (*s == '\\' && s + 1 < r->end) {
            s++;
            if (*s >= '1' && *s <= '9' && (size_t)(*s - '0') > r->regex.re_nsub) {
                return bad_rule(r->text, "the replacement names a group that the regex does not have", err);
            }
        }
    }
    return FC_OK;
}

static fc_code parse_rule(const char *text, rule *r, fc_error *err) {
    r->text = text;
    r->delimiter = text[0] == 's' ? text[1] : '\0';
    if (r->delimiter <= ' ' || r->delimiter == '\\') { /* nor a byte of a multi-byte character */
        return bad_rule(text, "it does not begin with s and a delimiter", err);
    }
    const char *middle = find_delimiter(text + 2, r->delimiter);
    r->replacement = middle ? middle + 1 : NULL;
    r->end = middle ? find_delimiter(r->replacement, r->delimiter) : NULL;
    if (!r->end) {
        return bad_rule(text, "a delimiter is missing", err);
    }
    int how = REG_EXTENDED;
    FC_TRY(parse_flags(r, r->end + 1, &how, err));
    char *pattern = copy_pattern(text + 2, middle, r->delimiter);
    if (pattern && !fc_regex_is_small(pattern)) {
        free(pattern);
        return bad_rule(text, "it has too many repetitions when they are expanded", err);
    }
    int bad = pattern ? regcomp(&r->regex, pattern, how) : REG_ESPACE;
    free(pattern);
    if (bad != 0) {
        char why[128];
        regerror(bad, &r->regex, why, sizeof why);
        return bad == REG_ESPACE ? fc_no_memory(err, NULL) : bad_rule(text, why, err);
    }
    r->compiled = true;
    return check_groups(r, err);
}

static fc_code parse_rules(fc_rename *rename, const char *const *rules, size_t count, fc_error *err) {
    locale_t before = uselocale(rename->locale);
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        rename->nrules++;
        FC_TRY_GOTO(parse_rule(rules[i], &rename->rules[i], err), rc, out);
    }
out:
    uselocale(before);
    return rc;
}

fc_code fc_rename_new(const fc_selection *selection, fc_rename **out, fc_error *err) {
    fc_rename *rename = calloc(1, sizeof *rename);
    const size_t count = fc_count_texts(selection->rename);
    *out = NULL;
    if (rename) {
        rename->rules = calloc(count + 1, sizeof *rename->rules);
    }
    if (!rename || !rename->rules) {
        free(rename);
        return fc_no_memory(err, NULL);
    }
    rename->prefix = selection->strip_prefix;
    rename->locale = count > 0 ? newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0) : (locale_t)0;
    fc_code rc = parse_rules(rename, selection->rename, count, err);
    if (rc != FC_OK) {
        fc_rename_free(rename);
        return rc;
    }
    *out = rename;
    return FC_OK;
}

static void free_text(const name_text *t) {
    free(t->chars);
    free(t->from);
    free(t->separates);
}

void fc_rename_free(fc_rename *rename) {
    if (!rename) {
        return;
    }
    for (size_t i = 0; i < rename->nrules; i++) {
        if (rename->rules[i].compiled) {
            regfree(&rename->rules[i].regex);
        }
    }
    if (rename->locale) {
        freelocale(rename->locale);
    }
    free_text(&rename->now);
    free_text(&rename->next);
    free(rename->rules);
    free(rename);
}

/* ---- text ---- */

/* Makes room for `more` characters and the NUL. */
static bool grow(name_text *t, size_t more) {
    size_t need, capacity;
    if (!fc_add_size(t->size, more, &need) || !fc_add_size(need, 1, &need)) {
        return false;
    }
    if (need <= t->capacity) {
        return true;
    }
    if (!fc_mul_size(need, 2, &capacity)) {
        return false;
    }
    char *chars = realloc(t->chars, capacity);
    t->chars = chars ? chars : t->chars;
    int64_t *from = realloc(t->from, capacity * sizeof *from);
    t->from = from ? from : t->from;
    bool *separates = realloc(t->separates, capacity * sizeof *separates);
    t->separates = separates ? separates : t->separates;
    t->capacity = chars && from && separates ? capacity : t->capacity;
    return t->capacity == capacity;
}

static bool copy_range(name_text *to, const name_text *from, size_t start, size_t end) {
    size_t n = end - start;
    if (!grow(to, n)) {
        return false;
    }
    memcpy(to->chars + to->size, from->chars + start, n);
    memcpy(to->from + to->size, from->from + start, n * sizeof *to->from);
    memcpy(to->separates + to->size, from->separates + start, n * sizeof *to->separates);
    to->size += n;
    to->chars[to->size] = '\0';
    return true;
}

static bool add_literal(name_text *t, char c) {
    if (!grow(t, 1)) {
        return false;
    }
    t->from[t->size] = LITERAL;
    t->separates[t->size] = false;
    t->chars[t->size++] = c;
    t->chars[t->size] = '\0';
    return true;
}

static bool begin(name_text *t, const fc_tensor *source) {
    size_t len = strlen(source->name);
    t->size = 0;
    if (!grow(t, len)) {
        return false;
    }
    memcpy(t->chars, source->name, len + 1);
    t->size = len;
    for (size_t i = 0; i < len; i++) {
        t->from[i] = (int64_t)i;
        t->separates[i] = false;
    }
    if (fc_path_spells(&source->path, source->name)) {
        size_t at = 0;
        for (size_t e = 0; e + 1 < source->path.count; e++) {
            at += strlen(source->path.elements[e].key);
            t->separates[at++] = true;
        }
    }
    return true;
}

/* ---- a match and its replacement ---- */

/* Lets the dots of the replacement, from `start` on, separate elements if the dots did that they replace. */
static void inherit_separators(name_text *to, size_t start, const name_text *from, const regmatch_t *groups,
                               unsigned copied) {
    size_t at = to->size;
    for (regoff_t i = groups[0].rm_eo; i-- > groups[0].rm_so;) {
        bool is_copied = false;
        for (int g = 0; g < GROUPS; g++) {
            is_copied = is_copied || ((copied >> g & 1) && i >= groups[g].rm_so && i < groups[g].rm_eo);
        }
        if (is_copied || from->chars[i] != '.') {
            continue;
        }
        while (at > start && !(to->chars[at - 1] == '.' && to->from[at - 1] == LITERAL)) {
            at--;
        }
        if (at == start) {
            return;
        }
        to->separates[--at] = from->separates[i];
    }
}

static bool substitute(const rule *r, name_text *to, const name_text *from, const regmatch_t *groups) {
    size_t start = to->size;
    unsigned copied = 0;
    bool ok = true;
    for (const char *s = r->replacement; ok && s < r->end; s++) {
        int group = *s == '&' ? 0 : -1;
        if (*s == '\\' && s + 1 < r->end) {
            s++;
            group = *s >= '0' && *s <= '9' ? *s - '0' : -1;
        }
        if (group < 0) {
            ok = add_literal(to, *s);
        } else if (groups[group].rm_so >= 0) {
            copied |= 1U << group;
            ok = copy_range(to, from, (size_t)groups[group].rm_so, (size_t)groups[group].rm_eo);
        }
    }
    if (ok) {
        inherit_separators(to, start, from, groups, copied);
    }
    return ok;
}

/* Copies the UTF-8 character at `at`. @return the index of the next one. */
static size_t copy_character(name_text *to, const name_text *from, size_t at, bool *ok) {
    size_t end = at + 1;
    while (end < from->size && ((unsigned char)from->chars[end] & 0xc0) == 0x80) {
        end++;
    }
    *ok = copy_range(to, from, at, end);
    return end;
}

static bool find_match(const rule *r, const name_text *t, size_t at, regmatch_t *groups) {
    if (at > t->size || regexec(&r->regex, t->chars + at, GROUPS, groups, at ? REG_NOTBOL : 0) != 0) {
        return false;
    }
    for (int g = 0; g < GROUPS; g++) {
        groups[g].rm_so += groups[g].rm_so < 0 ? 0 : (regoff_t)at;
        groups[g].rm_eo += groups[g].rm_eo < 0 ? 0 : (regoff_t)at;
    }
    return true;
}

/* Applies a rule to `now`, using `next` as scratch space. */
static bool apply_rule(fc_rename *rename, rule *r) {
    name_text *now = &rename->now, *next = &rename->next;
    regmatch_t groups[GROUPS];
    size_t at = 0, last = SIZE_MAX; /* end of the last match */
    bool ok = grow(next, 0), go_on = true;
    next->size = 0;
    while (ok && go_on && find_match(r, now, at, groups)) {
        size_t start = (size_t)groups[0].rm_so, end = (size_t)groups[0].rm_eo;
        ok = copy_range(next, now, at, start);
        at = end;
        if (ok && !(start == end && start == last)) { /* an empty match right after a match does not count */
            ok = substitute(r, next, now, groups);
            r->used = true;
            go_on = r->all;
        }
        last = end;
        if (ok && start == end && go_on) {
            if (at == now->size) {
                break;
            }
            at = copy_character(next, now, at, &ok);
        }
    }
    ok = ok && (at >= now->size || copy_range(next, now, at, now->size));
    if (ok) {
        next->chars[next->size] = '\0';
        name_text t = *now;
        *now = *next;
        *next = t;
    }
    return ok;
}

/* ---- names and paths ---- */

/* Removes the prefix, and a dot that would then begin the name. @return the number of characters removed. */
static size_t strip(fc_rename *rename) {
    name_text *t = &rename->now;
    size_t len = rename->prefix ? strlen(rename->prefix) : 0;
    if (len == 0 || strncmp(t->chars, rename->prefix, len) != 0) {
        return 0;
    }
    len += t->chars[len] == '.' && t->chars[len - 1] != '.';
    t->size -= len;
    memmove(t->chars, t->chars + len, t->size + 1);
    memmove(t->from, t->from + len, t->size * sizeof *t->from);
    memmove(t->separates, t->separates + len, t->size * sizeof *t->separates);
    rename->prefix_used = true;
    return len;
}

/* @return the element of the source's path that characters [start, end) still spell, or NULL. */
static const fc_path_element *untouched(const name_text *t, size_t start, size_t end, const fc_path *path) {
    size_t at = 0;
    for (size_t e = 0; e < path->count; e++) {
        size_t len = strlen(path->elements[e].key);
        if (len == end - start && len > 0) {
            size_t same = 0;
            while (same < len && t->from[start + same] == (int64_t)(at + same)) {
                same++;
            }
            if (same == len) {
                return &path->elements[e];
            }
        }
        at += len + 1;
    }
    return NULL;
}

static bool make_path(const name_text *t, const fc_tensor *source, fc_arena *arena, fc_path *path) {
    bool nested = fc_path_spells(&source->path, source->name);
    size_t count = 1;
    for (size_t i = 0; i < t->size; i++) {
        count += t->separates[i];
    }
    fc_path_element *elements = fc_arena_calloc(arena, count, sizeof *elements);
    size_t start = 0;
    for (size_t e = 0; elements && e < count; e++) {
        size_t end = start;
        while (end < t->size && !t->separates[end]) {
            end++;
        }
        const fc_path_element *same = nested ? untouched(t, start, end, &source->path) : NULL;
        if (same) { /* an index of a list stays one; new elements are keys of a dict */
            elements[e] = *same;
        }
        elements[e].key = fc_arena_strndup(arena, t->chars + start, end - start);
        if (!elements[e].key) {
            return false;
        }
        start = end + 1;
    }
    *path = (fc_path){elements, count};
    return elements != NULL;
}

static fc_code apply_rules(fc_rename *rename, const fc_tensor *source, fc_error *err) {
    locale_t before = uselocale(rename->locale);
    bool ok = true;
    for (size_t i = 0; i < rename->nrules && ok; i++) {
        ok = apply_rule(rename, &rename->rules[i]);
    }
    bool valid = !ok || rename->nrules == 0 || mbstowcs(NULL, rename->now.chars, 0) != (size_t)-1;
    uselocale(before);
    FC_NEED(ok, err, NULL);
    return valid ? FC_OK : fc_fail(err, FC_EUSAGE, "'%s' would be renamed to text that is not UTF-8", source->name);
}

fc_code fc_rename_apply(fc_rename *rename, const fc_tensor *source, fc_arena *arena, const char **name, fc_path *path,
                        bool *changed, fc_error *err) {
    *name = source->name;
    *path = source->path;
    FC_NEED(begin(&rename->now, source), err, NULL);
    if (strip(rename) > 0 && rename->now.size == 0) {
        return fc_fail(err, FC_EUSAGE, "the name '%s' would be empty without the prefix '%s'", source->name,
                       rename->prefix);
    }
    fc_code rc = apply_rules(rename, source, err);
    if (rc != FC_OK || strcmp(rename->now.chars, source->name) == 0) {
        return rc;
    }
    if (rename->now.size == 0) {
        return fc_fail(err, FC_EUSAGE, "the name '%s' would be empty after renaming", source->name);
    }
    *changed = true;
    *name = fc_arena_strndup(arena, rename->now.chars, rename->now.size);
    bool ok = *name && make_path(&rename->now, source, arena, path);
    return ok ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_rename_check_used(const fc_rename *rename, const char *path, const char *example, fc_error *err) {
    if (rename->prefix && !rename->prefix_used) {
        return fc_fail(err, FC_EUSAGE, "%s: no name has the prefix '%s' to strip; one is '%s'", path, rename->prefix,
                       example);
    }
    for (size_t i = 0; i < rename->nrules; i++) {
        if (!rename->rules[i].used) {
            return fc_fail(err, FC_EUSAGE, "%s: the rename rule '%s' matches no name; one is '%s'", path,
                           rename->rules[i].text, example);
        }
    }
    return FC_OK;
}
