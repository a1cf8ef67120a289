/*
 * Writes pickles opcode by opcode: see write.h.
 */
#include "torch/pickle/write.h"

#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/box.h"
#include "io/file.h"
#include "torch/names/globals.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLUSH = 256 << 10, MOST_NAMED = 64 /* they are searched linearly */ };

/* A global, or a string (then `name` is NULL), in the memo. */
typedef struct fc_torch_named {
    char *module, *name; /* owned; one allocation, freed through `module` */
    uint32_t memo;
} named;

void fc_torch_pickle_begin_file(fc_torch_pickler *w, int protocol, int fd, const char *path) {
    *w = (fc_torch_pickler){.protocol = protocol, .fd = fd, .path = path};
    unsigned char head[2] = {FC_PICKLE_PROTO, (unsigned char)protocol};
    unsigned char *p = malloc(FLUSH);
    if (!p) {
        w->failed = fc_no_memory(&w->error, NULL);
        return;
    }
    memcpy(p, head, sizeof head);
    w->bytes = p;
    w->size = sizeof head;
    w->capacity = FLUSH;
}

void fc_torch_pickle_begin(fc_torch_pickler *w, int protocol) {
    fc_torch_pickle_begin_file(w, protocol, -1, NULL);
}

static void flush_pickle(fc_torch_pickler *w) {
    if (w->failed == FC_OK) {
        w->failed = fc_pwrite_full(w->fd, w->bytes, w->size, w->written, w->path, &w->error);
        w->written += w->size;
        w->size = 0;
    }
}

/* @return room for `n` more bytes, or NULL after an error. */
static unsigned char *reserve_bytes(fc_torch_pickler *w, size_t n) {
    if (w->failed == FC_OK && n > w->capacity - w->size && w->fd >= 0) {
        flush_pickle(w);
    }
    if (w->failed == FC_OK && n > w->capacity - w->size && !fc_grow(&w->bytes, &w->capacity, w->size + n, 1)) {
        w->failed = fc_no_memory(&w->error, NULL);
    }
    if (w->failed != FC_OK) {
        return NULL;
    }
    unsigned char *p = w->bytes + w->size;
    w->size += n;
    return p;
}

/* Writes an opcode, `n` bytes of a little-endian number, then `length` bytes. */
static void emit_opcode(fc_torch_pickler *w, int op, uint64_t number, int n, const void *bytes, size_t length) {
    unsigned char *p = reserve_bytes(w, 1 + (size_t)n + length);
    if (p) {
        *p++ = (unsigned char)op;
        fc_store_little(p, number, n);
        if (length > 0) {
            memcpy(p + n, bytes, length);
        }
    }
}

fc_code fc_torch_pickle_error(const fc_torch_pickler *w, fc_error *err) {
    if (w->failed != FC_OK && err) {
        *err = w->error;
    }
    return w->failed;
}

fc_code fc_torch_pickle_end(fc_torch_pickler *w, fc_error *err) {
    emit_opcode(w, FC_PICKLE_STOP, 0, 0, NULL, 0);
    if (w->fd >= 0) {
        flush_pickle(w);
    }
    return fc_torch_pickle_error(w, err);
}

void fc_torch_pickle_free(fc_torch_pickler *w) {
    for (size_t i = 0; i < w->nnamed; i++) {
        free(w->named[i].module);
    }
    free(w->bytes);
    free(w->named);
    w->nnamed = 0;
    w->bytes = NULL;
    w->named = NULL;
}

void fc_torch_pickle_op(fc_torch_pickler *w, fc_pickle_opcode op) {
    emit_opcode(w, (int)op, 0, 0, NULL, 0);
}

void fc_torch_pickle_bool(fc_torch_pickler *w, bool value) {
    emit_opcode(w, value ? FC_PICKLE_NEWTRUE : FC_PICKLE_NEWFALSE, 0, 0, NULL, 0);
}

void fc_torch_pickle_int(fc_torch_pickler *w, int64_t value) {
    if (value >= 0 && value <= UINT8_MAX) {
        emit_opcode(w, FC_PICKLE_BININT1, (uint64_t)value, 1, NULL, 0);
    } else if (value >= 0 && value <= UINT16_MAX) {
        emit_opcode(w, FC_PICKLE_BININT2, (uint64_t)value, 2, NULL, 0);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        emit_opcode(w, FC_PICKLE_BININT, (uint64_t)value, 4, NULL, 0);
    } else {
        unsigned char bytes[8];
        fc_store_little(bytes, (uint64_t)value, 8);
        fc_torch_pickle_bigint(w, bytes, sizeof bytes);
    }
}

void fc_torch_pickle_bigint(fc_torch_pickler *w, const unsigned char *bytes, size_t n) {
    /* As short as possible, like Python: drops a last byte that only repeats the sign of the one before. */
    while (n > 1 && ((bytes[n - 1] == 0 && bytes[n - 2] < 0x80) || (bytes[n - 1] == 0xff && bytes[n - 2] >= 0x80))) {
        n--;
    }
    if (n <= UINT8_MAX) {
        emit_opcode(w, FC_PICKLE_LONG1, n, 1, bytes, n);
    } else {
        emit_opcode(w, FC_PICKLE_LONG4, n, 4, bytes, n);
    }
}

void fc_torch_pickle_float(fc_torch_pickler *w, double value) {
    uint64_t bits, swapped;
    memcpy(&bits, &value, sizeof bits);
    swapped = htobe64(bits);
    emit_opcode(w, FC_PICKLE_BINFLOAT, 0, 0, &swapped, sizeof swapped);
}

void fc_torch_pickle_strn(fc_torch_pickler *w, const char *text, size_t n) {
    if (n <= UINT8_MAX && w->protocol >= 4) {
        emit_opcode(w, FC_PICKLE_SHORT_BINUNICODE, n, 1, text, n);
    } else if (n <= UINT32_MAX) {
        emit_opcode(w, FC_PICKLE_BINUNICODE, n, 4, text, n);
    } else if (w->protocol >= 4) {
        emit_opcode(w, FC_PICKLE_BINUNICODE8, n, 8, text, n);
    } else if (w->failed == FC_OK) {
        w->failed = fc_fail(&w->error, FC_EUNSUPPORTED, "a string of %zu bytes is too long for torch.save", n);
    }
}

void fc_torch_pickle_str(fc_torch_pickler *w, const char *text) {
    fc_torch_pickle_strn(w, text, strlen(text));
}

/* Writes bytes as text, one Latin-1 character per byte, which is encoded again when it is loaded. */
static void bytes_as_text(fc_torch_pickler *w, const unsigned char *bytes, size_t n) {
    size_t length = n;
    for (size_t i = 0; i < n; i++) {
        length += bytes[i] >= 0x80;
    }
    fc_torch_pickle_global(w, "_codecs", "encode");
    if (length > UINT32_MAX) {
        fc_torch_pickle_strn(w, NULL, length); /* reports that it is too long */
        return;
    }
    emit_opcode(w, FC_PICKLE_BINUNICODE, length, 4, NULL, 0);
    unsigned char *p = reserve_bytes(w, length);
    for (size_t i = 0; i < n && p; i++) {
        if (bytes[i] >= 0x80) {
            *p++ = (unsigned char)(0xc0 | bytes[i] >> 6);
            *p++ = (unsigned char)(0x80 | (bytes[i] & 0x3f));
        } else {
            *p++ = bytes[i];
        }
    }
    fc_torch_pickle_often(w, "latin1");
    fc_torch_pickle_tuple(w, 2);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
}

void fc_torch_pickle_bytes(fc_torch_pickler *w, const void *bytes, size_t n) {
    if (w->protocol < 3) {
        bytes_as_text(w, bytes, n);
    } else if (n <= UINT8_MAX) {
        emit_opcode(w, FC_PICKLE_SHORT_BINBYTES, n, 1, bytes, n);
    } else if (n <= UINT32_MAX) {
        emit_opcode(w, FC_PICKLE_BINBYTES, n, 4, bytes, n);
    } else {
        emit_opcode(w, FC_PICKLE_BINBYTES8, n, 8, bytes, n);
    }
}

void fc_torch_pickle_tuple(fc_torch_pickler *w, size_t n) {
    static const int ops[] = {FC_PICKLE_EMPTY_TUPLE, FC_PICKLE_TUPLE1, FC_PICKLE_TUPLE2, FC_PICKLE_TUPLE3};
    emit_opcode(w, ops[n], 0, 0, NULL, 0);
}

void fc_torch_pickle_ints(fc_torch_pickler *w, const int64_t *values, size_t n) {
    if (n > 3) {
        fc_torch_pickle_op(w, FC_PICKLE_MARK);
    }
    for (size_t i = 0; i < n; i++) {
        fc_torch_pickle_int(w, values[i]);
    }
    if (n > 3) {
        fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    } else {
        fc_torch_pickle_tuple(w, n);
    }
}

uint32_t fc_torch_pickle_put(fc_torch_pickler *w) {
    uint32_t index = w->memo++;
    if (w->protocol >= 4) {
        emit_opcode(w, FC_PICKLE_MEMOIZE, 0, 0, NULL, 0);
    } else if (index <= UINT8_MAX) {
        emit_opcode(w, FC_PICKLE_BINPUT, index, 1, NULL, 0);
    } else {
        emit_opcode(w, FC_PICKLE_LONG_BINPUT, index, 4, NULL, 0);
    }
    return index;
}

void fc_torch_pickle_get(fc_torch_pickler *w, uint32_t index) {
    if (index <= UINT8_MAX) {
        emit_opcode(w, FC_PICKLE_BINGET, index, 1, NULL, 0);
    } else {
        emit_opcode(w, FC_PICKLE_LONG_BINGET, index, 4, NULL, 0);
    }
}

/* Fetches the memo entry with these names. @return false if there is none. */
static bool fetch_named(fc_torch_pickler *w, const char *module, const char *name) {
    for (size_t i = 0; i < w->nnamed; i++) {
        const named *n = &w->named[i];
        if (strcmp(n->module, module) == 0 && !n->name == !name && (!name || strcmp(n->name, name) == 0)) {
            fc_torch_pickle_get(w, n->memo);
            return true;
        }
    }
    return false;
}

/* Records the value that was just written under these names, if there is room. */
static void enter_named(fc_torch_pickler *w, const char *module, const char *name) {
    size_t first = strlen(module) + 1, second = name ? strlen(name) + 1 : 0;
    if (w->failed != FC_OK || w->nnamed == MOST_NAMED) {
        return;
    }
    w->named = w->named ? w->named : calloc(MOST_NAMED, sizeof *w->named);
    char *copy = malloc(first + second);
    if (!w->named || !copy) {
        free(copy);
        w->failed = fc_no_memory(&w->error, NULL);
        return;
    }
    memcpy(copy, module, first);
    if (name) {
        memcpy(copy + first, name, second);
    }
    w->named[w->nnamed++] = (named){copy, name ? copy + first : NULL, fc_torch_pickle_put(w)};
}

void fc_torch_pickle_global(fc_torch_pickler *w, const char *module, const char *name) {
    if (fetch_named(w, module, name)) {
        return;
    }
    if (w->protocol >= 4) {
        fc_torch_pickle_str(w, module);
        fc_torch_pickle_str(w, name);
        emit_opcode(w, FC_PICKLE_STACK_GLOBAL, 0, 0, NULL, 0);
    } else {
        emit_opcode(w, FC_PICKLE_GLOBAL, 0, 0, module, strlen(module));
        emit_opcode(w, '\n', 0, 0, name, strlen(name));
        emit_opcode(w, '\n', 0, 0, NULL, 0);
    }
    enter_named(w, module, name);
}

void fc_torch_pickle_often(fc_torch_pickler *w, const char *text) {
    if (!fetch_named(w, text, NULL)) {
        fc_torch_pickle_str(w, text);
        enter_named(w, text, NULL);
    }
}

/* Computes strides like torch: the product of the later sizes, each at least 1. */
static void row_major(int ndim, const int64_t *sizes, int64_t *strides) {
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = step;
        step = (int64_t)((uint64_t)step *
                         (uint64_t)(sizes[i] > 1 ? sizes[i]
                                                 : 1)); /* may overflow if the tensor is empty; then it is not used */
    }
}

void fc_torch_pickle_tensor(fc_torch_pickler *w, const fc_torch_tensor_out *tensor) {
    char key[24];
    int64_t own[FC_MAX_DIMS];
    const char *storage = fc_storage_class(tensor->dtype); /* NULL for newer dtypes, which a further argument names */
    snprintf(key, sizeof key, "%" PRIu64, tensor->key);
    row_major(tensor->ndim, tensor->sizes, own);
    fc_torch_pickle_global(w, "torch._utils", storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    fc_torch_pickle_often(w, "storage");
    fc_torch_pickle_global(w, storage ? "torch" : "torch.storage", storage ? storage : "UntypedStorage");
    fc_torch_pickle_str(w, key);
    fc_torch_pickle_often(w, "cpu");
    fc_torch_pickle_int(w, (int64_t)(storage ? tensor->numel : tensor->numel * fc_dtype_size(tensor->dtype)));
    fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(w, FC_PICKLE_BINPERSID);
    fc_torch_pickle_int(w, (int64_t)tensor->offset);
    fc_torch_pickle_ints(w, tensor->sizes, (size_t)tensor->ndim);
    fc_torch_pickle_ints(w, tensor->strides ? tensor->strides : own, (size_t)tensor->ndim);
    fc_torch_pickle_bool(w, false);                          /* requires_grad */
    fc_torch_pickle_global(w, "collections", "OrderedDict"); /* hooks: none */
    fc_torch_pickle_tuple(w, 0);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
    if (!storage) {
        fc_torch_pickle_global(w, "torch", fc_dtype_get(tensor->dtype)->torch_name);
    }
    fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
}
