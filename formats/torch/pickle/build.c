/*
 * The calls in a pickle: GLOBAL, REDUCE, NEWOBJ, BUILD, and adding items to containers. Nothing is called. Known
 * constructors are replaced by the values that they would create; every other call becomes an inert FC_PV_CALL.
 */
#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "torch/pickle/judge.h"
#include "torch/pickle/machine.h"

#include <string.h>

fc_code fc_pickle_global_op(fc_pickle_vm *vm, fc_pv module, fc_pv name, fc_pv *out) {
    fc_pickle *p = vm->p;
    size_t module_len, name_len;
    uint32_t aux;
    if (fc_pv_typeof(module) != FC_PV_STR || fc_pv_typeof(name) != FC_PV_STR) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: a global's name is not a string");
    }
    const char *m = fc_pickle_bytes(p, module, &module_len);
    const char *n = fc_pickle_bytes(p, name, &name_len);
    fc_global_kind kind = fc_global_find(m, module_len, n, name_len, &aux);
    if (kind == FC_GLOBAL_UNKNOWN && vm->mode == FC_PICKLE_STRICT && fc_global_runs(m, n)) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "pickle global %.200s.%.200s is not allowed: this file may be hostile", m, n);
    }
    const bool unknown = kind == FC_GLOBAL_UNKNOWN && !fc_global_is_reference(m, n);
    if (!fc_pickle_add_global(p, kind, aux, module, name, out)) {
        return fc_pickle_nomem(vm);
    }
    if (unknown) {
        fc_pickle_note_risk(p, FC_RISK_UNKNOWN, *out);
    }
    return FC_OK;
}

static fc_code bad_call(fc_pickle_vm *vm, fc_pv global) {
    char name[256];
    fc_pickle_global_name(vm->p, global, name, sizeof name);
    return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: it calls %s with invalid arguments", name);
}

static fc_code make_call(fc_pickle_vm *vm, fc_pv callee, fc_pv args, fc_pv *out) {
    uint64_t at;
    fc_pv global;
    fc_pickle_risk risk = fc_pickle_risk_of_call(vm->p, callee, args, &global);
    fc_pickle_note_risk(vm->p, risk, global);
    if (!fc_pickle_add_cells(vm->p, 6, &at)) { /* in the order that the accessors in pickle.h expect */
        return fc_pickle_nomem(vm);
    }
    memset(vm->p->cells + at, 0, 6 * sizeof *vm->p->cells);
    vm->p->cells[at] = callee;
    vm->p->cells[at + 1] = args;
    vm->p->cells[at + 5] = (uint64_t)risk << 8;
    *out = fc_pv_make(FC_PV_CALL, at);
    if (!fc_grow(&vm->calls, &vm->calls_capacity, vm->ncalls + 1, sizeof *vm->calls)) {
        return fc_pickle_nomem(vm);
    }
    vm->calls[vm->ncalls++] = *out;
    return FC_OK;
}

/* Gets the arguments of a call from a tuple of at most `max`. Missing ones become FC_PV_ABSENT. */
static bool take_args(const fc_pickle *p, fc_pv args, fc_pv *out, size_t max) {
    size_t n;
    const fc_pv *items = fc_pickle_tuple(p, args, &n);
    if (n > max) {
        return false;
    }
    for (size_t i = 0; i < max; i++) {
        out[i] = i < n ? items[i] : 0;
    }
    return true;
}

static bool are_integers(const fc_pv *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        fc_pv_type type = fc_pv_typeof(items[i]);
        if (type != FC_PV_INT && type != FC_PV_BIGINT && type != FC_PV_BOOL) {
            return false;
        }
    }
    return true;
}

/* A pickler writes the arguments of a call for this call alone, so they are shorter than the pickle. If many calls
 * share them, though, a small pickle could fill any memory. A few bytes, such as those of a NumPy scalar, are often
 * shared. */
fc_code fc_pickle_count_taken(fc_pickle_vm *vm, size_t n) {
    enum { RATIO = 8 };
    vm->taken += n;
    return vm->taken / RATIO <= vm->reader.source->size
               ? FC_OK
               : fc_pickle_fail(&vm->reader, FC_EUNSUPPORTED, "too many values are made from one shared value");
}

static fc_code make_size(fc_pickle_vm *vm, fc_pv callee, fc_pv args, fc_pv *out) {
    fc_pickle *p = vm->p;
    fc_pv arg;
    size_t n;
    if (!take_args(p, args, &arg, 1)) {
        return bad_call(vm, callee);
    }
    fc_pv_type type = fc_pv_typeof(arg);
    if (type == FC_PV_TUPLE || type == FC_PV_SIZE) {
        const fc_pv *sizes = fc_pickle_tuple(p, arg, &n);
        FC_TRY(fc_pickle_count_taken(vm, n));
        if (!are_integers(sizes, n)) {
            return bad_call(vm, callee);
        }
        fc_pickle_drop_tuple(vm, args);
        *out = fc_pv_make(FC_PV_SIZE, fc_pv_payload(arg));
        return FC_OK;
    }
    if (type != FC_PV_LIST && type != FC_PV_ABSENT) {
        return bad_call(vm, callee);
    }
    const fc_pv *items = NULL;
    n = 0;
    if (type == FC_PV_LIST) {
        items = fc_pickle_items(p, arg, &n);
        FC_TRY(fc_pickle_count_taken(vm, n));
    }
    if (!are_integers(items, n)) {
        return bad_call(vm, callee);
    }
    return fc_pickle_add_tuple(p, FC_PV_SIZE, items, n, out) ? FC_OK : fc_pickle_nomem(vm);
}

/* Appends the pairs of a list or tuple of pairs to a dict. Protocol 2 wrote an OrderedDict in this way. */
static fc_code append_pairs(fc_pickle_vm *vm, fc_pv callee, fc_pv pairs, fc_pv dict) {
    fc_pickle *p = vm->p;
    size_t n, two;
    const fc_pv *items = fc_pickle_sequence(p, pairs, &n);
    FC_TRY(fc_pickle_count_taken(vm, n));
    for (size_t i = 0; i < n; i++) {
        const fc_pv_type type = fc_pv_typeof(items[i]);
        const fc_pv *pair = fc_pickle_sequence(p, items[i], &two);
        if ((type != FC_PV_TUPLE && type != FC_PV_LIST) || two != 2) {
            return bad_call(vm, callee);
        }
        FC_TRY(fc_pickle_check_keys(vm, pair, 2, 2));
        if (!fc_pickle_append(p, dict, pair, 2)) {
            return fc_pickle_nomem(vm);
        }
    }
    return FC_OK;
}

static fc_code make_container(fc_pickle_vm *vm, fc_pv callee, fc_pv_type type, fc_pv init, fc_pv *out) {
    fc_pickle *p = vm->p;
    if (!fc_pickle_add_container(p, type, out)) {
        return fc_pickle_nomem(vm);
    }
    fc_pv_type from = fc_pv_typeof(init);
    if (from == FC_PV_ABSENT) {
        return FC_OK;
    }
    if (type == FC_PV_DICT && (from == FC_PV_LIST || from == FC_PV_TUPLE)) {
        return append_pairs(vm, callee, init, *out);
    }
    size_t n;
    const fc_pv *items = fc_pickle_sequence(p, init, &n);
    if (!(type == FC_PV_DICT
              ? from == FC_PV_DICT
              : from == FC_PV_LIST || from == FC_PV_SET || from == FC_PV_FROZENSET || from == FC_PV_TUPLE)) {
        return bad_call(vm, callee);
    }
    FC_TRY(fc_pickle_count_taken(vm, n));
    if (type == FC_PV_SET || type == FC_PV_FROZENSET) {
        FC_TRY(fc_pickle_check_keys(vm, items, n, 1));
    }
    return fc_pickle_append(p, *out, items, n) ? FC_OK : fc_pickle_nomem(vm);
}

/* Whether a defaultdict's factory, which is called when a missing key is looked up, only creates data. */
static bool is_data_factory(const fc_pickle *p, fc_pv factory) {
    return factory == 0 || fc_pv_typeof(factory) == FC_PV_NONE || fc_pickle_is_harmless_function(p, factory);
}

/* Makes a dict that records its class and its factory. The factory is code, but only its name is kept. */
static fc_code make_dict(fc_pickle_vm *vm, fc_pv callee, fc_pv init, fc_pv factory, fc_pv *out) {
    FC_TRY(make_container(vm, callee, FC_PV_DICT, init, out));
    /* The class calls `keys` or `items` of the other dict, which may be an attribute of it. No pickler writes this. */
    if (fc_pv_typeof(init) == FC_PV_DICT && vm->p->containers[fc_pv_payload(init)].state) {
        fc_pickle_note_risk(vm->p, FC_RISK_RUNS, callee);
    }
    if (!fc_pickle_is_str(vm->p, vm->p->cells[fc_pv_payload(callee) + 2], "dict")) {
        vm->p->containers[fc_pv_payload(*out)].cls = callee;
        vm->p->containers[fc_pv_payload(*out)].factory = factory;
    }
    if (!is_data_factory(vm->p, factory)) {
        fc_pickle_note_risk(vm->p, FC_RISK_UNKNOWN, fc_pv_typeof(factory) == FC_PV_GLOBAL ? factory : callee);
    }
    return FC_OK;
}

/* Converts text whose characters are all below 256 to bytes. */
static fc_code make_latin1(fc_pickle_vm *vm, fc_pv callee, fc_pv text, fc_pv_type type, fc_pv *out) {
    fc_pickle *p = vm->p;
    unsigned char *to;
    size_t n, length = 0;
    fc_pickle_bytes(p, text, &n);
    FC_TRY(fc_pickle_count_taken(vm, n));
    /* Adding text may move the text area, so the source must be looked up again. */
    if (!fc_pickle_add_text(p, type, n, out, &to)) {
        return fc_pickle_nomem(vm);
    }
    const unsigned char *from = (const unsigned char *)fc_pickle_bytes(p, text, &n);
    for (size_t i = 0; i < n; i++) {
        if (from[i] < 0x80) {
            to[length++] = from[i];
        } else if ((from[i] == 0xc2 || from[i] == 0xc3) && i + 1 < n) {
            to[length++] = (unsigned char)((from[i] & 3) << 6 | (from[i + 1] & 0x3f));
            i++;
        } else {
            return bad_call(vm, callee);
        }
    }
    to[length] = '\0';
    fc_pickle_record(p, *out)->length = length;
    return FC_OK;
}

static fc_code make_bytes(fc_pickle_vm *vm, fc_pv callee, const fc_pv args[2], fc_pv_type type, fc_pv *out) {
    fc_pickle *p = vm->p;
    unsigned char *to;
    size_t n = 0;
    switch (fc_pv_typeof(args[0])) {
    case FC_PV_ABSENT:
        break;
    case FC_PV_STR:
        if (args[1] && !fc_pickle_is_str(p, args[1], "latin1") && !fc_pickle_is_str(p, args[1], "latin-1")) {
            return bad_call(vm, callee);
        }
        return make_latin1(vm, callee, args[0], type, out);
    case FC_PV_BYTES:
    case FC_PV_BYTEARRAY:
        fc_pickle_bytes(p, args[0], &n);
        break;
    default:
        return bad_call(vm, callee);
    }
    FC_TRY(fc_pickle_count_taken(vm, n));
    if (!fc_pickle_add_text(p, type, n, out, &to)) {
        return fc_pickle_nomem(vm);
    }
    if (n > 0) {
        memcpy(to, fc_pickle_bytes(p, args[0], &n), n);
    }
    return FC_OK;
}

/* Python 3.11.0 to 3.11.3 write members of an enumeration as getattr(class, name). Data needs no other getattr. */
static fc_code call_getattr(fc_pickle_vm *vm, fc_pv callee, fc_pv args, fc_pv *out) {
    fc_pv arg[2];
    uint32_t aux;
    if (vm->mode == FC_PICKLE_STRICT &&
        (!take_args(vm->p, args, arg, 2) || fc_pv_typeof(arg[0]) != FC_PV_GLOBAL ||
         fc_pickle_global(vm->p, arg[0], &aux) != FC_GLOBAL_ENUM || fc_pv_typeof(arg[1]) != FC_PV_STR)) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "pickle global builtins.getattr is not allowed: this file may be hostile");
    }
    return make_call(vm, callee, args, out);
}

fc_code fc_pickle_reduce(fc_pickle_vm *vm, fc_pv callee, fc_pv args, fc_pv *out) {
    fc_pickle *p = vm->p;
    fc_pv arg[2] = {0, 0};
    uint32_t aux;
    const fc_pv_type type = fc_pv_typeof(callee);
    if (type != FC_PV_GLOBAL && type != FC_PV_CALL && type != FC_PV_PERSID) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "the pickle is damaged: it calls a value that is not a function");
    }
    if (fc_pv_typeof(args) != FC_PV_TUPLE) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "the pickle is damaged: the arguments of a call are not a tuple");
    }
    if (type != FC_PV_GLOBAL) {
        if (vm->mode == FC_PICKLE_STRICT) {
            return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                                  "the pickle calls something that is not a global: this file may be hostile");
        }
        return make_call(vm, callee, args, out);
    }
    fc_global_kind kind = fc_pickle_global(p, callee, &aux);
    if (kind == FC_GLOBAL_UNKNOWN && vm->mode == FC_PICKLE_STRICT) {
        return fc_pickle_unsupported_class(vm, callee);
    }
    switch (kind) {
    case FC_GLOBAL_SIZE:
        return make_size(vm, callee, args, out);
    case FC_GLOBAL_GETATTR:
        return call_getattr(vm, callee, args, out);
    case FC_GLOBAL_DTYPE:
    case FC_GLOBAL_STORAGE:
        return bad_call(vm, callee);
    case FC_GLOBAL_DICT:
    case FC_GLOBAL_LIST:
    case FC_GLOBAL_SET:
    case FC_GLOBAL_FROZENSET:
    case FC_GLOBAL_BYTES:
    case FC_GLOBAL_BYTEARRAY:
    case FC_GLOBAL_ENCODE:
    case FC_GLOBAL_DEFAULTDICT:
        if (!take_args(p, args, arg, 2)) {
            return bad_call(vm, callee);
        }
        break;
    default:
        return make_call(vm, callee, args, out);
    }
    switch (kind) {
    case FC_GLOBAL_DICT:
        return make_dict(vm, callee, arg[0], 0, out);
    case FC_GLOBAL_DEFAULTDICT:
        return make_dict(vm, callee, arg[1], arg[0], out);
    case FC_GLOBAL_LIST:
        return make_container(vm, callee, FC_PV_LIST, arg[0], out);
    case FC_GLOBAL_SET:
        return make_container(vm, callee, FC_PV_SET, arg[0], out);
    case FC_GLOBAL_FROZENSET:
        return make_container(vm, callee, FC_PV_FROZENSET, arg[0], out);
    case FC_GLOBAL_BYTEARRAY:
        return make_bytes(vm, callee, arg, FC_PV_BYTEARRAY, out);
    default:
        return make_bytes(vm, callee, arg, FC_PV_BYTES, out);
    }
}

fc_code fc_pickle_newobj(fc_pickle_vm *vm, fc_pv cls, fc_pv args, fc_pv *out) {
    fc_pickle *p = vm->p;
    uint32_t aux = 0;
    uint64_t at;
    const fc_global_kind kind =
        fc_pv_typeof(cls) == FC_PV_GLOBAL ? fc_pickle_global(p, cls, &aux) : FC_GLOBAL_INERT; /* made by a call */
    /*
     * In an item it is a value like any other. An unknown class may be similar to a known one, which BUILD will show.
     */
    if ((kind == FC_GLOBAL_CLASS || kind == FC_GLOBAL_UNKNOWN) && vm->mode == FC_PICKLE_STRICT) {
        size_t n = 0;
        while (kind == FC_GLOBAL_CLASS ? fc_class_fields((fc_class)aux)[n] != NULL : n < FC_CLASS_MAX_FIELDS) {
            n++;
        }
        if (!fc_pickle_add_cells(p, n + 1, &at)) {
            return fc_pickle_nomem(vm);
        }
        memset(p->cells + at, 0, (n + 1) * sizeof *p->cells);
        p->cells[at] = cls;
        *out = fc_pv_make(FC_PV_OBJECT, at);
        return FC_OK;
    }
    FC_TRY(fc_pickle_reduce(vm, cls, args, out));
    if (fc_pv_typeof(*out) == FC_PV_CALL) {
        p->cells[fc_pv_payload(*out) + 5] |= 1;
    }
    return FC_OK;
}

/* OrderedDict and Counter have attributes, dict and defaultdict do not. */
static bool has_attributes(const fc_pickle *p, fc_pv dict) {
    const fc_pv cls = p->containers[fc_pv_payload(dict)].cls;
    return cls && !fc_pickle_is_str(p, p->cells[fc_pv_payload(cls) + 2], "defaultdict");
}

/* A state that is not a dict can set anything, also the class. */
static fc_code examine_attributes(fc_pickle_vm *vm, fc_pv instance, fc_pv state) {
    fc_pickle *p = vm->p;
    size_t n = 0;
    bool harmless = fc_pv_typeof(state) == FC_PV_DICT && !p->containers[fc_pv_payload(state)].state;
    const fc_pv *items = harmless ? fc_pickle_items(p, state, &n) : NULL;
    FC_TRY(fc_pickle_count_taken(vm, n));
    for (size_t i = 0; i + 1 < n; i += 2) {
        harmless = harmless && fc_pv_typeof(items[i]) == FC_PV_STR && !fc_pickle_is_dunder(p, items[i]);
    }
    if (!harmless) {
        fc_pickle_note_risk(p, FC_RISK_UNKNOWN, p->containers[fc_pv_payload(instance)].cls);
    }
    return FC_OK;
}

fc_code fc_pickle_build(fc_pickle_vm *vm, fc_pv instance, fc_pv state) {
    switch (fc_pv_typeof(instance)) {
    case FC_PV_OBJECT:
        return fc_pickle_build_object(vm, instance, state);
    case FC_PV_CALL:
        fc_pickle_note_state(vm->p, instance);
        vm->p->cells[fc_pv_payload(instance) + 2] = state;
        return FC_OK;
    case FC_PV_DICT: /* attributes, such as nn.Module.state_dict's _metadata */
        if (!has_attributes(vm->p, instance) && fc_pv_typeof(state) != FC_PV_NONE) {
            break;
        }
        if (fc_pv_typeof(state) != FC_PV_NONE) {
            FC_TRY(examine_attributes(vm, instance, state));
        }
        if (vm->p->containers[fc_pv_payload(instance)].state) { /* which may have an attribute __setstate__ */
            fc_pickle_note_risk(vm->p, FC_RISK_RUNS, 0);
        }
        vm->p->containers[fc_pv_payload(instance)].state = fc_pv_typeof(state) == FC_PV_NONE ? 0 : state;
        return FC_OK;
    case FC_PV_LIST:
    case FC_PV_SET:
        if (fc_pv_typeof(state) == FC_PV_NONE) {
            return FC_OK;
        }
        break;
    default:
        break;
    }
    return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: BUILD on a value that has no state");
}

/*
 * Adds items to an instance of an unknown class that behaves like a container. Their meaning is unknown, but they are
 * kept.
 */
static fc_code extend_call(fc_pickle_vm *vm, fc_pv call, const fc_pv *items, size_t n, fc_pv_type wanted) {
    size_t cell = (size_t)fc_pv_payload(call) + (wanted == FC_PV_DICT ? 4 : 3);
    fc_pv kept = vm->p->cells[cell];
    fc_pickle_note_items(vm->p, call, wanted);
    if (!kept) {
        if (!fc_pickle_add_container(vm->p, wanted, &kept)) {
            return fc_pickle_nomem(vm);
        }
        vm->p->cells[cell] = kept;
    }
    return fc_pickle_append(vm->p, kept, items, n) ? FC_OK : fc_pickle_nomem(vm);
}

fc_code fc_pickle_extend(fc_pickle_vm *vm, fc_pv target, const fc_pv *items, size_t n, fc_pv_type wanted) {
    fc_pv_type type = fc_pv_typeof(target);
    if (wanted == FC_PV_DICT && n % 2 != 0) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: a dict has a key without a value");
    }
    if (wanted != FC_PV_LIST) {
        FC_TRY(fc_pickle_check_keys(vm, items, n, wanted == FC_PV_DICT ? 2 : 1));
    }
    if (type == wanted) {
        return fc_pickle_append(vm->p, target, items, n) ? FC_OK : fc_pickle_nomem(vm);
    }
    if (type == FC_PV_CALL && vm->mode == FC_PICKLE_ITEM) {
        return extend_call(vm, target, items, n, wanted);
    }
    return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                          "the pickle is damaged: items are added to a value that is not a %s",
                          wanted == FC_PV_DICT   ? "dict"
                          : wanted == FC_PV_LIST ? "list"
                                                 : "set");
}
