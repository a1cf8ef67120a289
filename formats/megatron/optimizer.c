/*
 * Reads the optimizer of one rank, which numbers its parameters. Megatron goes through the parameters of the model's
 * chunks in order and puts those without weight decay (biases and other parameters of one dimension) into a group of
 * their own. So the numbers can be replaced by names: optim.state.<parameter>.exp_avg, and .fp32_param for the fp32
 * masters of 16-bit parameters. If a shape contradicts this, all states keep their numbers, and a note says why. With
 * expert parallelism there are two optimizers, one of them for the experts.
 */
#include "megatron/stages.h"

#include "fsdpckpt/try.h"
#include "torch/file/name_list.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_GROUPS = 64, MOST_OPTIMIZERS = 3 };

/* A parameter and its state in the optimizer. */
typedef struct mg_param {
    fc_mg_value value; /* a copy: the reader's list moves as it grows */
    const char *name;  /* without "model." */
    size_t group;
    fc_pv state;  /* a dict, or FC_PV_ABSENT */
    fc_pv master; /* a tensor, or FC_PV_ABSENT */
} mg_param;

typedef struct mg_optimizer {
    fc_mg_reader *r;
    size_t member, first_group; /* its index among the optimizers, and that of its first group among all groups */
    fc_pv outer, inner, masters;
    const fc_pv *groups;
    size_t ngroups;
    mg_param *params; /* malloc'ed */
    size_t nparams;
} mg_optimizer;

static fc_pv get_item(const fc_mg_reader *r, fc_pv v, const char *key) {
    return fc_pv_typeof(v) == FC_PV_DICT ? fc_torch_dict_get(r->f.p, v, key) : 0;
}

/* @return NULL if `v` is not a list. */
static const fc_pv *list_of(const fc_mg_reader *r, fc_pv v, size_t *count) {
    static const fc_pv none = 0;
    *count = 0;
    const fc_pv *items = fc_pv_typeof(v) == FC_PV_LIST ? fc_pickle_items(r->f.p, v, count) : NULL;
    return items || fc_pv_typeof(v) != FC_PV_LIST ? items : &none;
}

/* ---- from numbers to names ---- */

/* State dicts contain buffers as well as parameters. */
static bool is_buffer(const char *name) {
    static const char *const buffers[] = {"inv_freq", "expert_bias", "local_tokens_per_expert", "_extra_state"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        size_t m = strlen(buffers[i]);
        if (n >= m && strcmp(name + n - m, buffers[i]) == 0) {
            return true;
        }
    }
    return false;
}

bool fc_mg_is_parameter(const fc_mg_value *v) {
    return v->shared && !is_buffer(v->name) && strncmp(v->name, "model.", 6) == 0;
}

bool fc_mg_name_state(const fc_mg_reader *r, const fc_mg_value *parameter, const char *key, const char **name,
                      fc_path *path) {
    fc_arena *arena = r->checkpoint->arena;
    const char *plain = parameter->name + sizeof "model." - 1;
    fc_path_element *elements = fc_arena_calloc(arena, 4, sizeof *elements);
    *name = fc_arena_printf(arena, "optim.state.%s.%s", plain, key);
    if (!elements || !*name) {
        return false;
    }
    elements[0].key = "optim";
    elements[1].key = "state";
    elements[2].key = plain;
    elements[3].key = key;
    *path = (fc_path){elements, 4};
    return true;
}

/* The optimizer of the experts is the last one. Before it there is one optimizer, or one for the first chunk of the
 * model and one for the others (--overlap-param-gather-with-optimizer-step). */
bool fc_mg_belongs(const fc_mg_reader *r, const fc_mg_value *parameter, size_t member, size_t members) {
    size_t dense = members - (members > 1 && r->grid.ep > 1);
    if (member == dense || (parameter->expert && dense < members)) {
        return parameter->expert && member == dense;
    }
    return dense == 1 || (member == 0) == (parameter->chunk == 0);
}

static fc_code list_params(mg_optimizer *o, size_t members, size_t first, size_t end) {
    fc_mg_reader *r = o->r;
    o->params = calloc(end - first + 1, sizeof *o->params);
    FC_NEED(o->params, r->err, r->checkpoint->path);
    for (size_t i = first; i < end; i++) {
        const fc_mg_value *v = &r->values[i];
        if (fc_mg_is_parameter(v) && fc_mg_belongs(r, v, o->member, members)) {
            o->params[o->nparams++] = (mg_param){.value = *v, .name = v->name + sizeof "model." - 1};
        }
    }
    return FC_OK;
}

static bool without_decay(const fc_mg_value *v) {
    size_t n = strlen(v->name);
    return v->ndim == 1 || (n >= 5 && strcmp(v->name + n - 5, ".bias") == 0);
}

/* Whether a group is the one without weight decay. */
static bool is_undecayed(const fc_mg_reader *r, fc_pv group) {
    int64_t whole;
    fc_pv v = get_item(r, group, "wd_mult");
    v = v ? v : get_item(r, group, "weight_decay");
    return (fc_pv_typeof(v) == FC_PV_FLOAT && fc_pickle_float(r->f.p, v) == 0.0) ||
           (v && fc_pickle_int(r->f.p, v, &whole) && whole == 0);
}

static bool same_sizes(const fc_mg_reader *r, const fc_mg_value *param, fc_pv v) {
    fc_torch_tensor t = {0};
    return fc_torch_is_tensor(r->f.p, v) && fc_torch_tensor_decode(r->f.p, v, &t, NULL) == FC_OK &&
           fc_same_sizes(t.ndim, t.sizes, param->ndim, param->sizes);
}

/* Assigns each parameter to its group. @return NULL, or why that is impossible. */
static const char *assign_groups(mg_optimizer *o, size_t *sizes) {
    size_t plain = o->ngroups, undecayed = o->ngroups, used = 0, total = 0;
    for (size_t g = 0; g < o->ngroups; g++) {
        if (!list_of(o->r, get_item(o->r, o->groups[g], "params"), &sizes[g])) {
            return "a group of parameters has no list of parameters";
        }
        if (sizes[g] > 0) {
            *(is_undecayed(o->r, o->groups[g]) ? &undecayed : &plain) = g;
            used++;
            total += sizes[g];
        }
    }
    if (used > 2 || (used == 2 && (plain == o->ngroups || undecayed == o->ngroups))) {
        return "its groups of parameters are not those with and without weight decay";
    }
    if (total != o->nparams) {
        return "its number of parameters differs from that of the model";
    }
    for (size_t i = 0; i < o->nparams; i++) {
        size_t only = plain == o->ngroups ? undecayed : plain;
        o->params[i].group = used < 2 ? only : without_decay(&o->params[i].value) ? undecayed : plain;
    }
    return NULL;
}

/* Lists the states by number. @return false if a number is invalid. */
static bool list_states(const mg_optimizer *o, fc_pv *states) {
    size_t n = 0;
    fc_pv all = get_item(o->r, o->inner, "state");
    const fc_pv *pairs = fc_pv_typeof(all) == FC_PV_DICT ? fc_pickle_items(o->r->f.p, all, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        int64_t number;
        if (!fc_pickle_int(o->r->f.p, pairs[i], &number) || number < 0 || (uint64_t)number >= o->nparams ||
            fc_pv_typeof(pairs[i + 1]) != FC_PV_DICT) {
            return false;
        }
        states[number] = pairs[i + 1];
    }
    return true;
}

static bool is_16_bit(fc_dtype dtype) {
    return dtype == FC_F16 || dtype == FC_BF16;
}

/* Whether each tensor of the state has the parameter's shape or is a scalar. */
static bool state_fits(const mg_optimizer *o, const mg_param *param) {
    size_t n = 0;
    const fc_pickle *p = o->r->f.p;
    const fc_pv *pairs = param->state ? fc_pickle_items(p, param->state, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_torch_tensor t = {0};
        bool tensor = fc_torch_is_tensor(p, pairs[i + 1]);
        if (fc_pv_typeof(pairs[i]) != FC_PV_STR ||
            (tensor && (fc_torch_tensor_decode(p, pairs[i + 1], &t, NULL) != FC_OK ||
                        (t.ndim > 0 && !same_sizes(o->r, &param->value, pairs[i + 1]))))) {
            return false;
        }
    }
    return true;
}

/* Assigns each parameter its state and its master. @return NULL, or why that is impossible. */
static const char *assign_states(mg_optimizer *o, const size_t *sizes, const fc_pv *states, bool *taken) {
    size_t at[MOST_GROUPS] = {0}, masters[MOST_GROUPS] = {0}, nlists, n;
    const fc_pickle *p = o->r->f.p;
    const fc_pv *lists = list_of(o->r, o->masters, &nlists);
    for (size_t i = 0; i < o->nparams; i++) {
        mg_param *param = &o->params[i];
        int64_t number;
        const fc_pv *numbers = list_of(o->r, get_item(o->r, o->groups[param->group], "params"), &n);
        if (at[param->group] == sizes[param->group] || !fc_pickle_int(p, numbers[at[param->group]++], &number) ||
            number < 0 || (uint64_t)number >= o->nparams || taken[number]) {
            return "the sizes of its groups differ from the model's numbers of parameters with and without weight "
                   "decay";
        }
        taken[number] = true;
        param->state = states[number];
        if (lists && is_16_bit(param->value.dtype)) {
            const fc_pv *list = param->group < nlists ? list_of(o->r, lists[param->group], &n) : NULL;
            if (!list || masters[param->group] >= n || !same_sizes(o->r, &param->value, list[masters[param->group]])) {
                return "its fp32 masters are not the model's 16-bit parameters, by number and shape";
            }
            param->master = list[masters[param->group]++];
        }
        if (!state_fits(o, param)) {
            return "the shapes of its states differ from those of the model's parameters";
        }
    }
    for (size_t g = 0; g < nlists; g++) {
        if (g >= o->ngroups || !list_of(o->r, lists[g], &n) || n != masters[g]) {
            return "its fp32 masters are not the model's 16-bit parameters, by number and shape";
        }
    }
    return NULL;
}

static fc_code assign(mg_optimizer *o, const char **reason) {
    size_t sizes[MOST_GROUPS] = {0};
    fc_pv *states = calloc(o->nparams + 1, sizeof *states);
    bool *taken = calloc(o->nparams + 1, sizeof *taken);
    fc_code rc;
    FC_TRY_GOTO(states && taken ? FC_OK : fc_mg_no_memory(o->r), rc, out);
    *reason = o->ngroups > MOST_GROUPS ? "it has too many groups of parameters" : assign_groups(o, sizes);
    if (!*reason && !list_states(o, states)) {
        *reason = "the numbers of its states differ from those of its parameters";
    }
    *reason = *reason ? *reason : assign_states(o, sizes, states, taken);
out:
    free(states);
    free(taken);
    return rc;
}

/* ---- values ---- */

static fc_code add_state(const mg_optimizer *o, const mg_param *param, const char *key, fc_pv v) {
    fc_mg_reader *r = o->r;
    const fc_mg_value *of = &param->value;
    const char *name;
    fc_path path;
    FC_NEED(fc_mg_name_state(r, of, key, &name, &path), r->err, r->checkpoint->path);
    fc_mg_value *value = fc_mg_add_leaf(r, name, &path, v);
    if (value && value->extent && fc_same_sizes(value->ndim, value->sizes, of->ndim, of->sizes)) {
        value->shared = true;
        value->sharding = of->sharding;
        value->expert = of->expert;
        value->grouped = of->grouped;
    }
    return value ? FC_OK : r->err->code;
}

static fc_code add_states(const mg_optimizer *o, const mg_param *param) {
    fc_mg_reader *r = o->r;
    size_t n = 0;
    const fc_pv *pairs = param->state ? fc_pickle_items(r->f.p, param->state, &n) : NULL;
    if (param->master) {
        FC_TRY(add_state(o, param, "fp32_param", param->master));
    }
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length;
        const char *key = fc_pickle_bytes(r->f.p, pairs[i], &length);
        const char *copy = fc_arena_strndup(r->checkpoint->arena, key, strlen(key));
        FC_NEED(copy, r->err, r->checkpoint->path);
        FC_TRY(add_state(o, param, copy, pairs[i + 1]));
    }
    return FC_OK;
}

/* The numbers of a group's parameters are replaced by their names. */
static fc_code add_names(const mg_optimizer *o, size_t group, const fc_path *path, const char *name) {
    fc_mg_reader *r = o->r;
    const torch_file kept = r->f;
    torch_name_list names;
    fc_torch_name_list_begin(&names);
    for (size_t i = 0; i < o->nparams; i++) {
        if (o->params[i].group == group) {
            fc_torch_name_list_add(&names, o->params[i].name);
        }
    }
    fc_code rc;
    FC_TRY_GOTO(fc_torch_name_list_end(&names, &r->f, r->err), rc, out);
    r->f = names.f;
    rc = fc_mg_add_leaf(r, name, path, names.f.p->root) ? FC_OK : r->err->code;
    r->f = kept;
out:
    fc_torch_name_list_free(&names);
    return rc;
}

/* Adds the members of a dict, whose path is `prefix`, except those in `skipped`. */
static fc_code add_members(const mg_optimizer *o, fc_pv dict, const fc_path *prefix, const char *const *skipped) {
    fc_mg_reader *r = o->r;
    fc_arena *arena = r->checkpoint->arena;
    size_t n;
    const fc_pv *pairs = fc_pickle_items(r->f.p, dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_path_element *path = fc_arena_calloc(arena, prefix->count + 1, sizeof *path);
        FC_NEED(path, r->err, r->checkpoint->path);
        memcpy(path, prefix->elements, prefix->count * sizeof *path);
        FC_TRY(fc_torch_key_element(&r->f, pairs[i], arena, &path[prefix->count], r->err));
        bool skip = false;
        for (size_t k = 0; skipped[k]; k++) {
            skip = skip || strcmp(skipped[k], path[prefix->count].key) == 0;
        }
        const fc_path whole = {path, prefix->count + 1};
        if (!skip) {
            FC_TRY(fc_mg_add(r, &whole, pairs[i + 1]));
        }
    }
    return FC_OK;
}

static fc_code add_groups(const mg_optimizer *o) {
    static const char *const skipped[] = {"params", NULL};
    fc_arena *arena = o->r->checkpoint->arena;
    for (size_t g = 0; g < o->ngroups; g++) {
        fc_path_element *path = fc_arena_calloc(arena, 4, sizeof *path);
        const char *name = fc_arena_printf(arena, "optim.param_groups.%zu.params", o->first_group + g);
        const char *number = fc_arena_printf(arena, "%zu", o->first_group + g);
        FC_NEED(path && name && number, o->r->err, o->r->checkpoint->path);
        path[0].key = "optim";
        path[1].key = "param_groups";
        path[2] = (fc_path_element){.key = number, .is_index = true};
        path[3].key = "params";
        const fc_path prefix = {path, 3}, whole = {path, 4};
        FC_TRY(add_members(o, o->groups[g], &prefix, skipped));
        FC_TRY(add_names(o, g, &whole, name));
    }
    return FC_OK;
}

static fc_code add_all(const mg_optimizer *o) {
    static const char *const inner[] = {"state", "param_groups", NULL};
    static const char *const outer[] = {"optimizer", "fp32_from_fp16_params", NULL};
    fc_path_element path[2] = {{.key = "optim"}};
    const fc_path prefix = {path, o->member > 0 ? 2 : 1};
    path[1].key = fc_arena_printf(o->r->checkpoint->arena, "chained_%zu", o->member); /* as torch_dist calls it */
    FC_NEED(path[1].key, o->r->err, o->r->checkpoint->path);
    for (size_t i = 0; i < o->nparams; i++) {
        FC_TRY(add_states(o, &o->params[i]));
    }
    FC_TRY(add_groups(o));
    FC_TRY(add_members(o, o->inner, &prefix, inner));
    return o->outer != o->inner ? add_members(o, o->outer, &prefix, outer) : FC_OK;
}

/* A distributed optimizer has its state in another file. */
static bool is_stateless(const mg_optimizer *o) {
    return fc_pv_typeof(o->inner) == FC_PV_DICT && !get_item(o->r, o->inner, "state");
}

/* Assigns the parameters of one of `members` optimizers their states. `*reason` is NULL, or why that is impossible. */
static fc_code prepare_member(mg_optimizer *o, fc_pv optimizer, size_t members, size_t first, size_t end,
                              const char **reason) {
    o->outer = o->inner = optimizer;
    if (get_item(o->r, optimizer, "optimizer")) {
        o->inner = get_item(o->r, optimizer, "optimizer");
        o->masters = get_item(o->r, optimizer, "fp32_from_fp16_params");
    }
    o->groups = list_of(o->r, get_item(o->r, o->inner, "param_groups"), &o->ngroups);
    *reason = o->groups ? NULL : "it has no groups of parameters";
    if (is_stateless(o) || *reason) {
        return FC_OK;
    }
    FC_TRY(list_params(o, members, first, end));
    return assign(o, reason);
}

static fc_code read_members(mg_optimizer *optimizers, const fc_pv *values, size_t members, size_t first, size_t end,
                            bool *named) {
    fc_mg_reader *r = optimizers->r;
    const char *reason = NULL;
    size_t stateless = 0;
    for (size_t i = 0; !reason && i < members; i++) {
        mg_optimizer *o = &optimizers[i];
        o->r = r;
        o->member = i;
        o->first_group = i > 0 ? o[-1].first_group + o[-1].ngroups : 0;
        FC_TRY(prepare_member(o, values[i], members, first, end, &reason));
        stateless += is_stateless(o);
    }
    reason = !reason && stateless > 0 && stateless < members ? "only some of its optimizers have a state" : reason;
    *named = !reason && stateless == 0;
    if (reason && stateless < members) {
        r->unnamed = reason;
        r->unnamed_file = r->rank;
    }
    for (size_t i = 0; *named && i < members; i++) {
        FC_TRY(add_all(&optimizers[i]));
    }
    return FC_OK;
}

fc_code fc_mg_read_optimizer(fc_mg_reader *r, fc_pv optimizer, size_t first, size_t end) {
    static const fc_path_element element = {.key = "optimizer"};
    const fc_path path = {&element, 1};
    mg_optimizer optimizers[MOST_OPTIMIZERS] = {{.r = r}};
    size_t members;
    bool named = false;
    const fc_pv *list = list_of(r, optimizer, &members);
    fc_code rc = FC_OK;
    if (list && (members == 0 || members > MOST_OPTIMIZERS)) {
        r->unnamed = "it consists of an unsupported number of optimizers";
        r->unnamed_file = r->rank;
    } else {
        FC_TRY_GOTO(read_members(optimizers, list ? list : &optimizer, list ? members : 1, first, end, &named), rc,
                    out);
    }
out:
    for (size_t i = 0; i < MOST_OPTIMIZERS; i++) {
        free(optimizers[i].params);
    }
    return rc == FC_OK && !named ? fc_mg_add(r, &path, optimizer) : rc;
}
