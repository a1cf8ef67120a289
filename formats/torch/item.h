/*
 * One torch.save archive: its pickle, and the places of its tensors' bytes. A DCP item holds one tensor or one
 * object; a `.pt` file holds a whole state dict.
 */
#ifndef FSDPCKPT_FORMATS_TORCH_ITEM_H
#define FSDPCKPT_FORMATS_TORCH_ITEM_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "torch/pickle.h"
#include "torch/zip.h"

/** A data.pkl that is larger is not read: in memory it would take twenty times its size. */
enum { FC_TORCH_MAX_PICKLE = 16 << 20, FC_TORCH_MAX_FILE_PICKLE = 1 << 30 /* of a `.pt` file, not deflated */ };

/** An open archive. The caller owns it and keeps the descriptor open while it reads. */
typedef struct fc_torch_item {
    fc_zip zip;
    fc_pickle *pickle;
    uint64_t pickle_size; /**< bytes of data.pkl; known also where it is too large to be read */
    size_t prefix;        /**< length of the records' common folder */
    bool big_endian;
    uint64_t max_pickle; /**< a larger data.pkl is not read */
} fc_torch_item;

/** A tensor as its pickle describes it. */
typedef struct fc_torch_tensor {
    fc_dtype dtype;
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS]; /**< elements, >= 0 */
    uint64_t first;               /**< bytes: of the first element, in the storage */
    uint64_t storage_bytes;
    bool negate;       /**< a lazy negative view: the values are the stored ones negated */
    bool conjugate;    /**< a lazy conjugate view of a complex tensor */
    fc_pv storage_key; /**< a string: the record's name below data/ */
    fc_pv location;    /**< a string, such as cuda:3: where it was when it was saved; or something else */
} fc_torch_tensor;

/**
 * Opens the archive at a range of a file: its directory and its data.pkl. FC_EUNSUPPORTED with `item->pickle_size`
 * above FC_TORCH_MAX_PICKLE where that is too large.
 * @param path for messages; borrowed until fc_torch_item_close.
 */
fc_code fc_torch_item_open(int fd, const char *path, uint64_t offset, uint64_t length, fc_torch_item *item,
                           fc_error *err);

/** Likewise, with the bytes of the range read already: as fc_zip_open_read. */
fc_code fc_torch_item_open_read(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes,
                                fc_torch_item *item, fc_error *err);

/** Likewise an archive that is in memory: `bytes` are malloc'ed and freed as in fc_zip_open_read. */
fc_code fc_torch_item_open_memory(unsigned char *bytes, uint64_t length, const char *path, fc_torch_item *item,
                                  fc_error *err);

/** Likewise a whole `.pt` file, whose data.pkl may be as large as a state dict of a million tensors. */
fc_code fc_torch_item_open_file(int fd, const char *path, uint64_t length, fc_torch_item *item, fc_error *err);

/** Frees what `item` holds; a zeroed one is allowed. */
void fc_torch_item_close(fc_torch_item *item);

/** Whether `v` is a tensor (of any kind, supported or not). */
bool fc_torch_is_tensor(const fc_pickle *p, fc_pv v);

/**
 * Reads the description of a tensor and checks that every element is within its storage.
 * Messages do not name the file: the caller knows where `p` came from.
 * @return FC_EUNSUPPORTED for sparse, quantized, conjugated … tensors.
 */
fc_code fc_torch_tensor_decode(const fc_pickle *p, fc_pv v, fc_torch_tensor *out, fc_error *err);

/** Reads a storage's persistent id: sets only storage_key and storage_bytes of `out`. */
fc_code fc_torch_storage_decode(const fc_pickle *p, fc_pv persid, fc_torch_tensor *out, fc_error *err);

/** Finds the record that holds a decoded tensor's storage and checks its size; it may be compressed. */
fc_code fc_torch_item_record(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                             fc_error *err);

/** Likewise, and refuses a compressed record, so that its bytes can be read directly from the file. */
fc_code fc_torch_item_storage(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                              fc_error *err);

struct fc_defect; /* fsdpckpt/verify.h */
struct fc_findings;

/**
 * Compares the records of an open archive with their CRC-32s; each that is damaged is a finding.
 * @param read_data whether to read the uncompressed data records of tensors as well.
 * @param item      for the findings: file and tensor.
 * @param covered   set to false when some record has no CRC, is damaged, or too large to be read.
 */
fc_code fc_torch_check_records(fc_torch_item *archive, bool read_data, const struct fc_defect *item,
                               struct fc_findings *findings, bool *covered, fc_error *err);

/** Compares all records of an open archive with their CRC-32s, where they have one and are not too large to be read at
 *  once. @return what is wrong with the first that is damaged. */
fc_code fc_torch_check_archive(fc_torch_item *archive, fc_error *err);

/**
 * The safe decoding of a pickled value as JSON text, allocated from `arena`. The forms are those of
 * docs/HDF5_SCHEMA.md, "Objects", and are listed in object_json.c.
 * @param budget roughly how many bytes of JSON to write; what goes beyond is {"$omitted": "too large"}.
 */
fc_code fc_torch_json(const fc_pickle *p, fc_pv v, uint64_t budget, fc_arena *arena, const char **json, fc_error *err);

/** The same of the value of an archive, which it closes. `opened` is the outcome of opening it: a pickle that was too
 *  large is {"$omitted": "too large"}. */
fc_code fc_torch_json_item(fc_torch_item *item, fc_code opened, fc_arena *arena, const char **json, fc_error *err);

/** The same of an archive in memory; takes over the malloc'ed `bytes`. */
fc_code fc_torch_json_memory(unsigned char *bytes, uint64_t length, const char *path, fc_arena *arena,
                             const char **json, fc_error *err);

#endif
