/*
 * The loop of the pickle machine, which applies one opcode after another to a stack of values. pickle.h explains its
 * purpose, machine.h its parts.
 */
#include "torch/pickle/pickle.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "torch/pickle/judge.h"

#include <stdlib.h>
#include <string.h>

static fc_code push_value(fc_pickle_vm *vm, fc_pv v) {
    if (vm->depth == vm->stack_capacity &&
        !fc_grow(&vm->stack, &vm->stack_capacity, vm->depth + 1, sizeof *vm->stack)) {
        return fc_pickle_nomem(vm);
    }
    vm->stack[vm->depth++] = v;
    return FC_OK;
}

/* Fails unless `n` values are above the innermost mark. */
static fc_code need_values(fc_pickle_vm *vm, size_t n) {
    return vm->depth - vm->base >= n
               ? FC_OK
               : fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: an opcode finds too few values");
}

static fc_code push_mark(fc_pickle_vm *vm) {
    if (!fc_grow(&vm->marks, &vm->marks_capacity, vm->nmarks + 1, sizeof *vm->marks)) {
        return fc_pickle_nomem(vm);
    }
    vm->marks[vm->nmarks++] = vm->depth;
    vm->base = vm->depth;
    return FC_OK;
}

/* Pops the values above the innermost mark. They stay readable until the next push. */
static fc_code pop_mark(fc_pickle_vm *vm, const fc_pv **items, size_t *n) {
    if (vm->nmarks == 0) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: an opcode finds no mark");
    }
    size_t mark = vm->marks[--vm->nmarks];
    *items = vm->stack + mark;
    *n = vm->depth - mark;
    vm->depth = mark;
    vm->base = vm->nmarks ? vm->marks[vm->nmarks - 1] : 0;
    return FC_OK;
}

static fc_code memo_put(fc_pickle_vm *vm, uint64_t index) {
    FC_TRY(need_values(vm, 1));
    fc_pv *slot = fc_pickle_memo_slot(&vm->memo, index);
    if (!slot) {
        return FC_OK;
    }
    fc_pv v = vm->stack[vm->depth - 1];
    switch (fc_pv_typeof(v)) {
    case FC_PV_LIST:
    case FC_PV_DICT:
    case FC_PV_SET:
    case FC_PV_FROZENSET:
        vm->p->containers[fc_pv_payload(v)].memoized = true;
        break;
    default:
        vm->protected_cell = vm->p->ncells;
        break;
    }
    *slot = v;
    return FC_OK;
}

/* No pickler mixes these, and then the numbers of MEMOIZE would depend on the indexes of the PUTs. */
static fc_code mixed_memo(fc_pickle_vm *vm) {
    return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: it mixes MEMOIZE and PUT");
}

static fc_code memo_get(fc_pickle_vm *vm, uint64_t index) {
    const fc_pv *slot = fc_pickle_memo_slot(&vm->memo, index);
    if (!slot || !*slot) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "the pickle is damaged: it fetches memo entry %" PRIu64 ", which was never stored",
                              index);
    }
    return push_value(vm, *slot);
}

/* Whether it is UTF-8 as Python's "surrogatepass" accepts it. */
static bool is_utf8(const unsigned char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        unsigned c = s[i++];
        if (c < 0x80) {
            continue;
        }
        size_t more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
        if (c < 0xc2 || c > 0xf4 || more > n - i || (c == 0xe0 && s[i] < 0xa0) || (c == 0xf0 && s[i] < 0x90) ||
            (c == 0xf4 && s[i] > 0x8f)) {
            return false;
        }
        for (; more > 0; more--) {
            if ((s[i++] & 0xc0) != 0x80) {
                return false;
            }
        }
    }
    return true;
}

static fc_code push_text(fc_pickle_vm *vm, fc_pv_type type, uint64_t n) {
    unsigned char *bytes;
    fc_pv v;
    if (!fc_pickle_add_text(vm->p, type, n, &v, &bytes)) {
        return fc_pickle_nomem(vm);
    }
    FC_TRY(fc_pickle_payload(&vm->reader, bytes, n));
    if (type == FC_PV_STR) {
        if (!is_utf8(bytes, (size_t)n)) {
            return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: a string is not UTF-8");
        }
        if (!fc_pickle_intern_last(vm->p, &v)) {
            return fc_pickle_nomem(vm);
        }
    }
    return push_value(vm, v);
}

/* Python 2's str is text or bytes; it counts as bytes if it is not UTF-8. */
static fc_code push_string(fc_pickle_vm *vm, uint64_t n) {
    FC_TRY(push_text(vm, FC_PV_BYTES, n));
    fc_pv *v = &vm->stack[vm->depth - 1];
    size_t length;
    const char *bytes = fc_pickle_bytes(vm->p, *v, &length);
    if (is_utf8((const unsigned char *)bytes, length)) {
        *v = fc_pv_make(FC_PV_STR, fc_pv_payload(*v));
        return fc_pickle_intern_last(vm->p, v) ? FC_OK : fc_pickle_nomem(vm);
    }
    return FC_OK;
}

/* Integers of up to 64 bits become FC_PV_INT or eight bytes; larger ones keep their bytes. */
static fc_code push_long(fc_pickle_vm *vm, uint64_t n) {
    int64_t value;
    FC_TRY(push_text(vm, FC_PV_BIGINT, n));
    if (!fc_pickle_int(vm->p, vm->stack[vm->depth - 1], &value)) {
        return FC_OK;
    }
    vm->p->ntext = (size_t)fc_pv_payload(vm->stack[--vm->depth]) * 8;
    fc_pv v;
    return fc_pickle_add_int(vm->p, value, &v) ? push_value(vm, v) : fc_pickle_nomem(vm);
}

static fc_code push_int(fc_pickle_vm *vm, uint64_t argument) {
    fc_pv v;
    return fc_pickle_add_int(vm->p, (int64_t)argument, &v) ? push_value(vm, v) : fc_pickle_nomem(vm);
}

static fc_code push_float(fc_pickle_vm *vm, uint64_t argument) {
    uint64_t bits = __builtin_bswap64(argument); /* the only big-endian number in a pickle */
    double value;
    fc_pv v;
    memcpy(&value, &bits, sizeof value);
    return fc_pickle_add_float(vm->p, value, &v) ? push_value(vm, v) : fc_pickle_nomem(vm);
}

static fc_code push_container(fc_pickle_vm *vm, fc_pv_type type, const fc_pv *items, size_t n) {
    fc_pv v;
    if (!fc_pickle_add_container(vm->p, type, &v) || !fc_pickle_append(vm->p, v, items, n)) {
        return fc_pickle_nomem(vm);
    }
    return push_value(vm, v);
}

static fc_code push_tuple(fc_pickle_vm *vm, const fc_pv *items, size_t n) {
    fc_pv v;
    return fc_pickle_add_tuple(vm->p, FC_PV_TUPLE, items, n, &v) ? push_value(vm, v) : fc_pickle_nomem(vm);
}

static fc_code small_tuple(fc_pickle_vm *vm, size_t n) {
    FC_TRY(need_values(vm, n));
    vm->depth -= n;
    return push_tuple(vm, vm->stack + vm->depth, n);
}

static fc_code global_lines(fc_pickle_vm *vm) {
    const char *lines[2];
    size_t lengths[2];
    fc_pv names[2], v;
    FC_TRY(fc_pickle_lines(&vm->reader, lines, lengths));
    for (int i = 0; i < 2; i++) {
        if (!is_utf8((const unsigned char *)lines[i], lengths[i])) {
            return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: a string is not UTF-8");
        }
        FC_TRY(fc_pickle_add_string(vm->p, lines[i], lengths[i], &names[i]) ? FC_OK : fc_pickle_nomem(vm));
    }
    FC_TRY(fc_pickle_global_op(vm, names[0], names[1], &v));
    return push_value(vm, v);
}

static fc_code persistent_id(fc_pickle_vm *vm) {
    uint64_t at;
    FC_TRY(need_values(vm, 1));
    if (vm->mode == FC_PICKLE_STRICT) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle has a persistent id, which has no meaning here");
    }
    if (!fc_pickle_add_cells(vm->p, 1, &at)) {
        return fc_pickle_nomem(vm);
    }
    vm->p->cells[at] = vm->stack[vm->depth - 1];
    vm->stack[vm->depth - 1] = fc_pv_make(FC_PV_PERSID, at);
    if ((!vm->p->persids && !fc_pickle_add_container(vm->p, FC_PV_LIST, &vm->p->persids)) ||
        !fc_pickle_append(vm->p, vm->p->persids, &vm->stack[vm->depth - 1], 1)) {
        return fc_pickle_nomem(vm);
    }
    return FC_OK;
}

/* The value that an opcode makes of two. */
static fc_code combine_values(fc_pickle_vm *vm, int op, fc_pv first, fc_pv second, fc_pv *v) {
    switch (op) {
    case FC_PICKLE_REDUCE:
        return fc_pickle_reduce(vm, first, second, v);
    case FC_PICKLE_NEWOBJ:
        return fc_pickle_newobj(vm, first, second, v);
    case FC_PICKLE_STACK_GLOBAL:
        return fc_pickle_global_op(vm, first, second, v);
    case FC_PICKLE_BUILD:
        *v = first;
        return fc_pickle_build(vm, first, second);
    default: /* FC_PICKLE_APPEND */
        *v = first;
        return fc_pickle_extend(vm, first, &second, 1, FC_PV_LIST);
    }
}

/* The opcodes that take two values and leave one. */
static fc_code execute_binary(fc_pickle_vm *vm, int op) {
    fc_pv v;
    FC_TRY(need_values(vm, 2));
    fc_pv second = vm->stack[vm->depth - 1], first = vm->stack[vm->depth - 2];
    vm->depth--;
    FC_TRY(combine_values(vm, op, first, second, &v));
    vm->stack[vm->depth - 1] = v;
    return FC_OK;
}

static bool is_empty_dict(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_DICT && p->containers[fc_pv_payload(v)].count == 0;
}

/* Pops cls, args and kwargs. The known data classes have no keyword arguments. */
static fc_code newobj_ex(fc_pickle_vm *vm) {
    fc_pv v;
    FC_TRY(need_values(vm, 3));
    vm->depth -= 2;
    FC_TRY(fc_pickle_newobj(vm, vm->stack[vm->depth - 1], vm->stack[vm->depth], &v));
    if (fc_pv_typeof(v) == FC_PV_CALL && !is_empty_dict(vm->p, vm->stack[vm->depth + 1])) {
        vm->p->cells[fc_pv_payload(v) + 5] = 2 | vm->p->cells[fc_pv_payload(v) + 5] >> 8 << 8;
    }
    vm->stack[vm->depth - 1] = v;
    return FC_OK;
}

/* The opcodes that take all values above the mark. */
static fc_code execute_marked(fc_pickle_vm *vm, int op) {
    const fc_pv *items = NULL;
    size_t n = 0;
    FC_TRY(pop_mark(vm, &items, &n));
    if (op == FC_PICKLE_POP_MARK) {
        return FC_OK;
    }
    if (op == FC_PICKLE_TUPLE) {
        return push_tuple(vm, items, n);
    }
    if (op == FC_PICKLE_FROZENSET) {
        FC_TRY(fc_pickle_check_keys(vm, items, n, 1));
        return push_container(vm, FC_PV_FROZENSET, items, n);
    }
    FC_TRY(need_values(vm, 1));
    fc_pv_type wanted = op == FC_PICKLE_SETITEMS ? FC_PV_DICT : op == FC_PICKLE_APPENDS ? FC_PV_LIST : FC_PV_SET;
    return fc_pickle_extend(vm, vm->stack[vm->depth - 1], items, n, wanted);
}

static fc_code execute_setitem(fc_pickle_vm *vm) {
    FC_TRY(need_values(vm, 3));
    vm->depth -= 2;
    return fc_pickle_extend(vm, vm->stack[vm->depth - 1], vm->stack + vm->depth, 2, FC_PV_DICT);
}

static fc_code pop_value(fc_pickle_vm *vm) {
    if (vm->depth == vm->base && vm->nmarks > 0) { /* Python pops a mark for recursive tuples */
        const fc_pv *items;
        size_t n;
        return pop_mark(vm, &items, &n);
    }
    FC_TRY(need_values(vm, 1));
    vm->depth--;
    return FC_OK;
}

static fc_code check_protocol(fc_pickle_vm *vm, uint64_t protocol) {
    if (protocol < 2) { /* their picklers do not write a number, but Python reads it */
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "pickle protocol %" PRIu64 " is forged: this file may be hostile", protocol);
    }
    return protocol <= 5 ? FC_OK
                         : fc_pickle_fail(&vm->reader, FC_EUNSUPPORTED,
                                          "pickle protocol %" PRIu64 " is not one of 2 to 5", protocol);
}

static fc_code execute_opcode(fc_pickle_vm *vm, int op, uint64_t argument) {
    switch (op) {
    case FC_PICKLE_PROTO:
        return check_protocol(vm, argument);
    case FC_PICKLE_FRAME: /* only tells readers how much to read ahead */
        return FC_OK;
    case FC_PICKLE_MEMOIZE:
        return vm->puts ? mixed_memo(vm) : memo_put(vm, vm->memoized++);
    case FC_PICKLE_BINPUT:
    case FC_PICKLE_LONG_BINPUT:
        vm->puts = true;
        return vm->memoized > 0 ? mixed_memo(vm) : memo_put(vm, argument);
    case FC_PICKLE_BINGET:
    case FC_PICKLE_LONG_BINGET:
        return memo_get(vm, argument);
    case FC_PICKLE_MARK:
        return push_mark(vm);
    case FC_PICKLE_NONE:
        return push_value(vm, fc_pv_make(FC_PV_NONE, 0));
    case FC_PICKLE_NEWTRUE:
        return push_value(vm, fc_pv_make(FC_PV_BOOL, 1));
    case FC_PICKLE_NEWFALSE:
        return push_value(vm, fc_pv_make(FC_PV_BOOL, 0));
    case FC_PICKLE_BININT:
    case FC_PICKLE_BININT1:
    case FC_PICKLE_BININT2:
        return push_int(vm, argument);
    case FC_PICKLE_LONG1:
    case FC_PICKLE_LONG4:
        return push_long(vm, argument);
    case FC_PICKLE_BINFLOAT:
        return push_float(vm, argument);
    case FC_PICKLE_SHORT_BINUNICODE:
    case FC_PICKLE_BINUNICODE:
    case FC_PICKLE_BINUNICODE8:
        return push_text(vm, FC_PV_STR, argument);
    case FC_PICKLE_SHORT_BINBYTES:
    case FC_PICKLE_BINBYTES:
    case FC_PICKLE_BINBYTES8:
        return push_text(vm, FC_PV_BYTES, argument);
    case FC_PICKLE_BYTEARRAY8:
        return push_text(vm, FC_PV_BYTEARRAY, argument);
    case FC_PICKLE_BINSTRING:
    case FC_PICKLE_SHORT_BINSTRING:
        return push_string(vm, argument);
    case FC_PICKLE_EMPTY_TUPLE:
        return push_tuple(vm, NULL, 0);
    case FC_PICKLE_TUPLE1:
    case FC_PICKLE_TUPLE2:
    case FC_PICKLE_TUPLE3:
        return small_tuple(vm, (size_t)(op - FC_PICKLE_TUPLE1) + 1);
    case FC_PICKLE_EMPTY_LIST:
        return push_container(vm, FC_PV_LIST, NULL, 0);
    case FC_PICKLE_EMPTY_DICT:
        return push_container(vm, FC_PV_DICT, NULL, 0);
    case FC_PICKLE_EMPTY_SET:
        return push_container(vm, FC_PV_SET, NULL, 0);
    case FC_PICKLE_REDUCE:
    case FC_PICKLE_NEWOBJ:
    case FC_PICKLE_STACK_GLOBAL:
    case FC_PICKLE_BUILD:
    case FC_PICKLE_APPEND:
        return execute_binary(vm, op);
    case FC_PICKLE_NEWOBJ_EX:
        return newobj_ex(vm);
    case FC_PICKLE_TUPLE:
    case FC_PICKLE_FROZENSET:
    case FC_PICKLE_SETITEMS:
    case FC_PICKLE_APPENDS:
    case FC_PICKLE_ADDITEMS:
    case FC_PICKLE_POP_MARK:
        return execute_marked(vm, op);
    case FC_PICKLE_SETITEM:
        return execute_setitem(vm);
    case FC_PICKLE_GLOBAL:
        return global_lines(vm);
    case FC_PICKLE_BINPERSID:
        return persistent_id(vm);
    default: /* FC_PICKLE_POP: the reader lets no other opcode through */
        return pop_value(vm);
    }
}

/* The value that is left at the end. */
static fc_code take_root(fc_pickle_vm *vm) {
    FC_TRY(need_values(vm, 1));
    if (vm->depth != 1 || vm->nmarks != 0) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle is damaged: values are left over at its end");
    }
    if (vm->mode == FC_PICKLE_STRICT && vm->p->risk == FC_RISK_RUNS) {
        return fc_pickle_fail(&vm->reader, FC_ECORRUPT,
                              "the pickle calls something that is not a global: this file may be hostile");
    }
    vm->p->root = vm->stack[0];
    vm->p->size = fc_pickle_position(&vm->reader);
    return FC_OK;
}

static fc_code run_opcodes(fc_pickle_vm *vm) {
    fc_pickle_rewind(&vm->reader);
    for (;;) {
        uint64_t argument = 0;
        FC_TRY(fc_pickle_next(&vm->reader, &argument));
        if (vm->reader.op == FC_PICKLE_STOP) {
            return take_root(vm);
        }
        FC_TRY(execute_opcode(vm, vm->reader.op, argument));
    }
}

/* In `.metadata`, a call that is not known to be harmless is an error. */
static fc_code judge_calls(fc_pickle_vm *vm) {
    fc_pickle *p = vm->p;
    char name[256];
    if (vm->mode == FC_PICKLE_STRICT) {
        p->risk = FC_RISK_NONE; /* of classes that are similar to known ones */
    }
    if (!fc_pickle_judge(p, vm->calls, vm->ncalls, p->size, vm->mode == FC_PICKLE_ITEM)) {
        return fc_pickle_nomem(vm);
    }
    if (vm->mode == FC_PICKLE_ITEM || p->risk == FC_RISK_NONE) {
        return FC_OK;
    }
    fc_pickle_risky_name(p, name, sizeof name);
    return p->risk == FC_RISK_RUNS
               ? fc_pickle_fail(&vm->reader, FC_ECORRUPT, "the pickle calls %s: this file may be hostile", name)
               : fc_pickle_fail(&vm->reader, FC_EUNSUPPORTED,
                                "unsupported: %s is not known to be harmless as it is used here", name);
}

fc_code fc_pickle_load(const fc_pickle_source *source, fc_pickle_mode mode, fc_pickle **out, fc_error *err) {
    fc_pickle_vm vm = {0};
    *out = NULL;
    vm.mode = mode;
    vm.reader.source = source;
    vm.reader.err = err;
    vm.p = calloc(1, sizeof *vm.p);
    vm.reader.buffer = source->bytes ? NULL : malloc(FC_PICKLE_WINDOW);
    fc_code rc = FC_OK;
    /* The stack is never NULL, so that pointers into an empty one are valid. */
    if (!vm.p || (!source->bytes && !vm.reader.buffer) ||
        !fc_grow(&vm.stack, &vm.stack_capacity, 1, sizeof *vm.stack)) {
        rc = fc_no_memory(err, source->name);
        goto out;
    }
    fc_pickle_rewind(&vm.reader);
    FC_TRY_GOTO(fc_pickle_scan(&vm.reader, &vm.memo), rc, out);
    FC_TRY_GOTO(run_opcodes(&vm), rc, out);
    FC_TRY_GOTO(judge_calls(&vm), rc, out);
    *out = vm.p;
    vm.p = NULL;
out:
    free(vm.memo.used);
    free(vm.memo.before);
    free(vm.memo.values);
    free(vm.stack);
    free(vm.marks);
    free(vm.calls);
    free(vm.reader.buffer);
    fc_pickle_free(vm.p);
    return rc;
}

void fc_pickle_free(fc_pickle *pickle) {
    if (!pickle) {
        return;
    }
    for (size_t i = 0; i < pickle->ncontainers; i++) {
        free(pickle->containers[i].items);
    }
    free(pickle->containers);
    free(pickle->cells);
    free(pickle->text);
    free(pickle->interned);
    free(pickle);
}
