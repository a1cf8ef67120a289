/*
 * What loading a pickle in Python would do besides creating data: the risk of each call, and keys that Python cannot
 * hash. Safety does not depend on the list of dangerous functions being complete, because everything outside the
 * allowlist of globals.c is at least an unknown class. The list only decides which message a user reads.
 */
#include "torch/pickle_private.h"

#include <stdio.h>
#include <string.h>

enum { MAX_WRAPPERS = 8, MAX_KEY_DEPTH = 16, MAX_KEY_ITEMS = 1024 };

/* Modules whose functions run code, start programs, or load other pickles. Their submodules count, too. */
static const char *const running_modules[] = {
    "os",
    "posix",
    "nt",
    "subprocess",
    "sys",
    "shutil",
    "pty",
    "commands",
    "popen2",
    "ctypes",
    "importlib",
    "imp",
    "runpy",
    "code",
    "codeop",
    "pdb",
    "bdb",
    "timeit",
    "profile",
    "cProfile",
    "trace",
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "dill",
    "cloudpickle",
    "joblib",
    "webbrowser",
    "socket",
    "http",
    "urllib",
    "requests",
    "smtplib",
    "ftplib",
    "asyncio",
    "multiprocessing",
    "threading",
    "_thread",
    "signal",
    "pip",
    "setuptools",
    "distutils",
    "types",
    "operator",
    "_operator",
    "torch.hub",
    "torch.jit",
    "torch.package",
    "torch.fx",
    "torch._dynamo",
    "torch._inductor",
    "torch.ops",
    "torch.utils.cpp_extension",
    "torch.distributed.rpc",
    "numpy.f2py",
    "numpy.testing",
    "numpy.distutils",
    "pydoc",
    "doctest",
    "venv",
    "ensurepip",
    "site",
};

static const struct {
    const char *module, *name;
} running_functions[] = {
    {"torch", "load"},
    {"torch", "compile"},
    {"torch.serialization", "load"},
    {"torch.storage", "_load_from_bytes"},
    {"numpy", "load"},
    {"functools", "reduce"},
    {"copyreg", "_reconstructor"},
    {"copyreg", "__newobj__"},
    {"copyreg", "__newobj_ex__"},
};

static const char *const running_builtins[] = {
    "eval",    "exec",    "execfile", "compile", "open",       "file",   "__import__",  "getattr",
    "setattr", "delattr", "apply",    "map",     "filter",     "reduce", "globals",     "locals",
    "vars",    "input",   "help",     "type",    "breakpoint", "super",  "classmethod", "staticmethod",
};

static bool is_within(const char *module, const char *of) {
    size_t n = strlen(of);
    return strncmp(module, of, n) == 0 && (module[n] == '\0' || module[n] == '.');
}

static bool is_running_module(const char *module) {
    for (size_t i = 0; i < sizeof running_modules / sizeof *running_modules; i++) {
        if (is_within(module, running_modules[i])) {
            return true;
        }
    }
    return false;
}

static bool is_running_builtin(const char *name) {
    for (size_t i = 0; i < sizeof running_builtins / sizeof *running_builtins; i++) {
        if (strcmp(name, running_builtins[i]) == 0) {
            return true;
        }
    }
    return false;
}

bool fc_global_runs(const char *module, const char *name) {
    /* A dotted name can reach other modules: torch has imported os, so its "os.system" is os.system. */
    if (is_running_module(module) || (strchr(name, '.') && is_running_module(name))) {
        return true;
    }
    if (strcmp(module, "builtins") == 0 || strcmp(module, "__builtin__") == 0) {
        return is_running_builtin(name);
    }
    for (size_t i = 0; i < sizeof running_functions / sizeof *running_functions; i++) {
        if (strcmp(module, running_functions[i].module) == 0 && strcmp(name, running_functions[i].name) == 0) {
            return true;
        }
    }
    return false;
}

/* Functions that make types of types. Where they are called with anything else, they run. */
static const struct {
    const char *module, *name;
} type_functions[] = {
    {"_operator", "getitem"}, {"_operator", "or_"},    {"functools", "reduce"},   {"__builtin__", "reduce"},
    {"builtins", "type"},     {"__builtin__", "type"}, {"types", "GenericAlias"},
};

bool fc_global_is_reference(const char *module, const char *name) {
    for (size_t i = 0; i < sizeof type_functions / sizeof *type_functions; i++) {
        if (strcmp(module, type_functions[i].module) == 0 && strcmp(name, type_functions[i].name) == 0) {
            return true;
        }
    }
    return is_within(module, "torch") || is_within(module, "numpy") || strcmp(module, "typing") == 0;
}

static fc_global_kind kind_of(const fc_pickle *p, fc_pv v, uint32_t *aux) {
    return fc_pv_typeof(v) == FC_PV_GLOBAL ? fc_pickle_global(p, v, aux) : FC_GLOBAL_UNKNOWN;
}

static fc_pickle_risk risk_of_unknown(const fc_pickle *p, fc_pv global) {
    const uint64_t *cell = p->cells + fc_pv_payload(global);
    size_t n;
    return fc_global_runs(fc_pickle_bytes(p, cell[1], &n), fc_pickle_bytes(p, cell[2], &n)) ? FC_RISK_RUNS
                                                                                            : FC_RISK_UNKNOWN;
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

/* Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, name). Any other getattr can reach
 * anything. */
static bool is_enum_member(const fc_pickle *p, fc_pv args) {
    size_t n;
    uint32_t is_enum;
    const fc_pv *items = fc_pickle_tuple(p, args, &n);
    if (n != 2 || fc_pv_typeof(items[1]) != FC_PV_STR) {
        return false;
    }
    const char *name = fc_pickle_bytes(p, items[1], &n);
    const fc_global_kind kind = kind_of(p, items[0], &is_enum);
    return name[0] != '_' && (kind == FC_GLOBAL_ENUM || (kind == FC_GLOBAL_INERT && is_enum));
}

/* Whether it is a generic type such as typing.Optional, and not what its module has imported, such as sys.modules. */
static bool is_generic(const fc_pickle *p, fc_pv v) {
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_GLOBAL) {
        return false;
    }
    const uint64_t *cell = p->cells + fc_pv_payload(v);
    const char *name = fc_pickle_bytes(p, cell[2], &n);
    return strcmp(fc_pickle_bytes(p, cell[1], &n), "typing") == 0 && name[0] >= 'A' && name[0] <= 'Z' &&
           !strchr(name, '.');
}

/* Whether it is a class, or a type made of classes. */
static bool is_type(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_GLOBAL || fc_pv_typeof(v) == FC_PV_NONE ||
           (fc_pv_typeof(v) == FC_PV_CALL && fc_pickle_risk_of(p, v) == FC_RISK_NONE &&
            fc_pickle_call_kind(p, v) == 0 && !fc_pickle_state(p, v));
}

static bool are_types(const fc_pickle *p, fc_pv v) {
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_TUPLE) {
        return false;
    }
    const fc_pv *items = fc_pickle_tuple(p, v, &n);
    for (size_t i = 0; i < n; i++) {
        if (!is_type(p, items[i])) {
            return false;
        }
    }
    return true;
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
        return is_generic(p, items[0]);
    }
    if (fc_pickle_is_global(p, callee, "functools", "reduce") ||
        fc_pickle_is_global(p, callee, "__builtin__", "reduce")) {
        return fc_pickle_is_global(p, items[0], "_operator", "or_") && are_types(p, items[1]);
    }
    if (fc_pickle_is_global(p, callee, "types", "GenericAlias")) {
        return is_type(p, items[0]);
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
    if (fc_pv_typeof(callee) != FC_PV_GLOBAL) { /* the result of another call */
        fc_pv inner = fc_pv_typeof(callee) == FC_PV_CALL ? fc_pickle_callee(p, callee) : 0;
        *global = fc_pv_typeof(inner) == FC_PV_GLOBAL ? inner : 0;
        return FC_RISK_RUNS;
    }
    *global = callee;
    switch (fc_pickle_global(p, callee, &aux)) {
    case FC_GLOBAL_UNKNOWN:
        return is_type_call(p, callee, args) ? FC_RISK_NONE : risk_of_unknown(p, callee);
    case FC_GLOBAL_GETATTR:
        return is_enum_member(p, args) ? FC_RISK_NONE : FC_RISK_RUNS;
    case FC_GLOBAL_REBUILD:
        return aux == FC_REBUILD_FROM_TYPE ? risk_of_wrapper(p, args, global) : FC_RISK_NONE;
    default:
        return FC_RISK_NONE;
    }
}

const char *fc_pickle_risky_name(const fc_pickle *p, char *buf, size_t size) {
    if (p->risky) {
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
