/*
 * Writes pickles: the data.pkl of a torch.save archive (protocol 2, the only one that torch.load(weights_only=True)
 * accepts) and DCP's `.metadata` (protocol 4).
 *
 * The caller writes one opcode or value at a time, in the order of Python's pickler: a container's opcode, a mark, the
 * items, the opcode that takes them. The bytes are kept in memory, or go to a file as they come. Only
 * fc_torch_pickle_end and fc_torch_pickle_error report errors, so that callers need not check each step.
 *
 *     fc_torch_pickler w;
 *     fc_torch_pickle_begin(&w, 2);                            {"a": [1, 2]}
 *     fc_torch_pickle_op(&w, FC_PICKLE_EMPTY_DICT);
 *     fc_torch_pickle_str(&w, "a");
 *     fc_torch_pickle_op(&w, FC_PICKLE_EMPTY_LIST);
 *     fc_torch_pickle_op(&w, FC_PICKLE_MARK);
 *     fc_torch_pickle_int(&w, 1);
 *     fc_torch_pickle_int(&w, 2);
 *     fc_torch_pickle_op(&w, FC_PICKLE_APPENDS);
 *     fc_torch_pickle_op(&w, FC_PICKLE_SETITEM);
 *     rc = fc_torch_pickle_end(&w, err);                       w.bytes, w.size
 *     fc_torch_pickle_free(&w);
 */
#pragma once

#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "torch/pickle/opcodes.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A pickle being written. Owned by the caller; made by fc_torch_pickle_begin or fc_torch_pickle_begin_file. */
typedef struct fc_torch_pickler {
    unsigned char *bytes; /**< the bytes that are not in the file yet; all bytes if there is no file */
    size_t size, capacity;
    int protocol;
    uint32_t memo; /**< number of memo entries, which is the index of the next one */
    struct fc_torch_named *named;
    size_t nnamed;
    int fd; /**< -1: the pickle is in memory */
    const char *path;
    uint64_t written; /**< bytes that were written to the file */
    fc_code failed;
    fc_error error;
} fc_torch_pickler;

/** Starts a pickle in memory. @param protocol 2 or 4. */
void fc_torch_pickle_begin(fc_torch_pickler *w, int protocol);

/** Starts a pickle that is written from the start of `fd`, 256 KiB at a time. @param path for messages; borrowed. */
void fc_torch_pickle_begin_file(fc_torch_pickler *w, int protocol, int fd, const char *path);

/** @return the first error since the start, for callers that stop before the end. */
fc_code fc_torch_pickle_error(const fc_torch_pickler *w, fc_error *err);

/** Ends the pickle and flushes it to the file. @return the first error since the start. */
fc_code fc_torch_pickle_end(fc_torch_pickler *w, fc_error *err);

/** Frees the content of `w`. */
void fc_torch_pickle_free(fc_torch_pickler *w);

void fc_torch_pickle_op(fc_torch_pickler *w, fc_pickle_opcode op);
void fc_torch_pickle_bool(fc_torch_pickler *w, bool value);
void fc_torch_pickle_int(fc_torch_pickler *w, int64_t value);
/** Writes an integer of any size from its `n` bytes of little-endian two's complement. */
void fc_torch_pickle_bigint(fc_torch_pickler *w, const unsigned char *bytes, size_t n);
void fc_torch_pickle_float(fc_torch_pickler *w, double value);
void fc_torch_pickle_str(fc_torch_pickler *w, const char *text);
void fc_torch_pickle_strn(fc_torch_pickler *w, const char *text, size_t n);
/** Writes bytes. Protocol 2 has no bytes, so there it is a call of _codecs.encode, as in Python. */
void fc_torch_pickle_bytes(fc_torch_pickler *w, const void *bytes, size_t n);

/**
 * Makes a tuple of the last `n` values, n <= 3. For more, write FC_PICKLE_MARK before and FC_PICKLE_TUPLE after them.
 */
void fc_torch_pickle_tuple(fc_torch_pickler *w, size_t n);

/** Writes a tuple of integers, such as a shape. */
void fc_torch_pickle_ints(fc_torch_pickler *w, const int64_t *values, size_t n);

/** Stores the value that was written last in the memo. @return its index, for fc_torch_pickle_get. */
uint32_t fc_torch_pickle_put(fc_torch_pickler *w);
/** Fetches a value from the memo. */
void fc_torch_pickle_get(fc_torch_pickler *w, uint32_t index);

/**
 * Writes a class or function. The first few dozen are written only once, and fetched from the memo after that.
 */
void fc_torch_pickle_global(fc_torch_pickler *w, const char *module, const char *name);

/** Likewise writes a string that occurs often, such as "storage". */
void fc_torch_pickle_often(fc_torch_pickler *w, const char *text);

/** A tensor to write: a view of a storage of its own type. */
typedef struct fc_torch_tensor_out {
    fc_dtype dtype;
    uint64_t key;    /**< the key of the storage: record data/<key> of the archive */
    uint64_t numel;  /**< number of elements of the storage */
    uint64_t offset; /**< offset of the first element in the storage, in elements */
    int ndim;
    const int64_t *sizes;
    const int64_t *strides; /**< in elements; NULL: row-major */
} fc_torch_tensor_out;

/** Writes a tensor like torch.save. */
void fc_torch_pickle_tensor(fc_torch_pickler *w, const fc_torch_tensor_out *tensor);
