/*
 * The head that a folder of transformers ties to its embedding: see names.h.
 */
#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "io/path.h"
#include "plan/names.h"

#include <string.h>
#include <unistd.h>

/* The names of heads and embeddings in transformers: _tied_weights_keys, get_input_embeddings. */
static const char *const heads[] = {"lm_head.weight", "embed_out.weight"};
static const char *const embeddings[] = {"embed_tokens.weight", "wte.weight", "word_embeddings.weight",
                                         "embed_in.weight"};

/* Whether a name is one of the list, alone or as its last components. */
static bool ends_with_one_of(const char *name, const char *const *list, size_t count) {
    bool is = false;
    for (size_t i = 0; i < count && !is; i++) {
        const size_t n = strlen(name), m = strlen(list[i]);
        is = fc_ends_with(name, list[i]) && (n == m || name[n - m - 1] == '.');
    }
    return is;
}

bool fc_is_embedding_name(const char *name) {
    return ends_with_one_of(name, embeddings, sizeof embeddings / sizeof *embeddings);
}

bool fc_is_head_name(const char *name) {
    return ends_with_one_of(name, heads, sizeof heads / sizeof *heads);
}

bool fc_class_has_head(const char *name) {
    return strstr(name, "ForCausalLM") || strstr(name, "LMHeadModel") || strstr(name, "ForConditionalGeneration");
}

/* Whether a model of this configuration has a head, and does not say that it is a tensor of its own. */
static bool may_tie(const char *config, fc_arena *arena) {
    const char *file;
    json_t *root = NULL;
    fc_error ignored = {0};
    if (fc_json_load_config(config, arena, &file, &root, &ignored) != FC_OK) {
        return false; /* it belongs to another program */
    }
    const json_t *text = json_object_get(root, "text_config");
    const char *model = json_string_value(json_array_get(json_object_get(root, "architectures"), 0));
    const bool has_head = model && fc_class_has_head(model);
    const bool own = json_is_false(json_object_get(root, "tie_word_embeddings")) ||
                     json_is_false(json_object_get(text, "tie_word_embeddings"));
    json_decref(root);
    return has_head && !own;
}

/* Finds config.json in the folder `path`, or next to the file `path`. */
static fc_code find_config(const char *path, fc_arena *arena, const char **out, fc_error *err) {
    const int len = (int)(fc_base_name(path) - path);
    *out = fc_arena_printf(arena, "%s/config.json", path);
    if (*out && fc_access(*out, R_OK) != 0) {
        struct stat st;
        const bool is_file = fc_stat(path, &st) == 0 && S_ISREG(st.st_mode);
        *out = is_file ? fc_arena_printf(arena, "%.*sconfig.json", len, path) : "";
    }
    return *out ? FC_OK : fc_no_memory(err, path);
}

static size_t find_embedding(const fc_names *names) {
    for (size_t i = 0; i < names->count; i++) {
        if (fc_is_embedding_name(names->items[i].name)) {
            return i;
        }
    }
    return FC_NO_NAME;
}

fc_code fc_names_add_tied_head(fc_names *names, const fc_checkpoint *checkpoint, fc_arena *arena, fc_error *err) {
    const char *config;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        if (fc_names_find(names, heads[i]) != FC_NO_NAME) {
            return FC_OK;
        }
    }
    const size_t embedding = find_embedding(names);
    if (embedding == FC_NO_NAME) {
        return FC_OK;
    }
    FC_TRY(find_config(checkpoint->path, arena, &config, err));
    if (fc_access(config, R_OK) != 0 || !may_tie(config, arena)) {
        return FC_OK;
    }
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        FC_NEED(fc_name_table_put(names->table, heads[i], strlen(heads[i]), embedding) != FC_NO_NAME, err,
                checkpoint->path);
    }
    return FC_OK;
}
