/*
 * Tensors that repeat another one of their side: an embedding that is the head, too. A's are left out, B's are added.
 */
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "infer/search.h"

#include <inttypes.h>
#include <string.h>

/* A name in which the layer after the last one has the number of layers of the configuration. */
static const char *spell_name(const fc_search *s, const fc_thing *t) {
    const int64_t layers = fc_search_size(s, "num_hidden_layers");
    const char *text = "", *from = t->skeleton;
    for (int i = 0; i < t->nslots && text; i++) {
        const size_t len = strcspn(from, "\1");
        const bool after = layers > 0 && t->numbers[i] == (uint64_t)layers;
        text = after ? fc_arena_printf(s->arena, "%s%.*s{0+num_hidden_layers}", text, (int)len, from)
                     : fc_arena_printf(s->arena, "%s%.*s%" PRIu64, text, (int)len, from, t->numbers[i]);
        from += len + 1;
    }
    return text ? fc_arena_printf(s->arena, "%s%s", text, from) : NULL;
}

static fc_code add_tie(fc_search *s, fc_side *side, size_t first, size_t other, fc_error *err) {
    const bool in_a = side == &s->a;
    const char **names = fc_arena_calloc(s->arena, 3, sizeof *names);
    FC_NEED(names, err, NULL);
    names[in_a ? 0 : 1] = spell_name(s, &side->things[other]);
    names[in_a ? 1 : 0] = spell_name(s, &side->things[first]);
    FC_NEED(names[0] && names[1], err, NULL);
    side->taken[other] = true;
    const fc_recipe_rule rule =
        in_a ? (fc_recipe_rule){.kind = FC_RULE_DROP, .from = names, .nfrom = 1, .to = names + 1, .nto = 1}
             : (fc_recipe_rule){.kind = FC_RULE_ADD, .to = names, .nto = 2};
    return fc_search_add_rule(s, &rule, NULL, err);
}

/* Whether two tensors have the same elements and the same shape. One-dimensional ones are equal too easily. */
static bool are_equal(const fc_search *s, const fc_thing *t, const fc_thing *u) {
    const bool same = t->tensor->dtype == u->tensor->dtype && t->tensor->ndim > 1 &&
                      fc_same_sizes(t->tensor->ndim, t->tensor->shape, u->tensor->ndim, u->tensor->shape);
    unsigned equal = 0;
    for (int k = 0; k < s->ntypes; k++) {
        equal |= t->known & u->known & 1U << k && t->sums[k] == u->sums[k] && t->sums[k] ? 1U : 0;
    }
    return same && equal;
}

fc_code fc_search_ties(fc_search *s, fc_side *side, fc_error *err) {
    fc_name_table *table = fc_name_table_new(s->arena, side->count + 1);
    FC_NEED(table, err, NULL);
    for (size_t i = 0; i < side->count; i++) {
        const fc_thing *t = &side->things[i];
        FC_NEED(!side->taken[i] || fc_name_table_put(table, (const char *)t->sums, sizeof t->sums, i) != FC_NO_NAME,
                err, NULL);
    }
    for (size_t i = 0; i < side->count; i++) {
        const fc_thing *t = &side->things[i];
        const size_t at =
            side->taken[i] ? FC_NO_NAME : fc_name_table_find(table, (const char *)t->sums, sizeof t->sums);
        bool same = at != FC_NO_NAME && are_equal(s, &side->things[at], t);
        FC_TRY(same ? fc_search_same(side->checkpoint, side->things[at].tensor, t->tensor, &same, err) : FC_OK);
        FC_TRY(same ? add_tie(s, side, at, i, err) : FC_OK);
    }
    return FC_OK;
}
