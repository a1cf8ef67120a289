/*
 * Derives from a parameter's name the dimension along which tensor parallelism shards it, and its layer. The names are
 * those of megatron.core's modules and of Megatron-LM's older ones. Each class always shards in the same way:
 * ColumnParallelLinear and VocabParallelEmbedding by rows, RowParallelLinear by columns.
 */
#include "megatron/rules.h"

#include "base/file_name.h"

#include <string.h>

enum { MAX_LAYERS = 1 << 20 };

typedef struct rule {
    const char *parent; /* the end of the parent module's name; "" for any */
    const char *module;
    fc_mg_rule weight, bias;
    int dim; /* the sharded dimension of the weight; a bias has only one */
} rule;

static const rule rules[] = {
    {"", "word_embeddings", MG_SHARD, MG_UNKNOWN, 0},
    {"", "word_embeddings_for_head", MG_SHARD, MG_UNKNOWN, 0},
    {"", "output_layer", MG_SHARD, MG_SHARD, 0},
    {"", "linear_qkv", MG_SHARD, MG_SHARD, 0},
    {"", "linear_q", MG_SHARD, MG_SHARD, 0},
    {"", "linear_kv", MG_SHARD, MG_SHARD, 0},
    {"", "linear_q_proj", MG_SHARD, MG_SHARD, 0},
    {"", "linear_q_up_proj", MG_SHARD, MG_SHARD, 0},
    {"", "linear_kv_up_proj", MG_SHARD, MG_SHARD, 0},
    {"", "linear_proj", MG_SHARD, MG_COPY, 1},
    {"", "linear_fc1", MG_SHARD, MG_SHARD, 0},
    {"", "linear_fc2", MG_SHARD, MG_COPY, 1},
    {"", "query_key_value", MG_SHARD, MG_SHARD, 0},
    {"", "query", MG_SHARD, MG_SHARD, 0},
    {"", "key_value", MG_SHARD, MG_SHARD, 0},
    {"attention", "dense", MG_SHARD, MG_COPY, 1},
    {"", "dense_h_to_4h", MG_SHARD, MG_SHARD, 0},
    {"", "dense_4h_to_h", MG_SHARD, MG_COPY, 1},
    {"", "lm_head", MG_UNKNOWN, MG_SHARD, 0},
    {"", "position_embeddings", MG_COPY, MG_COPY, 0},
    {"", "tokentype_embeddings", MG_COPY, MG_COPY, 0},
    {"", "router", MG_COPY, MG_COPY, 0},
    {"", "eh_proj", MG_SHARD, MG_SHARD, 0},
};

static bool ends_in(const char *text, size_t length, const char *end) {
    size_t n = strlen(end);
    return length >= n && memcmp(text + length - n, end, n) == 0;
}

/* Whether the text is `what`, optionally followed by a number: TEGroupedMLP calls the experts "weight0", "weight1". */
static bool is(const char *text, const char *what) {
    size_t n = strlen(what);
    return strncmp(text, what, n) == 0 && text[n + strspn(text + n, "0123456789")] == '\0';
}

/* The length of a name of `length` bytes without its last element and dot. */
static size_t before_last(const char *name, size_t length) {
    while (length > 0 && name[length - 1] != '.') {
        length--;
    }
    return length > 0 ? length - 1 : 0;
}

fc_mg_sharding fc_mg_rule_of(const char *name) {
    const fc_mg_sharding copy = {MG_COPY, 0};
    size_t module_end = before_last(name, strlen(name)), parent_end = before_last(name, module_end);
    const char *module = parent_end ? name + parent_end + 1 : name, *leaf = module_end ? name + module_end + 1 : name;
    size_t length = (size_t)(name + module_end - module);
    bool weight = is(leaf, "weight"), bias = is(leaf, "bias");
    if (is(leaf, "layer_norm_weight") || is(leaf, "layer_norm_bias") ||
        ((weight || bias) && (ends_in(module, length, "norm") || ends_in(module, length, "layernorm")))) {
        return copy;
    }
    if (ends_in(name, strlen(name),
                ".experts.weight1")) { /* GroupedMLP stores the matrices of the experts transposed */
        return (fc_mg_sharding){MG_SHARD, 1};
    }
    if (ends_in(name, strlen(name), ".experts.weight2")) {
        return (fc_mg_sharding){MG_SHARD, 0};
    }
    for (size_t i = 0; (weight || bias) && i < sizeof rules / sizeof *rules; i++) {
        const rule *r = &rules[i];
        if (strlen(r->module) == length && memcmp(module, r->module, length) == 0 &&
            ends_in(name, parent_end, r->parent)) {
            return weight ? (fc_mg_sharding){r->weight, r->dim} : (fc_mg_sharding){r->bias, 0};
        }
    }
    return (fc_mg_sharding){MG_UNKNOWN, 0};
}

bool fc_mg_is_extra_state(const char *name) {
    const char *dot = strrchr(name, '.'), *leaf = dot ? dot + 1 : name;
    return is(leaf, "_extra_state");
}

const char *fc_mg_first_of_mlp(const char *name, const char **first, const char **second) {
    static const char *const pairs[][2] = {{".linear_fc1.", ".linear_fc2."},
                                           {".dense_h_to_4h.", ".dense_4h_to_h."},
                                           {".experts.weight1", ".experts.weight2"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const char *at = strstr(name, pairs[i][0]);
        if (at) {
            *first = pairs[i][0];
            *second = pairs[i][1];
            return at;
        }
    }
    return NULL;
}

bool fc_mg_layer(const char *key, size_t *prefix, int64_t *number, size_t *end) {
    static const char word[] = "layers.", mtp[] = "mtp.";
    for (const char *at = key; at && *at; at = strchr(at, '.'), at = at ? at + 1 : NULL) {
        if (strncmp(at, word, sizeof word - 1) != 0) {
            continue;
        }
        const char *digits = at + sizeof word - 1, *p = digits;
        const int64_t value = fc_take_number(&p, MAX_LAYERS);
        /* Layers of multi-token prediction are all on the last stage and keep their numbers. */
        bool predicts = ends_in(key, (size_t)(at - key), mtp);
        if (value < 0 || *p != '.' || predicts) {
            return false;
        }
        *prefix = (size_t)(digits - key);
        *number = value;
        *end = (size_t)(p - key);
        return true;
    }
    return false;
}
