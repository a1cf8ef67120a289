/*
 * Writes the recipe that was found: one line per rule, and only the sizes that the rules mention.
 */
#include "base/grow.h"
#include "infer/search.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static bool is_word(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

/* Whether a text has the name as a word. */
static bool has_word(const char *text, const char *name) {
    const size_t len = strlen(name);
    for (const char *at = text ? strstr(text, name) : NULL; at; at = strstr(at + 1, name)) {
        if ((at == text || !is_word(at[-1])) && !is_word(at[len])) {
            return true;
        }
    }
    return false;
}

bool fc_search_mentions(const fc_recipe_rule *rule, const char *name) {
    bool found = has_word(rule->when, name);
    for (size_t i = 0; i < rule->nops && !found; i++) {
        const fc_recipe_op *op = &rule->ops[i];
        found = has_word(op->left, name) || has_word(op->right, name);
        for (const char *const *t = op->sizes; t && *t && !found; t++) {
            found = has_word(*t, name);
        }
    }
    return found;
}

/* Whether the rules or a size that they mention have the name. */
static bool is_used(const fc_search *s, const char *name, int depth) { // NOLINT(misc-no-recursion): three levels
    for (size_t r = 0; r < s->recipe.nrules; r++) {
        if (fc_search_mentions(&s->recipe.rules[r], name)) {
            return true;
        }
    }
    for (size_t i = 0; i < s->recipe.nsizes && depth < 3; i++) {
        for (const char *const *t = s->sizes[i].expressions; *t; t++) {
            if (strcmp(s->sizes[i].name, name) != 0 && has_word(*t, name) && is_used(s, s->sizes[i].name, depth + 1)) {
                return true;
            }
        }
    }
    return false;
}

/* One text, or an array of several. */
static json_t *texts_of(const char *const *texts, size_t count) {
    if (count == 1) {
        return json_string(texts[0]);
    }
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) {
        json_array_append_new(list, json_string(texts[i]));
    }
    return list;
}

static size_t count_texts(const char *const *texts) {
    size_t count = 0;
    while (texts[count]) {
        count++;
    }
    return count;
}

static json_t *op_of(const fc_recipe_op *op) {
    static const char *const names[] = {
        [FC_OP_CONCATENATE] = "concatenate", [FC_OP_SPLIT] = "split",         [FC_OP_STACK] = "stack",
        [FC_OP_UNSTACK] = "unstack",         [FC_OP_TRANSPOSE] = "transpose", [FC_OP_REARRANGE] = "rearrange",
        [FC_OP_RESIZE] = "resize",
    };
    const char *name = op->kind == FC_OP_SPLIT && !op->sizes ? "chunk" : names[op->kind];
    json_t *object = json_object();
    if (op->kind == FC_OP_REARRANGE) {
        const char *right = op->right + strspn(op->right, " ");
        size_t left = strlen(op->left);
        while (left > 0 && op->left[left - 1] == ' ') {
            left--;
        }
        json_object_set_new(object, name, json_sprintf("%.*s -> %s", (int)left, op->left, right));
    } else if (op->kind == FC_OP_TRANSPOSE) {
        json_object_set_new(object, name, json_pack("[i, i]", op->dim, op->other));
    } else {
        json_object_set_new(object, name, json_integer(op->dim));
    }
    if (op->sizes) {
        json_object_set_new(object, "sizes", texts_of(op->sizes, count_texts(op->sizes)));
    }
    if (op->kind == FC_OP_RESIZE) {
        json_object_set_new(object, "from", json_string(op->left));
        json_object_set_new(object, "to", json_string(op->right));
    }
    return object;
}

static json_t *rule_of(const fc_recipe_rule *rule) {
    json_t *object = json_object();
    if (rule->kind == FC_RULE_DROP) {
        json_object_set_new(object, "drop", json_string(rule->from[0]));
        if (rule->nto > 0) {
            json_object_set_new(object, "same_as", json_string(rule->to[0]));
        }
    } else if (rule->kind == FC_RULE_ADD) {
        json_object_set_new(object, "add", json_string(rule->to[1]));
        json_object_set_new(object, "same_as", json_string(rule->to[0]));
    } else {
        json_object_set_new(object, "from", texts_of(rule->from, rule->nfrom));
        json_object_set_new(object, "to", texts_of(rule->to, rule->nto));
    }
    if (rule->nops == 1) {
        json_object_set_new(object, "operations", op_of(&rule->ops[0]));
    } else if (rule->nops > 1) {
        json_t *list = json_array();
        for (size_t i = 0; i < rule->nops; i++) {
            json_array_append_new(list, op_of(&rule->ops[i]));
        }
        json_object_set_new(object, "operations", list);
    }
    if (rule->when) {
        json_object_set_new(object, "when", json_string(rule->when));
    }
    return object;
}

/*
 * Appends JSON. Logs of CI obey "##[" and "##vso[" anywhere, so the second of two of these characters, which only texts
 * have, is escaped.
 */
static bool append_json(fc_notes *out, const char *json) {
    bool done = true;
    for (const char *at; done && (at = strstr(json, "##")); json = at + 2) {
        done = fc_notes_add(out, json, (size_t)(at - json) + 1) && fc_notes_add(out, "\\u0023", 6);
    }
    return done && fc_notes_add(out, json, strlen(json));
}

/* Appends a text and a JSON value, which it takes. */
static bool append(fc_notes *out, const char *front, json_t *value) {
    char *dumped = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII) : NULL;
    const bool done = dumped && fc_notes_add(out, front, strlen(front)) && append_json(out, dumped);
    free(dumped);
    json_decref(value);
    return done;
}

static json_t *sizes_of(const fc_search *s) {
    json_t *sizes = json_object();
    for (size_t i = 0; i < s->recipe.nsizes; i++) {
        const fc_recipe_size *size = &s->sizes[i];
        if (is_used(s, size->name, 0)) {
            json_object_set_new(sizes, size->name, texts_of(size->expressions, count_texts(size->expressions)));
        }
    }
    return sizes;
}

static json_t *dtypes_of(const fc_search *s) {
    json_t *dtypes = json_object();
    for (size_t i = 0; i < s->recipe.ndtypes; i++) {
        json_object_set_new(dtypes, s->recipe.dtypes[i].glob,
                            json_string(fc_dtype_get(s->recipe.dtypes[i].dtype)->short_name));
    }
    return dtypes;
}

/* Appends a rule, and its note. */
static bool append_rule(const fc_search *s, fc_notes *out, size_t r) {
    json_t *rule = rule_of(&s->recipe.rules[r]);
    if (r < s->note_capacity && s->notes[r]) {
        json_object_set_new(rule, "note", json_string(s->notes[r]));
    }
    return append(out, r ? ",\n    " : "    ", rule);
}

static bool append_all(const fc_search *s, fc_notes *out) {
    static const char begin[] = "{\n  \"fsdpckpt\": \"recipe\",\n  \"schema\": 1", rules[] = ",\n  \"rules\": [\n",
                      end[] = "\n  ]\n}\n";
    json_t *sizes = sizes_of(s);
    bool done = fc_notes_add(out, begin, sizeof begin - 1) &&
                append(out, ",\n  \"description\": ", json_string(s->recipe.description));
    done = done && (!json_object_size(sizes) || append(out, ",\n  \"sizes\": ", json_incref(sizes)));
    json_decref(sizes);
    done = done && (s->recipe.ndtypes == 0 || append(out, ",\n  \"dtypes\": ", dtypes_of(s)));
    done = done && fc_notes_add(out, rules, sizeof rules - 1);
    for (size_t r = 0; r < s->recipe.nrules && done; r++) {
        done = append_rule(s, out, r);
    }
    return done && fc_notes_add(out, end, sizeof end);
}

const char *fc_search_text(const fc_search *s) {
    fc_notes out = {.data = NULL};
    const char *text = append_all(s, &out) ? fc_arena_copy(s->arena, out.data, out.size, 1) : NULL;
    free(out.data);
    return text;
}
