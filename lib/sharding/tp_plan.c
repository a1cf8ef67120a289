/*
 * Tensor-parallel plans: finds the rule for a tensor by its name, and the dimension that the rule shards. The rules
 * come from tp_json.c or tp_model_rules.c; layout.c turns the dimension into placements.
 *
 * A pattern is compared with the end of the parameter's name ("experts.gate_up_proj") and of its module's name
 * ("q_proj" for "…q_proj.weight"). If several match, one that names the parameter beats one that names the module. Then
 * the pattern with more components wins, then the one with more literal characters, then the earlier one.
 */
#include "fsdpckpt/layout.h"

#include "sharding/tp_plan.h"

#include <string.h>

typedef fc_fqn_component component;
typedef fc_fqn name;

/* Modules like nn.Embedding are recognised by the end of their names. */
static bool ends_with(component p, const char *text) {
    size_t len = strlen(text);
    return p.len >= len && memcmp(p.text + p.len - len, text, len) == 0;
}

static bool has_wildcard(component p) {
    return memchr(p.text, '*', p.len) != NULL;
}

/*
 * Whether the first `count` components of `n` end with those of `pattern`. A wildcard does not match "weight" or
 * "bias", because patterns such as "layers.*" and "w*" mean modules.
 */
static bool matches(const fc_tp_pattern *pattern, const name *n, int count) {
    if (pattern->count > count || pattern->count == 0) {
        return false;
    }
    component leaf = n->components[count - 1], last = pattern->components[pattern->count - 1];
    if (has_wildcard(last) && (fc_fqn_is(leaf, "weight") || fc_fqn_is(leaf, "bias"))) {
        return false;
    }
    for (int i = 1; i <= pattern->count; i++) {
        if (!fc_fqn_component_matches(pattern->components[pattern->count - i], n->components[count - i])) {
            return false;
        }
    }
    return true;
}

/* How well a rule fits a name. The fields are in order of importance. */
typedef struct fit {
    int64_t rule; /* -1: no rule fits */
    int level;    /* leading components of the name that the pattern was compared with: all of them, or one less */
    int components;
    size_t literals;
} fit;

static size_t literal_count(const char *pattern) {
    size_t n = 0;
    for (; *pattern; pattern++) {
        n += *pattern != '*';
    }
    return n;
}

static bool is_better(const fit *a, const fit *b) {
    if (a->level != b->level) {
        return a->level > b->level;
    }
    if (a->components != b->components) {
        return a->components > b->components;
    }
    return a->literals > b->literals;
}

/* FNV-1a. A user writes the plan, so the hash need not resist collisions. */
static size_t bucket_of(const fc_tp_plan *plan, component last) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < last.len; i++) {
        h = (h ^ (unsigned char)last.text[i]) * 16777619u;
    }
    return (h ^ h >> 16) & (plan->nbuckets - 1);
}

/* Tries the rules of one bucket; a tie goes to the earlier rule. */
static void find_among(const fc_tp_plan *plan, uint32_t first, const name *n, fit *best) {
    for (uint32_t r = first; r != 0; r = plan->patterns[r - 1].next) {
        const fc_tp_pattern *pattern = &plan->patterns[r - 1];
        for (int level = n->count; level >= n->count - 1 && level > 0; level--) {
            if (matches(pattern, n, level)) {
                fit f = {(int64_t)r - 1, level, pattern->count, pattern->literals};
                if (best->rule < 0 || is_better(&f, best) || (f.rule < best->rule && !is_better(best, &f))) {
                    *best = f;
                }
                break;
            }
        }
    }
}

/* Only rules whose last component equals that of the parameter or of its module, or has a wildcard, can match. */
static fit find_fit(const fc_tp_plan *plan, const name *n) {
    fit best = {-1, 0, 0, 0};
    for (int level = n->count; level >= n->count - 1 && level > 0; level--) {
        find_among(plan, plan->buckets[bucket_of(plan, n->components[level - 1])], n, &best);
    }
    find_among(plan, plan->wild, n, &best);
    return best;
}

/*
 * Splits the components that a look-up needs. The name of optimizer state is split completely, because its first
 * components identify it; other names only as far as the longest pattern can match.
 * @return the key of optimizer state, or an empty component.
 */
static component read_name(const fc_tp_plan *plan, const char *fqn, name *n) {
    if (strstr(fqn, "optim") || strstr(fqn, "state")) {
        fc_fqn_split(fqn, FC_FQN_COMPONENTS, n);
        return fc_fqn_take_state_key(n);
    }
    fc_fqn_split(fqn, plan->longest < FC_FQN_COMPONENTS ? plan->longest + 1 : FC_FQN_COMPONENTS, n);
    return (component){"", 0};
}

static bool make_pattern(const char *text, fc_arena *arena, fc_tp_pattern *out) {
    name n;
    fc_fqn_split(text, FC_FQN_COMPONENTS, &n);
    component *components = fc_arena_copy(arena, n.components, (size_t)n.count, sizeof *components);
    *out = (fc_tp_pattern){components, n.count, literal_count(text), 0};
    return components != NULL;
}

const fc_tp_plan *fc_tp_plan_make(const char *label, const fc_tp_rule *rules, size_t count, fc_arena *arena) {
    size_t nbuckets = 16;
    while (nbuckets < 2 * count) {
        nbuckets *= 2;
    }
    fc_tp_plan *plan = fc_arena_calloc(arena, 1, sizeof *plan);
    fc_tp_pattern *patterns = fc_arena_calloc(arena, count, sizeof *patterns);
    uint32_t *buckets = fc_arena_calloc(arena, nbuckets, sizeof *buckets);
    label = fc_arena_strndup(arena, label, strlen(label));
    if (!plan || !patterns || !buckets || !label) {
        return NULL;
    }
    *plan = (fc_tp_plan){label, rules, count, patterns, 0, buckets, nbuckets, 0};
    for (size_t r = 0; r < count; r++) {
        fc_tp_pattern *p = &patterns[r];
        if (!make_pattern(rules[r].pattern, arena, p)) {
            return NULL;
        }
        if (p->count == 0) { /* only wrapper names, so it matches nothing */
            continue;
        }
        component last = p->components[p->count - 1];
        uint32_t *head = has_wildcard(last) ? &plan->wild : &buckets[bucket_of(plan, last)];
        p->next = *head;
        *head = (uint32_t)r + 1;
        plan->longest = p->count > plan->longest ? p->count : plan->longest;
    }
    return plan;
}

/* Recognises nn.Embedding by the module's name. GPT-NeoX's embed_out is a linear layer and ends differently. */
static bool is_embedding(component module) {
    static const char *const names[] = {"embed_tokens", "embed_in", "embed_positions", "wte", "wpe"};
    return fc_fqn_is_one_of(module, names, sizeof names / sizeof *names) || ends_with(module, "embed") ||
           ends_with(module, "embedding") || ends_with(module, "embeddings");
}

/*
 * @return the dimension that `style` shards, as ColwiseParallel and RowwiseParallel do, or -1. Of a fused expert weight
 * of three dimensions, transformers shards the last two like those of a matrix. A vector that is not a bias, such as a
 * scale, is treated like one.
 */
static int sharded_dimension(fc_tp_style style, fc_tp_module module, bool bias, int ndim) {
    if (ndim == 0 || (style != FC_TP_COLWISE && style != FC_TP_ROWWISE)) {
        return -1;
    }
    bool colwise = style == FC_TP_COLWISE;
    bool vector = bias || ndim == 1;
    switch (module) {
    case FC_TP_EXPERTS:
        return 0;
    case FC_TP_EMBEDDING:
        return colwise ? (ndim > 1 ? 1 : -1) : 0;
    case FC_TP_CONV1D:
        return vector ? (colwise ? 0 : -1) : (colwise ? 1 : 0);
    default:
        break;
    }
    if (colwise) {
        return ndim == 3 ? 1 : 0;
    }
    return vector ? -1 : ndim == 3 ? 2 : 1;
}

int fc_tp_plan_dim(const fc_tp_plan *plan, const char *fqn, int ndim, fc_tp_style *style) {
    name n;
    component key = read_name(plan, fqn, &n);
    fit f = find_fit(plan, &n);
    *style = FC_TP_NONE;
    if (f.rule < 0) {
        return -1;
    }
    const fc_tp_rule *rule = &plan->rules[f.rule];
    *style = rule->style;
    if (fc_fqn_is(key, "step")) {
        return -1;
    }
    fc_tp_module module = rule->module;
    if (module == FC_TP_BY_NAME) {
        module = is_embedding(n.components[f.level - 1]) ? FC_TP_EMBEDDING : FC_TP_LINEAR;
    }
    return sharded_dimension(rule->style, module, fc_fqn_is(n.components[n.count - 1], "bias"), ndim);
}

const char *fc_tp_plan_name(const fc_tp_plan *plan) {
    return plan->name;
}

size_t fc_tp_plan_rules(const fc_tp_plan *plan) {
    return plan->count;
}

const char *fc_tp_plan_pattern(const fc_tp_plan *plan, size_t rule) {
    return plan->rules[rule].pattern;
}

int64_t fc_tp_plan_rule_of(const fc_tp_plan *plan, const char *fqn) {
    name n;
    read_name(plan, fqn, &n);
    return find_fit(plan, &n).rule;
}
