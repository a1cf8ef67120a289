/*
 * Loads a tensor-parallel plan from a JSON file in the form of Hugging Face's base_model_tp_plan. People write these
 * files by hand, so every error names the pattern and the style.
 */
#include "fsdpckpt/layout.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "sharding/tp_plan.h"

#include <string.h>

/*
 * The styles of transformers (ALL_PARALLEL_STYLES, versions 4.48 to 5.23). Many differ only in how activations travel,
 * which does not affect a checkpoint: "_rep" and "_gather_output" gather the output, "local_" keeps plain tensors.
 */
static const struct {
    const char *name;
    fc_tp_style style; /* FC_TP_NONE: known, but its shards are not boxes */
    fc_tp_module module;
} styles[] = {
    {"colwise", FC_TP_COLWISE, FC_TP_BY_NAME},
    {"colwise_rep", FC_TP_COLWISE, FC_TP_BY_NAME},
    {"colwise_gather_output", FC_TP_COLWISE, FC_TP_BY_NAME},
    {"local_colwise", FC_TP_COLWISE, FC_TP_BY_NAME},
    {"rowwise", FC_TP_ROWWISE, FC_TP_BY_NAME},
    {"rowwise_rep", FC_TP_ROWWISE, FC_TP_BY_NAME},
    {"rowwise_split_input", FC_TP_ROWWISE, FC_TP_BY_NAME},
    {"local_rowwise", FC_TP_ROWWISE, FC_TP_BY_NAME},
    {"embedding_rowwise", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"embedding_colwise", FC_TP_COLWISE, FC_TP_EMBEDDING},
    {"grouped_gemm", FC_TP_COLWISE, FC_TP_EXPERTS},
    {"replicate", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"sequence_parallel", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"replicated_with_grad_allreduce", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"local", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"gather", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"moe_tp_experts", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"moe_identity_expert", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"ep_router", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"ep_dispatch_experts", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"all_reduce", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"local_params", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"mla_kv_a_proj", FC_TP_REPLICATE, FC_TP_LINEAR},
    /* Each rank holds a slice of gate next to a slice of up. These are two boxes, which no DTensor can describe. */
    {"packed_colwise", FC_TP_NONE, FC_TP_LINEAR},
    {"packed_rowwise", FC_TP_NONE, FC_TP_LINEAR},
    {"local_packed_colwise", FC_TP_NONE, FC_TP_LINEAR},
    {"local_packed_rowwise", FC_TP_NONE, FC_TP_LINEAR},
};

static fc_code style_of(const char *path, const char *pattern, const char *text, fc_tp_rule *rule, fc_error *err) {
    for (size_t i = 0; i < sizeof styles / sizeof *styles; i++) {
        if (strcmp(styles[i].name, text) != 0) {
            continue;
        }
        if (styles[i].style == FC_TP_NONE) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "%s: pattern \"%s\": the style \"%s\" interleaves the halves of a fused weight, so a rank "
                           "does not hold one box; use \"colwise\", \"rowwise\" or \"replicate\"",
                           path, pattern, text);
        }
        rule->style = styles[i].style;
        rule->module = styles[i].module;
        return FC_OK;
    }
    return fc_fail(err, FC_EUSAGE,
                   "%s: pattern \"%s\": unknown style \"%s\"; known are colwise, rowwise, embedding_colwise, "
                   "embedding_rowwise, sequence_parallel, replicate and their variants in transformers",
                   path, pattern, text);
}

/* Rejects empty components, which would match nothing and hide a typing error. */
static fc_code check_pattern(const char *path, const char *pattern, fc_error *err) {
    size_t len = strlen(pattern);
    if (len == 0 || pattern[0] == '.' || pattern[len - 1] == '.' || strstr(pattern, "..")) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: pattern \"%s\": a pattern must be module names joined by dots, such as "
                       "\"layers.*.self_attn.q_proj\"",
                       path, pattern);
    }
    return FC_OK;
}

static fc_code rules_of(const char *path, json_t *root, fc_arena *arena, const fc_tp_plan **plan, fc_error *err) {
    const char *key;
    json_t *value;
    size_t count = json_object_size(root), i = 0;
    fc_tp_rule *rules = fc_arena_calloc(arena, count, sizeof *rules);
    FC_NEED(rules, err, path);
    json_object_foreach(root, key, value) {
        FC_TRY(check_pattern(path, key, err));
        if (!json_is_string(value)) {
            return fc_fail(err, FC_EUSAGE, "%s: pattern \"%s\": the style must be a string such as \"colwise\"", path,
                           key);
        }
        FC_TRY(style_of(path, key, json_string_value(value), &rules[i], err));
        rules[i].pattern = fc_arena_strndup(arena, key, strlen(key));
        FC_NEED(rules[i++].pattern, err, path);
    }
    *plan = fc_tp_plan_make(path, rules, count, arena);
    return *plan ? FC_OK : fc_no_memory(err, path);
}

static fc_code load_file(const char *path, fc_arena *arena, const fc_tp_plan **out, fc_error *err) {
    json_t *root = NULL;
    static const char example[] = "{\"layers.*.self_attn.q_proj\": \"colwise\"}";
    FC_TRY(fc_check_named("TP plan", "plan", path, "known is 'auto'", example, err));
    fc_code code = fc_json_load(path, "a TP plan", example, &root, err);
    if (code != FC_OK) {
        return code == FC_EIO ? fc_context(err, code, "TP plan") : code;
    }
    if (json_object_size(root) == 0) {
        code = fc_fail(err, FC_EUSAGE, "%s: a TP plan must be an object such as %s", path, example);
    } else {
        code = rules_of(path, root, arena, out, err);
    }
    json_decref(root);
    return code;
}

fc_code fc_tp_plan_load(const char *name_or_path, fc_arena *arena, const fc_tp_plan **out, fc_error *err) {
    *out = NULL;
    if (!name_or_path || strcmp(name_or_path, "auto") == 0) {
        *out = fc_tp_plan_make("auto", fc_tp_auto_rules, fc_tp_auto_count, arena);
        return *out ? FC_OK : fc_no_memory(err, NULL);
    }
    fc_code code = load_file(name_or_path, arena, out, err);
    if (code != FC_OK) {
        *out = NULL;
    }
    return code;
}
