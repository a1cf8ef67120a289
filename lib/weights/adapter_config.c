/*
 * Reads adapter_config.json: see adapter_config.h. rank_pattern and alpha_pattern have regular expressions in Python's
 * syntax, which are translated to POSIX's.
 */
#include "weights/adapter_config.h"

#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "io/path.h"
#include "plan/regex_size.h"

#include <ctype.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

/* ---- regular expressions ---- */

/* What a class such as \d means, outside and inside of brackets. */
static const struct {
    char letter;
    const char *outside, *inside;
} classes[] = {{'d', "[0-9]", "0-9"}, {'w', "[A-Za-z0-9_]", "A-Za-z0-9_"}, {'s', "[[:space:]]", "[:space:]"}};

typedef struct translator {
    const char *at;
    char *out;
    bool brackets; /* within [...] */
    bool repeated; /* the last thing was a repetition, after which ? means "as few as possible" */
} translator;

static void put(translator *t, const char *text) {
    const size_t len = strlen(text);
    memcpy(t->out, text, len);
    t->out += len;
}

/* Translates what follows a backslash. @return false for what POSIX lacks. */
static bool escape(translator *t) {
    const char c = *t->at++;
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        if (c == classes[i].letter) {
            put(t, t->brackets ? classes[i].inside : classes[i].outside);
            return true;
        }
    }
    if (c == '\0' || isalnum((unsigned char)c)) {
        return false;
    }
    if (!t->brackets) {
        *t->out++ = '\\';
    }
    *t->out++ = c;
    return !t->brackets || !strchr("]^-\\", c); /* which POSIX cannot escape there */
}

static bool translate_one(translator *t) {
    const char c = *t->at++;
    const bool was = t->repeated;
    t->repeated = !t->brackets && strchr("*+?}", c) != NULL;
    if (c == '\\') {
        return escape(t);
    }
    if (!t->brackets && c == '(' && *t->at == '?') {
        if (t->at[1] != ':') {
            return false;
        }
        t->at += 2;
    } else if (c == '?' && was) { /* it changes what is found, but not whether all of the name matches */
        t->repeated = false;
        return true;
    }
    t->brackets = t->brackets ? c != ']' : c == '[';
    *t->out++ = c;
    return true;
}

/* @return the POSIX expression of a pattern that matches the end of a module's name, or NULL with the reason in err. */
static const char *translate(const char *path, const char *pattern, fc_arena *arena, fc_error *err) {
    static const char before[] = "^(.*\\.)?(", after[] = ")$";
    char *text = fc_arena_alloc(arena, sizeof before + sizeof after + 16 * (strlen(pattern) + 1));
    translator t = {.at = pattern, .out = text};
    bool good = true;
    if (!text) {
        fc_no_memory(err, path);
        return NULL;
    }
    put(&t, before);
    while (good && *t.at) {
        good = translate_one(&t);
    }
    put(&t, after);
    *t.out = '\0';
    if (!good || !fc_regex_is_small(text)) {
        fc_fail(err, FC_EUNSUPPORTED, "%s: the pattern '%s' is not supported: it has no equal POSIX expression", path,
                pattern);
        return NULL;
    }
    return text;
}

/* ---- the file ---- */

static fc_code read_patterns(const fc_adapter_config *c, const json_t *object, fc_arena *arena,
                             fc_adapter_pattern **out, size_t *count, fc_error *err) {
    const char *key;
    json_t *value;
    *out = fc_arena_calloc(arena, json_object_size(object) + 1, sizeof **out);
    FC_NEED(*out, err, c->path);
    json_object_foreach((json_t *)object, key, value) {
        const char *text = fc_arena_strndup(arena, key, strlen(key)), *regex = NULL;
        FC_NEED(text, err, c->path);
        if (!fc_adapter_pattern_is_plain(text) && !(regex = translate(c->path, key, arena, err))) {
            return err->code;
        }
        (*out)[(*count)++] = (fc_adapter_pattern){text, regex, json_number_value(value)};
    }
    return FC_OK;
}

/* Whether a member says anything but "no". */
static bool is_set(const json_t *value) {
    return value && !json_is_null(value) && !json_is_false(value) &&
           !(json_is_array(value) && json_array_size(value) == 0) &&
           !(json_is_object(value) && json_object_size(value) == 0);
}

/* Members with which weights are not base + scale × B × A, or not only. */
static const struct {
    const char *key, *what;
} refused[] = {
    {"use_dora", "DoRA, which also scales each column"},
    {"use_qalora", "QALoRA, which pools the input"},
    {"use_bdlora", "BD-LoRA, whose factors are block-diagonal"},
    {"arrow_config", "Arrow, which routes between adapters"},
    {"alora_invocation_tokens", "activated LoRA, which applies from some token on"},
    {"layer_replication", "replicated layers, which the base model does not have"},
    {"lora_bias", "LoRA with biases (lora_bias)"},
    {"trainable_token_indices", "trained tokens (trainable_token_indices)"},
    {"kasa_config", "KaSA, which changes the base weights"},
    {"monteclora_config", "MonteCLoRA, which samples"},
};

/* Initializations that change the base weights, on which the adapter was then trained. */
static bool changes_base(const json_t *how) {
    static const char *const harmless[] = {"gaussian", "eva", "orthogonal"};
    for (size_t i = 0; json_is_string(how) && i < sizeof harmless / sizeof *harmless; i++) {
        if (strcmp(json_string_value(how), harmless[i]) == 0) {
            return false;
        }
    }
    return json_is_string(how);
}

static fc_code check_kind(const char *path, const json_t *root, fc_error *err) {
    const json_t *type = json_object_get(root, "peft_type"), *init = json_object_get(root, "init_lora_weights");
    if (!json_is_string(type) || strcmp(json_string_value(type), "LORA") != 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: an adapter of type %s; only LORA can be merged", path,
                       json_is_string(type) ? json_string_value(type) : "unknown");
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (is_set(json_object_get(root, refused[i].key))) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s: %s cannot be merged", path, refused[i].what);
        }
    }
    return changes_base(init) ? fc_fail(err, FC_EUNSUPPORTED,
                                        "%s: init_lora_weights is %s, which changes the base weights; convert the "
                                        "adapter with PEFT's path_initial_model_for_weight_conversion first",
                                        path, json_string_value(init))
                              : FC_OK;
}

static fc_code read_parameters(const json_t *list, fc_arena *arena, fc_adapter_config *c, fc_error *err) {
    c->parameters = fc_arena_calloc(arena, json_array_size(list) + 1, sizeof *c->parameters);
    for (size_t i = 0; c->parameters && i < json_array_size(list); i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text) {
            return fc_fail(err, FC_EUSAGE, "%s: target_parameters has a member that is not a string", c->path);
        }
        c->parameters[c->nparameters] = fc_arena_strndup(arena, text, strlen(text));
        FC_NEED(c->parameters[c->nparameters++], err, c->path);
    }
    return c->parameters ? FC_OK : fc_no_memory(err, c->path);
}

static fc_code read_all(const json_t *root, fc_arena *arena, fc_adapter_config *c, fc_error *err) {
    FC_TRY(check_kind(c->path, root, err));
    FC_TRY(read_parameters(json_object_get(root, "target_parameters"), arena, c, err));
    c->rank = json_number_value(json_object_get(root, "r"));
    c->alpha = json_number_value(json_object_get(root, "lora_alpha"));
    c->rank_stabilized = json_is_true(json_object_get(root, "use_rslora"));
    c->transposed = json_is_true(json_object_get(root, "fan_in_fan_out"));
    if (!(c->rank >= 1) || !isfinite(c->alpha) || !json_is_number(json_object_get(root, "lora_alpha"))) {
        return fc_fail(err, FC_EUSAGE, "%s: has no rank (r) or no lora_alpha", c->path);
    }
    FC_TRY(read_patterns(c, json_object_get(root, "rank_pattern"), arena, &c->ranks, &c->nranks, err));
    return read_patterns(c, json_object_get(root, "alpha_pattern"), arena, &c->alphas, &c->nalphas, err);
}

fc_code fc_adapter_config_load(const char *folder, fc_arena *arena, fc_adapter_config *out, fc_error *err) {
    json_t *root = NULL;
    struct stat st;
    const bool file = fc_stat(folder, &st) == 0 && !S_ISDIR(st.st_mode);
    *out = (fc_adapter_config){.path = fc_arena_printf(arena, "%s%s", folder, file ? "" : "/adapter_config.json")};
    FC_NEED(out->path, err, folder);
    FC_TRY(
        fc_json_load(out->path, "the configuration of an adapter", "{\"peft_type\": \"LORA\", \"r\": 16}", &root, err));
    const fc_code rc = read_all(root, arena, out, err);
    json_decref(root);
    return rc;
}

/* Sets the scales. `ranks` and `alphas` have those that are no exceptions. */
static fc_code find_scales(const fc_adapter_config *c, const char *const *names, double *ranks, double *alphas,
                           fc_adapter_module *modules, size_t count, fc_error *err) {
    FC_TRY(fc_adapter_patterns_apply(c->path, c->ranks, c->nranks, names, count, ranks, err));
    FC_TRY(fc_adapter_patterns_apply(c->path, c->alphas, c->nalphas, names, count, alphas, err));
    for (size_t i = 0; i < count; i++) {
        if (ranks[i] != (double)modules[i].rank) {
            return fc_fail(err, FC_EUSAGE, "%s: the rank of %.256s is %g, but its lora_A has %lld rows", c->path,
                           names[i], ranks[i], (long long)modules[i].rank);
        }
        modules[i].scale = alphas[i] / (c->rank_stabilized ? sqrt(ranks[i]) : ranks[i]);
    }
    return FC_OK;
}

fc_code fc_adapter_scales(const fc_adapter_config *c, fc_adapter_module *modules, size_t count, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    const char **names = arena ? fc_arena_calloc(arena, count + 1, sizeof *names) : NULL;
    double *numbers = names ? fc_arena_calloc(arena, 2 * count + 1, sizeof *numbers) : NULL;
    for (size_t i = 0; numbers && i < count; i++) {
        names[i] = modules[i].name;
        numbers[i] = c->rank;
        numbers[count + i] = c->alpha;
    }
    const fc_code rc =
        numbers ? find_scales(c, names, numbers, numbers + count, modules, count, err) : fc_no_memory(err, c->path);
    fc_arena_free(arena);
    return rc;
}
