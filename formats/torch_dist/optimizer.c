/*
 * Finds the optimizer of a source for megatron-core, whose formats store it by parameter: see adapting.h. The source
 * has torch's names, `optim.state.<parameter>.<key>` (DCP of FSDP and torchtitan, Megatron's rank files), or Megatron's
 * own, with the key before the parameter. Megatron divides its parameters among groups itself, by what their names and
 * shapes say, and looks for the group with the same multipliers. With expert parallelism it has a second optimizer, for
 * the experts.
 */
#include "base/grow.h"
#include "checkpoint/path.h"
#include "derived/optim_name.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "torch_dist/adapting.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A value of a group of the source. */
typedef struct setting {
    const fc_target_tensor *value;
    fc_optim_name name;
    size_t group; /* index into groups.items */
} setting;

/* A group of the source, or a parameter that has settings of its own. */
typedef struct group {
    size_t optimizer; /* 1: that of the experts */
    size_t number;    /* within its optimizer */
    bool has_step;
} group;

typedef struct finding {
    fc_dist_adapting *a;
    const fc_dist_optimizer *to;
    const fc_target *target;
    fc_arena *scratch;
    fc_name_table *weights;        /* tensors of the target by name: their indexes */
    fc_name_table *masters;        /* parameters that have a master in fp32 */
    const fc_target_tensor *first; /* a state */
    setting *settings;
    size_t nsettings;
    group *groups;
    size_t ngroups;
    bool *taken;
    bool grouped; /* whether the groups are Megatron's */
    bool experts; /* whether experts have an optimizer of their own */
    int64_t step; /* -1: not found yet */
} finding;

static fc_code refuse(const finding *f, const fc_target_tensor *w, const char *why) {
    fc_code rc = fc_fail(f->a->err, FC_EUNSUPPORTED, "%s: '%.256s' %s", f->a->source->path, w->name, why);
    char glob[64];
    snprintf(glob, sizeof glob, "%.*s*", (int)strcspn(w->name, "."), w->name);
    return fc_advise(f->a->err, rc, FC_HINT_EXCLUDE, glob);
}

/* Reads the value of an object as JSON; "null" in a schema, which has none. */
static fc_code read_json(const finding *f, const fc_target_tensor *w, const char **json) {
    *json = "null";
    return f->a->source->format->layout_only
               ? FC_OK
               : fc_checkpoint_object_json(f->a->source, w->source, f->scratch, json, f->a->err);
}

/* ---- the state ---- */

/* The name of a key in the distributed optimizer, or NULL. */
static const char *dist_key(const char *key) {
    static const char *const keys[][2] = {
        {"exp_avg", "exp_avg"}, {"exp_avg_sq", "exp_avg_sq"}, {"fp32_param", "param"}, {"param", "param"}};
    for (size_t i = 0; key && i < sizeof keys / sizeof *keys; i++) {
        if (strcmp(key, keys[i][0]) == 0) {
            return keys[i][1];
        }
    }
    return NULL;
}

/* Reads the value of a step, which is a tensor with one number, or a number. */
static fc_code read_step(const finding *f, const fc_target_tensor *w, double *out) {
    const fc_tensor *t = w->source;
    const char *json = NULL;
    if (t->object) {
        FC_TRY(read_json(f, w, &json));
        json_t *number = json_loads(json, JSON_DECODE_ANY, NULL);
        *out = json_is_number(number) ? json_number_value(number) : -1;
        json_decref(number);
        return FC_OK;
    }
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box all = {t->ndim, origin, t->shape};
    const fc_dtype_class cls = fc_dtype_get(t->dtype)->cls;
    double real = -1;
    int64_t whole = -1;
    *out = -1;
    if (fc_box_volume(&all) == 1 && cls == FC_CLASS_FLOAT) {
        FC_TRY(fc_read_box(f->a->source, t, &all, FC_F64, &real, f->a->err));
        *out = real;
    } else if (fc_box_volume(&all) == 1 && t->dtype == FC_I64) {
        FC_TRY(fc_read_box(f->a->source, t, &all, FC_I64, &whole, f->a->err));
        *out = (double)whole;
    }
    return FC_OK;
}

/* megatron-core has one step for all parameters. */
static fc_code take_step(finding *f, const fc_target_tensor *w) {
    double step;
    if (f->a->source->format->layout_only) {
        f->step = 0;
        return FC_OK;
    }
    FC_TRY(read_step(f, w, &step));
    if (!(step >= 0) || step > (double)(INT64_C(1) << 53) || step != floor(step)) {
        return refuse(f, w, "is not a number of steps");
    }
    if (f->step >= 0 && (double)f->step != step) {
        const char *why = fc_arena_printf(f->scratch,
                                          "is %.0f, but other parameters made %" PRId64
                                          " steps; megatron-core has one number for all of them",
                                          step, f->step);
        return why ? refuse(f, w, why) : fc_no_memory(f->a->err, f->a->source->path);
    }
    f->step = (int64_t)step;
    return FC_OK;
}

/* Adds a state under its new name. */
static fc_code take_state(finding *f, const fc_target_tensor *w, const fc_optim_name *n) {
    const char *key = w->source->object ? NULL : dist_key(n->key);
    const char *parameter = fc_arena_strndup(f->scratch, n->text, n->len);
    FC_NEED(parameter, f->a->err, f->a->source->path);
    f->first = f->first ? f->first : w;
    if (n->is_number) {
        return refuse(f, w, "has the number of a parameter, but megatron-core needs the names of parameters");
    }
    if (n->key && strcmp(n->key, "step") == 0) {
        FC_TRY(take_step(f, w));
        return f->to->takes_step ? f->to->add_state(f->to->context, w->source, "step", parameter) : FC_OK;
    }
    if (!key) {
        return refuse(
            f, w,
            "has no place in megatron-core's distributed optimizer, which has exp_avg, exp_avg_sq and weights in "
            "fp32");
    }
    f->experts = f->experts || (!f->grouped && strstr(parameter, ".mlp.experts."));
    if (strcmp(key, "param") == 0) {
        FC_NEED(fc_name_table_put(f->masters, parameter, n->len, 0) != FC_NO_NAME, f->a->err, f->a->source->path);
    }
    return f->to->add_state(f->to->context, w->source, key, parameter);
}

/* Without a weight in fp32 among the states, the model's own is the one that the optimizer changes. */
static fc_code add_master(const finding *f, const fc_target_tensor *w, const fc_optim_name *n) {
    if (fc_name_table_find(f->masters, n->text, n->len) != FC_NO_NAME) {
        return FC_OK;
    }
    const size_t at = fc_name_table_find(f->weights, n->text, n->len);
    const char *parameter = fc_arena_strndup(f->scratch, n->text, n->len);
    FC_NEED(parameter, f->a->err, f->a->source->path);
    return at != FC_NO_NAME ? f->to->add_state(f->to->context, f->target->tensors[at].source, "param", parameter)
                            : refuse(f, w, "is state of a parameter that is missing");
}

/* ---- the groups ---- */

/* Whether a value of a group lists its parameters, which megatron-core does not store. */
static bool is_list(const fc_target_tensor *w, const fc_optim_name *n) {
    const fc_path *path = &w->path;
    const char *key = n->key ? n->key : n->levels + 2 < path->count ? path->elements[n->levels + 2].key : "";
    return strncmp(key, "params", strlen("params")) == 0 || strcmp(key, "param_names") == 0;
}

void fc_dist_drop_lists(fc_target *target) {
    fc_target_tensor *kept = (fc_target_tensor *)(uintptr_t)target->tensors; /* of the target's own arena */
    size_t count = 0;
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_optim_name n = fc_optim_name_of(&target->tensors[i]);
        if (n.kind == FC_OPTIM_STATE && n.is_number) {
            return;
        }
    }
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_optim_name n = fc_optim_name_of(&target->tensors[i]);
        if (n.kind != FC_OPTIM_GROUP || !is_list(&target->tensors[i], &n)) {
            kept[count++] = target->tensors[i];
        }
    }
    target->ntensors = count;
}

static bool is_setting(const fc_optim_name *n, const char *key) {
    return n->key && strcmp(n->key, key) == 0;
}

/* Finds the optimizer of Megatron's group: its files have a list of them, or the group says whether it has experts. */
static fc_code find_optimizer(const finding *f, const setting *s, group *g) {
    const char *json = NULL;
    for (size_t i = 0; i < s->name.levels; i++) {
        const fc_path_element *e = &s->value->path.elements[i];
        g->optimizer = e->is_index || e->is_number ? strtoull(e->key, NULL, 10) : g->optimizer;
    }
    if (g->optimizer == 0 && is_setting(&s->name, "is_expert_parallel")) {
        FC_TRY(read_json(f, s->value, &json));
        g->optimizer = strcmp(json, "true") == 0;
    }
    return FC_OK;
}

static fc_code find_group(finding *f, fc_name_table *known, setting *s) {
    const fc_path *path = &s->value->path;
    char *text = fc_arena_strndup(f->scratch, "", 0);
    for (size_t i = 0; text && i < s->name.levels; i++) {
        text = fc_arena_printf(f->scratch, "%s%s.", text, path->elements[i].key);
    }
    text = text ? fc_arena_printf(f->scratch, "%s%.*s", text, (int)s->name.len, s->name.text) : NULL;
    s->group = text ? fc_name_table_put(known, text, strlen(text), f->ngroups) : FC_NO_NAME;
    FC_NEED(s->group != FC_NO_NAME, f->a->err, f->a->source->path);
    f->ngroups += s->group == f->ngroups;
    group *g = &f->groups[s->group];
    f->grouped = f->grouped || is_setting(&s->name, "wd_mult") || is_setting(&s->name, "pre_wd_mult");
    g->has_step = g->has_step || is_setting(&s->name, "step");
    return find_optimizer(f, s, g);
}

static fc_code find_groups(finding *f) {
    size_t numbers[2] = {0, 0};
    fc_name_table *known = fc_name_table_new(f->scratch, 0);
    f->settings = fc_arena_calloc(f->scratch, f->target->ntensors + 1, sizeof *f->settings);
    f->groups = fc_arena_calloc(f->scratch, f->target->ntensors + 1, sizeof *f->groups);
    FC_NEED(known && f->settings && f->groups, f->a->err, f->a->source->path);
    for (size_t i = 0; i < f->target->ntensors; i++) {
        setting s = {.value = &f->target->tensors[i], .name = fc_optim_name_of(&f->target->tensors[i])};
        if (s.name.kind == FC_OPTIM_GROUP) {
            FC_TRY(find_group(f, known, &s));
            f->settings[f->nsettings++] = s;
        }
    }
    for (size_t i = 0; i < f->ngroups; i++) {
        if (f->groups[i].optimizer > 1) {
            return refuse(f, f->settings[0].value, "is of more than two optimizers, which megatron-core does not have");
        }
        f->groups[i].number = numbers[f->groups[i].optimizer]++;
        f->experts = f->experts || (f->grouped && f->groups[i].optimizer > 0);
    }
    return FC_OK;
}

static const char *step_json(const finding *f) {
    return fc_arena_printf(f->a->out->arena, "%" PRId64, f->step);
}

static fc_code add_setting(const finding *f, size_t optimizer, size_t number, const char *key, const fc_tensor *value,
                           const char *json) {
    const fc_dist_setting s = {optimizer, number, f->experts, key, value, json};
    FC_NEED(value || json, f->a->err, f->a->source->path);
    return f->to->add_setting(f->to->context, &s);
}

/* Adds Megatron's own groups. */
static fc_code add_own_groups(const finding *f) {
    for (size_t i = 0; i < f->nsettings; i++) {
        const setting *s = &f->settings[i];
        const group *g = &f->groups[s->group];
        if (is_list(s->value, &s->name)) {
            continue;
        }
        if (!s->name.key) {
            return refuse(f, s->value, "is nested deeper than in megatron-core's groups");
        }
        FC_TRY(add_setting(f, g->optimizer, g->number, s->name.key, s->value->source, NULL));
    }
    for (size_t i = 0; i < f->ngroups; i++) {
        const group *g = &f->groups[i];
        FC_TRY(g->has_step ? FC_OK : add_setting(f, g->optimizer, g->number, "step", NULL, step_json(f)));
    }
    return FC_OK;
}

/* A setting that the groups of torch's optimizer have in common. */
typedef struct shared {
    const setting *like;
    const char *key, *json;
} shared;

/* Finds the settings of torch's groups. All groups must have the same, but some may have no weight decay. */
static fc_code find_shared(const finding *f, shared *all, size_t *count) {
    fc_name_table *known = fc_name_table_new(f->scratch, 0);
    FC_NEED(known, f->a->err, f->a->source->path);
    for (size_t i = 0; i < f->nsettings; i++) {
        const setting *s = &f->settings[i];
        const char *json = NULL;
        if (is_list(s->value, &s->name)) {
            continue;
        }
        if (!s->name.key) {
            return refuse(f, s->value, "is nested deeper than in torch's optimizers");
        }
        FC_TRY(read_json(f, s->value, &json));
        const size_t at = fc_name_table_put(known, s->name.key, strlen(s->name.key), *count);
        FC_NEED(at != FC_NO_NAME, f->a->err, f->a->source->path);
        const bool decay = strcmp(s->name.key, "weight_decay") == 0;
        if (at == *count || (decay && strtod(all[at].json, NULL) == 0)) {
            all[at] = (shared){s, s->name.key, json};
            *count += at == *count;
        } else if (strcmp(all[at].json, json) != 0 && !(decay && strtod(json, NULL) == 0)) {
            return refuse(f, s->value, "differs between groups, which Megatron makes by other rules");
        }
    }
    return FC_OK;
}

/* Adds one of the groups that Megatron makes: without weight decay for biases and norms, and with it for the rest. */
static fc_code add_made_group(const finding *f, size_t optimizer, bool decays, const shared *all, size_t count) {
    const size_t number = !decays;
    const char *const settings[][2] = {{"wd_mult", decays ? "1.0" : "0.0"},
                                       {"lr_mult", "1.0"},
                                       {"is_expert_parallel", optimizer > 0 ? "true" : "false"},
                                       {"is_decoupled_lr", "false"},
                                       {"default_config", "true"},
                                       {"bias_correction", "true"}, /* Transformer Engine's and Apex' AdamW need it */
                                       {"step", step_json(f)}};
    for (size_t i = 0; i < count; i++) {
        const bool zero = !decays && strcmp(all[i].key, "weight_decay") == 0;
        FC_TRY(add_setting(f, optimizer, number, all[i].key, zero ? NULL : all[i].like->value->source, "0.0"));
    }
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        FC_TRY(add_setting(f, optimizer, number, settings[i][0], NULL, settings[i][1]));
    }
    return FC_OK;
}

static fc_code add_made_groups(const finding *f) {
    static const char *const needed[] = {"lr", "betas", "eps", "weight_decay"};
    shared *all = fc_arena_calloc(f->scratch, f->nsettings + 1, sizeof *all);
    size_t count = 0, found = 0;
    FC_NEED(all, f->a->err, f->a->source->path);
    FC_TRY(find_shared(f, all, &count));
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < sizeof needed / sizeof *needed; k++) {
            found += strcmp(all[i].key, needed[k]) == 0;
        }
        if ((strcmp(all[i].key, "amsgrad") == 0 || strcmp(all[i].key, "maximize") == 0) &&
            strcmp(all[i].json, "true") == 0) {
            return refuse(f, all[i].like->value, "is true, which megatron-core's optimizer does not know");
        }
    }
    if (found < sizeof needed / sizeof *needed) {
        return refuse(f, f->first, "is of an optimizer whose param_groups lack lr, betas, eps or weight_decay");
    }
    for (size_t optimizer = 0; optimizer <= f->experts; optimizer++) {
        FC_TRY(add_made_group(f, optimizer, true, all, count));
        FC_TRY(add_made_group(f, optimizer, false, all, count));
    }
    return FC_OK;
}

/* ---- the whole ---- */

/* Adds the states, and then the weights in fp32 that are not among them. */
static fc_code add_states(finding *f) {
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        const fc_optim_name n = fc_optim_name_of(w);
        if (n.kind == FC_OPTIM_STATE && (!n.key_first || f->to->takes_key_first)) {
            f->taken[i] = true;
            FC_TRY(take_state(f, w, &n));
        } else if (n.kind == FC_OPTIM_NONE && !w->source->object) {
            FC_NEED(fc_name_table_put(f->weights, w->name, strlen(w->name), i) != FC_NO_NAME, f->a->err,
                    f->a->source->path);
        }
    }
    for (size_t i = 0; f->first && i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        const fc_optim_name n = f->taken[i] ? fc_optim_name_of(w) : (fc_optim_name){0};
        FC_TRY(f->taken[i] && is_setting(&n, "exp_avg") ? add_master(f, w, &n) : FC_OK);
    }
    return FC_OK;
}

static fc_code add_optimizer(finding *f) {
    FC_TRY(find_groups(f));
    FC_TRY(add_states(f));
    if (!f->first) {
        f->step = -1;
        return FC_OK;
    }
    if (f->step < 0 && !f->grouped) {
        return refuse(f, f->first, "is of an optimizer without a step");
    }
    f->step = f->step < 0 ? 0 : f->step; /* Megatron's groups have it */
    for (size_t i = 0; i < f->nsettings; i++) {
        f->taken[f->settings[i].value - f->target->tensors] = true;
    }
    return f->grouped ? add_own_groups(f) : add_made_groups(f);
}

fc_code fc_dist_find_optimizer(fc_dist_adapting *a, const fc_target *target, const fc_dist_optimizer *to, bool *taken,
                               int64_t *step, bool *experts) {
    finding f = {.a = a, .to = to, .target = target, .taken = taken, .step = -1, .scratch = fc_arena_new()};
    f.weights = f.scratch ? fc_name_table_new(f.scratch, 0) : NULL;
    f.masters = f.weights ? fc_name_table_new(f.scratch, 0) : NULL;
    const fc_code rc = f.masters ? add_optimizer(&f) : fc_no_memory(a->err, a->source->path);
    fc_arena_free(f.scratch);
    *step = f.step;
    *experts = f.experts;
    return rc;
}
