/*
 * Checks whether the optimizer's state fits the parameters. It uses names such as "optim.state.<parameter>.exp_avg"
 * from torch's get_optimizer_state_dict, nested or flattened, and the parameter lists of param_groups. Numbered state
 * ("optim.state.0.exp_avg") has no names to check and is ignored.
 */
#include "check/check.h"

#include "fsdpckpt/format.h"

#include <jansson.h>
#include <stdint.h>
#include <string.h>

enum { MOST_KEYS = 64, MOST_SUFFIXES = 64 };

/* A run of characters within a name. */
typedef struct span {
    const char *text;
    size_t len;
} span;

/* A parameter that has state. */
typedef struct stateful {
    const char *name;    /* as in the optimizer, without wrapper components */
    size_t parameter;    /* index into the names; FC_NO_NAME when it is missing */
    size_t first, count; /* index of its first state value, and how many it has */
    uint64_t keys;       /* one bit per optimizer.keys */
    bool grouped;        /* whether param_groups lists it */
} stateful;

typedef struct optimizer {
    fc_check_run *c;
    fc_name_table *suffixes; /* from each suffix of the parameters' names to an index into the names */
    fc_name_table *by_name;  /* from stateful.name to an index into params */
    stateful *params;
    size_t count, found;
    span keys[MOST_KEYS];
    size_t nkeys;
    size_t having[MOST_KEYS]; /* how many parameters have that key */
} optimizer;

static bool span_is(span s, const char *text) {
    return strlen(text) == s.len && memcmp(s.text, text, s.len) == 0;
}

static bool all_digits(span s) {
    size_t i = 0;
    while (i < s.len && s.text[i] >= '0' && s.text[i] <= '9') {
        i++;
    }
    return i == s.len;
}

const char *fc_check_after_section(const char *name, const char *word) {
    size_t len = strlen(word);
    bool optim = false;
    for (const char *at = name; at; at = strchr(at, '.'), at = at ? at + 1 : NULL) {
        size_t n = strcspn(at, ".");
        if (n == len && memcmp(at, word, len) == 0 && at[n] == '.' && (optim || at == name)) {
            return at + n + 1;
        }
        optim = optim || memmem(at, n, "optim", 5);
    }
    return NULL;
}

/*
 * Splits "optim.state.<parameter>.<key>". A nested path shows where the parameter ends; in a flat name the last dot
 * does.
 */
static bool split_state(const fc_named *named, span *parameter, span *key) {
    const char *rest = fc_check_after_section(named->name, "state");
    const fc_path *path = &named->tensor->path;
    if (!rest || named->tensor->object) {
        return false;
    }
    for (size_t i = 0; i + 2 < path->count; i++) {
        const char *element = path->elements[i + 1].key;
        size_t len = strlen(element);
        if (strcmp(path->elements[i].key, "state") == 0 && strncmp(rest, element, len) == 0 && rest[len] == '.') {
            *parameter = (span){rest, len};
            *key = (span){rest + len + 1, strlen(rest + len + 1)};
            return !path->elements[i + 1].is_index;
        }
    }
    const char *dot = strrchr(rest, '.');
    if (!dot) {
        return false;
    }
    *parameter = (span){rest, (size_t)(dot - rest)};
    *key = (span){dot + 1, strlen(dot + 1)};
    return true;
}

/* Lists a parameter under the suffixes of its name: at most MOST_SUFFIXES, so that the time stays linear in the length
   of the name. The shortest name wins a suffix that several share. */
static void enter_suffixes(optimizer *o, size_t index) {
    const fc_names *names = &o->c->names;
    const char *name = names->items[index].name;
    const char *at = fc_check_unwrap(o->c, name, strlen(name), NULL);
    for (int i = 0; at && i < MOST_SUFFIXES; i++) {
        size_t len = strlen(at);
        size_t before = fc_name_table_put(o->suffixes, at, len, index);
        if (before != index && before != FC_NO_NAME && strlen(names->items[before].name) > strlen(name)) {
            fc_name_table_set(o->suffixes, at, len, index);
        }
        at = strchr(at, '.');
        at = at ? at + 1 : NULL;
    }
}

static size_t count_suffixes(const char *name) {
    size_t n = 1;
    for (; n < MOST_SUFFIXES && (name = strchr(name, '.')); name++) {
        n++;
    }
    return n;
}

static bool is_parameter(const fc_named *named) {
    return !named->tensor->object && !fc_check_after_section(named->name, "state") &&
           !fc_check_after_section(named->name, "param_groups");
}

static bool list_parameters(optimizer *o) {
    const fc_names *names = &o->c->names;
    size_t suffixes = 0;
    for (size_t i = 0; i < names->count; i++) {
        suffixes += is_parameter(&names->items[i]) ? count_suffixes(names->items[i].name) : 0;
    }
    o->suffixes = fc_name_table_new(o->c->arena, suffixes);
    o->by_name = fc_name_table_new(o->c->arena, names->count);
    o->params = fc_check_alloc(o->c, names->count, sizeof *o->params);
    if (!o->suffixes || !o->by_name || !o->params) {
        o->c->no_memory = true;
        return false;
    }
    for (size_t i = 0; i < names->count; i++) {
        if (is_parameter(&names->items[i])) {
            enter_suffixes(o, i);
        }
    }
    return true;
}

static size_t key_number(optimizer *o, span key) {
    size_t k = 0;
    while (k < o->nkeys && !(o->keys[k].len == key.len && memcmp(o->keys[k].text, key.text, key.len) == 0)) {
        k++;
    }
    if (k == o->nkeys && k < MOST_KEYS) {
        o->keys[o->nkeys++] = key;
    }
    return k;
}

/*
 * Returns whether torch keeps this state per element of the parameter. Other state may have any shape (Adafactor's rows
 * and columns).
 */
static bool is_elementwise(span key) {
    static const char *const keys[] = {"exp_avg",         "exp_avg_sq", "max_exp_avg_sq",
                                       "momentum_buffer", "square_avg", "acc_delta",
                                       "grad_avg",        "exp_inf",    "prev"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (span_is(key, keys[i])) {
            return true;
        }
    }
    return false;
}

static void check_shape(optimizer *o, const stateful *p, size_t index, span key) {
    const fc_named *state = &o->c->names.items[index], *parameter = &o->c->names.items[p->parameter];
    if (is_elementwise(key) &&
        !fc_same_sizes(state->tensor->ndim, state->tensor->shape, parameter->tensor->ndim, parameter->tensor->shape)) {
        fc_check_add(o->c, &(fc_finding){.kind = FC_FOUND_STATE_SHAPE,
                                         .name = state->name,
                                         .other = parameter->name,
                                         .found = fc_check_type(o->c, state->tensor),
                                         .expected = fc_check_type(o->c, parameter->tensor)});
    }
}

static void add_state(optimizer *o, size_t index, span parameter, span key) {
    const char *name = fc_check_unwrap(o->c, parameter.text, parameter.len, NULL);
    size_t at = fc_name_table_put(o->by_name, name, strlen(name), o->count);
    if (at == FC_NO_NAME) {
        return;
    }
    stateful *p = &o->params[at];
    if (at == o->count) {
        *p = (stateful){.name = name, .parameter = fc_name_table_find(o->suffixes, name, strlen(name)), .first = index};
        o->count++;
        o->found += p->parameter != FC_NO_NAME;
    }
    p->count++;
    size_t k = key_number(o, key);
    if (k < MOST_KEYS && !(p->keys >> k & 1)) {
        p->keys |= UINT64_C(1) << k;
        o->having[k] += p->parameter != FC_NO_NAME;
    }
    if (p->parameter != FC_NO_NAME) {
        check_shape(o, p, index, key);
    }
}

/* Returns the keys of `set`, separated by commas. */
static const char *key_list(optimizer *o, uint64_t set) {
    const char *list = "";
    for (size_t k = 0; k < o->nkeys; k++) {
        if (set >> k & 1) {
            list = fc_check_text(o->c, "%s%s%.*s", list, *list ? ", " : "", (int)o->keys[k].len, o->keys[k].text);
        }
    }
    return list;
}

static void report_orphan(optimizer *o, const stateful *p) {
    const char *name = o->c->names.items[p->first].name;
    const char *end = strrchr(name, '.');
    const char *glob = fc_check_text(o->c, "%.*s.*", (int)(end ? end - name : 0), name);
    fc_check_add(o->c, &(fc_finding){.kind = FC_FOUND_STATE_ORPHAN,
                                     .name = name,
                                     .other = p->name,
                                     .detail = key_list(o, p->keys),
                                     .fix = fc_check_fix(o->c, FC_SETTING_EXCLUDE, glob),
                                     .count = p->count});
}

static void report_incomplete(optimizer *o, const stateful *p) {
    uint64_t lacking = 0;
    size_t having = 0;
    for (size_t k = 0; k < o->nkeys; k++) {
        if (!(p->keys >> k & 1) && 2 * o->having[k] > o->found) {
            lacking |= UINT64_C(1) << k;
            having = o->having[k] > having ? o->having[k] : having;
        }
    }
    if (lacking) {
        fc_check_add(o->c, &(fc_finding){.kind = FC_FOUND_STATE_INCOMPLETE,
                                         .name = o->c->names.items[p->parameter].name,
                                         .detail = key_list(o, lacking),
                                         .count = having});
    }
}

/* ---- param_groups ---- */

/* Checks one "params" list. Missing parameters share one finding per list. */
static void check_members(optimizer *o, const json_t *list, const char *object, bool *named) {
    size_t missing = 0;
    const char *first = NULL;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text || all_digits((span){text, strlen(text)})) {
            continue;
        }
        *named = true;
        const char *name = fc_check_unwrap(o->c, text, strlen(text), NULL);
        size_t at = fc_name_table_find(o->by_name, name, strlen(name));
        if (at != FC_NO_NAME) {
            o->params[at].grouped = true;
        }
        if (fc_name_table_find(o->suffixes, name, strlen(name)) == FC_NO_NAME) {
            first = missing++ ? first : name;
        }
    }
    if (missing > 0 && o->found > 0) {
        fc_check_add(o->c,
                     &(fc_finding){.kind = FC_FOUND_GROUP_ORPHAN, .name = object, .other = first, .count = missing});
    }
}

/*
 * Checks an object that is a list of parameters or of groups. It reads the object's few bytes; verify reports damage in
 * them.
 */
static void check_groups(optimizer *o, const fc_named *object, bool *named) {
    const char *text = NULL;
    const fc_format *format = o->c->checkpoint->format;
    if (!format->reader.object_json ||
        fc_checkpoint_object_json(o->c->checkpoint, object->tensor, o->c->arena, &text, NULL) != FC_OK) {
        return;
    }
    json_t *root = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    for (size_t i = 0; i < json_array_size(root); i++) {
        const json_t *group = json_array_get(root, i);
        if (json_is_object(group)) {
            check_members(o, json_object_get(group, "params"), object->name, named);
        } else if (json_is_string(group)) {
            check_members(o, root, object->name, named);
            break;
        }
    }
    json_decref(root);
}

static bool is_group_list(const fc_named *named) {
    const char *name = named->name;
    size_t len = strlen(name);
    static const char whole[] = "param_groups", member[] = ".params";
    if (!named->tensor->object) {
        return false;
    }
    bool is_whole = len >= sizeof whole - 1 && strcmp(name + len - (sizeof whole - 1), whole) == 0;
    const char *rest = fc_check_after_section(name, whole);
    return is_whole || (rest && len > sizeof member && strcmp(name + len - (sizeof member - 1), member) == 0);
}

/*
 * Flattened groups have one name per parameter and key, such as "param_groups.<parameter>.lr". A missing parameter is
 * reported once, and not if its state is already reported.
 */
static void check_flat_group(optimizer *o, const fc_named *named, fc_name_table *reported) {
    const char *rest = fc_check_after_section(named->name, "param_groups");
    const char *dot = rest ? strrchr(rest, '.') : NULL;
    if (!dot || o->found == 0 || all_digits((span){rest, strcspn(rest, ".")})) {
        return;
    }
    const char *name = fc_check_unwrap(o->c, rest, (size_t)(dot - rest), NULL);
    size_t len = strlen(name);
    if (fc_name_table_find(o->suffixes, name, len) == FC_NO_NAME &&
        fc_name_table_find(o->by_name, name, len) == FC_NO_NAME &&
        fc_name_table_find(reported, name, len) == FC_NO_NAME) {
        fc_name_table_put(reported, name, len, 0);
        fc_check_add(o->c, &(fc_finding){.kind = FC_FOUND_GROUP_ORPHAN, .name = named->name, .other = name});
    }
}

static void check_all_groups(optimizer *o) {
    const fc_names *names = &o->c->names;
    const char *last = NULL;
    bool named = false;
    fc_name_table *reported = fc_name_table_new(o->c->arena, names->count);
    o->c->no_memory |= !reported;
    for (size_t i = 0; reported && i < names->count; i++) {
        if (is_group_list(&names->items[i])) {
            check_groups(o, &names->items[i], &named);
            last = names->items[i].name;
        } else {
            check_flat_group(o, &names->items[i], reported);
        }
    }
    for (size_t i = 0; named && i < o->count; i++) {
        const stateful *p = &o->params[i];
        if (!p->grouped && p->parameter != FC_NO_NAME) {
            fc_check_add(
                o->c,
                &(fc_finding){.kind = FC_FOUND_GROUP_STATE, .name = names->items[p->parameter].name, .other = last});
        }
    }
}

void fc_check_optimizer(fc_check_run *c) {
    optimizer o = {.c = c};
    if (!list_parameters(&o)) {
        return;
    }
    for (size_t i = 0; i < c->names.count; i++) {
        span parameter, key;
        if (split_state(&c->names.items[i], &parameter, &key) && !all_digits(parameter)) {
            add_state(&o, i, parameter, key);
        }
    }
    /* If none is found, the optimizer was saved on its own. */
    for (size_t i = 0; i < o.count && o.found > 0; i++) {
        if (o.params[i].parameter == FC_NO_NAME) {
            report_orphan(&o, &o.params[i]);
        } else {
            report_incomplete(&o, &o.params[i]);
        }
    }
    check_all_groups(&o);
}
