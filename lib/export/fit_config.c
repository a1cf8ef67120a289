/*
 * Fits a model to a config.json alone, where no weights say how the model should become: the size of the vocabulary,
 * the number of layers, whether the head is tied to the embedding, whether weights are quantized.
 */
#include "base/file_name.h"
#include "export/fit.h"
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "plan/names.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The modules of transformers that are lists of a language model's layers. */
static const char *const layer_lists[] = {"model.layers.",
                                          "model.language_model.layers.",
                                          "language_model.model.layers.",
                                          "transformer.h.",
                                          "gpt_neox.layers.",
                                          "model.decoder.layers.",
                                          "backbone.layers.",
                                          "layers.",
                                          "language_model.layers.",
                                          "h."};

static const char *const layer_counts[] = {"num_hidden_layers", "n_layer", "num_layers", "n_layers"};

enum { MOST_DIFFERENCES = 8, MOST_CHECKED = 5 };

/* ---- the configuration ---- */

/* Finds a member of the configuration, or of the language model's part in it. */
static const json_t *member(const json_t *config, const char *name) {
    const json_t *value = json_object_get(config, name);
    return value ? value : json_object_get(json_object_get(config, "text_config"), name);
}

static void take_facts(const json_t *config, fc_fit_facts *facts) {
    const char *model = json_string_value(json_array_get(json_object_get(config, "architectures"), 0));
    const json_t *tie = member(config, "tie_word_embeddings");
    facts->vocabulary = json_integer_value(member(config, "vocab_size"));
    for (size_t i = 0; i < sizeof layer_counts / sizeof *layer_counts && facts->layers == 0; i++) {
        facts->layers = json_integer_value(member(config, layer_counts[i]));
    }
    const char *kind = json_string_value(json_object_get(config, "model_type"));
    facts->embd = kind && strcmp(kind, "gpt2") == 0 ? json_integer_value(json_object_get(config, "n_embd")) : 0;
    facts->extra_layers = json_integer_value(member(config, "num_nextn_predict_layers"));
    facts->tied = json_is_true(tie);
    facts->untied = json_is_false(tie);
    facts->has_head = model && fc_class_has_head(model);
    facts->quantized = json_object_size(member(config, "quantization_config")) > 0;
}

fc_code fc_fit_read_config(fc_fit *f) {
    json_t *config = NULL;
    const char *file;
    if (!f->reference->config) {
        return FC_OK;
    }
    FC_TRY(fc_json_load_config(f->reference->config, f->arena, &file, &config, f->err));
    take_facts(config, &f->facts);
    json_decref(config);
    return FC_OK;
}

/* ---- what was compared, and what differs ---- */

static void note_checked(fc_fit *f, const char *key) {
    f->checked[f->report->nchecked++] = key;
}

/* Adds a line, which is NULL if there is no memory for it. */
static fc_code add_difference(const fc_fit *f, const char *line) {
    FC_NEED(line, f->err, f->model->path);
    f->lines[f->report->ndifferences++] = line;
    return FC_OK;
}

/* ---- the vocabulary ---- */

static bool is_of_vocabulary(const fc_tensor *t) {
    return !t->object && t->ndim == 2 && (fc_is_embedding_name(t->name) || fc_is_head_name(t->name));
}

/* Whether a tensor is left out, because it repeats another one. */
static bool is_tied(const fc_fit *f, const fc_tensor *t) {
    bool is = false;
    for (size_t i = 0; i < f->report->ntied && !is; i++) {
        is = f->report->tied[i].name == t->name;
    }
    return is;
}

/* Rows beyond the vocabulary are padding where the embedding and the head have the same number of them. Elsewhere the
   model itself has them, as Llama 3.2 Vision has 8 more in its embedding. */
static fc_code fit_vocabulary(fc_fit *f) {
    const int64_t wanted = f->facts.vocabulary;
    int64_t rows = -1;
    bool alike = true;
    for (size_t i = 0; i < f->model->ntensors; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        if (is_of_vocabulary(t)) {
            alike = alike && (rows < 0 || rows == t->shape[0]);
            rows = rows < 0 || t->shape[0] < rows ? t->shape[0] : rows;
        }
    }
    if (wanted <= 0 || rows < 0) {
        return FC_OK;
    }
    note_checked(f, "vocab_size");
    for (size_t i = 0; i < f->model->ntensors && alike && rows > wanted; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        FC_TRY(is_of_vocabulary(t) && !is_tied(f, t) ? fc_fit_rows(f, t, wanted) : FC_OK);
    }
    return rows >= wanted ? FC_OK
                          : add_difference(f, fc_arena_printf(f->arena,
                                                              "the embedding or the head has %" PRId64
                                                              " rows, and vocab_size of config.json is %" PRId64,
                                                              rows, wanted));
}

/* ---- the head ---- */

static const fc_tensor *find_tensor(const fc_fit *f, bool (*is)(const char *name)) {
    for (size_t i = 0; i < f->model->ntensors; i++) {
        if (is_of_vocabulary(&f->model->tensors[i]) && is(f->model->tensors[i].name)) {
            return &f->model->tensors[i];
        }
    }
    return NULL;
}

/* A tied head is not stored, and must be the embedding. */
static fc_code fit_tied_head(fc_fit *f, const fc_tensor *head, const fc_tensor *embedding) {
    fc_name_table *other = fc_name_table_new(f->arena, 1);
    const size_t before = f->nrules;
    FC_NEED(other, f->err, f->model->path);
    fc_name_table_put(other, embedding->name, strlen(embedding->name), 0);
    const fc_export_shapes *shapes = fc_export_shapes_new(f->model, other, f->arena);
    FC_NEED(shapes, f->err, f->model->path);
    FC_TRY(fc_fit_twin(f, shapes, head, true));
    return f->nrules > before
               ? FC_OK
               : add_difference(f, fc_arena_printf(f->arena,
                                                   "%s is not equal to %s, but tie_word_embeddings of config.json "
                                                   "says that they are one tensor",
                                                   head->name, embedding->name));
}

static fc_code fit_head(fc_fit *f) {
    const fc_tensor *embedding = find_tensor(f, fc_is_embedding_name), *head = find_tensor(f, fc_is_head_name);
    if (!embedding || !f->facts.has_head || !(f->facts.tied || f->facts.untied)) {
        return FC_OK;
    }
    note_checked(f, "tie_word_embeddings");
    if (f->facts.tied) {
        return head ? fit_tied_head(f, head, embedding) : FC_OK;
    }
    return head ? FC_OK
                : add_difference(f,
                                 "the head, such as lm_head.weight, is missing: tie_word_embeddings of config.json is "
                                 "false");
}

/* ---- the layers ---- */

/* @return the number of the layer that a tensor of the list belongs to; -1: it belongs to none. */
static int64_t layer_of(const fc_tensor *t, const char *list) {
    const char *at = t->name;
    const int64_t layer = !t->object && fc_take_text(&at, list) ? fc_take_number(&at, INT32_MAX) : -1;
    return *at == '.' ? layer : -1;
}

/* Finds the list whose layers the model has. @return NULL: none of the known ones. */
static const char *find_layers(const fc_fit *f) {
    for (size_t l = 0; l < sizeof layer_lists / sizeof *layer_lists; l++) {
        for (size_t i = 0; i < f->model->ntensors; i++) {
            if (layer_of(&f->model->tensors[i], layer_lists[l]) >= 0) {
                return layer_lists[l];
            }
        }
    }
    return NULL;
}

static fc_code check_layers(fc_fit *f) {
    const int64_t wanted = f->facts.layers;
    const char *list = wanted > 0 ? find_layers(f) : NULL;
    int64_t most = -1, missing = 0;
    if (!list) {
        return FC_OK;
    }
    note_checked(f, "num_hidden_layers");
    bool *seen = calloc(f->model->ntensors + 1, sizeof *seen); /* a model has no more layers than tensors */
    FC_NEED(seen, f->err, f->model->path);
    for (size_t i = 0; i < f->model->ntensors; i++) {
        const int64_t layer = layer_of(&f->model->tensors[i], list);
        most = layer > most ? layer : most;
        if (layer >= 0 && (uint64_t)layer < f->model->ntensors) {
            seen[layer] = true;
        }
    }
    while ((uint64_t)missing < f->model->ntensors && seen[missing]) {
        missing++;
    }
    free(seen);
    if (missing <= most && missing < wanted) {
        return add_difference(f, fc_arena_printf(f->arena, "%s%" PRId64 " is missing: there are layers up to %" PRId64,
                                                 list, missing, most));
    }
    if (most + 1 < wanted || most + 1 > wanted + f->facts.extra_layers) {
        return add_difference(f, fc_arena_printf(f->arena, "%.*s has %" PRId64 " layers, and config.json says %" PRId64,
                                                 (int)strlen(list) - 1, list, most + 1, wanted));
    }
    return FC_OK;
}

/* ---- matrices of GPT-2 ---- */

/* GPT-2 of transformers has its matrices transposed, under the names of other programs' GPT-2, so names do not tell
   whether a recipe was needed. The one matrix of three times the width tells. */
static fc_code check_transposed(fc_fit *f) {
    for (size_t i = 0; i < f->model->ntensors && f->facts.embd > 0; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        if (t->object || t->ndim != 2 || !fc_ends_with(t->name, ".attn.c_attn.weight")) {
            continue;
        }
        note_checked(f, "n_embd");
        return t->shape[0] == f->facts.embd
                   ? FC_OK
                   : add_difference(f, fc_arena_printf(f->arena,
                                                       "%s has the shape [%" PRId64 ", %" PRId64
                                                       "], and transformers has [%" PRId64
                                                       ", …]: it is transposed once too often or too seldom; choose "
                                                       "another recipe, or none",
                                                       t->name, t->shape[0], t->shape[1], f->facts.embd));
    }
    return FC_OK;
}

/* ---- quantization ---- */

static fc_code check_quantized(fc_fit *f) {
    bool codes = false;
    for (size_t i = 0; i < f->model->ntensors; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        codes = codes || (!t->object && t->ndim > 1 && !fc_export_casts(t->dtype, FC_F32));
    }
    if (!f->facts.quantized || f->reference->dequantized) {
        return FC_OK;
    }
    note_checked(f, "quantization_config");
    return codes
               ? FC_OK
               : add_difference(f, "config.json has a quantization_config, but no weight is quantized: give the folder "
                                   "of the model that is not");
}

fc_code fc_fit_config(fc_fit *f) {
    f->lines = fc_arena_calloc(f->arena, MOST_DIFFERENCES, sizeof *f->lines);
    f->checked = fc_arena_calloc(f->arena, MOST_CHECKED, sizeof *f->checked);
    FC_NEED(f->lines && f->checked, f->err, f->model->path);
    f->report->differences = f->lines;
    f->report->checked = f->checked;
    FC_TRY(fit_head(f));
    FC_TRY(fit_vocabulary(f));
    FC_TRY(check_layers(f));
    FC_TRY(check_transposed(f));
    return check_quantized(f);
}
