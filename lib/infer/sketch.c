/*
 * Tries a way to make tensors of one: as a rule from A to B, which may be the opposite direction.
 */
#include "infer/sketch.h"

#include "fsdpckpt/try.h"

static fc_recipe_op inverse_of(const fc_recipe_op *op) {
    static const fc_recipe_op_kind kinds[] = {
        [FC_OP_CONCATENATE] = FC_OP_SPLIT, [FC_OP_SPLIT] = FC_OP_CONCATENATE,   [FC_OP_STACK] = FC_OP_UNSTACK,
        [FC_OP_UNSTACK] = FC_OP_STACK,     [FC_OP_TRANSPOSE] = FC_OP_TRANSPOSE, [FC_OP_REARRANGE] = FC_OP_REARRANGE,
        [FC_OP_RESIZE] = FC_OP_RESIZE,
    };
    fc_recipe_op inverse = *op;
    inverse.kind = kinds[op->kind];
    inverse.left = op->right;
    inverse.right = op->left;
    return inverse;
}

fc_code fc_sketch_try(fc_search *s, fc_puzzle *p, const int *order, const fc_sketch *k, fc_error *err) {
    const bool reverse = p->match->reverse;
    const int nparts = p->match->nmany;
    fc_recipe_rule old = p->rule, *rule = &p->rule;
    fc_recipe_op *ops = fc_arena_calloc(s->arena, (size_t)k->count + 1, sizeof *ops);
    const char **names = fc_arena_calloc(s->arena, (size_t)nparts + 1, sizeof *names);
    FC_NEED(ops && names, err, s->source->path);
    for (int i = 0; i < k->count; i++) {
        ops[i] = reverse ? inverse_of(&k->ops[k->count - 1 - i]) : k->ops[i];
    }
    for (int i = 0; i < nparts; i++) {
        names[i] = (reverse ? old.from : old.to)[order[i]];
    }
    rule->ops = ops;
    rule->nops = (size_t)k->count;
    *(reverse ? &rule->from : &rule->to) = names;
    FC_TRY(fc_search_try(s, p, &p->found, err));
    if (!p->found) {
        *rule = old;
    }
    return FC_OK;
}
