/*
 * A data-only pickle machine: turns the bytes of a pickle (protocol 2 to 5) into inert values. Nothing is ever
 * executed: a global is only a name, and names outside the allowlist (names/globals.c) are refused or kept as names.
 *
 * The input is a `.metadata` file, or the data.pkl record of a torch.save archive. The output is an fc_pickle, which
 * the DCP manifest and the decoding of objects traverse. It is made for pickles of a million objects: a value takes
 * eight bytes, equal strings are stored once, instances of known dataclasses are folded into a fixed number of slots,
 * and the input is read through a small window. Time and memory are linear in the size of the input, and nothing
 * recurses.
 */
#pragma once

#include "fsdpckpt/error.h"
#include "torch/names/globals.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * A value: the type in the low byte; the other bytes are an integer, or an index into one of the areas of fc_pickle.
 */
typedef uint64_t fc_pv;

typedef enum fc_pv_type {
    FC_PV_ABSENT, /**< no value: a slot that was never set. The fc_pv 0 */
    FC_PV_NONE,
    FC_PV_BOOL,
    FC_PV_INT,    /**< 56 bits, inline */
    FC_PV_BIGINT, /**< the little-endian two's complement bytes, in the text area */
    FC_PV_FLOAT,
    FC_PV_STR, /**< UTF-8 with surrogates; interned, so equal strings are equal values */
    FC_PV_BYTES,
    FC_PV_BYTEARRAY,
    FC_PV_TUPLE,
    FC_PV_SIZE, /**< torch.Size */
    FC_PV_LIST,
    FC_PV_DICT, /**< also OrderedDict, defaultdict, Counter */
    FC_PV_SET,
    FC_PV_FROZENSET,
    FC_PV_GLOBAL, /**< a class or function, by name */
    FC_PV_OBJECT, /**< an instance of a known dataclass, folded into slots */
    FC_PV_CALL,   /**< a call that Python would make: callee, arguments, state, items */
    FC_PV_PERSID  /**< a persistent id: torch.save's reference to a storage */
} fc_pv_type;

/** What Python would do besides creating data when it loads a value. */
typedef enum fc_pickle_risk {
    FC_RISK_NONE,
    FC_RISK_UNKNOWN, /**< it needs a class or function that is not on the list of harmless ones */
    FC_RISK_RUNS     /**< it calls something that runs code or commands */
} fc_pickle_risk;

/** A list, dict (keys and values in turn) or set. */
typedef struct fc_pickle_container {
    fc_pv *items;
    size_t count, capacity;
    fc_pv cls;          /* the class of a dict that is not plain (OrderedDict, defaultdict, Counter), or 0 */
    fc_pv factory;      /* default_factory of a defaultdict, usually a global */
    fc_pv state;        /* the attributes of a dict, such as nn.Module.state_dict's _metadata, or 0 */
    uint32_t next_free; /* list of recycled containers while loading */
    bool memoized;      /* whether a later opcode may refer to it, so that it cannot be recycled */
} fc_pickle_container;

/** The header before the bytes of a text. */
typedef struct fc_pickle_text {
    uint64_t length;
    uint32_t tag[2]; /**< free for users of the pickle, which get one pair per distinct string; 0 at first */
} fc_pickle_text;

/** A loaded pickle. Owned by the caller. */
typedef struct fc_pickle {
    fc_pv root;
    uint64_t *cells; /* tuples, instances, calls, floats, globals */
    size_t ncells, cells_capacity;
    unsigned char *text; /* strings, bytes, big integers: fc_pickle_text records at multiples of 8 */
    size_t ntext, text_capacity;
    fc_pickle_container *containers;
    size_t ncontainers, containers_capacity;
    uint32_t free_container; /* index + 1 */
    uint64_t *interned;      /* hash table of text indexes + 1 */
    size_t interned_slots, ninterned;
    uint64_t hash_seed;
    fc_pv persids;       /* a list of all persistent ids, or 0 */
    fc_pickle_risk risk; /* the highest risk of all calls and globals, including those whose value was dropped */
    fc_pv risky;         /* the first global of that risk; 0 if none has a name */
    bool risk_of_use;    /* whether the risk is what the global is given, and not the global itself */
    uint64_t size;       /* size of the pickle in bytes; the source may be longer */
} fc_pickle;

/** Where a pickle is read from: a range of a file, or memory (`bytes` not NULL). */
typedef struct fc_pickle_source {
    const char *name; /**< the name of the file, for messages */
    uint64_t offset;  /**< offset of the pickle in the file, in bytes; messages give offsets in the file */
    uint64_t size;
    int fd;
    const unsigned char *bytes;
} fc_pickle_source;

typedef enum fc_pickle_mode {
    FC_PICKLE_STRICT, /**< for `.metadata`: a global outside the allowlist is an error, and so is a persistent id */
    FC_PICKLE_ITEM    /**< for data.pkl: unknown globals stay names, and persistent ids are kept */
} fc_pickle_mode;

/**
 * Loads a pickle.
 * @param out receives the pickle, to be given to fc_pickle_free; NULL on failure.
 */
fc_code fc_pickle_load(const fc_pickle_source *source, fc_pickle_mode mode, fc_pickle **out, fc_error *err);

/** Frees the pickle and all its values. NULL is allowed. */
void fc_pickle_free(fc_pickle *pickle);

static inline fc_pv fc_pv_make(fc_pv_type type, uint64_t payload) {
    return (uint64_t)type | payload << 8;
}

static inline fc_pv_type fc_pv_typeof(fc_pv v) {
    return (fc_pv_type)(v & 0xff);
}

static inline uint64_t fc_pv_payload(fc_pv v) {
    return v >> 8;
}

static inline bool fc_pv_is_true(fc_pv v) {
    return v == fc_pv_make(FC_PV_BOOL, 1);
}

/** @return the items of a tuple or torch.Size. */
static inline const fc_pv *fc_pickle_tuple(const fc_pickle *p, fc_pv v, size_t *count) {
    const uint64_t *cell = p->cells + fc_pv_payload(v);
    *count = (size_t)cell[0];
    return cell + 1;
}

/** @return the items of a list or set, or the keys and values of a dict in turn (the count is then even). */
static inline const fc_pv *fc_pickle_items(const fc_pickle *p, fc_pv v, size_t *count) {
    const fc_pickle_container *c = &p->containers[fc_pv_payload(v)];
    *count = c->count;
    return c->items;
}

/** @return the items of a tuple, torch.Size or container, as above; NULL and a count of 0 for any other value. */
static inline const fc_pv *fc_pickle_sequence(const fc_pickle *p, fc_pv v, size_t *count) {
    const fc_pv_type type = fc_pv_typeof(v);
    *count = 0;
    return type == FC_PV_TUPLE || type == FC_PV_SIZE       ? fc_pickle_tuple(p, v, count)
           : type >= FC_PV_LIST && type <= FC_PV_FROZENSET ? fc_pickle_items(p, v, count)
                                                           : NULL;
}

/** @return the header of a string, bytes or big integer. The bytes follow it, and then a NUL that is not counted. */
static inline fc_pickle_text *fc_pickle_record(const fc_pickle *p, fc_pv v) {
    return (fc_pickle_text *)(void *)(p->text + fc_pv_payload(v) * 8);
}

static inline const char *fc_pickle_bytes(const fc_pickle *p, fc_pv v, size_t *length) {
    const fc_pickle_text *text = fc_pickle_record(p, v);
    *length = (size_t)text->length;
    return (const char *)(text + 1);
}

double fc_pickle_float(const fc_pickle *p, fc_pv v);

/** Converts an integer. @return false for another type, or if it does not fit. */
bool fc_pickle_int(const fc_pickle *p, fc_pv v, int64_t *out);

/** @return whether `v` is the string `text`. */
bool fc_pickle_is_str(const fc_pickle *p, fc_pv v, const char *text);

/** @return whether `v` is the global `module`.`name`; a NULL module or name matches any. */
bool fc_pickle_is_global(const fc_pickle *p, fc_pv v, const char *module, const char *name);

/** @return the module of a global, and its name in that module. */
static inline const char *fc_pickle_module(const fc_pickle *p, fc_pv global) {
    size_t n;
    return fc_pickle_bytes(p, p->cells[fc_pv_payload(global) + 1], &n);
}

static inline const char *fc_pickle_name(const fc_pickle *p, fc_pv global) {
    size_t n;
    return fc_pickle_bytes(p, p->cells[fc_pv_payload(global) + 2], &n);
}

/** @return the kind of a global. */
static inline fc_global_kind fc_pickle_global(const fc_pickle *p, fc_pv v, uint32_t *aux) {
    uint64_t cell = p->cells[fc_pv_payload(v)];
    *aux = (uint32_t)(cell >> 32);
    return (fc_global_kind)(uint32_t)cell;
}

/** @return the number of a global's entry in the table of harmless ones (names/harmless.h), or 0. */
static inline uint32_t fc_pickle_global_entry(const fc_pickle *p, fc_pv v) {
    return (uint32_t)p->cells[fc_pv_payload(v) + 3];
}

/** Writes the name of pickle->risky, truncated to `size` bytes. @return `buf`. */
const char *fc_pickle_risky_name(const fc_pickle *p, char *buf, size_t size);

/** Writes "module.name" of a global, truncated to `size` bytes. */
void fc_pickle_global_name(const fc_pickle *p, fc_pv v, char *buf, size_t size);

/** @return whether `v` is an instance of `cls`. */
static inline bool fc_pickle_is_object(const fc_pickle *p, fc_pv v, fc_class cls) {
    uint32_t aux;
    if (fc_pv_typeof(v) != FC_PV_OBJECT) {
        return false;
    }
    fc_global_kind kind = fc_pickle_global(p, p->cells[fc_pv_payload(v)], &aux);
    return kind == FC_GLOBAL_CLASS && aux == (uint32_t)cls;
}

/** @return slot `slot` of an object; FC_PV_ABSENT if it was never set. */
static inline fc_pv fc_pickle_slot(const fc_pickle *p, fc_pv v, size_t slot) {
    return p->cells[fc_pv_payload(v) + 1 + slot];
}

static inline fc_pv fc_pickle_callee(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v)];
}

/** @return the arguments of a call, a tuple. A pickle with other arguments is refused when it is loaded. */
static inline fc_pv fc_pickle_arguments(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v) + 1];
}

/** @return the items of a call's arguments. */
static inline const fc_pv *fc_pickle_call_items(const fc_pickle *p, fc_pv v, size_t *n) {
    return fc_pickle_tuple(p, fc_pickle_arguments(p, v), n);
}

/** Return the state that BUILD set on a call, and its items as a list and as a dict; FC_PV_ABSENT if there are none. */
static inline fc_pv fc_pickle_state(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v) + 2];
}

static inline fc_pv fc_pickle_list_items(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v) + 3];
}

static inline fc_pv fc_pickle_dict_items(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v) + 4];
}

/** @return how a call is made: 0 REDUCE, 1 NEWOBJ, 2 NEWOBJ_EX with keyword arguments, which are not kept. */
static inline uint64_t fc_pickle_call_kind(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v) + 5] & 0xff;
}

/** @return the risk of making this call, without that of its arguments. */
static inline fc_pickle_risk fc_pickle_risk_of(const fc_pickle *p, fc_pv v) {
    return (fc_pickle_risk)(p->cells[fc_pv_payload(v) + 5] >> 8);
}

/** @return the record of a container, with its class, factory and state. */
static inline const fc_pickle_container *fc_pickle_container_of(const fc_pickle *p, fc_pv v) {
    return &p->containers[fc_pv_payload(v)];
}

/** @return the value of a persistent id. */
static inline fc_pv fc_pickle_persid(const fc_pickle *p, fc_pv v) {
    return p->cells[fc_pv_payload(v)];
}
