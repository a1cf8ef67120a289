/*
 * One torch.save file, for every format that has such files: .pt files themselves, and the files of DCP, DeepSpeed,
 * Lightning and Megatron checkpoints. file.c opens it (legacy.c if torch before 1.6 wrote it), flatten.c walks its
 * state dict, object.c handles values that are not tensors, extent.c finds bytes, same.c compares them, and reader.c
 * makes a manifest.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "torch/object/item.h"

/** The bytes of one storage in its file. */
typedef struct torch_record {
    uint64_t offset; /**< offset of its first byte in the file */
    uint64_t stored; /**< bytes in the file */
    uint64_t size;   /**< bytes after decompression */
    uint32_t crc;    /**< CRC-32 of the decompressed bytes; 0 if the file has none */
    uint16_t method; /**< FC_ZIP_STORED or FC_ZIP_DEFLATED */
    uint32_t file;   /**< index into fc_checkpoint.files */
} torch_record;

/** A storage of a legacy file. The array is sorted by key. */
typedef struct torch_legacy_storage {
    fc_pv key; /**< a string of the main pickle */
    uint64_t elements, element_size;
    uint64_t offset; /**< offset of its first element in the file, in bytes */
} torch_legacy_storage;

/** A torch.save file that is open while headers are read. */
typedef struct torch_file {
    const char *path;               /**< borrowed */
    uint32_t index;                 /**< into fc_checkpoint.files */
    int fd;                         /**< -1 when closed */
    uint64_t size;                  /**< size of the file in bytes */
    fc_torch_item item;             /**< the archive; zero for a legacy file */
    fc_pickle *pickle;              /**< owned pickle of a legacy file, else NULL */
    torch_legacy_storage *storages; /**< owned; of a legacy file */
    size_t nstorages;
    const fc_pickle *p; /**< the pickle of the state dict, in either kind of file */
    bool described;     /**< a file of another kind, which `pickle` describes: see fc_torch_file_describe */
    bool swap;          /**< whether the elements are big-endian */
    uint64_t *left;     /**< owned; the budget that fc_torch_unfold has left, shared with copies of this struct */
} torch_file;

/** @return whether a file that begins with `head` is a zip archive. */
bool fc_torch_is_zip(const unsigned char *head, size_t size);
/** @return whether it is a file of torch before 1.6: a sequence of pickles. */
bool fc_torch_is_legacy(const unsigned char *head, size_t size);
/** @return whether it is a tar file of torch before 0.1.10. */
bool fc_torch_is_tar(const unsigned char *head, size_t size);

/** Stores whether `path` is a torch.save file: an archive or a legacy file whose pickles can be read. */
fc_code fc_torch_is_file(const char *path, bool *is, fc_error *err);

/** Opens `path` and loads its pickle. After a failure nothing is left open. */
fc_code fc_torch_file_open(const char *path, uint32_t index, torch_file *f, fc_error *err);
void fc_torch_file_close(torch_file *f);

/**
 * Opens a file of another kind, whose content the pickle `bytes` describes: the key of a storage is the offset of its
 * first byte in the file. After a failure nothing is left open.
 */
fc_code fc_torch_file_describe(const char *path, uint32_t index, const unsigned char *bytes, size_t size, torch_file *f,
                               fc_error *err);

/**
 * Counts `bytes` of names and objects that are made from the pickle. They are about as long as the pickle, unless they
 * share parts of it: every value in a dict repeats the keys on its path, and every object has its own copy of shared
 * values. So a small pickle could unfold to more than fits in memory.
 * @return FC_EUNSUPPORTED if the pickle unfolds to much more than its own size, and for all further bytes.
 */
fc_code fc_torch_unfold(const torch_file *f, uint64_t bytes, fc_error *err);

/** Loads the pickles of a legacy file and finds its storages. */
fc_code fc_torch_legacy_open(torch_file *f, fc_error *err);
fc_code fc_torch_legacy_storage(const torch_file *f, const fc_torch_tensor *tensor, torch_record *out, fc_error *err);

/** Finds the bytes of a decoded tensor's storage (storage_key, storage_bytes). */
fc_code fc_torch_file_storage(const torch_file *f, const fc_torch_tensor *tensor, torch_record *out, fc_error *err);

/** The kind of a leaf of a state dict. */
typedef enum torch_leaf_kind {
    TORCH_OBJECT,
    TORCH_TENSOR,
    TORCH_DTENSOR,       /**< one rank's shard, with its mesh and placements */
    TORCH_SHARDED_TENSOR /**< one rank's shards, with their boxes */
} torch_leaf_kind;

typedef struct torch_leaf {
    const char *name;
    fc_path path;
    fc_pv v;
    torch_leaf_kind kind;
} torch_leaf;

typedef struct torch_leaves {
    fc_arena *arena;   /**< owns the names and paths */
    torch_leaf *items; /**< owned by the caller, who frees it */
    size_t count, capacity;
    /**
     * Whether the file is complete on its own. Then modules that were pickled as a whole are read as their state dicts,
     * and a dict of tensors without names is one value. In a rank's file both are refused, because it is unknown how
     * the values of the ranks are combined.
     */
    bool alone;
    size_t modules;           /**< modules that were read as their state dict */
    const char *of_module;    /**< a leaf of the first such module, for a note */
    const char *module_class; /**< the class of that module */
} torch_leaves;

/**
 * Adds the leaves of the state dict in `f`, named as DCP's flatten_state_dict names them.
 * @param prefix path elements before all others; may be NULL.
 */
fc_code fc_torch_flatten(const torch_file *f, const fc_path *prefix, torch_leaves *leaves, fc_error *err);

/** Makes a path element of a dict's key. @return FC_EUNSUPPORTED for a key that is neither text nor an integer. */
fc_code fc_torch_key_element(const torch_file *f, fc_pv key, fc_arena *arena, fc_path_element *out, fc_error *err);

/** Fails if two leaves have the same name. */
fc_code fc_torch_check_names(const char *path, const torch_leaves *leaves, fc_error *err);

/** @return the value of `key` in a dict, or FC_PV_ABSENT. */
fc_pv fc_torch_dict_get(const fc_pickle *p, fc_pv dict, const char *key);

/** One string or integer key of a dict. */
typedef struct torch_dict_entry {
    const char *text; /**< NULL: the key is `number` */
    size_t length;
    int64_t number;
    fc_pv value;
    size_t place; /**< in the dict */
} torch_dict_entry;

/** The sorted keys of a dict, for many look-ups. */
typedef struct torch_dict {
    torch_dict_entry *entries; /**< from malloc */
    size_t count;
} torch_dict;

/** Sorts the keys of `v`; anything but a dict has none. @return false when out of memory. */
bool fc_torch_dict_begin(torch_dict *dict, const fc_pickle *p, fc_pv v);
/** @return the value of a string key, or FC_PV_ABSENT. */
fc_pv fc_torch_dict_find(const torch_dict *dict, const char *key);
/** @return the value of an integer key, or FC_PV_ABSENT. */
fc_pv fc_torch_dict_find_number(const torch_dict *dict, int64_t key);
void fc_torch_dict_free(torch_dict *dict);

/** The bytes of one chunk: fc_chunk.data, in the checkpoint's arena. */
typedef struct torch_extent {
    torch_record record;
    uint64_t first; /**< bytes from the record's start to the first element */
    bool negate, conjugate, swap;
    int64_t strides[]; /**< in elements */
} torch_extent;

/** Returns the chunk with these bytes. `dims` and `extent` must live as long as the checkpoint. */
static inline fc_chunk fc_torch_chunk(const int64_t *dims, const torch_extent *extent, uint32_t rank) {
    return (fc_chunk){.dims = dims,
                      .place = fc_place_bytes(extent->record.file, extent->record.offset, extent->record.stored),
                      .rank = rank,
                      .data = extent};
}

/** Decodes the tensor `v` and finds its bytes. Messages do not name the file. */
fc_code fc_torch_find_extent(const torch_file *f, fc_pv v, fc_torch_tensor *t, fc_arena *arena, torch_extent **out,
                             fc_error *err);

/**
 * Finds out whether two chunks of equal dtype and sizes have the same bytes: by the CRC-32s of their records if these
 * are enough, otherwise by reading both. `*same` is false for chunks that are too large to be read while headers are
 * read.
 */
fc_code fc_torch_same_extent(const fc_checkpoint *checkpoint, fc_dtype dtype, int ndim, const int64_t *sizes,
                             const torch_extent *a, const torch_extent *b, bool *same, fc_error *err);

/**
 * A value that is not a tensor: fc_tensor.detail, in the checkpoint's arena. Like those of any object, its bytes are a
 * torch.save archive of this value alone, which is made when they are read. An object of another format has its own
 * bytes.
 */
typedef struct torch_object {
    const char *encoding;        /**< of an object of another format; NULL: a torch.save archive */
    const char *json;            /**< of an object of another format whose bytes are not JSON: what it is, for people */
    const unsigned char *pickle; /**< data.pkl of the archive, or the bytes of an object of another format */
    size_t size;
    torch_record *storages; /**< the storages of the tensors within the value */
    size_t nstorages;
    uint64_t length; /**< size of the object in bytes */
} torch_object;

fc_code fc_torch_object_new(const torch_file *f, fc_pv v, fc_arena *arena, torch_object **out, fc_error *err);
bool fc_torch_same_object(const torch_object *a, const torch_object *b);

/** Fills `t` with an object's shape, chunk and encoding. */
fc_code fc_torch_object_tensor(const torch_object *object, uint32_t file, fc_arena *arena, fc_tensor *t, fc_error *err);

/** Fills `t` as an unreadable value; `reason` is copied. */
fc_code fc_torch_refused_tensor(const char *reason, fc_hint hint, uint32_t file, fc_arena *arena, fc_tensor *t,
                                fc_error *err);

/**
 * Sets checkpoint->risk if loading the file would run code: torch.load of a whole file makes every call in it, even if
 * its result is not used.
 */
fc_code fc_torch_note_risk(fc_checkpoint *checkpoint, const torch_file *f, fc_error *err);

/** Opens checkpoint->files[index] and notes its risk. On failure nothing stays open. */
fc_code fc_torch_open_one(fc_checkpoint *checkpoint, uint32_t index, torch_file *f, fc_error *err);

/**
 * Reads the tensors and objects of the file that is checkpoint->files[index] into the checkpoint's arena.
 * @param sharded receives whether it contains DTensors or ShardedTensors; then nothing is read. NULL: they are an
 * error.
 */
fc_code fc_torch_read_file(fc_checkpoint *checkpoint, const char *path, uint32_t index, fc_tensor **tensors,
                           size_t *count, bool *sharded, fc_error *err);

/** Makes the manifest of the one file that checkpoint->path names. @param sharded as in fc_torch_read_file */
fc_code fc_torch_open_file(fc_checkpoint *checkpoint, const fc_open_options *options, bool *sharded, fc_error *err);

/** Fails: the value `leaf` of one file is a shard, and other files have the other shards. */
fc_code fc_torch_fail_shard(const char *path, const char *leaf, fc_error *err);

/** @return whether the size of the tensor fits in 63 bits; then sums and products of its boxes do, too. */
bool fc_torch_shape_fits(fc_dtype dtype, int ndim, const int64_t *shape);

/* Members of fc_format for checkpoints whose chunks and objects were made by the functions above. */
fc_code fc_torch_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
fc_code fc_torch_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                        fc_error *err);
fc_code fc_torch_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);
fc_code fc_torch_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                             const char **json, fc_error *err);
fc_code fc_torch_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                        fc_error *err);
