/*
 * Declarations shared by the parts of the pickle machine: the window over the input, the storage of values, the running
 * machine. read.c decodes opcodes, value.c stores values, build.c replaces calls by values, and pickle.c runs the
 * opcodes.
 */
#pragma once

#include "torch/pickle/opcodes.h"
#include "torch/pickle/pickle.h"

#include <endian.h>
#include <inttypes.h>
#include <string.h>

/** A window that moves over the input. */
typedef struct fc_pickle_reader {
    const fc_pickle_source *source;
    const unsigned char *at, *end; /* unread bytes of the window */
    uint64_t end_position;         /* offset of `end` from the start of the pickle, in bytes */
    unsigned char *buffer;         /* NULL if the source is in memory */
    uint64_t op_position;          /* offset of the current opcode in the pickle, in bytes */
    int op;
    fc_error *err;
} fc_pickle_reader;

/** Sets the reader to the start of the pickle. `buffer` is FC_PICKLE_WINDOW bytes, or NULL for memory. */
void fc_pickle_rewind(fc_pickle_reader *r);
enum { FC_PICKLE_WINDOW = 256 * 1024, FC_PICKLE_LINE = 1024 };

/** Makes at least `n` bytes (at most FC_PICKLE_WINDOW) readable at r->at; FC_ECORRUPT past the end. */
fc_code fc_pickle_need_slow(fc_pickle_reader *r, size_t n);
static inline fc_code fc_pickle_need(fc_pickle_reader *r, size_t n) {
    return (size_t)(r->end - r->at) >= n ? FC_OK : fc_pickle_need_slow(r, n);
}

static inline uint64_t fc_pickle_position(const fc_pickle_reader *r) {
    return r->end_position - (uint64_t)(r->end - r->at);
}

/**
 * How the argument of each opcode is written: 1 plus its size in bytes (0: an unknown opcode), and flags. NO_SCAN: the
 * first pass can skip it.
 */
extern const unsigned char fc_pickle_shapes[256];
enum { FC_PICKLE_ARG_SIZE = 15, FC_PICKLE_ARG_SIGNED = 16, FC_PICKLE_ARG_LENGTH = 32, FC_PICKLE_NO_SCAN = 64 };

fc_code fc_pickle_next_slow(fc_pickle_reader *r, uint64_t *argument);

/** Reads the next opcode and its fixed argument: a number (sign-extended), or the length of the payload. */
static inline fc_code fc_pickle_next(fc_pickle_reader *r, uint64_t *argument) {
    /* Most opcodes are completely in the window. The slow function handles the others. */
    if (r->end - r->at >= 9) {
        unsigned shape = fc_pickle_shapes[*r->at];
        unsigned bytes = shape & FC_PICKLE_ARG_SIZE;
        uint64_t value;
        memcpy(&value, r->at + 1, sizeof value);
        value = bytes == 9 ? le64toh(value) : le64toh(value) & ((UINT64_C(1) << ((bytes - 1) * 8 & 63)) - 1);
        if (bytes > 0 && !(shape & FC_PICKLE_ARG_SIGNED) &&
            (!(shape & FC_PICKLE_ARG_LENGTH) || value <= (uint64_t)(r->end - r->at) - bytes)) {
            r->op_position = fc_pickle_position(r);
            r->op = *r->at;
            r->at += bytes;
            *argument = value;
            return FC_OK;
        }
    }
    return fc_pickle_next_slow(r, argument);
}

/** @return whether `argument` bytes follow the opcode that was just read. */
static inline bool fc_pickle_has_payload(int op) {
    return fc_pickle_shapes[op] & FC_PICKLE_ARG_LENGTH;
}

/** Copies the next `n` bytes to `dst`, or skips them if it is NULL. */
fc_code fc_pickle_payload(fc_pickle_reader *r, void *dst, uint64_t n);

/** Finds the two lines of GLOBAL within the window; they stay valid until the next read. */
fc_code fc_pickle_lines(fc_pickle_reader *r, const char *lines[2], size_t lengths[2]);

/** Fails with a message that begins with the file and the offset of the current opcode. */
fc_code fc_pickle_fail(fc_pickle_reader *r, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/** The memo. Only entries that are fetched later are kept; a first pass over the opcodes finds them. */
typedef struct fc_pickle_memo {
    uint64_t *used;   /* one bit per index: whether it is fetched */
    uint32_t *before; /* number of set bits before each word */
    size_t words;
    fc_pv *values; /* one per set bit */
    uint64_t count;
} fc_pickle_memo;

/** The first pass: checks that the opcodes are known and well-formed up to STOP, and fills `memo`. */
fc_code fc_pickle_scan(fc_pickle_reader *r, fc_pickle_memo *memo);

/** @return the slot of `index`, or NULL if it is never fetched. */
fc_pv *fc_pickle_memo_slot(const fc_pickle_memo *memo, uint64_t index);

/** The running machine. */
typedef struct fc_pickle_vm {
    fc_pickle *p;
    fc_pickle_reader reader;
    fc_pickle_mode mode;
    fc_pv *stack;
    size_t depth, stack_capacity;
    size_t *marks; /* stack depths */
    size_t nmarks, marks_capacity;
    size_t base; /* depth of the stack at the innermost mark; nothing below it is popped */
    fc_pickle_memo memo;
    uint64_t memoized;     /* number of MEMOIZE so far */
    bool puts;             /* whether there was a PUT */
    uint64_t taken;        /* number of items and bytes that calls took from their arguments */
    size_t protected_cell; /* the memo may refer to cells below this one */
    fc_pv *calls;          /* all calls, also those whose results were dropped */
    size_t ncalls, calls_capacity;
} fc_pickle_vm;

/* Store values. Each returns false when out of memory. */
bool fc_pickle_add_cells(fc_pickle *p, size_t n, uint64_t *index);
bool fc_pickle_add_tuple(fc_pickle *p, fc_pv_type type, const fc_pv *items, size_t n, fc_pv *out);
/** Allocates `n` bytes of text and a NUL; `*bytes` is valid until the next addition. */
bool fc_pickle_add_text(fc_pickle *p, fc_pv_type type, uint64_t n, fc_pv *out, unsigned char **bytes);
/** Replaces text that was just added by the stored copy of the same string, if there is one. */
bool fc_pickle_intern_last(fc_pickle *p, fc_pv *text);
bool fc_pickle_add_string(fc_pickle *p, const char *s, size_t n, fc_pv *out);
bool fc_pickle_add_container(fc_pickle *p, fc_pv_type type, fc_pv *out);
bool fc_pickle_append(fc_pickle *p, fc_pv container, const fc_pv *items, size_t n);
/** Recycles a container that nothing can refer to any more. */
void fc_pickle_recycle(fc_pickle *p, fc_pv container);
bool fc_pickle_add_global(fc_pickle *p, fc_global_kind kind, uint32_t aux, fc_pv module, fc_pv name, fc_pv *out);
bool fc_pickle_add_int(fc_pickle *p, int64_t value, fc_pv *out);
bool fc_pickle_add_float(fc_pickle *p, double value, fc_pv *out);

/* Execute opcodes. Their results replace calls, which are never made. */
fc_code fc_pickle_global_op(fc_pickle_vm *vm, fc_pv module, fc_pv name, fc_pv *out);
fc_code fc_pickle_reduce(fc_pickle_vm *vm, fc_pv callee, fc_pv args, fc_pv *out);
fc_code fc_pickle_newobj(fc_pickle_vm *vm, fc_pv cls, fc_pv args, fc_pv *out);
fc_code fc_pickle_build(fc_pickle_vm *vm, fc_pv instance, fc_pv state);
/* What Python may call when a state of the instance is set, or items of this type are added to it. */
void fc_pickle_note_state(fc_pickle *p, fc_pv call);
void fc_pickle_note_items(fc_pickle *p, fc_pv call, fc_pv_type wanted);
/** Executes BUILD for an instance of a data class. */
fc_code fc_pickle_build_object(fc_pickle_vm *vm, fc_pv instance, fc_pv state);
/** Fails with the name of a class in `.metadata` that is neither known nor similar to a known one. */
fc_code fc_pickle_unsupported_class(fc_pickle_vm *vm, fc_pv global);
/** Counts `n` items or bytes that a call or BUILD takes from its arguments. @return FC_EUNSUPPORTED if there are too
 * many. */
fc_code fc_pickle_count_taken(fc_pickle_vm *vm, size_t n);
/** Frees the cells of a tuple if it is the newest value and nothing else can refer to it. */
void fc_pickle_drop_tuple(fc_pickle_vm *vm, fc_pv tuple);
fc_code fc_pickle_extend(fc_pickle_vm *vm, fc_pv target, const fc_pv *items, size_t n, fc_pv_type wanted);

/** Fails if every `step`-th of `n` values includes one that cannot be a key of a dict or set. */
fc_code fc_pickle_check_keys(fc_pickle_vm *vm, const fc_pv *items, size_t n, size_t step);

/**
 * @return the risk of calling `callee` with `args`; `*global` receives the global that causes it, or 0 if it has no
 * name.
 */
fc_pickle_risk fc_pickle_risk_of_call(const fc_pickle *p, fc_pv callee, fc_pv args, fc_pv *global);

/** Sets the risk of making a call. */
static inline void fc_pickle_set_risk(fc_pickle *p, fc_pv call, fc_pickle_risk risk) {
    uint64_t *how = &p->cells[fc_pv_payload(call) + 5];
    *how = (*how & 0xff) | (uint64_t)risk << 8;
}

/** Raises the risk of the whole pickle to `risk`. */
void fc_pickle_note_risk(fc_pickle *p, fc_pickle_risk risk, fc_pv global);

static inline fc_code fc_pickle_nomem(fc_pickle_vm *vm) {
    return fc_pickle_fail(&vm->reader, FC_ENOMEM, "out of memory");
}
