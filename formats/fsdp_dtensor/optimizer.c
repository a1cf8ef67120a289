/*
 * Adds an optimizer as Megatron-FSDP looks for it: a state becomes `optimizer.state.<parameter>.<key>`, and the values
 * of its group become `optimizer.param_to_group_meta.<parameter>.<key>`, for each parameter. The masters in fp32 are
 * the weights of the model. Which group a parameter belongs to follows from its name and its shape, as in Megatron.
 */
#include "fsdp_dtensor/optimizer.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static const char wrapped[] = "module.module.module."; /* the classes around the model of a bf16 or fp16 run */

/* A parameter of the optimizer. */
typedef struct parameter {
    const char *name; /* with `wrapped` */
    bool expert, decays;
} parameter;

/* A group of megatron-core's optimizers. */
typedef struct group {
    size_t optimizer, number;
    double decay; /* the factor for weight decay, -1: unknown */
} group;

typedef struct adding {
    fc_dist_adapting *a;
    fc_arena *scratch;
    fc_fsdp_dtensor_optimizer *o;
    parameter *parameters;
    fc_dist_setting *settings;
    group *groups;
    fc_name_table *known; /* of `parameters`: their indexes */
    size_t nparameters, nsettings, ngroups, nweights, parameter_room, setting_room, group_room, weight_room;
} adding;

size_t fc_fsdp_dtensor_parameter(const fc_name_table *parameters, const char *name) {
    const size_t n = strlen(name);
    if (fc_name_table_find(parameters, name, n) != FC_NO_NAME) {
        return n;
    }
    const bool half = fc_ends_with(name, "_w") || fc_ends_with(name, "_v");
    return half && fc_name_table_find(parameters, name, n - 2) != FC_NO_NAME ? n - 2 : 0;
}

/* Adds a value below "optimizer", "state" or "param_to_group_meta", and the name of its parameter. */
static fc_code add_value(const adding *x, const char *kind, const char *name, const char *key, const fc_tensor *value,
                         const char *json) {
    const fc_path_element elements[] = {{.key = "optimizer"}, {.key = kind}, {.key = name}, {.key = key}};
    const fc_path path = {elements, 4};
    const char *text = fc_path_spell(x->a->out->arena, &path, '.');
    FC_NEED(text, x->a->err, x->a->source->path);
    return value ? fc_dist_keep(x->a, value, text, &path) : fc_dist_add_text(x->a, text, &path, json);
}

/* ---- the states ---- */

static fc_code add_parameter(adding *x, const char *name, size_t length, const fc_tensor *state) {
    const char *own = fc_arena_printf(x->scratch, "%s%.*s", wrapped, (int)length, name);
    FC_NEED(own && fc_arena_grow(x->scratch, &x->parameters, &x->parameter_room, x->nparameters, x->nparameters + 1,
                                 sizeof *x->parameters),
            x->a->err, x->a->source->path);
    const size_t at = fc_name_table_put(x->known, own, strlen(own), x->nparameters);
    FC_NEED(at != FC_NO_NAME, x->a->err, x->a->source->path);
    if (at == x->nparameters) {
        x->parameters[x->nparameters++] =
            (parameter){own, strstr(own, ".mlp.experts.") != NULL, state->ndim != 1 && !fc_ends_with(own, ".bias")};
    }
    return FC_OK;
}

/* Remembers the weight that the optimizer changes, which becomes that of the model. */
static fc_code add_master(adding *x, const char *name, const fc_tensor *value) {
    const char *own = fc_arena_strndup(x->scratch, name, strlen(name));
    FC_NEED(own && fc_arena_grow(x->scratch, &x->o->weights, &x->weight_room, x->nweights, x->nweights + 1,
                                 sizeof(const fc_tensor *)),
            x->a->err, x->a->source->path);
    const size_t at = fc_name_table_put(x->o->masters, own, strlen(own), x->nweights);
    FC_NEED(at != FC_NO_NAME, x->a->err, x->a->source->path);
    x->o->weights[x->nweights++] = value;
    return FC_OK;
}

static fc_code add_state(void *context, const fc_tensor *value, const char *key, const char *name) {
    adding *x = context;
    const size_t length = fc_fsdp_dtensor_parameter(x->o->parameters, name);
    const bool master = strcmp(key, "param") == 0;
    if (length == 0) {
        return fc_fail(x->a->err, FC_EUNSUPPORTED, "%s: '%.256s' is state of a parameter that is missing",
                       x->a->source->path, value->name);
    }
    FC_TRY(strcmp(key, "exp_avg") == 0 ? add_parameter(x, name, length, value) : FC_OK);
    const char *own = master ? name : fc_arena_printf(x->scratch, "%s%s", wrapped, name);
    FC_NEED(own, x->a->err, x->a->source->path);
    return master ? add_master(x, own, value) : add_value(x, "state", own, key, value, NULL);
}

/* ---- the groups ---- */

/* Reads the factor of a group for weight decay. */
static fc_code read_decay(const adding *x, const fc_dist_setting *s, double *out) {
    const char *json = s->json;
    if (s->value && x->a->source->format->layout_only) {
        return FC_OK;
    }
    FC_TRY(s->value ? fc_checkpoint_object_json(x->a->source, s->value, x->scratch, &json, x->a->err) : FC_OK);
    *out = strtod(json, NULL);
    return FC_OK;
}

static fc_code add_setting(void *context, const fc_dist_setting *s) {
    adding *x = context;
    size_t i = 0;
    while (i < x->ngroups && (x->groups[i].optimizer != s->optimizer || x->groups[i].number != s->number)) {
        i++;
    }
    FC_NEED(fc_arena_grow(x->scratch, &x->settings, &x->setting_room, x->nsettings, x->nsettings + 1,
                          sizeof *x->settings) &&
                fc_arena_grow(x->scratch, &x->groups, &x->group_room, x->ngroups, x->ngroups + 1, sizeof *x->groups),
            x->a->err, x->a->source->path);
    if (i == x->ngroups) {
        x->groups[x->ngroups++] = (group){s->optimizer, s->number, -1};
    }
    x->settings[x->nsettings++] = *s;
    const bool decay = strcmp(s->key, "wd_mult") == 0 || strcmp(s->key, "pre_wd_mult") == 0;
    return decay ? read_decay(x, s, &x->groups[i].decay) : FC_OK;
}

/* Finds the only group that a parameter can belong to. */
static fc_code find_group(const adding *x, const parameter *p, const group **out) {
    const bool experts = x->settings[0].experts;
    *out = NULL;
    for (size_t i = 0; i < x->ngroups; i++) {
        const group *g = &x->groups[i];
        const bool fits = g->optimizer == (experts && p->expert) && (g->decay < 0 || (g->decay > 0) == p->decays);
        if (fits && *out && g->decay >= 0) {
            return fc_fail(x->a->err, FC_EUNSUPPORTED,
                           "%s: parameter %.256s may belong to group %zu of the optimizer, or to group %zu",
                           x->a->source->path, p->name + sizeof wrapped - 1, (*out)->number, g->number);
        }
        *out = fits && !*out ? g : *out;
    }
    return *out ? FC_OK
                : fc_fail(x->a->err, FC_EUNSUPPORTED, "%s: no group of the optimizer is for parameter %.256s",
                          x->a->source->path, p->name + sizeof wrapped - 1);
}

static fc_code add_groups(const adding *x) {
    for (size_t i = 0; i < x->nparameters; i++) {
        const group *g = NULL;
        FC_TRY(find_group(x, &x->parameters[i], &g));
        for (size_t k = 0; k < x->nsettings; k++) {
            const fc_dist_setting *s = &x->settings[k];
            const bool own = s->optimizer == g->optimizer && s->number == g->number;
            FC_TRY(own ? add_value(x, "param_to_group_meta", x->parameters[i].name, s->key, s->value, s->json) : FC_OK);
        }
    }
    return FC_OK;
}

fc_code fc_fsdp_dtensor_add_optimizer(fc_dist_adapting *a, const fc_target *target, fc_fsdp_dtensor_optimizer *o,
                                      bool *taken, fc_arena *scratch) {
    adding x = {.a = a, .scratch = scratch, .o = o, .known = fc_name_table_new(scratch, 0)};
    const fc_dist_optimizer to = {&x, true, true, add_state, add_setting};
    bool experts = false;
    o->masters = fc_name_table_new(scratch, 0);
    FC_NEED(x.known && o->masters, a->err, a->source->path);
    FC_TRY(fc_dist_find_optimizer(a, target, &to, taken, &o->step, &experts));
    return x.nsettings > 0 ? add_groups(&x) : FC_OK;
}
