/*
 * Finds what the layers of a model have in common, for megatron-core's keys: see torch_dist.h. Sources call experts as
 * Megatron's modules do: SequentialMLP, TEGroupedMLP and GroupedMLP have different names for them, and one key.
 */
#include "torch_dist/torch_dist.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "fsdpckpt/try.h"
#include "megatron/rules.h"

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

static fc_code split_parameter(const char *name, bool fuse, fc_arena *arena, fc_dist_parameter *out, bool *is,
                               fc_error *err) {
    layer_at at;
    size_t digits = 0, end = 0;
    *is = find_layer(name, &at);
    if (!*is) {
        return FC_OK;
    }
    const char *rest = name + at.rest, *pattern = rest;
    *out = (fc_dist_parameter){.module = rest, .prefix = at.prefix, .layer = at.number, .expert = -1};
    const fc_mg_expert kind = fc_mg_expert_of(rest, &digits, &end, &out->expert);
    out->grouped = out->transposed = kind == MG_ALL_EXPERTS;
    out->expert = kind == MG_ONE_EXPERT ? out->expert : -1;
    if (kind == MG_ONE_EXPERT) {
        pattern = fc_arena_printf(arena, "%.*s{e}%s", (int)digits, rest, rest + end);
        out->module = expert_module(arena, rest, digits, end);
    } else if (kind == MG_ALL_EXPERTS) {
        out->module = grouped_module(arena, rest);
    } else if (fuse) {
        out->module = fused_norm(arena, rest);
    }
    out->from = pattern ? fc_arena_printf(arena, "%.*s{n}.%s", (int)at.prefix, name, pattern) : NULL;
    return out->from && out->module ? FC_OK : fc_no_memory(err, NULL);
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

/* The tables by which names are found while layers are counted. */
typedef struct counting {
    fc_dist_layers *out;
    fc_name_table *kinds, *stacks;
} counting;

static void count_parameter(const counting *c, const fc_target_tensor *w, const fc_dist_parameter *p, size_t *kind) {
    fc_dist_layers *l = c->out;
    const size_t stack = fc_name_table_put(c->stacks, w->name, p->prefix, l->nstacks);
    fc_dist_stack *s = &l->stacks[stack];
    if (stack == l->nstacks) {
        const bool predicts = p->prefix == sizeof prediction - 1 && strncmp(w->name, prediction, p->prefix) == 0;
        *s = (fc_dist_stack){.prefix = w->name, .length = p->prefix, .alike = !predicts};
        l->nstacks++;
    }
    s->layers = p->layer >= s->layers ? p->layer + 1 : s->layers;
    *kind = fc_name_table_put(c->kinds, p->from, strlen(p->from), l->nkinds);
    fc_dist_kind *k = &l->kinds[*kind];
    if (*kind == l->nkinds) {
        *k = (fc_dist_kind){.like = *p, .first = w->source, .stack = stack};
        l->nkinds++;
    }
    k->count++;
    k->experts = p->expert >= k->experts ? p->expert + 1 : k->experts;
    k->layers = p->layer >= k->layers ? p->layer + 1 : k->layers;
    if (!fc_same_sizes(k->first->ndim, k->first->shape, w->source->ndim, w->source->shape) ||
        k->first->dtype != w->source->dtype) {
        s->alike = false;
    }
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
    const bool fuse = has_own_norms(target);
    *out = (fc_dist_layers){.kinds = fc_arena_calloc(arena, n, sizeof *out->kinds),
                            .stacks = fc_arena_calloc(arena, n, sizeof *out->stacks),
                            .kind_of = fc_arena_calloc(arena, n, sizeof *out->kind_of),
                            .parameters = fc_arena_calloc(arena, n, sizeof *out->parameters)};
    const counting c = {out, fc_name_table_new(arena, n), fc_name_table_new(arena, n)};
    FC_NEED(out->kinds && out->stacks && out->kind_of && out->parameters && c.kinds && c.stacks, err, NULL);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *w = &target->tensors[i];
        bool is = false;
        out->kind_of[i] = SIZE_MAX;
        if (!w->source->object && !fc_dist_is_state(w->name)) {
            FC_TRY(split_parameter(w->name, fuse, arena, &out->parameters[i], &is, err));
        }
        if (is) {
            count_parameter(&c, w, &out->parameters[i], &out->kind_of[i]);
        }
    }
    compare_layers(out);
    return FC_OK;
}
