/*
 * Fuzzes recipes with their expressions and patterns. If one loads, it is applied to tensors in memory. Every chunk of
 * the result is within its tensor and is read.
 */
#include "fsdpckpt/memory.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/recipe.h"
#include "fsdpckpt/select.h"
#include "recipe/recipe.h"

#include "fuzz.h"

enum { ROWS = 8, COLUMNS = 6 };

static float values[ROWS * COLUMNS];

static fc_checkpoint *make_source(void) {
    static const char *const names[] = {
        "tok_embeddings.weight",        "layers.0.attention.wq.weight",       "layers.0.attention.wk.weight",
        "layers.1.attention.wq.weight", "transformer.h.0.attn.c_attn.weight", "norm.weight"};
    static const int64_t shape[] = {ROWS, COLUMNS}, origin[2];
    fc_memory_tensor tensors[6];
    const fc_memory_chunk chunk = {origin, shape, NULL, values};
    fc_checkpoint *source = NULL;
    memset(tensors, 0, sizeof tensors);
    for (int i = 0; i < 6; i++) {
        const int ndim = i == 5 ? 1 : 2;
        tensors[i] = (fc_memory_tensor){
            .name = names[i], .dtype = FC_F32, .ndim = ndim, .shape = shape, .chunks = &chunk, .nchunks = 1};
    }
    if (fc_checkpoint_in_memory("fuzz", tensors, 6, &source, NULL) != FC_OK) {
        abort();
    }
    return source;
}

static void read_tensor(const fc_checkpoint *made, const fc_tensor *t) {
    static const int64_t zeros[FC_MAX_DIMS];
    const fc_box whole = {t->ndim, zeros, t->shape};
    int64_t elements;
    fc_error err;
    if (!fc_numel(t->ndim, t->shape, &elements)) {
        abort();
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_box box = fc_chunk_box(t, &t->chunks[i]);
        if (!fc_box_within(&box, t->shape)) {
            abort();
        }
    }
    if (elements * fc_dtype_size(t->dtype) < 1 << 16) {
        void *bytes = malloc((size_t)elements * fc_dtype_size(t->dtype) + 1);
        (void)fc_read_box(made, t, &whole, t->dtype, bytes, &err);
        free(bytes);
    }
}

static void apply(const fc_recipe *recipe, fc_arena *arena) {
    static const fc_selection everything;
    fc_checkpoint *source = make_source(), *made = NULL;
    fc_target target;
    fc_selected counts;
    fc_error err;
    if (fc_target_new(source, &everything, arena, &target, &counts, &err) == FC_OK &&
        fc_recipe_apply(source, &target, recipe, &made, &err) == FC_OK) {
        for (size_t i = 0; i < made->ntensors; i++) {
            if (!made->tensors[i].object) {
                read_tensor(made, &made->tensors[i]);
            }
        }
    }
    fc_checkpoint_close(made ? made : source);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fc_arena *arena = fc_arena_new();
    for (int reverse = 0; reverse < 2; reverse++) {
        const fc_recipe_options options = {.reverse = reverse};
        const fc_recipe *recipe;
        fc_error err;
        if (fc_recipe_parse("fuzz", (const char *)data, size, &options, arena, &recipe, &err) == FC_OK) {
            apply(recipe, arena);
        }
    }
    fc_arena_free(arena);
    return 0;
}
