/*
 * Computes the sizes of a recipe: expressions over the model's configuration. It parses by recursive descent and
 * computes in 64 bits, with checks for overflow. A division must be exact.
 */
#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"

#include <ctype.h>
#include <string.h>

enum { MOST_NESTED = 16, MOST_NAMES = 10000 };

typedef struct parser {
    const fc_recipe *recipe;
    const char *text, *at;
    const char *unknown; /* the first name without a value */
    int depth;           /* of parentheses and of sizes within sizes */
    int *names;          /* that were looked up, also in sizes within sizes: their number can double at each level */
    fc_error *err;
} parser;

static fc_code evaluate(parser *p, const char *text, int64_t *out);

static fc_code wrong(const parser *p, const char *why) {
    return fc_fail(p->err, FC_EUSAGE, "%s: expression '%s': %s", p->recipe->label, p->text, why);
}

static char peek(parser *p) {
    while (*p->at == ' ') {
        p->at++;
    }
    return *p->at;
}

static bool take_token(parser *p, const char *token) {
    peek(p);
    size_t len = strlen(token);
    if (strncmp(p->at, token, len) != 0) {
        return false;
    }
    p->at += len;
    return true;
}

static const fc_recipe_size *find_size(const fc_recipe *recipe, const char *name, size_t len) {
    for (size_t i = 0; i < recipe->nsizes; i++) {
        if (strlen(recipe->sizes[i].name) == len && memcmp(recipe->sizes[i].name, name, len) == 0) {
            return &recipe->sizes[i];
        }
    }
    return NULL;
}

bool fc_recipe_has_size(const fc_recipe *recipe, const char *name, size_t len) {
    return find_size(recipe, name, len) != NULL;
}

/* The first alternative whose names are known. */
static fc_code evaluate_size(parser *p, const fc_recipe_size *size, int64_t *out) {
    fc_code rc = wrong(p, "it has no alternatives");
    for (const char *const *e = size->expressions; *e; e++) {
        p->unknown = NULL;
        rc = evaluate(p, *e, out);
        if (rc == FC_OK || !p->unknown) {
            return rc;
        }
    }
    return rc;
}

static fc_code parse_name(parser *p, int64_t *out) {
    const char *name = p->at;
    if (++*p->names > MOST_NAMES) {
        return wrong(p, "its sizes refer to each other too often");
    }
    while (isalnum((unsigned char)*p->at) || *p->at == '_' || *p->at == '.') {
        p->at++;
    }
    const size_t len = (size_t)(p->at - name);
    const fc_recipe_size *size = find_size(p->recipe, name, len);
    if (size) {
        return evaluate_size(p, size, out);
    }
    const fc_recipe_config *config = p->recipe->config;
    for (size_t i = 0; config && i < config->count; i++) {
        if (strlen(config->numbers[i].name) == len && memcmp(config->numbers[i].name, name, len) == 0) {
            *out = config->numbers[i].value;
            return FC_OK;
        }
    }
    p->unknown = name;
    fc_code rc =
        fc_fail(p->err, FC_EUSAGE, "%s: needs '%.*s' of the model's config.json%s%s%s", p->recipe->label, (int)len,
                name, p->recipe->config_path ? ", which " : "", p->recipe->config_path ? p->recipe->config_path : "",
                p->recipe->config_path ? " does not have" : "");
    return p->recipe->config_path ? rc : fc_advise(p->err, rc, FC_HINT_CONFIG, NULL);
}

static fc_code parse_number(parser *p, int64_t *out) {
    *out = 0;
    for (; isdigit((unsigned char)*p->at); p->at++) {
        if (!fc_mul_i64(*out, 10, out) || !fc_add_i64(*out, *p->at - '0', out)) {
            return wrong(p, "a number exceeds 64 bits");
        }
    }
    return FC_OK;
}

static fc_code parse_equality(parser *p, int64_t *out);

static fc_code parse_atom(parser *p, int64_t *out) { // NOLINT(misc-no-recursion): as deep as the text nests
    if (take_token(p, "(")) {
        if (++p->depth > MOST_NESTED) {
            return wrong(p, "it is nested too deeply");
        }
        FC_TRY(parse_equality(p, out));
        p->depth--;
        return take_token(p, ")") ? FC_OK : wrong(p, "a ')' is missing");
    }
    if (peek(p) == '!' && p->at[1] != '=') {
        p->at++;
        if (++p->depth > MOST_NESTED) {
            return wrong(p, "it is nested too deeply");
        }
        FC_TRY(parse_atom(p, out));
        p->depth--;
        *out = *out == 0;
        return FC_OK;
    }
    if (isdigit((unsigned char)peek(p))) {
        return parse_number(p, out);
    }
    return isalpha((unsigned char)*p->at) || *p->at == '_' ? parse_name(p, out)
                                                           : wrong(p, "a number or name is missing");
}

static fc_code parse_product(parser *p, int64_t *out) { // NOLINT(misc-no-recursion)
    FC_TRY(parse_atom(p, out));
    for (;;) {
        int64_t right;
        if (take_token(p, "*")) {
            FC_TRY(parse_atom(p, &right));
            if (!fc_mul_i64(*out, right, out)) {
                return wrong(p, "it exceeds 64 bits");
            }
        } else if (take_token(p, "/")) {
            FC_TRY(parse_atom(p, &right));
            if (right <= 0 || *out % right != 0) {
                return fc_fail(p->err, FC_EUSAGE, "%s: expression '%s': %lld cannot be divided by %lld",
                               p->recipe->label, p->text, (long long)*out, (long long)right);
            }
            *out /= right;
        } else {
            return FC_OK;
        }
    }
}

static fc_code parse_sum(parser *p, int64_t *out) { // NOLINT(misc-no-recursion)
    FC_TRY(parse_product(p, out));
    while (peek(p) == '+' || *p->at == '-') {
        int64_t right, sign = *p->at++ == '-' ? -1 : 1;
        FC_TRY(parse_product(p, &right));
        if (!fc_mul_i64(right, sign, &right) || !fc_add_i64(*out, right, out)) {
            return wrong(p, "it exceeds 64 bits");
        }
    }
    return FC_OK;
}

static fc_code parse_equality(parser *p, int64_t *out) { // NOLINT(misc-no-recursion)
    FC_TRY(parse_sum(p, out));
    bool equal = take_token(p, "==");
    if (equal || take_token(p, "!=")) {
        int64_t right;
        FC_TRY(parse_sum(p, &right));
        *out = (*out == right) == equal;
    }
    return FC_OK;
}

/* Evaluates `text` with the depth and the unknown name of `p`. */
static fc_code evaluate(parser *p, const char *text, int64_t *out) { // NOLINT(misc-no-recursion)
    parser inner = {
        .recipe = p->recipe, .text = text, .at = text, .depth = p->depth + 1, .names = p->names, .err = p->err};
    if (inner.depth > MOST_NESTED) {
        return wrong(p, "its sizes are defined by themselves, or nested too deeply");
    }
    fc_code rc = parse_equality(&inner, out);
    if (rc == FC_OK && peek(&inner)) {
        rc = wrong(&inner, "it goes on after its end");
    }
    p->unknown = inner.unknown;
    return rc;
}

fc_code fc_recipe_evaluate(const fc_recipe *recipe, const char *expression, int64_t *out, const char **unknown,
                           fc_error *err) {
    int names = 0;
    fc_error failed = {.code = FC_OK}; /* also of alternatives that another one replaces */
    parser p = {.recipe = recipe, .text = expression, .at = expression, .names = &names, .err = &failed};
    fc_code rc = evaluate(&p, expression, out);
    *unknown = p.unknown;
    if (rc != FC_OK && err) {
        *err = failed;
    }
    return rc;
}

fc_code fc_recipe_evaluate_known(const fc_recipe *recipe, const char *expression, int64_t *out, bool *known,
                                 fc_error *err) {
    const char *unknown = NULL;
    fc_error failed = {.code = FC_OK};
    fc_code rc = fc_recipe_evaluate(recipe, expression, out, &unknown, &failed);
    *known = rc == FC_OK;
    if (rc != FC_OK && !unknown && err) {
        *err = failed;
    }
    return unknown ? FC_OK : rc;
}
