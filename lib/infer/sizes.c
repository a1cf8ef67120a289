/*
 * Numbers as sizes of the model: names for those that its config.json has, so that the recipe fits larger models.
 */
#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Sizes that a recipe may have, in the order in which they are tried. */
static const fc_recipe_size known_sizes[] = {
    {"heads", (const char *const[]){"num_attention_heads", "n_heads", "n_head", NULL}},
    {"kv_heads", (const char *const[]){"num_key_value_heads", "n_kv_heads", "heads", NULL}},
    {"head", (const char *const[]){"head_dim", "hidden_size / heads", "n_embd / heads", NULL}},
    {"experts", (const char *const[]){"num_experts", "num_local_experts", "n_routed_experts", NULL}},
    {"hidden", (const char *const[]){"hidden_size", "n_embd", NULL}},
    {"inner", (const char *const[]){"intermediate_size", NULL}},
    {"expert_inner", (const char *const[]){"moe_intermediate_size", NULL}},
    {"vocabulary", (const char *const[]){"vocab_size", NULL}},
    {"padded", (const char *const[]){"padded_vocab_size", "vocab_size", NULL}},
};

fc_code fc_search_sizes(fc_search *s, const char *config, fc_error *err) {
    const size_t count = sizeof known_sizes / sizeof *known_sizes;
    s->recipe.label = "the recipe that is sought";
    if (config) {
        FC_TRY(fc_recipe_load_config(&s->recipe, config, s->arena, err));
    }
    FC_NEED(fc_arena_grow(s->arena, &s->sizes, &s->size_capacity, 0, count, sizeof *s->sizes), err, NULL);
    memcpy(s->sizes, known_sizes, sizeof known_sizes);
    s->recipe.sizes = s->sizes;
    s->recipe.nsizes = count;
    return FC_OK;
}

int64_t fc_search_size(const fc_search *s, const char *name) {
    const char *unknown = NULL;
    int64_t value = 0;
    return s->recipe.config && fc_recipe_evaluate(&s->recipe, name, &value, &unknown, NULL) == FC_OK ? value : 0;
}

/* The name of a size that is only a number. */
static const char *plain_name(const fc_search *s, int64_t value) {
    static const char *const words[] = {"one", "two", "three", "four", "five", "six", "seven", "eight"};
    return value >= 1 && value <= 8 ? words[value - 1] : fc_arena_printf(s->arena, "size%" PRId64, value);
}

static const char *add_plain(fc_search *s, int64_t value) {
    const char *name = plain_name(s, value), **texts = fc_arena_calloc(s->arena, 2, sizeof *texts);
    if (!name || !texts) {
        return NULL;
    }
    if (fc_recipe_has_size(&s->recipe, name, strlen(name))) {
        return name;
    }
    texts[0] = fc_arena_printf(s->arena, "%" PRId64, value);
    if (!texts[0] || !fc_arena_grow(s->arena, &s->sizes, &s->size_capacity, s->recipe.nsizes, s->recipe.nsizes + 1,
                                    sizeof *s->sizes)) {
        return NULL;
    }
    s->recipe.sizes = s->sizes;
    s->sizes[s->recipe.nsizes++] = (fc_recipe_size){name, texts};
    return name;
}

const char *fc_search_axis(fc_search *s, int64_t value, const char *const *names) {
    for (; names && *names; names++) {
        if (fc_search_size(s, *names) == value) {
            return *names;
        }
    }
    return add_plain(s, value);
}

const char *fc_search_expression(fc_search *s, int64_t value) {
    static const char *const texts[] = {
        "heads / kv_heads", "heads * head",     "kv_heads * head", "2 * kv_heads * head", "kv_heads", "heads", "head",
        "expert_inner",     "2 * expert_inner", "inner",           "2 * inner",           "hidden"};
    for (size_t i = 0; value > 1 && i < sizeof texts / sizeof *texts; i++) {
        if (fc_search_size(s, texts[i]) == value) {
            return texts[i];
        }
    }
    return fc_arena_printf(s->arena, "%" PRId64, value);
}
