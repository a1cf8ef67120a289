/*
 * Gives a rank's parameters their names in the whole model. Each pipeline stage, and each of its chunks (`model0`,
 * `model1` … with virtual stages), numbers its layers from 0; the layers of all earlier chunks are added. Likewise each
 * expert-parallel rank numbers its experts from 0. A tied output layer gets the name of the embedding.
 */
#include "megatron/stages.h"

#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

/* Numbers the chunks in the order of the layers: first the first chunks of all stages, then the second ones. */
static size_t chunk_number(const fc_mg_reader *r, size_t chunk) {
    return chunk * (size_t)r->grid.stages + (size_t)r->grid.places[r->rank].stage;
}

static fc_mg_layers *layers_of(fc_mg_reader *r, const char *prefix, size_t length, bool make) {
    fc_arena *arena = r->checkpoint->arena;
    for (size_t i = 0; i < r->nlayers; i++) {
        if (strlen(r->layers[i].prefix) == length && memcmp(r->layers[i].prefix, prefix, length) == 0) {
            return &r->layers[i];
        }
    }
    if (!make || !fc_grow(&r->layers, &r->layers_capacity, r->nlayers + 1, sizeof *r->layers)) {
        return NULL;
    }
    fc_mg_layers *l = &r->layers[r->nlayers];
    l->prefix = fc_arena_strndup(arena, prefix, length);
    l->counts = fc_arena_calloc(arena, r->chunks * (size_t)r->grid.stages, sizeof *l->counts);
    r->nlayers += l->prefix && l->counts;
    return l->prefix && l->counts ? l : NULL;
}

fc_code fc_mg_count_layer(fc_mg_reader *r, const torch_leaf *leaf, size_t chunk) {
    size_t prefix, end;
    int64_t number;
    if (!fc_mg_layer(leaf->name, &prefix, &number, &end)) {
        return FC_OK;
    }
    fc_mg_layers *l = layers_of(r, leaf->name, prefix, true);
    FC_NEED(l, r->err, r->checkpoint->path);
    int64_t *count = &l->counts[chunk_number(r, chunk)];
    *count = number >= *count ? number + 1 : *count;
    return FC_OK;
}

/* Replaces the number in an element of a path. */
static const char *with_number(fc_arena *arena, const char *key, size_t digits, size_t end, int64_t number) {
    return fc_arena_printf(arena, "%.*s%" PRId64 "%s", (int)digits, key, number, key + end);
}

/* The number of layers in the chunks before this one. */
static int64_t layers_before(fc_mg_reader *r, const char *name, size_t prefix, size_t chunk) {
    const fc_mg_layers *l = layers_of(r, name, prefix, false);
    int64_t sum = 0;
    for (size_t i = 0; l && i < chunk_number(r, chunk); i++) {
        sum += l->counts[i];
    }
    return sum;
}

/* Gives the leaf a path of its own, with the numbers that layer and expert have in the whole model. */
static fc_code renumber(fc_mg_reader *r, torch_leaf *leaf, size_t chunk) {
    fc_arena *arena = r->checkpoint->arena;
    size_t start, end;
    int64_t number, layers = 0, experts = r->grid.places[r->rank].expert * r->local_experts;
    if (fc_mg_layer(leaf->name, &start, &number, &end)) {
        layers = layers_before(r, leaf->name, start, chunk);
    }
    if (layers == 0 && experts == 0) {
        return FC_OK;
    }
    fc_path_element *elements = fc_arena_copy(arena, leaf->path.elements, leaf->path.count, sizeof *elements);
    FC_NEED(elements, r->err, r->checkpoint->path);
    bool found = false;
    for (size_t i = 0; i < leaf->path.count; i++) {
        fc_path_element *e = &elements[i];
        if (!found && fc_mg_layer(e->key, &start, &number, &end)) {
            found = true;
            e->key = with_number(arena, e->key, start, end, number + layers);
        }
        if (e->key && fc_mg_expert_of(e->key, &start, &end, &number) == MG_ONE_EXPERT) {
            e->key = with_number(arena, e->key, start, end, number + experts);
        }
        FC_NEED(e->key, r->err, r->checkpoint->path);
    }
    leaf->path.elements = elements;
    leaf->name = fc_path_spell(arena, &leaf->path, '.');
    return leaf->name ? FC_OK : fc_mg_no_memory(r);
}

/* With tied embeddings and several stages, the last stage has a copy of the embedding's weight under another name. */
static fc_code name_tied(fc_mg_reader *r, torch_leaf *leaf) {
    static const fc_path_element core[] = {{.key = "model"}, {.key = "embedding.word_embeddings.weight"}};
    static const fc_path_element old[] = {{.key = "model"},
                                          {.key = "language_model"},
                                          {.key = "embedding"},
                                          {.key = "word_embeddings"},
                                          {.key = "weight"}};
    if (r->args.untied != 0 || r->grid.stages < 2) {
        return FC_OK;
    }
    if (strcmp(leaf->name, "model.output_layer.weight") == 0) {
        leaf->path = (fc_path){core, sizeof core / sizeof *core};
    } else if (strcmp(leaf->name, "model.word_embeddings_for_head.weight") == 0) {
        leaf->path = (fc_path){old, sizeof old / sizeof *old};
    } else {
        return FC_OK;
    }
    leaf->name = fc_path_spell(r->checkpoint->arena, &leaf->path, '.');
    return leaf->name ? FC_OK : fc_mg_no_memory(r);
}

fc_code fc_mg_rename(fc_mg_reader *r, torch_leaf *leaf, size_t chunk) {
    FC_TRY(renumber(r, leaf, chunk));
    return name_tied(r, leaf);
}
