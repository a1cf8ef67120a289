/*
 * One torch.save archive: its pickle, and the location of its tensors' bytes. An item of DCP contains one tensor or one
 * object; a `.pt` file contains a whole state dict.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "torch/pickle/pickle.h"
#include "torch/zip/zip.h"

/** A larger data.pkl is not read, because it would take twenty times its size in memory. In bytes. */
enum { FC_TORCH_MAX_PICKLE = 16 << 20, FC_TORCH_MAX_FILE_PICKLE = 1 << 30 /* of a `.pt` file, not deflated */ };

/** An open archive. The caller owns it and keeps the descriptor open while it reads. */
typedef struct fc_torch_item {
    fc_zip zip;
    fc_pickle *pickle;
    uint64_t pickle_size; /**< size of data.pkl in bytes, even if it is too large to be read */
    size_t prefix;        /**< length of the records' common folder in bytes */
    bool big_endian;
    uint64_t max_pickle; /**< bytes; a larger data.pkl is not read */
} fc_torch_item;

/** A tensor as its pickle describes it. */
typedef struct fc_torch_tensor {
    fc_dtype dtype;
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS]; /**< in elements, >= 0 */
    uint64_t first;               /**< offset of the first element in the storage, in bytes */
    uint64_t storage_bytes;
    bool negate;       /**< a lazy negative view: the values are the stored ones negated */
    bool conjugate;    /**< a lazy conjugate view of a complex tensor */
    fc_pv storage_key; /**< a string: the name of the record in data/ */
    fc_pv location;    /**< usually a string such as "cuda:3": the device when it was saved */
} fc_torch_tensor;

/**
 * Opens the archive at a range of a file: its directory and its data.pkl.
 * @return FC_EUNSUPPORTED, with `item->pickle_size` above FC_TORCH_MAX_PICKLE, if data.pkl is too large.
 * @param path for messages; borrowed until fc_torch_item_close.
 */
fc_code fc_torch_item_open(int fd, const char *path, uint64_t offset, uint64_t length, fc_torch_item *item,
                           fc_error *err);

/** Like fc_torch_item_open, for a range whose bytes were already read: see fc_zip_open_read. */
fc_code fc_torch_item_open_read(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes,
                                fc_torch_item *item, fc_error *err);

/** Like fc_torch_item_open, for a verdict: data.pkl may be as large as in a `.pt` file. */
fc_code fc_torch_item_open_to_judge(int fd, const char *path, uint64_t offset, uint64_t length, fc_torch_item *item,
                                    fc_error *err);

/** Like fc_torch_item_open, for an archive in memory. `bytes` are malloc'ed, and freed as in fc_zip_open_read. */
fc_code fc_torch_item_open_memory(unsigned char *bytes, uint64_t length, const char *path, fc_torch_item *item,
                                  fc_error *err);

/** Like fc_torch_item_open, for a whole `.pt` file. Its data.pkl may be as large as that of a million tensors. */
fc_code fc_torch_item_open_file(int fd, const char *path, uint64_t length, fc_torch_item *item, fc_error *err);

/**
 * Opens the beginning of an archive, as fc_zip_open_head does. @param short_of receives whether its pickle ends after
 * these bytes; then `item` is closed.
 */
fc_code fc_torch_item_open_head(const char *path, uint64_t offset, unsigned char *bytes, size_t size,
                                fc_torch_item *item, bool *short_of, fc_error *err);

/** Frees the content of `item`, which may be zeroed. */
void fc_torch_item_close(fc_torch_item *item);

/** @return whether torch.load would pass the archive to torch.jit.load, which compiles the code in it. */
bool fc_torch_is_script(const fc_torch_item *item);

/** @return whether `v` is a tensor, of a supported kind or not. */
bool fc_torch_is_tensor(const fc_pickle *p, fc_pv v);

/**
 * Reads the description of a tensor and checks that every element is within its storage.
 * Messages do not name the file: the caller knows where `p` came from.
 * @return FC_EUNSUPPORTED for sparse, quantized, conjugated … tensors.
 */
fc_code fc_torch_tensor_decode(const fc_pickle *p, fc_pv v, fc_torch_tensor *out, fc_error *err);

/** @return the arguments of the function that rebuilds a sparse tensor; NULL: `v` is another value. */
const fc_pv *fc_torch_sparse_arguments(const fc_pickle *p, fc_pv v, size_t *n);

/** Reads a storage's persistent id: sets only storage_key and storage_bytes of `out`. */
fc_code fc_torch_storage_decode(const fc_pickle *p, fc_pv persid, fc_torch_tensor *out, fc_error *err);

/** Finds the record of a decoded tensor's storage, which may be compressed, and checks its size. */
fc_code fc_torch_item_record(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                             fc_error *err);

/** Like fc_torch_item_record, but refuses a compressed record, so that its bytes can be read directly. */
fc_code fc_torch_item_storage(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                              fc_error *err);

struct fc_defect; /* fsdpckpt/verify.h */
struct fc_findings;

/**
 * Compares the records of an open archive with their CRC-32s, and reports each damaged one to `findings`.
 * @param read_data whether to read the uncompressed data records of tensors as well.
 * @param item      the file and tensor to report.
 * @param covered   set to false if some record has no CRC, is damaged, or is too large to be read.
 */
fc_code fc_torch_check_records(fc_torch_item *archive, bool read_data, const struct fc_defect *item,
                               struct fc_findings *findings, bool *covered, fc_error *err);

/**
 * Compares the records of an open archive with their CRC-32s, except those without a CRC and those too large to be read
 * at once. @return FC_ECORRUPT for the first damaged one.
 */
fc_code fc_torch_check_archive(fc_torch_item *archive, fc_error *err);

/**
 * Decodes a pickled value as JSON text, allocated from `arena`, without executing anything. The forms are those of
 * docs/HDF5_SCHEMA.md, "Objects", and are listed in json.c.
 * @param budget the approximate limit of the JSON text in bytes; the rest becomes {"$omitted": "too large"}.
 */
fc_code fc_torch_json(const fc_pickle *p, fc_pv v, uint64_t budget, fc_arena *arena, const char **json, fc_error *err);

/** Like fc_torch_json, for the whole value, with a budget that follows from the `size` of the pickle in bytes. */
fc_code fc_torch_json_root(const fc_pickle *p, uint64_t size, fc_arena *arena, const char **json, fc_error *err);

/** Like fc_torch_json, for the archive in a range of a file. */
fc_code fc_torch_json_range(int fd, const char *path, uint64_t offset, uint64_t length, fc_arena *arena,
                            const char **json, fc_error *err);

/** Like fc_torch_json, for an archive in memory. Frees the malloc'ed `bytes`. */
fc_code fc_torch_json_memory(unsigned char *bytes, uint64_t length, const char *path, fc_arena *arena,
                             const char **json, fc_error *err);
