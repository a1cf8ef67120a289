/*
 * A user's wrap policy: a JSON file that maps patterns to true, false or options, for use as an fc_wrap_fn.
 */
#include "fsdpckpt/wrap_policy.h"

#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "wrap/module_tree.h"

#include <string.h>

typedef struct rule {
    const char *pattern;    /* of modules; NULL for a class rule */
    const char *classes[2]; /* one class, NULL-terminated; {NULL} for a pattern rule */
    fc_wrap_choice choice;
    const char *key; /* the key in the file */
    bool used;
} rule;

struct fc_wrap_file {
    const char *path;
    rule *rules;
    size_t count;
    fc_wrap_choice root;
    const char *const *fp32_classes;
    const fc_wrap_term *terms; /* NULL without "$policy" */
    size_t nterms;
};

static const char *const strategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                         "_HYBRID_SHARD_ZERO2"};
static const char *const prefetches[] = {"BACKWARD_PRE", "BACKWARD_POST"};

const char *fc_sharding_strategy_name(fc_sharding_strategy strategy) {
    return strategies[strategy];
}

/* The position in the file, for messages: the key of the rule, and its option. */
typedef struct reader {
    const char *path, *key, *option;
    fc_error *err;
} reader;

static fc_code wrong(const reader *r, const char *expected) {
    return fc_fail(r->err, FC_EUSAGE, "%s: \"%.200s\": \"%.64s\" must be %s", r->path, r->key, r->option, expected);
}

static int find_name(const json_t *value, const char *const *names, size_t count) {
    const char *text = json_string_value(value);
    for (size_t i = 0; text && i < count; i++) {
        if (strcmp(text, names[i]) == 0) {
            return (int)i;
        }
    }
    return -1;
}

static fc_code read_bool(const reader *r, const json_t *value, bool *out) {
    *out = json_is_true(value);
    return json_is_boolean(value) ? FC_OK : wrong(r, "true or false");
}

static fc_code read_dtype(const reader *r, const json_t *value, fc_dtype *out) {
    const char *name = json_string_value(value);
    *out = FC_OPAQUE;
    if (json_is_null(value)) {
        return FC_OK;
    }
    if (!name || !fc_dtype_find(name, strlen(name), out) || fc_dtype_get(*out)->cls != FC_CLASS_FLOAT) {
        return wrong(r, "null or a floating-point type such as \"bfloat16\"");
    }
    return FC_OK;
}

/* A member of MixedPrecision. */
static fc_code read_precision(reader *r, const json_t *value, fc_unit_options *out) {
    static const char *const dtypes[] = {"param_dtype", "reduce_dtype", "buffer_dtype"};
    static const char *const flags[] = {"keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"};
    fc_dtype *const dtype_fields[] = {&out->param_dtype, &out->reduce_dtype, &out->buffer_dtype};
    bool *const flag_fields[] = {&out->keep_low_precision_grads, &out->cast_forward_inputs,
                                 &out->no_cast_root_forward_inputs};
    for (int i = 0; i < 3; i++) {
        if (strcmp(r->option, dtypes[i]) == 0) {
            return read_dtype(r, value, dtype_fields[i]);
        }
        if (strcmp(r->option, flags[i]) == 0) {
            FC_TRY(read_bool(r, value, flag_fields[i]));
            *flag_fields[i] = *flag_fields[i] != (i == 2); /* the last is stored as its opposite */
            return FC_OK;
        }
    }
    r->option = "mixed_precision";
    return wrong(r, "an object of param_dtype, reduce_dtype, buffer_dtype, keep_low_precision_grads, "
                    "cast_forward_inputs and cast_root_forward_inputs");
}

static fc_code read_mixed_precision(reader *r, const json_t *value, fc_unit_options *out) {
    const char *key;
    json_t *member;
    out->mixed_precision = json_is_object(value);
    out->param_dtype = out->reduce_dtype = out->buffer_dtype = FC_OPAQUE;
    if (!json_is_object(value) && !json_is_null(value)) {
        return wrong(r, "null or an object such as {\"param_dtype\": \"bfloat16\"}");
    }
    json_object_foreach((json_t *)value, key, member) {
        r->option = key;
        FC_TRY(read_precision(r, member, out));
    }
    /* As in FullyShardedDataParallel, gradients are by default reduced in the type in which they were computed. */
    out->reduce_dtype = out->reduce_dtype == FC_OPAQUE ? out->param_dtype : out->reduce_dtype;
    return FC_OK;
}

static fc_code read_option(reader *r, const json_t *value, fc_wrap_choice *choice) {
    fc_unit_options *o = &choice->options;
    int i;
    if (strcmp(r->option, "sharding_strategy") == 0) {
        choice->set |= FC_UNIT_SET_STRATEGY;
        i = find_name(value, strategies, 5);
        o->strategy = (fc_sharding_strategy)(i < 0 ? 0 : i);
        return i < 0 ? wrong(r, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2") : FC_OK;
    }
    if (strcmp(r->option, "backward_prefetch") == 0) {
        choice->set |= FC_UNIT_SET_PREFETCH;
        i = json_is_null(value) ? (int)FC_BACKWARD_PREFETCH_NONE : find_name(value, prefetches, 2);
        o->prefetch = (fc_backward_prefetch)(i < 0 ? 0 : i);
        return i < 0 ? wrong(r, "BACKWARD_PRE, BACKWARD_POST or null") : FC_OK;
    }
    if (strcmp(r->option, "mixed_precision") == 0) {
        choice->set |= FC_UNIT_SET_MIXED_PRECISION;
        return read_mixed_precision(r, value, o);
    }
    if (strcmp(r->option, "use_orig_params") == 0) {
        choice->set |= FC_UNIT_SET_USE_ORIG_PARAMS;
        return read_bool(r, value, &o->use_orig_params);
    }
    if (strcmp(r->option, "cpu_offload") == 0) {
        choice->set |= FC_UNIT_SET_CPU_OFFLOAD;
        return read_bool(r, value, &o->cpu_offload);
    }
    if (strcmp(r->option, "forward_prefetch") == 0) {
        choice->set |= FC_UNIT_SET_FORWARD_PREFETCH;
        return read_bool(r, value, &o->forward_prefetch);
    }
    return fc_fail(r->err, FC_EUSAGE,
                   "%s: \"%.200s\": unknown option \"%.64s\"; known are sharding_strategy, mixed_precision, "
                   "use_orig_params, cpu_offload, backward_prefetch and forward_prefetch",
                   r->path, r->key, r->option);
}

/* As in CustomPolicy, an empty dict means false. */
static fc_code read_choice(reader *r, const json_t *value, fc_wrap_choice *choice) {
    const char *key;
    json_t *member;
    if (!json_is_boolean(value) && !json_is_object(value)) {
        return fc_fail(r->err, FC_EUSAGE, "%s: \"%.200s\" must be true, false or an object of options", r->path,
                       r->key);
    }
    choice->wrap = json_is_true(value) || json_object_size(value) > 0;
    json_object_foreach((json_t *)value, key, member) {
        r->option = key;
        FC_TRY(read_option(r, member, choice));
    }
    return FC_OK;
}

static fc_code read_rule(reader *r, const json_t *value, fc_arena *arena, fc_wrap_file *file) {
    rule *one = &file->rules[file->count];
    one->key = fc_arena_strndup(arena, r->key, strlen(r->key));
    FC_NEED(one->key, r->err, r->path);
    if (strncmp(one->key, "class:", 6) == 0) {
        one->classes[0] = one->key + 6;
    } else {
        one->pattern = one->key;
    }
    file->count++;
    return read_choice(r, value, &one->choice);
}

static fc_code read_terms(reader *r, const json_t *value, fc_arena *arena, fc_wrap_file *file) {
    const char *text = json_string_value(value);
    if (!text) {
        return fc_fail(r->err, FC_EUSAGE, "%s: \"$policy\" must be a string such as \"size:100M+class:Embedding\"",
                       r->path);
    }
    FC_TRY_CONTEXT(fc_wrap_terms_parse(text, arena, &file->terms, &file->nterms, r->err), r->err, "%s", r->path);
    return FC_OK;
}

static fc_code read_member(reader *r, const json_t *value, fc_arena *arena, fc_wrap_file *file) {
    if (r->key[0] != '$') {
        return read_rule(r, value, arena, file);
    }
    if (strcmp(r->key, "$root") == 0) {
        return read_choice(r, value, &file->root);
    }
    if (strcmp(r->key, "$fp32_classes") == 0) {
        bool malformed;
        file->fp32_classes = fc_json_strings(value, arena, &malformed);
        if (file->fp32_classes) {
            return FC_OK;
        }
        return malformed ? fc_fail(r->err, FC_EUSAGE, "%s: \"$fp32_classes\" must be an array of classes", r->path)
                         : fc_no_memory(r->err, r->path);
    }
    if (strcmp(r->key, "$policy") == 0) {
        return read_terms(r, value, arena, file);
    }
    return fc_fail(r->err, FC_EUSAGE, "%s: unknown member \"%.64s\"; known are $root, $policy and $fp32_classes",
                   r->path, r->key);
}

fc_code fc_wrap_file_load(const char *path, fc_arena *arena, fc_wrap_file **out, fc_error *err) {
    json_t *root = NULL, *value;
    reader r = {.path = path, .err = err};
    *out = NULL;
    FC_TRY(fc_json_load(path, "a wrap policy", "{\"layers.*\": true}", &root, err));
    fc_code rc = FC_OK;
    fc_wrap_file *file = fc_arena_calloc(arena, 1, sizeof *file);
    rule *rules = fc_arena_calloc(arena, json_object_size(root) + 1, sizeof *rules);
    FC_TRY_GOTO(file && rules ? FC_OK : fc_no_memory(err, path), rc, out);
    *file = (fc_wrap_file){.path = path, .rules = rules};
    json_object_foreach(root, r.key, value) {
        FC_TRY_GOTO(read_member(&r, value, arena, file), rc, out);
    }
    if (file->fp32_classes && !file->root.options.mixed_precision) {
        rc = fc_fail(err, FC_EUSAGE, "%s: \"$fp32_classes\" needs \"mixed_precision\" in \"$root\"", path);
        goto out;
    }
    if (file->terms && file->count > 0) {
        rc = fc_fail(err, FC_EUSAGE, "%s: has \"$policy\" and patterns; give one of them", path);
        goto out;
    }
    *out = file;
out:
    json_decref(root);
    return rc;
}

const fc_unit_options *fc_wrap_file_root(const fc_wrap_file *file) {
    return &file->root.options;
}

const fc_wrap_term *fc_wrap_file_terms(const fc_wrap_file *file, size_t *count) {
    *count = file->nterms;
    return file->terms;
}

/* MixedPrecision._module_classes_to_ignore is (_BatchNorm,). Its subclasses are listed because a file of classes may
 * name a module's own class only. */
const char *const *fc_wrap_file_fp32_classes(const fc_wrap_file *file) {
    static const char *const none[] = {NULL}, *const norms[] = {"_BatchNorm",      "BatchNorm1d",     "BatchNorm2d",
                                                                "BatchNorm3d",     "SyncBatchNorm",   "LazyBatchNorm1d",
                                                                "LazyBatchNorm2d", "LazyBatchNorm3d", NULL};
    if (!file->root.options.mixed_precision) {
        return none;
    }
    return file->fp32_classes ? file->fp32_classes : norms;
}

fc_code fc_wrap_file_fn(const fc_module_tree *tree, uint32_t m, void *user, fc_wrap_choice *choice, fc_error *err) {
    fc_wrap_file *file = user;
    const fc_module *module = &tree->modules[m];
    fc_pattern_fit best = {0, 0};
    const rule *by_class = NULL;
    (void)err;
    for (size_t i = 0; i < file->count && m > 0; i++) {
        rule *r = &file->rules[i];
        bool fits = r->pattern ? fc_pattern_fits(r->pattern, module->fqn) : fc_module_is_instance(module, r->classes);
        r->used = r->used || fits;
        if (fits && r->pattern && fc_pattern_is_better(r->pattern, &best)) {
            *choice = r->choice;
        } else if (fits && !r->pattern && !by_class) {
            by_class = r;
        }
    }
    if (best.components == 0 && by_class) {
        *choice = by_class->choice;
    }
    return FC_OK;
}

size_t fc_wrap_file_idle(const fc_wrap_file *file, const char **first) {
    size_t idle = 0;
    *first = NULL;
    for (size_t i = 0; i < file->count; i++) {
        if (!file->rules[i].used) {
            *first = idle++ == 0 ? file->rules[i].key : *first;
        }
    }
    return idle;
}
