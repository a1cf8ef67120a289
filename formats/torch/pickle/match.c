/*
 * Compares arguments and states with the patterns of names/harmless.h.
 */
#include "torch/pickle/judge.h"

#include "base/checked.h"
#include "base/grow.h"
#include "torch/names/harmless.h"

#include <string.h>

enum { MAX_DEPTH = 16 };

static bool match_slots(fc_judge *j, const char *pattern, const char *end, const fc_pv *items, size_t n, int depth);

/* The callee of a call, or 0. */
static fc_pv callee_of(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_callee(p, v) : 0;
}

static bool is_call_of(const fc_pickle *p, fc_pv v, const char *module, const char *name) {
    return fc_pv_typeof(v) == FC_PV_CALL && fc_pickle_is_global(p, fc_pickle_callee(p, v), module, name);
}

bool fc_judge_may_be_value(const fc_pickle *p, fc_pv global) {
    const fc_harmless *entry = fc_judge_entry(p, global);
    switch (fc_judge_kind(p, global)) {
    case FC_GLOBAL_UNKNOWN:
        return fc_harmless_is_reference(fc_pickle_module(p, global), fc_pickle_name(p, global));
    case FC_GLOBAL_DTYPE:
    case FC_GLOBAL_STORAGE:
    case FC_GLOBAL_SIZE:
    case FC_GLOBAL_DICT:
    case FC_GLOBAL_DEFAULTDICT:
    case FC_GLOBAL_LIST:
    case FC_GLOBAL_SET:
    case FC_GLOBAL_FROZENSET:
    case FC_GLOBAL_BYTES:
    case FC_GLOBAL_BYTEARRAY:
        return true;
    default:
        return entry && entry->is_value;
    }
}

bool fc_pickle_is_harmless_function(const fc_pickle *p, fc_pv v) {
    const fc_pv callee = callee_of(p, v);
    if (fc_pv_typeof(v) == FC_PV_GLOBAL) {
        return fc_judge_kind(p, v) != FC_GLOBAL_DTYPE && fc_judge_may_be_value(p, v);
    }
    return callee &&
           (fc_pickle_is_global(p, callee, "functools", "partial") ||
            fc_pickle_is_global(p, callee, "operator", NULL) || fc_judge_kind(p, callee) == FC_GLOBAL_GETATTR);
}

void fc_judge_visit(fc_judge *j, fc_pv v) {
    if (fc_pv_typeof(v) < FC_PV_TUPLE) {
        return;
    }
    if (!fc_grow(&j->todo, &j->capacity, j->ntodo + 1, sizeof *j->todo)) {
        j->no_memory = true;
        return;
    }
    j->todo[j->ntodo++] = v;
}

static bool is_dict_without_attributes(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_DICT && !fc_pickle_container_of(p, v)->state;
}

bool fc_pickle_is_dunder(const fc_pickle *p, fc_pv name) {
    size_t n;
    const char *s = fc_pickle_bytes(p, name, &n);
    return n >= 4 && s[0] == '_' && s[1] == '_' && s[n - 1] == '_' && s[n - 2] == '_';
}

static bool is_empty(const fc_pickle *p, fc_pv v) {
    size_t n = 0;
    switch (fc_pv_typeof(v)) {
    case FC_PV_DICT:
    case FC_PV_LIST:
        fc_pickle_items(p, v, &n);
        return n == 0;
    default:
        return fc_pv_typeof(v) < FC_PV_STR;
    }
}

static bool names_hooks(const fc_pickle *p, fc_pv name) {
    size_t n;
    return strstr(fc_pickle_bytes(p, name, &n), "hook") != NULL;
}

/* Whether it is the dict of an instance's attributes. */
static bool are_fields(fc_judge *j, fc_pv v, bool without_hooks) {
    const fc_pickle *p = j->p;
    size_t n;
    if (!is_dict_without_attributes(p, v)) {
        return false;
    }
    const fc_pv *items = fc_pickle_items(p, v, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (j->left == 0 || fc_pv_typeof(items[i]) != FC_PV_STR || fc_pickle_is_dunder(p, items[i]) ||
            (without_hooks && names_hooks(p, items[i]) && !is_empty(p, items[i + 1]))) {
            return false;
        }
        j->left--;
    }
    fc_judge_visit(j, v);
    return true;
}

static bool are_values_in(fc_judge *j, fc_pv v, const char *slot, int depth) {
    size_t n;
    if (!is_dict_without_attributes(j->p, v)) {
        return false;
    }
    const fc_pv *items = fc_pickle_items(j->p, v, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (!match_slots(j, slot, NULL, &items[i + 1], 1, depth + 1)) {
            return false;
        }
    }
    return true;
}

static bool is_integer(fc_pv v) {
    const fc_pv_type type = fc_pv_typeof(v);
    return type == FC_PV_INT || type == FC_PV_BIGINT || type == FC_PV_BOOL;
}

static bool is_number(fc_pv v) {
    return is_integer(v) || fc_pv_typeof(v) == FC_PV_FLOAT;
}

/* Whether it is a shape, the state of a random generator, or similar. */
static bool are_numbers(fc_judge *j, fc_pv v) {
    size_t n;
    const fc_pv_type type = fc_pv_typeof(v);
    if (type != FC_PV_LIST && type != FC_PV_TUPLE && type != FC_PV_SIZE) {
        return false;
    }
    const fc_pv *items = fc_pickle_sequence(j->p, v, &n);
    for (size_t i = 0; i < n; i++) {
        if (j->left == 0 || !is_number(items[i])) {
            return false;
        }
        j->left--;
    }
    return true;
}

static bool is_scalar(fc_judge *j, fc_pv v, int depth) {
    size_t n;
    switch (fc_pv_typeof(v)) {
    case FC_PV_NONE:
    case FC_PV_BOOL:
    case FC_PV_INT:
    case FC_PV_BIGINT:
    case FC_PV_FLOAT:
    case FC_PV_STR:
    case FC_PV_BYTES:
    case FC_PV_BYTEARRAY:
        return true;
    case FC_PV_TUPLE:
    case FC_PV_SIZE: {
        const fc_pv *items = fc_pickle_tuple(j->p, v, &n);
        for (size_t i = 0; i < n; i++) {
            if (depth == MAX_DEPTH || j->left == 0 || !is_scalar(j, items[i], depth + 1)) {
                return false;
            }
            j->left--;
        }
        return true;
    }
    default:
        return false;
    }
}

/* The letter of NumPy's kind of types in the name of one, such as "f4"; 0 if it is none. */
static char numpy_kind(const fc_pickle *p, fc_pv v) {
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_STR) {
        return 0;
    }
    const char *name = fc_pickle_bytes(p, v, &n);
    const char *kind = name + strspn(name, "<>|=");
    return kind - name <= 1 && *kind && strchr("?biufcSUVMmO", *kind) && strlen(kind + 1) < 10 &&
                   strspn(kind + 1, "0123456789") == strlen(kind + 1) && strlen(name) == n
               ? *kind
               : 0;
}

/* @return the kind of a numpy.dtype, or 0. */
static char dtype_kind(const fc_pickle *p, fc_pv v) {
    size_t n;
    if (!is_call_of(p, v, "numpy", "dtype")) {
        return 0;
    }
    const fc_pv *items = fc_pickle_call_items(p, v, &n);
    return n > 0 ? numpy_kind(p, items[0]) : 0;
}

/*
 * The state of a type says whether its elements are pointers. NumPy believes it, and would follow pointers that a file
 * contains. It says also how long a string is.
 */
bool fc_judge_is_dtype_state(const fc_pickle *p, fc_pv v) {
    enum { SIZE = 5, FLAGS = 7, NEEDS_INIT = 8, OF_OBJECTS = 63 };
    const char kind = dtype_kind(p, v);
    size_t n;
    int64_t flags, size;
    const fc_pv *items = fc_pickle_tuple(p, fc_pickle_state(p, v), &n);
    if (!fc_pickle_int(p, items[FLAGS], &flags) || !fc_pickle_int(p, items[SIZE], &size)) {
        return false;
    }
    const bool has_size = kind == 'S' || kind == 'U' || kind == 'V';
    return (kind == 'O' ? flags == OF_OBJECTS : (flags | NEEDS_INIT) == NEEDS_INIT) &&
           (has_size ? size >= 0 && size <= INT32_MAX : size == -1);
}

bool fc_judge_is_object_state(const fc_pickle *p, fc_pv v) {
    enum { SHAPE = 1, DTYPE = 2, DATA = 4 };
    size_t n, ndim, length;
    int64_t dim, count = 1;
    const fc_pv *state = fc_pickle_tuple(p, fc_pickle_state(p, v), &n);
    if (fc_pv_typeof(state[DATA]) != FC_PV_LIST || dtype_kind(p, state[DTYPE]) != 'O') {
        return fc_pv_typeof(state[DATA]) != FC_PV_LIST;
    }
    fc_pickle_items(p, state[DATA], &length);
    const fc_pv *shape = fc_pickle_sequence(p, state[SHAPE], &ndim);
    for (size_t i = 0; i < ndim; i++) {
        if (!fc_pickle_int(p, shape[i], &dim) || dim < 0 || !fc_mul_i64(count, dim, &count)) {
            return false;
        }
    }
    return (uint64_t)count == length;
}

/* Whether it is a member of an enumeration, made from its value or by getattr. */
static bool is_member(const fc_pickle *p, fc_pv v) {
    const fc_pv callee = callee_of(p, v);
    const fc_harmless *entry = fc_judge_entry(p, callee);
    return (entry && entry->is_enum) || (callee && fc_judge_kind(p, callee) == FC_GLOBAL_GETATTR);
}

static bool is_array(const fc_pickle *p, fc_pv v) {
    return is_call_of(p, v, NULL, "_reconstruct") || is_call_of(p, v, NULL, "_frombuffer");
}

static bool is_tensor(const fc_pickle *p, fc_pv v) {
    return fc_pv_typeof(v) == FC_PV_CALL && (fc_judge_kind(p, fc_pickle_callee(p, v)) == FC_GLOBAL_REBUILD ||
                                             is_call_of(p, v, "torch.nn.parameter", "Parameter"));
}

static bool is_tensor_class(const fc_pickle *p, fc_pv v) {
    return fc_pickle_is_global(p, v, "torch", "Tensor") || fc_pickle_is_global(p, v, "torch._tensor", "Tensor") ||
           fc_pickle_is_global(p, v, "torch.nn.parameter", "Parameter") ||
           fc_pickle_is_global(p, v, "torch.nn.parameter", "Buffer") ||
           fc_pickle_is_global(p, v, "torch.nested._internal.nested_tensor", "NestedTensor");
}

static bool is_part_of_time(const fc_pickle *p, fc_pv v) {
    size_t n;
    const fc_pv callee = callee_of(p, v);
    if (is_call_of(p, v, "datetime", NULL) || is_call_of(p, v, "zoneinfo", NULL)) {
        return true;
    }
    if (fc_pv_typeof(callee) != FC_PV_CALL || fc_judge_kind(p, fc_pickle_callee(p, callee)) != FC_GLOBAL_GETATTR) {
        return false;
    }
    const fc_pv *items = fc_pickle_call_items(p, callee, &n); /* getattr(ZoneInfo, "_unpickle") */
    return n == 2 && fc_pickle_is_global(p, items[0], "zoneinfo", "ZoneInfo");
}

/* Whether the value is of the kind that a letter means, for the letters of instances of certain classes. */
static bool is_instance(const fc_pickle *p, char letter, fc_pv v) {
    switch (letter) {
    case 'T':
        return is_tensor(p, v);
    case 'D':
        return dtype_kind(p, v) && dtype_kind(p, v) != 'O';
    case 'O':
        return dtype_kind(p, v) == 'O';
    case 'A':
        return is_array(p, v);
    case 'Z':
        return is_part_of_time(p, v);
    case 'E':
        return is_member(p, v);
    case 'V':
        return is_call_of(p, v, "torch", "device");
    case 'L':
        return is_call_of(p, v, "torch.serialization", "_get_layout");
    case '#':
        return is_call_of(p, v, "numpy.random.bit_generator", "__pyx_unpickle_SeedSequence");
    case 'W':
        return is_tensor_class(p, v);
    case 'N':
        return fc_pickle_is_global(p, v, "numpy", "ndarray");
    default: /* 'Q' */
        return fc_pickle_is_global(p, v, "numpy.random.bit_generator", "SeedSequence");
    }
}

/* Whether the value fits the letter of a slot. */
static bool fits_slot(fc_judge *j, char letter, fc_pv v) {
    const fc_pickle *p = j->p;
    const fc_pv_type type = fc_pv_typeof(v);
    switch (letter) {
    case 'i':
        return is_integer(v);
    case 'f':
        return is_number(v);
    case 's':
        return type == FC_PV_STR;
    case 'x':
        return type == FC_PV_STR || type == FC_PV_BYTES || type == FC_PV_BYTEARRAY;
    case 'k':
        return is_scalar(j, v, 0);
    case 'z':
        return are_numbers(j, v);
    case 'n':
        return type == FC_PV_NONE;
    case '1':
        return fc_pv_is_true(v) || v == fc_pv_make(FC_PV_INT, 1);
    case 'q':
        return numpy_kind(p, v) != 0;
    case 'e':
        return type == FC_PV_NONE || (is_dict_without_attributes(p, v) && is_empty(p, v));
    case 'l':
        fc_judge_visit(j, v);
        return type == FC_PV_LIST || type == FC_PV_TUPLE || type == FC_PV_SIZE;
    case 'd':
        fc_judge_visit(j, v);
        return is_dict_without_attributes(p, v);
    case 'v':
        fc_judge_visit(j, v);
        return true;
    case 'R':
    case 'M':
        return are_fields(j, v, letter == 'M');
    case 'c':
        return fc_pickle_is_harmless_function(p, v);
    case 'g':
        return type == FC_PV_GLOBAL && fc_judge_may_be_value(p, v);
    case 'y':
        return fc_judge_kind(p, v) == FC_GLOBAL_DTYPE;
    case 'r':
        return fc_judge_kind(p, v) == FC_GLOBAL_REBUILD;
    case 'P':
        return type == FC_PV_PERSID;
    default:
        return is_instance(p, letter, v);
    }
}

/* @return the end of the slot at the start of a pattern. */
static const char *end_of_slot(const char *s) {
    int open = 0;
    do {
        open += *s == '(' || *s == '[' || *s == '{';
        open -= *s == ')' || *s == ']' || *s == '}';
        s++;
    } while (open > 0);
    return s;
}

static bool match_slot(fc_judge *j, const char *slot, const char *end, fc_pv v, int depth) {
    size_t n;
    if (j->left == 0) {
        return false;
    }
    j->left--;
    switch (*slot) {
    case '[':
        for (const char *s = slot + 1; s < end - 1; s = end_of_slot(s)) {
            if (match_slot(j, s, end_of_slot(s), v, depth)) {
                return true;
            }
        }
        return false;
    case '(': {
        const fc_pv *items = fc_pv_typeof(v) == FC_PV_TUPLE ? fc_pickle_tuple(j->p, v, &n) : NULL;
        return items && match_slots(j, slot + 1, end - 1, items, n, depth + 1);
    }
    case '{':
        return are_values_in(j, v, slot + 1, depth);
    default:
        return fits_slot(j, *slot, v);
    }
}

/* Whether the values fit a pattern without alternatives. */
static bool match_sequence(fc_judge *j, const char *s, const char *end, const fc_pv *items, size_t n, int depth) {
    size_t i = 0;
    while (s < end) {
        const char *slot = s, *after = end_of_slot(s);
        const char how = after < end ? *after : '\0';
        s = how == '*' || how == '?' ? after + 1 : after;
        if (how == '*') {
            while (i < n && match_slot(j, slot, after, items[i], depth)) {
                i++;
            }
        } else if (i < n && match_slot(j, slot, after, items[i], depth)) {
            i++;
        } else {
            return how == '?' && i == n;
        }
    }
    return i == n;
}

/* Likewise for a pattern with alternatives. If `end` is NULL, the pattern is the slot at its start. */
static bool match_slots(fc_judge *j, const char *pattern, const char *end, const fc_pv *items, size_t n, int depth) {
    if (depth > MAX_DEPTH) {
        return false;
    }
    end = end ? end : end_of_slot(pattern);
    for (const char *s = pattern;; s++) {
        const char *bar = s;
        while (bar < end && *bar != '|') {
            bar = end_of_slot(bar);
        }
        if (match_sequence(j, s, bar, items, n, depth)) {
            return true;
        }
        if (bar >= end) {
            return false;
        }
        s = bar;
    }
}

bool fc_judge_match(fc_judge *j, const char *pattern, const fc_pv *items, size_t n) {
    return match_slots(j, pattern, pattern + strlen(pattern), items, n, 0);
}
