/*
 * Finds what the layers of a model have in common, for megatron-core's keys: see torch_dist.h. Sources call experts as
 * Megatron's modules do: SequentialMLP, TEGroupedMLP and GroupedMLP have different names for them, and one key.
 */
#include "torch_dist/torch_dist.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "base/name_table.h"
#include "fsdpckpt/try.h"
#include "megatron/rules.h"

#include <stdio.h>
#include <string.h>

enum { MOST_LAYERS = 1 << 20 };

static const char prediction[] = "mtp.layers."; /* of multi-token prediction, which fc_mg_layer leaves out */

/* Where a name has its layer. */
typedef struct layer_at {
    size_t prefix, rest; /* bytes before the number, and before what follows it and its dot */
    int64_t number;
} layer_at;

static bool find_layer(const char *name, layer_at *out) {
    size_t end = 0;
    if (strncmp(name, prediction, sizeof prediction - 1) == 0) {
        const char *p = name + sizeof prediction - 1;
        *out = (layer_at){.prefix = sizeof prediction - 1, .number = fc_take_number(&p, MOST_LAYERS)};
        out->rest = (size_t)(p - name) + 1;
        return out->number >= 0 && *p == '.';
    }
    if (!fc_mg_layer(name, &out->prefix, &out->number, &end)) {
        return false;
    }
    out->rest = end + 1;
    return true;
}

/* Megatron's layers without Transformer Engine have norms of their own, which get the keys of the fused ones. */
static const char *fused_norm(fc_arena *arena, const char *rest) {
    static const char *const norms[][2] = {{"input_layernorm.", "self_attention.linear_qkv.layer_norm_"},
                                           {"pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"}};
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        const size_t n = strlen(norms[i][0]);
        if (strncmp(rest, norms[i][0], n) == 0) {
            return fc_arena_printf(arena, "%s%s", norms[i][1], rest + n);
        }
    }
    return rest;
}

/* The key of a parameter of one expert, whose number is in rest[digits:end]. */
static const char *expert_module(fc_arena *arena, const char *rest, size_t digits, size_t end) {
    static const char local[] = "local_experts.", experts[] = "experts.";
    const size_t l = sizeof local - 1, e = sizeof experts - 1;
    if (digits >= l && strncmp(rest + digits - l, local, l) == 0) {
        const size_t head = digits - l;
        const bool twice = head >= e && strncmp(rest + head - e, experts, e) == 0;
        return fc_arena_printf(arena, "%.*s%sexperts.%s", (int)head, rest, twice ? "" : experts, rest + end + 1);
    }
    const char *at = strstr(rest, ".linear_fc"); /* "experts.linear_fc1.weight7" */
    return fc_arena_printf(arena, "%.*s.experts%.*s", (int)(at - rest), rest, (int)(rest + digits - at), at);
}

/* The key of the matrices of all experts, "experts.weight1". */
static const char *grouped_module(fc_arena *arena, const char *rest) {
    const size_t n = strlen(rest);
    return fc_arena_printf(arena, "%.*sexperts.linear_fc%c.weight", (int)(n - strlen("weight1")), rest, rest[n - 1]);
}

/* Whether the model has norms of Megatron's own layers before a fused q, k and v. */
static bool has_own_norms(const fc_target *target) {
    bool norm = false, qkv = false;
    for (size_t i = 0; i < target->ntensors; i++) {
        layer_at at;
        const char *name = target->tensors[i].name;
        const char *rest = find_layer(name, &at) ? name + at.rest : "";
        norm = norm || strcmp(rest, "input_layernorm.weight") == 0;
        qkv = qkv || strcmp(rest, "self_attention.linear_qkv.weight") == 0;
    }
    return norm && qkv;
}

/* What is found while layers are counted. */
typedef struct counting {
    fc_dist_layers *out;
    fc_arena *arena; /* owns the result */
    fc_name_table *kinds, *stacks;
    size_t kind_capacity, stack_capacity;
    char *text; /* the pattern of the last parameter */
    size_t room;
    bool fuse; /* whether norms get the keys of fused ones */
    fc_error *err;
} counting;

/* Finds the kind of a parameter by its pattern, or SIZE_MAX. `rest[digits:end]` is the number of its expert. */
static fc_code find_kind(counting *c, const char *name, const fc_dist_parameter *p, size_t digits, size_t end,
                         size_t *kind) {
    const char *rest = p->module;
    const size_t needed = strlen(name) + sizeof "{n}.{e}";
    FC_NEED(fc_arena_grow(c->arena, &c->text, &c->room, 0, needed, 1), c->err, NULL);
    snprintf(c->text, c->room, "%.*s{n}.%.*s%s%s", (int)p->prefix, name, (int)digits, rest, p->expert >= 0 ? "{e}" : "",
             rest + end);
    *kind = fc_name_table_find(c->kinds, c->text, strlen(c->text));
    return FC_OK;
}

/* Adds the kind of a parameter that has a new pattern. */
static fc_code add_kind(counting *c, const fc_dist_parameter *p, size_t digits, size_t end, const fc_tensor *tensor,
                        size_t *kind) {
    fc_dist_layers *l = c->out;
    fc_dist_parameter own = *p;
    own.from = fc_arena_strndup(c->arena, c->text, strlen(c->text));
    own.module = p->expert >= 0 ? expert_module(c->arena, p->module, digits, end)
                 : p->grouped   ? grouped_module(c->arena, p->module)
                 : c->fuse      ? fused_norm(c->arena, p->module)
                                : p->module;
    FC_NEED(own.from && own.module &&
                fc_arena_grow(c->arena, &l->kinds, &c->kind_capacity, l->nkinds, l->nkinds + 1, sizeof *l->kinds),
            c->err, NULL);
    *kind = fc_name_table_put(c->kinds, own.from, strlen(own.from), l->nkinds);
    FC_NEED(*kind != FC_NO_NAME, c->err, NULL);
    l->kinds[l->nkinds++] = (fc_dist_kind){.like = own, .first = tensor};
    return FC_OK;
}

/* Finds the layers that a parameter belongs to, and counts its own. */
static fc_code find_stack(counting *c, const char *name, const fc_dist_parameter *p, size_t *stack) {
    fc_dist_layers *l = c->out;
    *stack = fc_name_table_put(c->stacks, name, p->prefix, l->nstacks);
    FC_NEED(*stack != FC_NO_NAME &&
                fc_arena_grow(c->arena, &l->stacks, &c->stack_capacity, l->nstacks, l->nstacks + 1, sizeof *l->stacks),
            c->err, NULL);
    fc_dist_stack *s = &l->stacks[*stack];
    if (*stack == l->nstacks) {
        const bool predicts = p->prefix == sizeof prediction - 1 && strncmp(name, prediction, p->prefix) == 0;
        *s = (fc_dist_stack){.prefix = name, .length = p->prefix, .alike = !predicts};
        l->nstacks++;
    }
    s->layers = p->layer >= s->layers ? p->layer + 1 : s->layers;
    return FC_OK;
}

static fc_code count_parameter(counting *c, const fc_target_tensor *w, const layer_at *at, fc_dist_parameter *p,
                               size_t *kind) {
    const char *rest = w->name + at->rest;
    size_t digits = 0, end = 0, stack = 0;
    *p = (fc_dist_parameter){.module = rest, .prefix = at->prefix, .layer = at->number, .expert = -1};
    const fc_mg_expert expert = fc_mg_expert_of(rest, &digits, &end, &p->expert);
    p->grouped = p->transposed = expert == MG_ALL_EXPERTS;
    if (expert != MG_ONE_EXPERT) {
        p->expert = -1;
        digits = end = 0;
    }
    FC_TRY(find_kind(c, w->name, p, digits, end, kind));
    FC_TRY(*kind == FC_NO_NAME ? add_kind(c, p, digits, end, w->source, kind) : FC_OK);
    FC_TRY(find_stack(c, w->name, p, &stack));
    fc_dist_kind *k = &c->out->kinds[*kind];
    p->from = k->like.from;
    p->module = k->like.module;
    k->stack = stack;
    k->count++;
    k->experts = p->expert >= k->experts ? p->expert + 1 : k->experts;
    k->layers = p->layer >= k->layers ? p->layer + 1 : k->layers;
    if (!fc_same_sizes(k->first->ndim, k->first->shape, w->source->ndim, w->source->shape) ||
        k->first->dtype != w->source->dtype) {
        c->out->stacks[stack].alike = false;
    }
    return FC_OK;
}

static void compare_layers(fc_dist_layers *l) {
    for (size_t i = 0; i < l->nkinds; i++) {
        const fc_dist_kind *k = &l->kinds[i];
        fc_dist_stack *s = &l->stacks[k->stack];
        const int64_t each = k->experts > 0 ? k->experts : 1;
        s->alike = s->alike && k->layers == s->layers && k->count % each == 0 && k->count / each == s->layers;
    }
}

fc_code fc_dist_find_layers(const fc_target *target, fc_arena *arena, fc_dist_layers *out, fc_error *err) {
    const size_t n = target->ntensors + 1;
    *out = (fc_dist_layers){.kind_of = fc_arena_calloc(arena, n, sizeof *out->kind_of),
                            .parameters = fc_arena_calloc(arena, n, sizeof *out->parameters)};
    counting c = {.out = out,
                  .arena = arena,
                  .kinds = fc_name_table_new(arena, 0),
                  .stacks = fc_name_table_new(arena, 0),
                  .fuse = has_own_norms(target),
                  .err = err};
    FC_NEED(out->kind_of && out->parameters && c.kinds && c.stacks, err, NULL);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *w = &target->tensors[i];
        layer_at at;
        out->kind_of[i] = SIZE_MAX;
        if (!w->source->object && !fc_dist_is_state(w->name) && find_layer(w->name, &at)) {
            FC_TRY(count_parameter(&c, w, &at, &out->parameters[i], &out->kind_of[i]));
        }
    }
    compare_layers(out);
    return FC_OK;
}
