/*
 * Merges LoRA adapters: finds the weight of each pair of factors by its name, and lists what is added to what.
 */
#include "weights/adapters.h"
#include "derived/derived.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "plan/quantized.h"
#include "weights/adapter_targets.h"
#include "weights/low_rank.h"

#include <math.h>
#include <string.h>

/* What is done to a value of the source, or a value that an adapter adds. */
typedef struct change {
    fc_merged *merged; /* NULL: nothing */
    const char *added; /* the name of a value that the source lacks */
} change;

typedef struct merger {
    fc_checkpoint *source, *out;
    fc_checkpoint **all; /* the source and the adapters */
    const fc_opened_adapter *adapters;
    size_t count;    /* of adapters */
    fc_arena *arena; /* of `out` */
    fc_arena *scratch;
    fc_name_table *names; /* of the source */
    fc_module_parameters modules_of_source;
    const char *prefix; /* which the source has before the adapters' names; NULL: not known yet */
    change *changes;    /* one per value of the source, then those that are added */
    size_t nchanges;
    fc_name_table *added;       /* the names of those that are added, with their numbers among the changes */
    fc_name_table *factors;     /* the names of the current adapter's values */
    fc_adapter_targets targets; /* of the current adapter */
    fc_adapter_module *modules; /* that the current adapter changes */
    fc_low_rank **terms;        /* of each of these */
    size_t nmodules;
    fc_error *err;
} merger;

/* ---- names ---- */

/* The kinds of values of an adapter: the ends of their names. */
typedef enum factor_kind { IS_A, IS_B, IS_OTHER } factor_kind;

static const struct {
    const char *end;
    factor_kind kind;
    bool embedding;
} ends[] = {{".lora_A.weight", IS_A, false},
            {".lora_B.weight", IS_B, false},
            {".lora_embedding_A", IS_A, true},
            {".lora_embedding_B", IS_B, true}};

typedef struct value_name {
    const char *module; /* of a factor */
    const char *weight; /* the parameter that is changed */
    factor_kind kind;
    bool embedding;
} value_name;

/* Removes every `part` from a name, in place. */
static void remove_part(char *name, const char *part) {
    const size_t len = strlen(part);
    char *out = name;
    for (const char *at = name; *at;) {
        if (strncmp(at, part, len) == 0) {
            at += len;
        } else {
            *out++ = *at++;
        }
    }
    *out = '\0';
}

static fc_code parse_name(const merger *m, const fc_checkpoint *adapter, const fc_tensor *t, value_name *out) {
    static const char wrapper[] = "base_model.model.";
    const char *start = strncmp(t->name, wrapper, sizeof wrapper - 1) == 0 ? t->name + sizeof wrapper - 1 : t->name;
    char *name = fc_arena_strndup(m->scratch, start, strlen(start));
    FC_NEED(name, m->err, adapter->path);
    remove_part(name, ".base_layer");
    remove_part(name, ".modules_to_save.default");
    remove_part(name, ".modules_to_save");
    *out = (value_name){.weight = name, .kind = IS_OTHER};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const size_t len = strlen(name), end = strlen(ends[i].end);
        if (len > end && strcmp(name + len - end, ends[i].end) == 0) {
            name[len - end] = '\0';
            *out = (value_name){name, fc_arena_printf(m->scratch, "%s.weight", name), ends[i].kind, ends[i].embedding};
            return out->weight ? FC_OK : fc_no_memory(m->err, adapter->path);
        }
    }
    return strstr(name, ".lora_") ? fc_fail(m->err, FC_EUNSUPPORTED,
                                            "%s: tensor %.256s cannot be merged: only lora_A and "
                                            "lora_B are known",
                                            adapter->path, t->name)
                                  : FC_OK;
}

static fc_code find_name(const merger *m, const char *prefix, const char *name, size_t *at) {
    const char *full = fc_arena_printf(m->scratch, "%s%s", prefix, name);
    FC_NEED(full, m->err, m->source->path);
    *at = fc_name_table_find(m->names, full, strlen(full));
    return FC_OK;
}

/* Finds what the source has before the names of adapters, such as "model.", from the first weight that is found. */
static fc_code find_prefix(merger *m, const char *name) {
    const size_t len = strlen(name);
    size_t found = 0, at = FC_NO_NAME;
    FC_TRY(find_name(m, "", name, &at));
    if (at != FC_NO_NAME) {
        m->prefix = "";
        return FC_OK;
    }
    for (size_t i = 0; i < m->source->ntensors; i++) {
        const char *full = m->source->tensors[i].name;
        const size_t more = strlen(full) - len;
        if (strlen(full) > len && strcmp(full + more, name) == 0 && full[more - 1] == '.') {
            m->prefix = fc_arena_strndup(m->scratch, full, more);
            FC_NEED(m->prefix, m->err, m->source->path);
            found++;
        }
    }
    m->prefix = found == 1 ? m->prefix : NULL;
    return FC_OK;
}

static fc_code locate(merger *m, const char *name, size_t *at) {
    *at = FC_NO_NAME;
    if (!m->prefix) {
        FC_TRY(find_prefix(m, name));
    }
    return m->prefix ? find_name(m, m->prefix, name, at) : FC_OK;
}

/* ---- what is added to what ---- */

/* @return the change of value `index`, from now on with room for a product of each adapter; NULL: out of memory. */
static fc_merged *merged_of(const merger *m, size_t index) {
    change *c = &m->changes[index];
    if (!c->merged) {
        fc_merged *made = fc_arena_calloc(m->arena, 1, sizeof *made);
        if (!made || !(made->terms = fc_arena_calloc(m->arena, m->count, sizeof *made->terms))) {
            return NULL;
        }
        made->base = index < m->source->ntensors ? &m->source->tensors[index] : NULL;
        c->merged = made;
    }
    return c->merged;
}

static fc_code no_weight(const merger *m, size_t i, const value_name *name, const fc_tensor *t) {
    return fc_fail(m->err, FC_EUSAGE, "%s: has no %s%.256s, which tensor %.256s of %s is for", m->source->path,
                   m->prefix ? m->prefix : "", name->weight, t->name, m->all[i + 1]->path);
}

/* ---- parameters of modules, such as the fused experts of a layer ---- */

/* Finds the other factor of a product: lora_B of the same module for lora_A, and so on. NULL: there is none. */
static fc_code find_partner(const merger *m, const fc_checkpoint *adapter, const fc_tensor *t, bool is_a,
                            const fc_tensor **out) {
    const size_t len = strlen(t->name);
    char *name = fc_arena_strndup(m->scratch, t->name, len);
    FC_NEED(name, m->err, adapter->path);
    name[len - strlen("A.weight")] = is_a ? 'B' : 'A';
    const size_t at = fc_name_table_find(m->factors, name, len);
    *out = at != FC_NO_NAME ? &adapter->tensors[at] : NULL;
    return FC_OK;
}

/* Finds the prefix from a module that has targets of the current adapter. */
static fc_code find_prefix_of_module(merger *m, const char *module) {
    size_t len = 0;
    const fc_tensor *t = fc_adapter_targets_prefix(&m->targets, m->source, module, &len);
    m->prefix = t ? fc_arena_strndup(m->scratch, t->name, len) : NULL;
    return t && !m->prefix ? fc_no_memory(m->err, m->source->path) : FC_OK;
}

/* Finds the parameter of a module that both factors fit: their names do not tell which of them it is. */
static fc_code find_parameter(merger *m, size_t i, value_name *name, const fc_tensor *t, size_t *at) {
    const fc_tensor *other = NULL, *a, *b;
    bool straight, across;
    FC_TRY(find_partner(m, m->all[i + 1], t, name->kind == IS_A, &other));
    FC_TRY(m->prefix ? FC_OK : find_prefix_of_module(m, name->module));
    if (!other || !m->prefix) {
        return FC_OK;
    }
    const char *module = fc_arena_printf(m->scratch, "%s%s", m->prefix, name->module);
    FC_NEED(module, m->err, m->source->path);
    a = name->kind == IS_A ? t : other;
    b = name->kind == IS_A ? other : t;
    size_t k = fc_name_table_find(m->modules_of_source.first, module, strlen(module));
    for (; k != FC_NO_NAME; k = m->modules_of_source.next[k]) {
        const fc_tensor *w = &m->source->tensors[k];
        const char *weight = w->name + strlen(m->prefix);
        if (!fc_low_rank_fits_experts(w, a, b, &straight, &across) || !fc_adapter_targets_have(&m->targets, weight)) {
            continue;
        }
        if (*at != FC_NO_NAME) {
            return fc_fail(m->err, FC_EUNSUPPORTED, "%s: tensor %.256s fits %.256s and %.256s of %s",
                           m->all[i + 1]->path, t->name, m->source->tensors[*at].name, w->name, m->source->path);
        }
        *at = k;
        name->module = name->weight = weight;
    }
    return FC_OK;
}

/* Finds the weight that a factor is for. PEFT's patterns are about the name of the parameter if it is a target. */
static fc_code find_weight(merger *m, size_t i, value_name *name, const fc_tensor *t, size_t *at) {
    FC_TRY(locate(m, name->weight, at));
    if (*at != FC_NO_NAME && fc_adapter_targets_have(&m->targets, name->weight)) {
        name->module = name->weight;
    }
    if (*at == FC_NO_NAME && m->targets.names && !name->embedding) {
        FC_TRY(find_parameter(m, i, name, t, at));
    }
    return *at == FC_NO_NAME ? no_weight(m, i, name, t) : FC_OK;
}

static fc_code add_factor(merger *m, size_t i, value_name *name, const fc_tensor *t) {
    size_t at;
    FC_TRY(find_weight(m, i, name, t, &at));
    fc_merged *merged = merged_of(m, at);
    FC_NEED(merged, m->err, m->source->path);
    fc_low_rank *term = &merged->terms[i];
    term->source = i + 1;
    term->transposed = name->embedding;
    term->experts = merged->base && merged->base->ndim == 3 && t->ndim == 2 ? merged->base->shape[0] : 0;
    const fc_tensor **factor = name->kind == IS_A ? &term->a : &term->b;
    if (*factor) {
        return fc_fail(m->err, FC_EUSAGE, "%s: tensors %.256s and %.256s are both lora_%c of %.256s",
                       m->all[i + 1]->path, (*factor)->name, t->name, name->kind == IS_A ? 'A' : 'B', name->weight);
    }
    *factor = t;
    if (name->kind == IS_A && t->ndim >= 2) {
        m->modules[m->nmodules] = (fc_adapter_module){.name = name->module, .rank = fc_low_rank_of(term)};
        m->terms[m->nmodules++] = term;
    }
    return fc_computed_shares(m->out, i + 1, t, m->err);
}

/* Adds a value that the source lacks. @return its number among the changes. */
static size_t add_value(merger *m, const char *name) {
    m->changes[m->nchanges] = (change){NULL, name};
    return fc_name_table_put(m->added, name, strlen(name), m->nchanges++);
}

/* A value that the adapter stores as a whole, such as those of modules_to_save: it replaces the source's. */
static fc_code replace(merger *m, size_t i, const value_name *name, const fc_tensor *t) {
    const char *full = fc_arena_printf(m->scratch, "%s%s", m->prefix ? m->prefix : "", name->weight);
    FC_NEED(full, m->err, m->source->path);
    if (m->adapters[i].weight != 1) {
        return fc_fail(m->err, FC_EUSAGE, "%s: tensor %.256s replaces one of %s, so the adapter's weight must be 1",
                       m->all[i + 1]->path, t->name, m->source->path);
    }
    size_t at = fc_name_table_find(m->names, full, strlen(full));
    if (at == FC_NO_NAME && (at = fc_name_table_find(m->added, full, strlen(full))) == FC_NO_NAME) {
        at = add_value(m, full);
    }
    fc_merged *merged = merged_of(m, at);
    FC_NEED(merged, m->err, m->source->path);
    if (merged->source > 0) {
        return fc_fail(m->err, FC_EUSAGE, "%s and %s both replace %.256s: merge one of them",
                       m->all[merged->source]->path, m->all[i + 1]->path, name->weight);
    }
    merged->base = t;
    merged->source = i + 1;
    return FC_OK;
}

static fc_code set_scales(merger *m, size_t i) {
    FC_TRY(fc_adapter_scales(&m->adapters[i].config, m->modules, m->nmodules, m->err));
    for (size_t k = 0; k < m->nmodules; k++) {
        m->terms[k]->scale = (float)(m->modules[k].scale * m->adapters[i].weight);
    }
    m->nmodules = 0;
    return FC_OK;
}

/* Takes the values of an adapter: first the factors, whose names tell the prefix. */
static fc_code take_adapter(merger *m, size_t i) {
    const fc_checkpoint *adapter = m->all[i + 1];
    m->factors = fc_names_of(adapter, m->scratch);
    m->modules = fc_arena_calloc(m->scratch, adapter->ntensors + 1, sizeof *m->modules);
    m->terms = fc_arena_calloc(m->scratch, adapter->ntensors + 1, sizeof *m->terms);
    FC_NEED(m->factors && m->modules && m->terms &&
                fc_adapter_targets_list(&m->adapters[i].config, m->scratch, &m->targets),
            m->err, adapter->path);
    for (int others = 0; others < 2; others++) {
        for (size_t k = 0; k < adapter->ntensors; k++) {
            const fc_tensor *t = &adapter->tensors[k];
            value_name name = {.kind = IS_OTHER};
            FC_TRY(parse_name(m, adapter, t, &name));
            if (!t->object && (name.kind == IS_OTHER) == (others == 1)) {
                FC_TRY(others ? replace(m, i, &name, t) : add_factor(m, i, &name, t));
            }
        }
    }
    return set_scales(m, i);
}

/* ---- shapes ---- */

/* Whether a parameter of square matrices is (experts, in, out): as the other one of its module, whose matrices are
 * wider. */
static fc_code is_transposed(const merger *m, const fc_tensor *w, bool *out) {
    const char *dot = strrchr(w->name, '.');
    const char *wide = fc_arena_printf(m->scratch, "%.*s.gate_up_proj", dot ? (int)(dot - w->name) : 0, w->name);
    FC_NEED(wide, m->err, m->source->path);
    const size_t at = fc_name_table_find(m->names, wide, strlen(wide));
    const fc_tensor *s = at != FC_NO_NAME ? &m->source->tensors[at] : NULL;
    const bool known = s && s->ndim == 3 && (s->shape[1] == w->shape[1]) != (s->shape[2] == w->shape[2]);
    *out = known && s->shape[1] == w->shape[1];
    return known ? FC_OK
                 : fc_fail(m->err, FC_EUNSUPPORTED,
                           "%s: %.256s has square matrices, and nothing tells whether they are (in, out) or (out, in)",
                           m->source->path, w->name);
}

static bool can_be_summed(const fc_tensor *t) {
    return t->dtype == FC_F32 || t->dtype == FC_BF16 || t->dtype == FC_F16;
}

static fc_code check_term(const merger *m, const fc_tensor *w, fc_low_rank *term, const fc_adapter_config *config) {
    const fc_checkpoint *adapter = m->all[term->source];
    if (!term->a || !term->b) {
        return fc_fail(m->err, FC_EUSAGE, "%s: has lora_%c of %.256s, but not lora_%c", adapter->path,
                       term->a ? 'A' : 'B', w->name, term->a ? 'B' : 'A');
    }
    if (!can_be_summed(w)) {
        fc_code rc = fc_fail(m->err, FC_EUNSUPPORTED,
                             "%s: tensor %.256s is of type %s; adapters are merged into float32, "
                             "bfloat16 and float16",
                             m->source->path, w->name, fc_dtype_get(w->dtype)->torch_name);
        return fc_dtype_size(w->dtype) == 1 ? fc_advise(m->err, rc, FC_HINT_DEQUANTIZE, NULL) : rc;
    }
    const bool floats =
        fc_dtype_get(term->a->dtype)->cls == FC_CLASS_FLOAT && fc_dtype_get(term->b->dtype)->cls == FC_CLASS_FLOAT;
    bool straight = fc_low_rank_fits(w, term), across = fc_low_rank_fits_transposed(w, term);
    if (term->experts > 0 && fc_low_rank_fits_experts(w, term->a, term->b, &straight, &across) && straight && across) {
        FC_TRY(is_transposed(m, w, &across));
        straight = !across;
    }
    if (!floats || (!straight && !across)) {
        return fc_fail(m->err, FC_EUSAGE, "%s: lora_A and lora_B do not fit %.256s of %s in shape or type",
                       adapter->path, w->name, m->source->path);
    }
    term->transposed = across && (!straight || term->transposed || config->transposed);
    return FC_OK;
}

/* Checks the products of a weight, and closes the gaps between them. */
static fc_code check_terms(const merger *m, fc_merged *merged) {
    for (size_t i = 0; i < m->count; i++) {
        fc_low_rank *term = &merged->terms[i];
        if (term->a || term->b) {
            FC_TRY(check_term(m, merged->base, term, &m->adapters[i].config));
            merged->terms[merged->nterms++] = *term;
        }
    }
    return FC_OK;
}

/* A tied tensor is stored once under two names; a change of one would part them. */
static fc_code check_ties(const merger *m) {
    const size_t count = m->source->ntensors;
    const fc_tensor **all = fc_arena_calloc(m->scratch, count + 1, sizeof *all);
    size_t *same_as = fc_arena_calloc(m->scratch, count + 1, sizeof *same_as);
    FC_NEED(all && same_as, m->err, m->source->path);
    for (size_t i = 0; i < count; i++) {
        all[i] = &m->source->tensors[i];
    }
    FC_TRY(fc_find_ties(m->source, all, count, same_as, m->err));
    for (size_t i = 0; i < count; i++) {
        if (same_as[i] != i && (m->changes[i].merged != NULL || m->changes[same_as[i]].merged != NULL)) {
            fc_code rc = fc_fail(m->err, FC_EUSAGE,
                                 "%s: %.256s and %.256s are tied, and an adapter changes only one of "
                                 "them",
                                 m->source->path, all[same_as[i]]->name, all[i]->name);
            return fc_advise(m->err, rc, FC_HINT_NONE, NULL);
        }
    }
    return FC_OK;
}

/* ---- the checkpoint ---- */

static fc_code add_merged(const merger *m, const fc_tensor *w, fc_merged *merged, const char *name) {
    int64_t block[FC_MAX_DIMS];
    fc_tensor like = *w;
    FC_TRY(check_terms(m, merged));
    like.ndim = merged->base->ndim; /* a module that is saved as a whole may have another shape */
    like.shape = merged->base->shape;
    fc_merged_blocks(merged, &like, block);
    return fc_computed_add(m->out, &like, name, block, fc_merged_compute, merged, m->err);
}

static fc_code build_merged(merger *m, size_t *merged) {
    for (size_t i = 0; i < m->count; i++) {
        FC_TRY(take_adapter(m, i));
    }
    FC_TRY(check_ties(m));
    for (size_t i = 0; i < m->nchanges; i++) {
        change *c = &m->changes[i];
        if (i >= m->source->ntensors) {
            FC_TRY(add_merged(m, c->merged->base, c->merged, c->added));
        } else if (c->merged) {
            FC_TRY(add_merged(m, &m->source->tensors[i], c->merged, NULL));
        } else {
            FC_TRY(fc_computed_keep(m->out, &m->source->tensors[i], m->err));
        }
        *merged += c->merged != NULL;
    }
    return fc_computed_own(m->out, m->err);
}

static fc_code prepare(merger *m) {
    const size_t count = m->source->ntensors;
    m->all = fc_arena_calloc(m->scratch, m->count + 1, sizeof *m->all);
    m->names = fc_names_of(m->source, m->scratch);
    FC_NEED(m->all && m->names, m->err, m->source->path);
    m->nchanges = count;
    m->all[0] = m->source;
    size_t most = count;
    for (size_t i = 0; i < m->count; i++) {
        m->all[i + 1] = m->adapters[i].values;
        most += m->all[i + 1]->ntensors;
    }
    m->added = fc_name_table_new(m->scratch, most);
    m->changes = fc_arena_calloc(m->scratch, most + 1, sizeof *m->changes);
    FC_NEED(m->added && m->changes && fc_module_parameters_list(m->source, m->scratch, &m->modules_of_source), m->err,
            m->source->path);
    FC_TRY(fc_computed_new(m->all, m->count + 1, most, &m->out, m->err));
    for (size_t i = 0; i < m->count; i++) {
        FC_TRY(fc_derived_add_header(m->out, m->adapters[i].config.path, m->err));
    }
    m->arena = m->out->arena;
    return FC_OK;
}

fc_code fc_merge_opened(fc_checkpoint *source, const fc_opened_adapter *adapters, size_t count, fc_checkpoint **out,
                        size_t *merged, fc_error *err) {
    merger m = {.source = source, .adapters = adapters, .count = count, .scratch = fc_arena_new(), .err = err};
    *out = NULL;
    *merged = 0;
    fc_code rc = m.scratch ? prepare(&m) : fc_no_memory(err, source->path);
    if (rc == FC_OK) {
        rc = build_merged(&m, merged);
    }
    if (rc == FC_OK) {
        *out = m.out;
    } else {
        fc_checkpoint_close(m.out); /* the sources stay open */
    }
    fc_arena_free(m.scratch);
    return rc;
}
