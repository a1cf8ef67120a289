/*
 * What loading a pickle in Python would do besides creating data: the risk of each call, and keys that Python cannot
 * hash. judge.c then examines the arguments of what is in the table of harmless classes.
 */
#include "torch/pickle/judge.h"

#include <stdio.h>
#include <string.h>

enum { MAX_WRAPPERS = 8, MAX_TYPES = 16, MAX_KEY_DEPTH = 16, MAX_KEY_ITEMS = 1024 };

/* Functions that make types from types. Called with anything else, they may run code. */
static const struct {
    const char *module, *name;
} type_functions[] = {
    {"_operator", "getitem"}, {"_operator", "or_"},    {"functools", "reduce"},   {"__builtin__", "reduce"},
    {"builtins", "type"},     {"__builtin__", "type"}, {"types", "GenericAlias"},
};

static bool is_type_function(const char *module, const char *name) {
    for (size_t i = 0; i < sizeof type_functions / sizeof *type_functions; i++) {
        if (strcmp(module, type_functions[i].module) == 0 && strcmp(name, type_functions[i].name) == 0) {
            return true;
        }
    }
    return false;
}

bool fc_global_is_reference(const char *module, const char *name) {
    if (is_type_function(module, name)) {
        return true;
    }
    return (fc_module_is_within(module, "torch") || fc_module_is_within(module, "numpy") ||
            strcmp(module, "typing") == 0) &&
           !fc_global_runs(module, name);
}

static fc_pickle_risk risk_of_unknown(const fc_pickle *p, fc_pv global) {
    return fc_global_runs(fc_pickle_module(p, global), fc_pickle_name(p, global)) ? FC_RISK_RUNS : FC_RISK_UNKNOWN;
}

/* _rebuild_from_type_v2(function, class, arguments, state) calls `function`, which must rebuild a tensor, too. */
static fc_pickle_risk risk_of_wrapper(const fc_pickle *p, fc_pv args, fc_pv *global) {
    for (int depth = 0; depth < MAX_WRAPPERS; depth++) {
        size_t n = 0;
        uint32_t which;
        const fc_pv *items = fc_pv_typeof(args) == FC_PV_TUPLE ? fc_pickle_tuple(p, args, &n) : NULL;
        if (n < 3) {
            return FC_RISK_NONE; /* Python fails before it calls anything */
        }
        *global = fc_pv_typeof(items[0]) == FC_PV_GLOBAL ? items[0] : *global;
        if (fc_pv_typeof(items[0]) != FC_PV_GLOBAL) {
            return FC_RISK_RUNS;
        }
        if (fc_pickle_global(p, items[0], &which) != FC_GLOBAL_REBUILD) {
            return risk_of_unknown(p, items[0]);
        }
        if (which != FC_REBUILD_FROM_TYPE) {
            return FC_RISK_NONE;
        }
        args = items[2];
    }
    return FC_RISK_RUNS;
}

/* @return the class of a module in a legacy file, from a persistent id: ('module', class, source file, source). */
static fc_pv class_of_persid(const fc_pickle *p, fc_pv v) {
    size_t n = 0;
    fc_pv id = fc_pickle_persid(p, v);
    const fc_pv *items = fc_pv_typeof(id) == FC_PV_TUPLE ? fc_pickle_tuple(p, id, &n) : NULL;
    return n >= 2 && fc_pv_typeof(items[1]) == FC_PV_GLOBAL ? items[1] : 0;
}

/* Attributes of classes that Python's pickler writes with getattr. `makes`: calling the attribute creates data. */
static const struct {
    const char *module, *class, *attribute; /* no attribute: any that activates a layer */
    bool makes;
} attributes[] = {
    {"zoneinfo", "ZoneInfo", "_unpickle", true},
    {"torch.distributed.distributed_c10d", "ReduceOp", "RedOpType", true},
    {"torch._C._distributed_c10d", "ReduceOp", "RedOpType", true},
    {"torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "ProcessGroupState", true}, /* a nested class */
    {"torch._C", "_VariableFunctionsClass", NULL, false}, /* torch.relu and others */
};

static bool is_known_attribute(const fc_pickle *p, fc_pv owner, const char *name, bool makes) {
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (fc_pickle_is_global(p, owner, attributes[i].module, attributes[i].class) &&
            (attributes[i].attribute ? strcmp(name, attributes[i].attribute) == 0 : fc_harmless_is_activation(name))) {
            return attributes[i].makes || !makes;
        }
    }
    return false;
}

/* Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, name). Any getattr but that and those of
 * `attributes` can reach anything. */
static bool is_harmless_getattr(const fc_pickle *p, fc_pv args, bool makes) {
    size_t n;
    const fc_pv *items = fc_pickle_tuple(p, args, &n);
    if (n != 2 || fc_pv_typeof(items[0]) != FC_PV_GLOBAL || fc_pv_typeof(items[1]) != FC_PV_STR) {
        return false;
    }
    const char *name = fc_pickle_bytes(p, items[1], &n);
    const fc_harmless *class = fc_judge_entry(p, items[0]);
    return is_known_attribute(p, items[0], name, makes) || (!makes && name[0] != '_' && class && class->is_enum);
}

/* Whether it is getattr(ZoneInfo, "_unpickle") or similar. */
static bool is_maker(const fc_pickle *p, fc_pv callee) {
    return fc_pv_typeof(callee) == FC_PV_CALL && !fc_pickle_state(p, callee) &&
           fc_judge_kind(p, fc_pickle_callee(p, callee)) == FC_GLOBAL_GETATTR &&
           is_harmless_getattr(p, fc_pickle_arguments(p, callee), true);
}

static bool is_numpy_generator(const char *name) {
    static const char *const names[] = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "__bit_generator_ctor"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* numpy's functions that make a random generator call their arguments, so these must be numpy's, too. */
static bool is_numpy_random(const fc_pickle *p, fc_pv v) {
    switch (fc_pv_typeof(v)) {
    case FC_PV_STR:
        return true;
    case FC_PV_GLOBAL:
        return fc_module_is_within(fc_pickle_module(p, v), "numpy.random") && is_numpy_generator(fc_pickle_name(p, v));
    case FC_PV_CALL:
        return fc_pickle_risk_of(p, v) == FC_RISK_NONE && fc_pv_typeof(fc_pickle_callee(p, v)) == FC_PV_GLOBAL &&
               is_numpy_random(p, fc_pickle_callee(p, v));
    default:
        return false;
    }
}

static bool makes_generator(const fc_pickle *p, fc_pv callee, fc_pv args) {
    static const char *const names[] = {"__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"};
    bool found = false;
    size_t n = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        found = found || fc_pickle_is_global(p, callee, "numpy.random._pickle", names[i]);
    }
    const fc_pv *items = fc_pickle_tuple(p, args, &n);
    for (size_t i = 0; i < n; i++) {
        found = found && is_numpy_random(p, items[i]);
    }
    return found;
}

/* Whether it is a generic type such as typing.Optional, and not what its module has imported, such as sys.modules. */
static bool is_generic(const fc_pickle *p, fc_pv v) {
    if (fc_pv_typeof(v) != FC_PV_GLOBAL) {
        return false;
    }
    const char *name = fc_pickle_name(p, v);
    return strcmp(fc_pickle_module(p, v), "typing") == 0 && name[0] >= 'A' && name[0] <= 'Z' && !strchr(name, '.');
}

static bool is_type(const fc_pickle *p, fc_pv v);

static bool are_types(const fc_pickle *p, const fc_pv *items, size_t n) {
    for (size_t i = 0; i < n && i < MAX_TYPES; i++) {
        if (!is_type(p, items[i])) {
            return false;
        }
    }
    return n <= MAX_TYPES;
}

/* Whether it is a class that may be a value, or a type made of such classes. A call was examined when it was made. */
static bool is_type(const fc_pickle *p, fc_pv v) {
    const fc_pv callee = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_callee(p, v) : 0;
    if (fc_pv_typeof(v) == FC_PV_GLOBAL) {
        return fc_judge_may_be_value(p, v);
    }
    if (callee) {
        return fc_pv_typeof(callee) == FC_PV_GLOBAL && fc_pickle_risk_of(p, v) == FC_RISK_NONE &&
               fc_pickle_call_kind(p, v) == 0 && !fc_pickle_state(p, v) &&
               is_type_function(fc_pickle_module(p, callee), fc_pickle_name(p, callee));
    }
    return fc_pv_typeof(v) == FC_PV_NONE;
}

/* Whether it is what a generic type is made of, such as int, (str, int), or ([int], str) of a Callable. */
static bool are_parameters(const fc_pickle *p, fc_pv v, int depth) {
    size_t n = 0;
    const fc_pv_type type = fc_pv_typeof(v);
    if (type != FC_PV_TUPLE && type != FC_PV_LIST) {
        return type < FC_PV_TUPLE || is_type(p, v); /* Literal has numbers and strings */
    }
    const fc_pv *items = fc_pickle_sequence(p, v, &n);
    for (size_t i = 0; i < n && i < MAX_TYPES; i++) {
        if (depth == MAX_KEY_DEPTH || !are_parameters(p, items[i], depth + 1)) {
            return false;
        }
    }
    return n <= MAX_TYPES;
}

static bool is_tuple_of_types(const fc_pickle *p, fc_pv v) {
    size_t n = 0;
    const fc_pv *items = fc_pv_typeof(v) == FC_PV_TUPLE ? fc_pickle_tuple(p, v, &n) : NULL;
    return items && are_types(p, items, n);
}

/*
 * The types in structured configurations: typing.Optional[int] is getitem(typing.Optional, int), int | str is
 * or_(int, str) or reduce(or_, (int, str)), and NoneType is type(None). Elsewhere these functions can reach anything.
 */
static bool is_type_call(const fc_pickle *p, fc_pv callee, fc_pv args) {
    size_t n;
    const fc_pv *items = fc_pickle_tuple(p, args, &n);
    if (n == 1) {
        return fc_pv_typeof(items[0]) == FC_PV_NONE && (fc_pickle_is_global(p, callee, "builtins", "type") ||
                                                        fc_pickle_is_global(p, callee, "__builtin__", "type"));
    }
    if (n != 2) {
        return false;
    }
    if (fc_pickle_is_global(p, callee, "_operator", "getitem")) {
        return is_generic(p, items[0]) && are_parameters(p, items[1], 0);
    }
    if (fc_pickle_is_global(p, callee, "functools", "reduce") ||
        fc_pickle_is_global(p, callee, "__builtin__", "reduce")) {
        return fc_pickle_is_global(p, items[0], "_operator", "or_") && is_tuple_of_types(p, items[1]);
    }
    if (fc_pickle_is_global(p, callee, "types", "GenericAlias")) {
        return is_type(p, items[0]) && are_parameters(p, items[1], 0);
    }
    return fc_pickle_is_global(p, callee, "_operator", "or_") && is_type(p, items[0]) && is_type(p, items[1]);
}

fc_pickle_risk fc_pickle_risk_of_call(const fc_pickle *p, fc_pv callee, fc_pv args, fc_pv *global) {
    uint32_t aux;
    *global = 0;
    if (fc_pv_typeof(callee) == FC_PV_PERSID) {
        *global = class_of_persid(p, callee);
        return *global ? risk_of_unknown(p, *global) : FC_RISK_UNKNOWN;
    }
    if (is_maker(p, callee)) {
        return FC_RISK_NONE;
    }
    if (fc_pv_typeof(callee) != FC_PV_GLOBAL) { /* the result of another call */
        fc_pv inner = fc_pv_typeof(callee) == FC_PV_CALL ? fc_pickle_callee(p, callee) : 0;
        *global = fc_pv_typeof(inner) == FC_PV_GLOBAL ? inner : 0;
        return FC_RISK_RUNS;
    }
    *global = callee;
    switch (fc_pickle_global(p, callee, &aux)) {
    case FC_GLOBAL_UNKNOWN:
        return is_type_call(p, callee, args) || makes_generator(p, callee, args) ? FC_RISK_NONE
                                                                                 : risk_of_unknown(p, callee);
    case FC_GLOBAL_GETATTR:
        return is_harmless_getattr(p, args, false) ? FC_RISK_NONE : FC_RISK_RUNS;
    case FC_GLOBAL_REBUILD:
        return aux == FC_REBUILD_FROM_TYPE ? risk_of_wrapper(p, args, global) : FC_RISK_NONE;
    default:
        return FC_RISK_NONE;
    }
}

/*
 * Setting a state and adding items look up a method of the instance: `__setstate__`, `append`, `extend` or `add`. If an
 * earlier state, item or argument gave the instance an attribute of that name, Python calls the attribute. Python's
 * pickler adds items first, then sets a state once, and only for classes that have both; anything else may be a call.
 */
static void note_hidden_call(fc_pickle *p, fc_pv call) {
    fc_pickle_set_risk(p, call, FC_RISK_RUNS);
    fc_pickle_note_risk(p, FC_RISK_RUNS, 0);
}

static bool has_name(const fc_pickle *p, fc_pv global, const char *name) {
    return fc_pv_typeof(global) == FC_PV_GLOBAL && fc_pickle_is_str(p, p->cells[fc_pv_payload(global) + 2], name);
}

/* Whether the arguments of its class become attributes of an instance. */
static bool has_attributes_of_arguments(const fc_pickle *p, fc_pv call) {
    size_t n = 0;
    const fc_pv callee = fc_pickle_callee(p, call);
    fc_pickle_tuple(p, fc_pickle_arguments(p, call), &n);
    return n > 0 && (has_name(p, callee, "AttributeDict") || has_name(p, callee, "SimpleNamespace"));
}

void fc_pickle_note_state(fc_pickle *p, fc_pv call) {
    const fc_global_kind kind = fc_judge_kind(p, fc_pickle_callee(p, call));
    const bool items = fc_pickle_list_items(p, call) || fc_pickle_dict_items(p, call);
    const bool type = kind == FC_GLOBAL_UNKNOWN && is_type(p, call);
    if (fc_pickle_state(p, call) || type || kind == FC_GLOBAL_REBUILD || (items && kind != FC_GLOBAL_UNKNOWN) ||
        has_attributes_of_arguments(p, call)) {
        note_hidden_call(p, call);
    }
}

void fc_pickle_note_items(fc_pickle *p, fc_pv call, fc_pv_type wanted) {
    const fc_pv callee = fc_pickle_callee(p, call);
    const bool known = fc_judge_kind(p, callee) != FC_GLOBAL_UNKNOWN || fc_pickle_risk_of(p, call) == FC_RISK_NONE;
    const bool takes = wanted == FC_PV_DICT ? has_name(p, callee, "AttributeDict")
                                            : wanted == FC_PV_LIST && has_name(p, callee, "deque");
    if (fc_pickle_state(p, call) || (known && !takes)) {
        note_hidden_call(p, call);
    }
}

const char *fc_pickle_risky_name(const fc_pickle *p, char *buf, size_t size) {
    if (p->risky && p->risk_of_use && p->risk == FC_RISK_RUNS) {
        const int n = snprintf(buf, size, "a function in an argument of ");
        fc_pickle_global_name(p, p->risky, buf + n, size - (size_t)n);
    } else if (p->risky) {
        fc_pickle_global_name(p, p->risky, buf, size);
    } else {
        snprintf(buf, size, "the result of another call");
    }
    return buf;
}

void fc_pickle_note_risk(fc_pickle *p, fc_pickle_risk risk, fc_pv global) {
    if (risk > p->risk) {
        p->risk = risk;
        p->risky = global;
        p->risk_of_use = false;
    }
}

/* A tuple is hashable if its items are. `*left` bounds the work, because shared tuples can unfold endlessly. */
static bool is_hashable(const fc_pickle *p, fc_pv v, int depth, int *left) {
    size_t n;
    switch (fc_pv_typeof(v)) {
    case FC_PV_LIST:
    case FC_PV_DICT:
    case FC_PV_SET:
    case FC_PV_BYTEARRAY:
        return false;
    case FC_PV_TUPLE: {
        const fc_pv *items = fc_pickle_tuple(p, v, &n);
        for (size_t i = 0; i < n && depth < MAX_KEY_DEPTH && (*left)-- > 0; i++) {
            if (!is_hashable(p, items[i], depth + 1, left)) {
                return false;
            }
        }
        return true;
    }
    default:
        return true;
    }
}

fc_code fc_pickle_check_keys(fc_pickle_vm *vm, const fc_pv *items, size_t n, size_t step) {
    for (size_t i = 0; i < n; i += step) {
        int left = MAX_KEY_ITEMS;
        if (fc_pv_typeof(items[i]) > FC_PV_STR && !is_hashable(vm->p, items[i], 0, &left)) {
            return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                                  "the pickle is damaged: a key of a dict or set cannot be hashed");
        }
    }
    return FC_OK;
}
