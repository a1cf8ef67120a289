/*
 * The numbers of a model's config.json, with which a recipe computes sizes, and the kind of the model.
 */
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "recipe/recipe.h"

#include <string.h>

enum { LONGEST_TEXT = 64 }; /* of a text that stands for a choice, such as the name of an activation function */

/*
 * Counts the numbers of an object and of the objects in it, and copies them to `numbers` unless that is NULL. A text is
 * the number 1 with the text in its name: "hidden_act.relu2". @return false if out of memory.
 */
static bool list_numbers(const json_t *object, const char *prefix, fc_recipe_number *numbers, size_t *count,
                         fc_arena *arena, int depth) { // NOLINT(misc-no-recursion): two levels
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        const bool inner = json_is_object(value) && depth < 2;
        const char *name = fc_arena_printf(arena, "%s%s%s", prefix, key, inner ? "." : "");
        if (!name || (inner && !list_numbers(value, name, numbers, count, arena, depth + 1))) {
            return false;
        }
        const bool text = json_is_string(value) && json_string_length(value) <= LONGEST_TEXT;
        if (text && !(name = fc_arena_printf(arena, "%s.%s", name, json_string_value(value)))) {
            return false;
        }
        if (text || json_is_integer(value) || json_is_boolean(value)) {
            if (numbers) {
                numbers[*count] =
                    (fc_recipe_number){name, text || json_is_true(value) ? 1 : (int64_t)json_integer_value(value)};
            }
            ++*count;
        }
    }
    return true;
}

/* Finds the kind of the model, also that of the language model in a larger one, and the key that names it. */
static fc_code find_model(const fc_recipe *recipe, const json_t *root, fc_arena *arena, fc_recipe_config *config,
                          fc_error *err) {
    const json_t *text = json_object_get(root, "text_config");
    const char *model = json_string_value(json_object_get(text ? text : root, "model_type"));
    config->model_key = text ? "text_config.model_type" : "model_type";
    if (!model) {
        model = json_string_value(json_array_get(json_object_get(root, "architectures"), 0));
        config->model_key = "architectures";
    }
    config->model = model ? fc_arena_strndup(arena, model, strlen(model)) : NULL;
    config->model_key = config->model ? config->model_key : NULL;
    return model && !config->model ? fc_no_memory(err, recipe->label) : FC_OK;
}

fc_code fc_recipe_load_config(fc_recipe *recipe, const char *path, fc_arena *arena, fc_error *err) {
    json_t *root = NULL;
    fc_recipe_config *config = fc_arena_calloc(arena, 1, sizeof *config);
    FC_NEED(config, err, recipe->label);
    FC_TRY(fc_json_load_config(path, arena, &recipe->config_path, &root, err));
    size_t count = 0;
    bool listed = list_numbers(root, "", NULL, &count, arena, 0);
    fc_recipe_number *numbers = listed ? fc_arena_calloc(arena, count + 1, sizeof *numbers) : NULL;
    count = 0;
    listed = numbers && list_numbers(root, "", numbers, &count, arena, 0);
    *config = (fc_recipe_config){.numbers = numbers, .count = count};
    fc_code rc = listed ? find_model(recipe, root, arena, config, err) : fc_no_memory(err, recipe->label);
    json_decref(root);
    recipe->config = config;
    return rc;
}
