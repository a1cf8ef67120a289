/*
 * Judges what Python would run besides creating data when it loads a pickle, from the table in names/harmless.h. It
 * runs after the last opcode. A pickle only adds items and attributes to a value, so nothing that a call could have
 * seen earlier is missing then.
 */
#include "torch/pickle/judge.h"

#include "torch/names/harmless.h"

#include <stdlib.h>

enum { MAX_WRAPPERS = 8, MAX_REACH = 8, SLOTS_PER_BYTE = 16 };

static bool match_arguments(fc_judge *j, const char *pattern, fc_pv args) {
    size_t n;
    const fc_pv *items = fc_pickle_tuple(j->p, args, &n);
    return pattern && fc_judge_match(j, pattern, items, n);
}

/* Whether the state of a call fits its class. None is no state for most classes. */
static bool match_state(fc_judge *j, const char *pattern, fc_pv state) {
    return !state || (pattern && fc_judge_match(j, pattern, &state, 1));
}

static bool is_wrapper(const fc_pickle *p, fc_pv function) {
    return fc_pickle_is_global(p, function, "torch._tensor", "_rebuild_from_type_v2");
}

/* _rebuild_from_type_v2(function, class, arguments, state) calls the function with these arguments. */
static bool calls_harmless_function(fc_judge *j, fc_pv args) {
    for (int depth = 0; depth < MAX_WRAPPERS; depth++) {
        size_t n;
        const fc_pv *items = fc_pickle_tuple(j->p, args, &n); /* four, as the pattern says */
        const fc_pv function = items[0];
        args = items[2];
        if (fc_pv_typeof(args) != FC_PV_TUPLE || !match_arguments(j, fc_judge_entry(j->p, function)->reduce, args)) {
            return false;
        }
        if (!is_wrapper(j->p, function)) {
            return true;
        }
    }
    return false;
}

/* Random generators of NumPy. Their arguments were examined when they were called. */
static bool is_harmless_generator(fc_judge *j, fc_pv v) {
    return fc_pickle_call_kind(j->p, v) == 0 && match_state(j, "d|(d[n#])", fc_pickle_state(j->p, v));
}

static bool is_harmless_call(fc_judge *j, fc_pv v) {
    const fc_pickle *p = j->p;
    const fc_pv callee = fc_pickle_callee(p, v), args = fc_pickle_arguments(p, v), state = fc_pickle_state(p, v);
    const fc_harmless *entry = fc_judge_entry(p, callee);
    const uint64_t how = fc_pickle_call_kind(p, v);
    if (how > 1) {
        return false; /* keyword arguments, which no pickler writes for the classes in the table */
    }
    if (fc_pv_typeof(callee) != FC_PV_GLOBAL) { /* getattr(ZoneInfo, "_unpickle") and similar */
        return match_arguments(j, "k*", args) && match_state(j, "k", state);
    }
    if (fc_judge_kind(p, callee) == FC_GLOBAL_GETATTR) {
        return !state && how == 0;
    }
    if (!entry) { /* only generators and types have no entry and get here */
        return fc_pickle_is_global(p, callee, "numpy.random._pickle", NULL) ? is_harmless_generator(j, v) : !state;
    }
    if (!match_arguments(j, how == 1 ? entry->newobj : entry->reduce, args) || !match_state(j, entry->state, state)) {
        return false;
    }
    if (is_wrapper(p, callee)) {
        return calls_harmless_function(j, args);
    }
    if (state && fc_pickle_is_global(p, callee, NULL, "_reconstruct")) {
        return fc_judge_is_object_state(p, v);
    }
    return !state || !fc_pickle_is_global(p, callee, "numpy", "dtype") || fc_judge_is_dtype_state(p, v);
}

/* Whether Python finds a function when it looks up an attribute of an argument. */
static bool holds_function(fc_judge *j, fc_pv v) {
    const fc_pickle *p = j->p;
    const fc_pv_type type = fc_pv_typeof(v);
    const fc_pv state = type == FC_PV_CALL   ? fc_pickle_state(p, v)
                        : type == FC_PV_DICT ? fc_pickle_container_of(p, v)->state
                                             : 0;
    size_t n = 0;
    const bool known = fc_pv_typeof(state) == FC_PV_DICT || fc_pv_typeof(state) == FC_PV_TUPLE;
    const fc_pv *items = known ? fc_pickle_sequence(p, state, &n) : NULL;
    for (size_t i = 0; i < n && j->left > 0; i++, j->left--) {
        const fc_global_kind kind = fc_judge_kind(p, items[i]);
        if ((fc_pv_typeof(items[i]) == FC_PV_GLOBAL && kind != FC_GLOBAL_DTYPE && kind != FC_GLOBAL_STORAGE) ||
            (fc_pv_typeof(items[i]) == FC_PV_CALL && fc_pickle_is_harmless_function(p, items[i]))) {
            return true;
        }
    }
    return false;
}

/* Whether it is a function that runs code. */
static bool is_dangerous(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_GLOBAL && fc_judge_kind(p, v) == FC_GLOBAL_UNKNOWN &&
           fc_global_runs(fc_pickle_module(p, v), fc_pickle_name(p, v));
}

/* Returns which argument is the class of a tensor, which PyTorch does not call; SIZE_MAX: none. */
static size_t place_of_class(const fc_pickle *p, fc_pv call) {
    const fc_pv callee = fc_pickle_callee(p, call);
    if (is_wrapper(p, callee)) {
        return 1;
    }
    return fc_pickle_is_global(p, callee, "torch._utils", "_rebuild_wrapper_subclass") ? 0 : SIZE_MAX;
}

static bool arguments_hold_function(fc_judge *j, fc_pv call) {
    const size_t class_at = place_of_class(j->p, call);
    size_t n;
    const fc_pv *items = fc_pickle_call_items(j->p, call, &n);
    for (size_t i = 0; i < n && i < MAX_REACH; i++) {
        if (holds_function(j, items[i]) || (i != class_at && is_dangerous(j->p, items[i]))) {
            return true;
        }
    }
    return fc_pickle_state(j->p, call) && holds_function(j, fc_pickle_state(j->p, call));
}

/* Raises the risk because of what a class or function is given, or because it is a value. */
static void note_use(fc_judge *j, fc_pickle_risk risk, fc_pv global) {
    const bool higher = risk > j->p->risk;
    fc_pickle_note_risk(j->p, risk, fc_pv_typeof(global) == FC_PV_GLOBAL ? global : 0);
    j->p->risk_of_use = higher || j->p->risk_of_use;
}

static void judge_call(fc_judge *j, fc_pv v) {
    fc_pickle *p = j->p;
    if (fc_pickle_risk_of(p, v) != FC_RISK_NONE) {
        return;
    }
    if (!is_harmless_call(j, v)) {
        const fc_pickle_risk risk = arguments_hold_function(j, v) ? FC_RISK_RUNS : FC_RISK_UNKNOWN;
        fc_pickle_set_risk(p, v, risk);
        note_use(j, risk, fc_pickle_callee(p, v));
    }
    fc_judge_visit(j, fc_pickle_list_items(p, v));
    fc_judge_visit(j, fc_pickle_dict_items(p, v));
}

/* A storage is ('storage', class, key, location, number of elements), and perhaps a view in files of old torch. */
static void judge_storage(fc_judge *j, fc_pv v) {
    const fc_pickle *p = j->p;
    const fc_pv id = fc_pickle_persid(p, v);
    size_t n = 0;
    const fc_pv *items = fc_pv_typeof(id) == FC_PV_TUPLE ? fc_pickle_tuple(p, id, &n) : NULL;
    if (n > 1 && fc_pickle_is_str(p, items[0], "module")) {
        return; /* a class, which is judged where it is used */
    }
    if (n < 5 || fc_judge_kind(p, items[1]) != FC_GLOBAL_STORAGE || !fc_judge_match(j, "kvkkkk?", items, n)) {
        bool function = false;
        for (size_t i = 0; i < n && i < MAX_REACH; i++) {
            function = function || holds_function(j, items[i]);
        }
        note_use(j, function ? FC_RISK_RUNS : FC_RISK_UNKNOWN, n > 1 ? items[1] : 0);
    }
}

/* Whether it is the first visit. */
static bool is_first_visit(fc_judge *j, fc_pv v) {
    const uint64_t index = fc_pv_payload(v);
    const bool cell = fc_pv_typeof(v) == FC_PV_TUPLE || fc_pv_typeof(v) == FC_PV_SIZE;
    unsigned char *byte = &(cell ? j->seen_cells : j->seen_containers)[index / 8];
    const unsigned char bit = (unsigned char)(1U << index % 8);
    if (*byte & bit) {
        return false;
    }
    *byte |= bit;
    return true;
}

/* A class or function among values must be allowed there. */
static void visit_value(fc_judge *j, fc_pv v) {
    const fc_pickle *p = j->p;
    const fc_pv *items = NULL;
    size_t n = 0;
    switch (fc_pv_typeof(v)) {
    case FC_PV_GLOBAL:
        if (!fc_judge_may_be_value(p, v)) {
            note_use(j, FC_RISK_UNKNOWN, v);
        }
        return;
    case FC_PV_TUPLE:
    case FC_PV_SIZE:
        items = is_first_visit(j, v) ? fc_pickle_tuple(p, v, &n) : NULL;
        break;
    case FC_PV_LIST:
    case FC_PV_DICT:
    case FC_PV_SET:
    case FC_PV_FROZENSET:
        if (is_first_visit(j, v)) {
            items = fc_pickle_items(p, v, &n);
            fc_judge_visit(j, fc_pickle_container_of(p, v)->state);
        }
        break;
    default:
        return;
    }
    for (size_t i = 0; items && i < n; i++) {
        fc_judge_visit(j, items[i]);
    }
}

bool fc_pickle_judge(fc_pickle *p, const fc_pv *calls, size_t ncalls, uint64_t size, bool as_value) {
    fc_judge j = {.p = p, .left = (size + 64) * SLOTS_PER_BYTE};
    size_t n = 0;
    j.seen_cells = calloc(p->ncells / 8 + 1, 1);
    j.seen_containers = calloc(p->ncontainers / 8 + 1, 1);
    j.no_memory = !j.seen_cells || !j.seen_containers;
    const fc_pv *persids = p->persids ? fc_pickle_items(p, p->persids, &n) : NULL;
    for (size_t i = 0; i < ncalls && !j.no_memory; i++) {
        judge_call(&j, calls[i]);
    }
    for (size_t i = 0; i < n && !j.no_memory; i++) {
        judge_storage(&j, persids[i]);
    }
    if (as_value) {
        fc_judge_visit(&j, p->root);
    }
    while (j.ntodo > 0 && !j.no_memory) {
        visit_value(&j, j.todo[--j.ntodo]);
    }
    free(j.todo);
    free(j.seen_cells);
    free(j.seen_containers);
    return !j.no_memory;
}
