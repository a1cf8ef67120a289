/*
 * Instances of DCP's data classes, folded into slots, and of similar classes: subclasses, or another program's copies
 * with the same fields.
 */
#include "fsdpckpt/try.h"
#include "torch/pickle/judge.h"

/* Reports a class in `.metadata` that is neither known nor similar to a known one. */
fc_code fc_pickle_unsupported_class(fc_pickle_vm *vm, fc_pv global) {
    return fc_pickle_fail(&vm->reader, FC_EUNSUPPORTED, "unsupported: class %.200s of %.200s",
                          fc_pickle_name(vm->p, global), fc_pickle_module(vm->p, global));
}

/* Frees the cells of an argument tuple if it is the newest value and nothing else can refer to it. */
void fc_pickle_drop_tuple(fc_pickle_vm *vm, fc_pv args) {
    fc_pickle *p = vm->p;
    uint64_t at = fc_pv_payload(args);
    if (fc_pv_typeof(args) == FC_PV_TUPLE && at >= vm->protected_cell && at + 1 + p->cells[at] == p->ncells) {
        p->ncells = (size_t)at;
    }
}

/* Sets the slots of `instance` from the names and values of a dict. Unknown names are fields of newer versions. */
static void set_slots(fc_pickle *p, fc_pv instance, const char *const *fields, const fc_pv *pairs, size_t n) {
    uint64_t *slots = p->cells + fc_pv_payload(instance) + 1;
    for (size_t i = 0; i + 1 < n; i += 2) {
        for (size_t f = 0; fields[f]; f++) {
            if (fc_pickle_is_str(p, pairs[i], fields[f])) {
                slots[f] = pairs[i + 1];
                break;
            }
        }
    }
}

static bool has_key(const fc_pickle *p, const fc_pv *pairs, size_t n, const char *key) {
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (fc_pickle_is_str(p, pairs[i], key)) {
            return true;
        }
    }
    return false;
}

/* @return DCP's class with the fields of this state, or FC_CLASS_COUNT. The last fields may be missing. */
static fc_class class_like(const fc_pickle *p, const fc_pv *pairs, size_t n) {
    static const struct {
        fc_class cls;
        size_t required;
    } candidates[] = {
        {FC_CLASS_STORAGE_INFO, 3},  {FC_CLASS_METADATA_INDEX, 2}, {FC_CLASS_TENSOR_STORAGE, 3},
        {FC_CLASS_CHUNK_STORAGE, 2}, {FC_CLASS_METADATA, 3},       {FC_CLASS_TENSOR_PROPERTIES, 2},
    };
    for (size_t c = 0; c < sizeof candidates / sizeof *candidates; c++) {
        const char *const *fields = fc_class_fields(candidates[c].cls);
        size_t found = 0;
        while (found < candidates[c].required && has_key(p, pairs, n, fields[found])) {
            found++;
        }
        if (found == candidates[c].required) {
            return candidates[c].cls;
        }
    }
    return n == 0 ? FC_CLASS_BYTES_STORAGE : FC_CLASS_COUNT;
}

/*
 * Turns an instance of an unknown class into one of DCP's class with the same fields. The unknown class is a subclass
 * or a copy of DCP's.
 */
static fc_code recognise_class(fc_pickle_vm *vm, fc_pv instance, fc_pv state) {
    fc_pickle *p = vm->p;
    fc_pv global = fc_pickle_callee(p, instance), like;
    uint32_t aux;
    size_t n;
    if (fc_pickle_global(p, global, &aux) != FC_GLOBAL_UNKNOWN) {
        return FC_OK;
    }
    const fc_pv *pairs = fc_pv_typeof(state) == FC_PV_DICT ? fc_pickle_items(p, state, &n) : NULL;
    FC_TRY(fc_pickle_count_taken(vm, pairs ? n : 0));
    fc_class cls = pairs ? class_like(p, pairs, n) : FC_CLASS_COUNT;
    if (cls == FC_CLASS_COUNT) {
        return fc_pickle_unsupported_class(vm, global);
    }
    const uint64_t *cell = p->cells + fc_pv_payload(global);
    const fc_pv module = cell[1], name = cell[2];
    if (!fc_pickle_add_global(p, FC_GLOBAL_CLASS, (uint32_t)cls, module, name, &like)) {
        return fc_pickle_nomem(vm);
    }
    p->cells[fc_pv_payload(instance)] = like;
    return FC_OK;
}

/* A state that sets __class__ or similar would change what the instance is. */
static fc_code refuse_dunder(fc_pickle_vm *vm, fc_pv instance, const fc_pv *pairs, size_t n) {
    char name[256];
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (fc_pv_typeof(pairs[i]) == FC_PV_STR && fc_pickle_is_dunder(vm->p, pairs[i])) {
            fc_pickle_global_name(vm->p, fc_pickle_callee(vm->p, instance), name, sizeof name);
            return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                                  "the state of %s sets a name that Python reserves: this file may be hostile", name);
        }
    }
    return FC_OK;
}

fc_code fc_pickle_build_object(fc_pickle_vm *vm, fc_pv instance, fc_pv state) {
    fc_pickle *p = vm->p;
    uint32_t cls;
    size_t n;
    const fc_pv *items = NULL;
    FC_TRY(recognise_class(vm, instance, state));
    fc_pickle_global(p, fc_pickle_callee(p, instance), &cls);
    const char *const *fields = fc_class_fields((fc_class)cls);
    fc_pv_type type = fc_pv_typeof(state);
    if (type == FC_PV_TUPLE || type == FC_PV_LIST) {
        items = fc_pickle_sequence(p, state, &n);
        if (type == FC_PV_TUPLE && n == 2 && cls != FC_CLASS_TENSOR_PROPERTIES &&
            fc_pv_typeof(items[1]) == FC_PV_DICT) { /* (__dict__, slots) */
            state = items[1];
            type = FC_PV_DICT;
        }
    }
    if (type == FC_PV_DICT) {
        items = fc_pickle_items(p, state, &n);
        FC_TRY(fc_pickle_count_taken(vm, n));
        FC_TRY(refuse_dunder(vm, instance, items, n));
        set_slots(p, instance, fields, items, n);
        if (!p->containers[fc_pv_payload(state)].memoized) {
            fc_pickle_recycle(p, state);
        }
        return FC_OK;
    }
    if (!items) {
        char name[256];
        fc_pickle_global_name(p, fc_pickle_callee(p, instance), name, sizeof name);
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "the pickle is damaged: the state of %s is neither a dict nor a tuple", name);
    }
    for (size_t i = 0; i < n && fields[i]; i++) { /* TensorProperties.__getstate__, dataclasses with slots */
        p->cells[fc_pv_payload(instance) + 1 + i] = items[i];
    }
    fc_pickle_drop_tuple(vm, state);
    return FC_OK;
}
