/*
 * Reads a recipe from JSON (docs/schemas/recipe.json), and reverses it for the other direction. People write these
 * files, so every error names the rule.
 */
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "recipe/recipe.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char example[] =
    "{\"fsdpckpt\": \"recipe\", \"schema\": 1, \"rules\": [{\"from\": \"wte.weight\", \"to\": "
    "\"transformer.wte.weight\"}]}";

typedef struct reader {
    fc_recipe *recipe;
    fc_arena *arena;
    bool reverse;
    size_t number; /* of the rule, from 1 */
    fc_error *err;
} reader;

/* Fails with the name of the file, and the number of the rule when one is being read. */
static __attribute__((format(printf, 2, 3))) fc_code bad(const reader *r, const char *fmt, ...) {
    char why[512], rule[48] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    if (r->number > 0) {
        snprintf(rule, sizeof rule, "rule %zu: ", r->number);
    }
    return fc_fail(r->err, FC_EUSAGE, "%s: %s%s", r->recipe->label, rule, why);
}

/* Copies a string, or returns NULL without an error for NULL. */
static fc_code read_text(const reader *r, const json_t *value, const char *what, const char **out) {
    *out = NULL;
    if (!value) {
        return FC_OK;
    }
    if (!json_is_string(value)) {
        return bad(r, "\"%.200s\" is not a string", what);
    }
    *out = fc_arena_strndup(r->arena, json_string_value(value), json_string_length(value));
    return *out ? FC_OK : fc_no_memory(r->err, r->recipe->label);
}

/* Reads a string or an array of strings. */
static fc_code read_list(const reader *r, const json_t *value, const char *what, const char *const **out,
                         size_t *count) {
    bool malformed = false;
    *out = fc_json_strings(value, r->arena, &malformed);
    *count = json_is_array(value) ? json_array_size(value) : 1;
    if (malformed || *count == 0) {
        return bad(r, "\"%.200s\" is not a string or an array of strings", what);
    }
    return *out ? FC_OK : fc_no_memory(r->err, r->recipe->label);
}

static fc_code check_keys(const reader *r, const json_t *object, const char *const *known) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        const char *const *k = known;
        while (*k && strcmp(*k, key) != 0) {
            k++;
        }
        if (!*k) {
            return bad(r, "unknown member \"%.200s\"", key);
        }
    }
    return FC_OK;
}

/* Adds to what the reversed recipe cannot restore. */
static fc_code add_lost(const reader *r, const char *before, const char *what, const char *after) {
    const char *lost = r->recipe->lost;
    if (lost && strlen(lost) > 300) {
        return FC_OK;
    }
    r->recipe->lost = fc_arena_printf(r->arena, "%s%s%s%s%s", lost ? lost : "", lost ? ", " : "", before, what, after);
    return r->recipe->lost ? FC_OK : fc_no_memory(r->err, r->recipe->label);
}

/* ---- operations ---- */

static const struct {
    const char *name;
    fc_recipe_op_kind kind;
} operations[] = {
    {"concatenate", FC_OP_CONCATENATE},
    {"split", FC_OP_SPLIT},
    {"chunk", FC_OP_SPLIT},
    {"stack", FC_OP_STACK},
    {"unstack", FC_OP_UNSTACK},
    {"transpose", FC_OP_TRANSPOSE},
    {"rearrange", FC_OP_REARRANGE},
    {"resize", FC_OP_RESIZE},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static fc_code read_rearrange(const reader *r, const char *text, fc_recipe_op *op) {
    const char *arrow = strstr(text, "->");
    if (!arrow || strstr(arrow + 2, "->")) {
        return bad(r, "a rearrangement has two sides, such as \"(h d two) c -> (h two d) c\"");
    }
    op->left = fc_arena_strndup(r->arena, text, (size_t)(arrow - text));
    op->right = arrow + 2;
    return op->left ? FC_OK : fc_no_memory(r->err, r->recipe->label);
}

static fc_code read_dims(const reader *r, const json_t *value, fc_recipe_op *op) {
    const bool pair = op->kind == FC_OP_TRANSPOSE;
    const json_t *first = pair ? json_array_get(value, 0) : value, *second = pair ? json_array_get(value, 1) : value;
    if (!json_is_integer(first) || !json_is_integer(second) || (pair && json_array_size(value) != 2)) {
        return bad(r, pair ? "\"transpose\" needs two dimensions, such as [0, 1]" : "an operation needs a dimension");
    }
    json_int_t dims[] = {json_integer_value(first), json_integer_value(second)};
    for (int i = 0; i < 2; i++) {
        if (dims[i] < -FC_MAX_DIMS || dims[i] >= FC_MAX_DIMS) {
            return bad(r, "a dimension is out of range");
        }
    }
    op->dim = (int)dims[0];
    op->other = (int)dims[1];
    return FC_OK;
}

static fc_code read_operation(const reader *r, const json_t *object, fc_recipe_op *op) {
    static const char *const known[] = {"concatenate", "split",  "chunk", "stack", "unstack", "transpose",
                                        "rearrange",   "resize", "sizes", "from",  "to",      NULL};
    const json_t *value = NULL;
    int found = 0;
    FC_TRY(check_keys(r, object, known));
    for (int i = 0; i < OPERATIONS; i++) {
        const json_t *v = json_object_get(object, operations[i].name);
        value = v ? v : value;
        op->kind = v ? operations[i].kind : op->kind;
        found += v != NULL;
    }
    if (found != 1) {
        return bad(r, "an operation is an object with one of concatenate, split, chunk, stack, unstack, transpose, "
                      "rearrange and resize");
    }
    size_t ignored;
    const json_t *sizes = json_object_get(object, "sizes");
    if (sizes && (json_object_get(object, "chunk") || (op->kind != FC_OP_SPLIT && op->kind != FC_OP_CONCATENATE))) {
        return bad(r, "only \"split\" and \"concatenate\" have \"sizes\"");
    }
    if ((json_object_get(object, "from") || json_object_get(object, "to")) && op->kind != FC_OP_RESIZE) {
        return bad(r, "only the operation \"resize\" has \"from\" and \"to\"");
    }
    if (op->kind == FC_OP_REARRANGE) {
        const char *text;
        FC_TRY(read_text(r, value, "rearrange", &text));
        return read_rearrange(r, text, op);
    }
    FC_TRY(read_dims(r, value, op));
    if (sizes) {
        FC_TRY(read_list(r, sizes, "sizes", &op->sizes, &ignored));
    }
    FC_TRY(read_text(r, json_object_get(object, "from"), "from", &op->left));
    return read_text(r, json_object_get(object, "to"), "to", &op->right);
}

static void invert(fc_recipe_op *op) {
    static const fc_recipe_op_kind inverse[] = {
        [FC_OP_CONCATENATE] = FC_OP_SPLIT, [FC_OP_SPLIT] = FC_OP_CONCATENATE,   [FC_OP_STACK] = FC_OP_UNSTACK,
        [FC_OP_UNSTACK] = FC_OP_STACK,     [FC_OP_TRANSPOSE] = FC_OP_TRANSPOSE, [FC_OP_REARRANGE] = FC_OP_REARRANGE,
        [FC_OP_RESIZE] = FC_OP_RESIZE};
    const char *left = op->left;
    op->kind = inverse[op->kind];
    op->left = op->right;
    op->right = left;
}

static fc_code read_operations(const reader *r, const json_t *value, fc_recipe_rule *rule) {
    const size_t count = !value ? 0 : json_is_array(value) ? json_array_size(value) : 1;
    fc_recipe_op *ops = fc_arena_calloc(r->arena, count + 1, sizeof *ops);
    FC_NEED(ops, r->err, r->recipe->label);
    for (size_t i = 0; i < count; i++) {
        fc_recipe_op *op = &ops[r->reverse ? count - 1 - i : i];
        const json_t *one = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_object(one)) {
            return bad(r, "an operation is an object, such as {\"concatenate\": 0}");
        }
        FC_TRY(read_operation(r, one, op));
        if (r->reverse) {
            invert(op);
        }
        if (op->kind == FC_OP_RESIZE && !op->right) {
            return bad(r, r->reverse ? "it cannot be reversed: \"resize\" has no \"from\", the size before"
                                     : "\"resize\" has no \"to\", the size after");
        }
    }
    rule->ops = ops;
    rule->nops = count;
    return FC_OK;
}

/* ---- rules ---- */

static fc_code check_patterns(const reader *r, const fc_recipe_rule *rule) {
    for (size_t i = 0; i < rule->nfrom; i++) {
        FC_TRY(fc_recipe_check_pattern(r->recipe->label, rule->from[i], r->err));
    }
    for (size_t i = 0; i < rule->nto; i++) {
        FC_TRY(fc_recipe_check_pattern(r->recipe->label, rule->to[i], r->err));
    }
    return FC_OK;
}

static fc_code read_map(const reader *r, const json_t *object, fc_recipe_rule *rule) {
    static const char *const known[] = {"from", "to", "operations", "when", "note", NULL};
    const json_t *from = json_object_get(object, "from"), *to = json_object_get(object, "to");
    FC_TRY(check_keys(r, object, known));
    if (!from || !to) {
        return bad(r, "it needs \"from\" and \"to\", or \"drop\", or \"add\"");
    }
    FC_TRY(read_list(r, r->reverse ? to : from, "from", &rule->from, &rule->nfrom));
    FC_TRY(read_list(r, r->reverse ? from : to, "to", &rule->to, &rule->nto));
    return read_operations(r, json_object_get(object, "operations"), rule);
}

/* "drop" leaves a tensor out, and "add" makes a second one. Each is the inverse of the other. */
static fc_code read_extra(const reader *r, const json_t *object, bool drop, fc_recipe_rule *rule, bool *skip) {
    static const char *const known[] = {"drop", "add", "same_as", "when", "note", NULL};
    const char **names = fc_arena_calloc(r->arena, 3, sizeof *names);
    FC_TRY(check_keys(r, object, known));
    FC_NEED(names, r->err, r->recipe->label);
    FC_TRY(read_text(r, json_object_get(object, "same_as"), "same_as", &names[0]));
    FC_TRY(read_text(r, json_object_get(object, drop ? "drop" : "add"), drop ? "drop" : "add", &names[1]));
    if (!drop && !names[0]) {
        return bad(r, "\"add\" needs \"same_as\", the tensor that it repeats");
    }
    rule->kind = drop != r->reverse ? FC_RULE_DROP : FC_RULE_ADD;
    *skip = rule->kind == FC_RULE_ADD && !names[0];
    FC_TRY(*skip && r->reverse ? add_lost(r, "'", names[1], "', which it drops") : FC_OK);
    if (rule->kind == FC_RULE_DROP) {
        rule->from = names + 1;
        rule->nfrom = 1;
    } else if (!*skip) {
        rule->to = names;
        rule->nto = 2;
    }
    return FC_OK;
}

static fc_code read_rule(reader *r, const json_t *object) {
    fc_recipe_rule *rule = &r->recipe->rules[r->recipe->nrules];
    bool skip = false;
    *rule = (fc_recipe_rule){.kind = FC_RULE_MAP};
    r->number++;
    if (!json_is_object(object)) {
        return bad(r, "it is not an object");
    }
    const bool drop = json_object_get(object, "drop") != NULL, add = json_object_get(object, "add") != NULL;
    if (drop && add) {
        return bad(r, "it has both \"drop\" and \"add\"; make two rules of it");
    }
    FC_TRY(drop || add ? read_extra(r, object, drop, rule, &skip) : read_map(r, object, rule));
    FC_TRY(read_text(r, json_object_get(object, "when"), "when", &rule->when));
    r->recipe->nrules += !skip;
    return check_patterns(r, rule);
}

static fc_code read_sizes(const reader *r, const json_t *object) {
    const char *key;
    if (object && !json_is_object(object)) {
        return bad(r, "\"sizes\" is not an object, such as {\"heads\": \"num_attention_heads\"}");
    }
    json_t *value;
    size_t count = json_object_size(object), ignored;
    fc_recipe_size *sizes = fc_arena_calloc(r->arena, count + 1, sizeof *sizes);
    FC_NEED(sizes, r->err, r->recipe->label);
    r->recipe->sizes = sizes;
    json_object_foreach((json_t *)object, key, value) {
        sizes->name = fc_arena_strndup(r->arena, key, strlen(key));
        FC_TRY(read_list(r, value, key, &sizes->expressions, &ignored));
        FC_NEED(sizes->name, r->err, r->recipe->label);
        sizes++;
        r->recipe->nsizes++;
    }
    return FC_OK;
}

/* What becomes of tensors that no rule takes. */
static fc_code read_others(const reader *r, const json_t *value) {
    const char *text = value ? json_string_value(value) : "refuse";
    r->recipe->keeps_others = text && strcmp(text, "keep") == 0;
    return text && (r->recipe->keeps_others || strcmp(text, "refuse") == 0)
               ? FC_OK
               : bad(r, "\"others\" is \"keep\" or \"refuse\"");
}

static fc_code read_dtypes(const reader *r, const json_t *object) {
    const size_t count = json_object_size(object);
    fc_recipe_dtype *dtypes = fc_arena_calloc(r->arena, count + 1, sizeof *dtypes);
    const char *glob;
    json_t *value;
    if (object && !json_is_object(object)) {
        return bad(r, "\"dtypes\" is not an object, such as {\"*.norm.weight\": \"f32\"}");
    }
    FC_NEED(dtypes, r->err, r->recipe->label);
    json_object_foreach((json_t *)object, glob, value) {
        const char *type = json_string_value(value);
        fc_recipe_dtype *d = &dtypes[r->recipe->ndtypes++];
        if (!type || !fc_dtype_find(type, strlen(type), &d->dtype) || fc_dtype_get(d->dtype)->cls != FC_CLASS_FLOAT) {
            return bad(r, "\"dtypes\": '%.200s' needs a floating-point type, such as \"f32\"", glob);
        }
        d->glob = fc_arena_strndup(r->arena, glob, strlen(glob));
        FC_NEED(d->glob, r->err, r->recipe->label);
    }
    r->recipe->dtypes = dtypes;
    return FC_OK;
}

static fc_code read_models(const reader *r, const json_t *value) {
    bool malformed = false;
    r->recipe->models = value ? fc_json_strings(value, r->arena, &malformed) : NULL;
    return malformed                     ? bad(r, "\"models\" is not an array of strings")
           : value && !r->recipe->models ? fc_no_memory(r->err, r->recipe->label)
                                         : FC_OK;
}

static fc_code read_recipe(reader *r, const json_t *root) {
    static const char *const known[] = {"fsdpckpt", "schema", "description", "models",  "dtypes",
                                        "others",   "sizes",  "rules",       "$schema", NULL};
    const json_t *rules = json_object_get(root, "rules");
    const char *kind = json_string_value(json_object_get(root, "fsdpckpt"));
    if (!kind || strcmp(kind, "recipe") != 0 || json_integer_value(json_object_get(root, "schema")) != 1) {
        return bad(r, "not a recipe, which begins with \"fsdpckpt\": \"recipe\", \"schema\": 1");
    }
    if (!json_is_array(rules)) {
        return bad(r, "a recipe has \"rules\", an array; an example is %s", example);
    }
    FC_TRY(check_keys(r, root, known));
    FC_TRY(read_text(r, json_object_get(root, "description"), "description", &r->recipe->description));
    FC_TRY(read_models(r, json_object_get(root, "models")));
    FC_TRY(read_dtypes(r, json_object_get(root, "dtypes")));
    FC_TRY(read_others(r, json_object_get(root, "others")));
    FC_TRY(read_sizes(r, json_object_get(root, "sizes")));
    r->recipe->rules = fc_arena_calloc(r->arena, json_array_size(rules) + 1, sizeof *r->recipe->rules);
    FC_NEED(r->recipe->rules, r->err, r->recipe->label);
    for (size_t i = 0; i < json_array_size(rules); i++) {
        FC_TRY(read_rule(r, json_array_get(rules, i)));
    }
    return FC_OK;
}

/* ---- the other direction ---- */

/* Whether an operation of a reversed rule adds zeros, as far as the configuration tells. */
static bool pads(const reader *r, const fc_recipe_op *op) {
    int64_t before = 0, after = 1;
    const char *unknown;
    return op->kind == FC_OP_RESIZE &&
           (!op->left || fc_recipe_evaluate(r->recipe, op->left, &before, &unknown, NULL) != FC_OK ||
            fc_recipe_evaluate(r->recipe, op->right, &after, &unknown, NULL) != FC_OK || before < after);
}

/* Lists what a reversed recipe cannot restore: dtypes, which are those of its result only, and trimmed values. */
static fc_code list_lost(const reader *r) {
    for (size_t i = 0; i < r->recipe->nrules; i++) {
        const fc_recipe_rule *rule = &r->recipe->rules[i];
        for (size_t k = 0; k < rule->nops; k++) {
            FC_TRY(pads(r, &rule->ops[k]) ? add_lost(r, "what it trims of '", rule->to[0], "' (zeros)") : FC_OK);
        }
    }
    for (size_t i = 0; i < r->recipe->ndtypes; i++) {
        FC_TRY(add_lost(r, "the dtype of '", r->recipe->dtypes[i].glob, "'"));
    }
    r->recipe->ndtypes = 0;
    return FC_OK;
}

/* ---- entry points ---- */

static fc_code make(const char *label, const json_t *root, const fc_recipe_options *options, fc_arena *arena,
                    const fc_recipe **out, fc_error *err) {
    fc_recipe *recipe = fc_arena_calloc(arena, 1, sizeof *recipe);
    reader r = {.recipe = recipe, .arena = arena, .reverse = options && options->reverse, .err = err};
    FC_NEED(recipe && (recipe->label = fc_arena_strndup(arena, label, strlen(label))), err, label);
    recipe->headers_only = options && options->headers_only;
    FC_TRY(read_recipe(&r, root));
    if (options && options->config) {
        FC_TRY(fc_recipe_load_config(recipe, options->config, arena, err));
    }
    if (!options || !options->as_written) {
        FC_TRY(fc_recipe_place_offsets(recipe, arena, err));
        FC_TRY(r.reverse ? list_lost(&r) : FC_OK);
    }
    *out = recipe;
    return FC_OK;
}

fc_code fc_recipe_parse(const char *label, const char *text, size_t len, const fc_recipe_options *options,
                        fc_arena *arena, const fc_recipe **out, fc_error *err) {
    json_error_t wrong;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &wrong);
    *out = NULL;
    if (!root) {
        return fc_fail(err, FC_EUSAGE, "%s:%d:%d: not a recipe: %s", label, wrong.line, wrong.column, wrong.text);
    }
    fc_code rc = make(label, root, options, arena, out, err);
    json_decref(root);
    return rc;
}

fc_code fc_recipe_load(const char *name_or_path, const fc_recipe_options *options, fc_arena *arena,
                       const fc_recipe **out, fc_error *err) {
    json_t *root = NULL;
    char known[512] = "known are 'auto',";
    *out = NULL;
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s '%s'", s == fc_shipped_recipes ? "" : ",", s->name);
        if (strcmp(s->name, name_or_path) == 0) {
            return fc_recipe_parse(s->name, s->text, strlen(s->text), options, arena, out, err);
        }
    }
    FC_TRY(fc_check_named("recipe", "recipe", name_or_path, known, example, err));
    FC_TRY(fc_json_load(name_or_path, "a recipe", example, &root, err));
    fc_code rc = make(name_or_path, root, options, arena, out, err);
    json_decref(root);
    return rc;
}

const char *fc_recipe_description(const fc_recipe *recipe) {
    return recipe->description ? recipe->description : "";
}
