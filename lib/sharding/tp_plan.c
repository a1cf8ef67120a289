/*
 * Tensor-parallel plans: which rule decides a tensor, found by its name, and which dimension that rule cuts. Rules come
 * from tp_json.c or tp_auto.c; layout.c turns the dimension into placements.
 *
 * Which rule: a pattern is compared with the end of the name of the parameter ("experts.gate_up_proj") and of its
 * module
 * ("q_proj" for "…q_proj.weight"). One that names the parameter beats one that names the module; then the one with
 * more components wins, then the one with more literal characters, then the earlier.
 */
#include "fsdpckpt/layout.h"

#include "sharding/tp_plan.h"

#include <string.h>

typedef fc_fqn_part part;
typedef fc_fqn name;

/* nn.Embedding is told by how its name ends. */
static bool ends_with(part p, const char *text) {
    size_t len = strlen(text);
    return p.len >= len && memcmp(p.text + p.len - len, text, len) == 0;
}

static bool has_wildcard(part p) {
    return memchr(p.text, '*', p.len) != NULL;
}

/*
 * Whether the first `count` components of `n` end with those of `pattern`. "weight" and "bias" at the end must be
 * written out: a pattern like "layers.*" or "w*" speaks of modules.
 */
static bool matches(const fc_tp_pattern *pattern, const name *n, int count) {
    if (pattern->count > count || pattern->count == 0) {
        return false;
    }
    part leaf = n->parts[count - 1], last = pattern->parts[pattern->count - 1];
    if (has_wildcard(last) && (fc_fqn_is(leaf, "weight") || fc_fqn_is(leaf, "bias"))) {
        return false;
    }
    for (int i = 1; i <= pattern->count; i++) {
        if (!fc_fqn_component_matches(pattern->parts[pattern->count - i], n->parts[count - i])) {
            return false;
        }
    }
    return true;
}

/* How well a rule fits; the fields in order of weight. */
typedef struct fit {
    int64_t rule; /* -1: none */
    int level;    /* components of the name that the pattern was compared with, from the first: all, or one less */
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

static bool better(const fit *a, const fit *b) {
    if (a->level != b->level) {
        return a->level > b->level;
    }
    if (a->components != b->components) {
        return a->components > b->components;
    }
    return a->literals > b->literals;
}

/* Fowler, Noll, Vo: a plan is by a person, and has few rules. */
static size_t bucket_of(const fc_tp_plan *plan, part last) {
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
                if (best->rule < 0 || better(&f, best) || (f.rule < best->rule && !better(best, &f))) {
                    *best = f;
                }
                break;
            }
        }
    }
}

/* The last component of a pattern is that of the parameter or of its module: only such rules are looked at. */
static fit find(const fc_tp_plan *plan, const name *n) {
    fit best = {-1, 0, 0, 0};
    for (int level = n->count; level >= n->count - 1 && level > 0; level--) {
        find_among(plan, plan->buckets[bucket_of(plan, n->parts[level - 1])], n, &best);
    }
    find_among(plan, plan->wild, n, &best);
    return best;
}

/*
 * Splits what a look-up needs: all of the name of optimizer state, whose first components say what it is, else no more
 * than the longest pattern can match, of the parameter or of its module.
 * @return the key of optimizer state, or an empty part.
 */
static part read_name(const fc_tp_plan *plan, const char *fqn, name *n) {
    if (strstr(fqn, "optim") || strstr(fqn, "state")) {
        fc_fqn_split(fqn, FC_FQN_PARTS, n);
        return fc_fqn_cut_state_key(n);
    }
    fc_fqn_split(fqn, plan->longest < FC_FQN_PARTS ? plan->longest + 1 : FC_FQN_PARTS, n);
    return (part){"", 0};
}

static bool make_pattern(const char *text, fc_arena *arena, fc_tp_pattern *out) {
    name n;
    fc_fqn_split(text, FC_FQN_PARTS, &n);
    part *parts = fc_arena_alloc(arena, (size_t)n.count * sizeof *parts);
    if (!parts) {
        return false;
    }
    memcpy(parts, n.parts, (size_t)n.count * sizeof *parts);
    *out = (fc_tp_pattern){parts, n.count, literal_count(text), 0};
    return true;
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
        if (p->count == 0) { /* made of wrappers alone: matches nothing */
            continue;
        }
        part last = p->parts[p->count - 1];
        uint32_t *head = has_wildcard(last) ? &plan->wild : &buckets[bucket_of(plan, last)];
        p->next = *head;
        *head = (uint32_t)r + 1;
        plan->longest = p->count > plan->longest ? p->count : plan->longest;
    }
    return plan;
}

/* nn.Embedding by the name of the module. embed_out of GPT-NeoX is a linear layer and ends otherwise. */
static bool is_embedding(part module) {
    static const char *const names[] = {"embed_tokens", "embed_in", "embed_positions", "wte", "wpe"};
    return fc_fqn_is_one_of(module, names, sizeof names / sizeof *names) || ends_with(module, "embed") ||
           ends_with(module, "embedding") || ends_with(module, "embeddings");
}

/*
 * The dimension that `style` cuts, as ColwiseParallel and RowwiseParallel do. Of a fused expert weight of three
 * dimensions, transformers cuts the last two as it does of a matrix. What has one dimension and is no bias (a scale)
 * is treated as one.
 */
static int cut_dimension(fc_tp_style style, fc_tp_module module, bool bias, int ndim) {
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
    part key = read_name(plan, fqn, &n);
    fit f = find(plan, &n);
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
        module = is_embedding(n.parts[f.level - 1]) ? FC_TP_EMBEDDING : FC_TP_LINEAR;
    }
    return cut_dimension(rule->style, module, fc_fqn_is(n.parts[n.count - 1], "bias"), ndim);
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
    return find(plan, &n).rule;
}
