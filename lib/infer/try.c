/*
 * Tries a rule on the tensors of one match: applies it, and compares samples of what it makes with B.
 */
#include "fsdpckpt/try.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/recipe.h"
#include "infer/search.h"

#include <stdlib.h>
#include <string.h>

enum { WHOLE = 1 << 14, BLOCK = 1 << 18, RUN = 256, SAMPLES = 24, MOST_RESULTS = 8 };

/* Compares one box. */
static fc_code compare_box(const fc_checkpoint *made, const fc_tensor *t, const fc_checkpoint *b, const fc_tensor *u,
                           const fc_box *box, bool *same, fc_error *err) {
    const size_t size = (size_t)fc_box_volume(box) * fc_dtype_size(u->dtype);
    unsigned char *x = malloc(size + 1), *y = malloc(size + 1);
    fc_code rc = x && y ? FC_OK : fc_no_memory(err, b->path);
    FC_TRY_GOTO(rc, rc, out);
    FC_TRY_GOTO(fc_read_box(made, t, box, t->dtype, x, err), rc, out);
    FC_TRY_GOTO(fc_read_box(b, u, box, u->dtype, y, err), rc, out);
    *same = memcmp(x, y, size) == 0;
out:
    free(x);
    free(y);
    return rc;
}

/* Compares all of a small tensor, and runs at many places of a large one. */
static fc_code compare_samples(const fc_checkpoint *made, const fc_tensor *t, const fc_checkpoint *b,
                               const fc_tensor *u, bool *same, fc_error *err) {
    int64_t offsets[FC_MAX_DIMS] = {0}, sizes[FC_MAX_DIMS] = {0}, elements = 0;
    uint64_t random = 0x9e3779b97f4a7c15U;
    const fc_box all = {u->ndim, offsets, u->shape}, box = {u->ndim, offsets, sizes};
    *same = t->dtype == u->dtype && fc_same_sizes(t->ndim, t->shape, u->ndim, u->shape) &&
            fc_numel(u->ndim, u->shape, &elements);
    if (!*same || elements <= WHOLE) {
        return *same ? compare_box(made, t, b, u, &all, same, err) : FC_OK;
    }
    for (int i = 0; i < SAMPLES && *same; i++) {
        for (int d = 0; d < u->ndim; d++) {
            const int64_t most = d == u->ndim - 1 ? RUN : 1;
            random = random * 6364136223846793005U + 1442695040888963407U;
            sizes[d] = u->shape[d] < most ? u->shape[d] : most;
            offsets[d] = (int64_t)((random >> 33) % (uint64_t)(u->shape[d] - sizes[d] + 1));
        }
        FC_TRY(compare_box(made, t, b, u, &box, same, err));
    }
    return FC_OK;
}

fc_code fc_search_same(const fc_checkpoint *checkpoint, const fc_tensor *a, const fc_tensor *b, bool *same,
                       fc_error *err) {
    int64_t offsets[FC_MAX_DIMS] = {0}, sizes[FC_MAX_DIMS];
    const fc_box box = {b->ndim, offsets, sizes};
    int64_t row = 1;
    for (int d = 1; d < b->ndim; d++) {
        sizes[d] = b->shape[d];
        row *= b->shape[d];
    }
    *same = true;
    for (int64_t at = 0; at < b->shape[0] && *same; at += sizes[0]) {
        const int64_t most = row < BLOCK ? BLOCK / row : 1;
        offsets[0] = at;
        sizes[0] = b->shape[0] - at < most ? b->shape[0] - at : most;
        FC_TRY(compare_box(checkpoint, a, checkpoint, b, &box, same, err));
    }
    return FC_OK;
}

/* The tensors of A that a match has. */
static fc_code make_target(const fc_search *s, const fc_match *m, fc_target *out, fc_error *err) {
    static const fc_mesh none;
    size_t count = 0, at = 0;
    const size_t nthings = m->reverse ? (size_t)m->nmany : 1;
    for (size_t i = 0; i < nthings; i++) {
        count += m->reverse ? m->many[i]->number : m->one->number;
    }
    fc_target_tensor *tensors = fc_arena_calloc(s->arena, count + 1, sizeof *tensors);
    FC_NEED(tensors, err, s->source->path);
    for (size_t i = 0; i < nthings; i++) {
        const fc_thing *t = m->reverse ? m->many[i] : m->one;
        for (size_t k = 0; k < t->number; k++) {
            const fc_tensor *tensor = s->a.tensors[s->a.order[t->first + k]];
            tensors[at++] = (fc_target_tensor){
                .name = tensor->name, .source = tensor, .path = tensor->path, .dtype = tensor->dtype};
        }
    }
    *out = (fc_target){.source = s->source, .mesh = &none, .tensors = tensors, .ntensors = count};
    return FC_OK;
}

static fc_code compare_results(const fc_search *s, const fc_checkpoint *made, bool *same, fc_error *err) {
    const fc_checkpoint *b = s->b.checkpoint;
    const size_t step = made->ntensors / MOST_RESULTS + 1;
    *same = made->ntensors > 0;
    for (size_t i = 0; i < made->ntensors && *same; i += step) {
        const fc_tensor *t = &made->tensors[i];
        const size_t at = fc_name_table_find(s->b_names, t->name, strlen(t->name));
        *same = at != FC_NO_NAME;
        FC_TRY(*same ? compare_samples(made, t, b, &b->tensors[at], same, err) : FC_OK);
    }
    return FC_OK;
}

fc_code fc_search_try(fc_search *s, const fc_puzzle *puzzle, bool *same, fc_error *err) {
    const fc_match *m = puzzle->match;
    const fc_tensor *b = m->reverse ? m->one->tensor : m->many[0]->tensor;
    const fc_tensor *a = m->reverse ? m->many[0]->tensor : m->one->tensor;
    const fc_recipe_dtype dtype = {"*", b->dtype};
    fc_recipe_rule rule = puzzle->rule;
    fc_recipe recipe = s->recipe;
    fc_checkpoint *made = NULL;
    fc_target target;
    fc_error ignored;
    recipe.rules = &rule;
    recipe.nrules = 1;
    recipe.borrows = true;
    recipe.dtypes = &dtype;
    recipe.ndtypes = a->dtype != b->dtype;
    *same = false;
    FC_TRY(make_target(s, m, &target, err));
    FC_TRY(fc_recipe_place_offsets(&recipe, s->arena, err));
    const fc_code rc = fc_recipe_apply(s->source, &target, &recipe, &made, &ignored);
    if (rc == FC_EUSAGE) { /* the shapes do not fit */
        return FC_OK;
    }
    if (rc != FC_OK) {
        if (err) {
            *err = ignored;
        }
        return rc;
    }
    const fc_code compared = compare_results(s, made, same, err);
    fc_checkpoint_close(made);
    return compared;
}
