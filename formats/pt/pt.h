/*
 * What the parts of the torch.save format share. pt.c is the format's table; file.c opens one file (legacy.c where it
 * is of before torch 1.6), index.c those of an index; flatten.c walks its state dict; object.c keeps what is no tensor;
 * reader.c makes the manifest of one file, ranks.c that of a directory of one file a rank; extent.c finds bytes, same.c
 * compares them, verify.c checks them; writer.c, tree.c, ties.c write. For other formats: beside_dcp.c reads a file
 * beside a DCP checkpoint, name_list.c makes lists of names.
 */
#ifndef FSDPCKPT_FORMATS_PT_PT_H
#define FSDPCKPT_FORMATS_PT_PT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "torch/item.h"
#include "torch/pickle_copy.h"

#include <limits.h>

/** Where the bytes of a storage are. */
typedef struct pt_record {
    uint64_t offset, stored; /* in the file */
    uint64_t size;           /* once inflated */
    uint32_t crc;            /* 0: not known */
    uint16_t method;         /* FC_ZIP_STORED or FC_ZIP_DEFLATED */
    uint32_t file;           /* index into fc_checkpoint.files */
} pt_record;

/** A storage of a legacy file; they are sorted by key. */
typedef struct pt_legacy_storage {
    fc_pv key; /* a string of the main pickle */
    uint64_t elements, element_size;
    uint64_t offset;
} pt_legacy_storage;

/** One torch.save file while headers are read. */
typedef struct pt_file {
    const char *path; /* borrowed */
    uint32_t index;   /* into fc_checkpoint.files */
    int fd;           /* -1: closed */
    uint64_t size;
    fc_torch_item item; /* a zip file */
    fc_pickle *pickle;  /* a legacy file's; else NULL */
    pt_legacy_storage *storages;
    size_t nstorages;
    const fc_pickle *p; /* of either */
    bool swap;          /* the bytes are big-endian */
} pt_file;

/** Whether the first bytes of a file are those of torch.save: a zip, or the legacy stream. */
bool fc_pt_is_zip(const unsigned char *head, size_t size);
bool fc_pt_is_legacy(const unsigned char *head, size_t size);
/** The tar files of torch before 0.1.10. */
bool fc_pt_is_tar(const unsigned char *head, size_t size);

/** Opens `path` and loads its pickle. On failure nothing is left open. */
fc_code fc_pt_file_open(const char *path, uint32_t index, pt_file *f, fc_error *err);

/** As fc_format.check_header, of a checkpoint whose files are torch.save's. */
fc_code fc_pt_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
void fc_pt_file_close(pt_file *f);

/** Loads the pickles of a legacy file and finds its storages. */
fc_code fc_pt_legacy_open(pt_file *f, fc_error *err);
fc_code fc_pt_legacy_storage(const pt_file *f, const fc_torch_tensor *tensor, pt_record *out, fc_error *err);

/** Finds the bytes of a decoded tensor's storage (storage_key, storage_bytes). */
fc_code fc_pt_storage(const pt_file *f, const fc_torch_tensor *tensor, pt_record *out, fc_error *err);

/** What a leaf of a state dict is. */
typedef enum pt_leaf_kind {
    PT_OBJECT,
    PT_TENSOR,
    PT_DTENSOR,       /* one rank's piece, with mesh and placements */
    PT_SHARDED_TENSOR /* one rank's pieces, with their places */
} pt_leaf_kind;

typedef struct pt_leaf {
    const char *name;
    fc_path path;
    fc_pv v;
    pt_leaf_kind kind;
} pt_leaf;

typedef struct pt_leaves {
    fc_arena *arena; /* owns the names and paths */
    pt_leaf *items;  /* malloc'ed */
    size_t count, capacity;
    /* The file is whole by itself: of modules pickled whole the state dict is read, and dicts of tensors without names
     * are one value. Else both are refused: nothing says how ranks' parts of them fit together. */
    bool alone;
    size_t modules;        /* that were read so */
    const char *of_module; /* a leaf of the first one, and its class; for a note */
    const char *module_class;
} pt_leaves;

/**
 * Adds the leaves of the state dict in `f`, as DCP's flatten_state_dict names them.
 * @param prefix path elements before all others; may be NULL.
 */
fc_code fc_pt_flatten(const pt_file *f, const fc_path *prefix, pt_leaves *leaves, fc_error *err);

/** The key of a dict as an element of a path. @return FC_EUNSUPPORTED for what is neither text nor an integer. */
fc_code fc_pt_key_element(const pt_file *f, fc_pv key, fc_arena *arena, fc_path_element *out, fc_error *err);

/** Fails where two leaves have one name. */
fc_code fc_pt_check_names(const char *path, const pt_leaves *leaves, fc_error *err);

/** Whether `v` is the global `module`.`name`; module NULL: of any module. */
bool fc_pt_is_global(const fc_pickle *p, fc_pv v, const char *module, const char *name);
/** The value of `key` in a dict; FC_PV_ABSENT where there is none. */
fc_pv fc_pt_dict_get(const fc_pickle *p, fc_pv dict, const char *key);

/** Where the elements of a chunk of a tensor are: fc_chunk.detail, in the arena. */
typedef struct pt_extent {
    pt_record record;
    uint64_t first;
    bool negate, conjugate, swap;
    int64_t strides[];
} pt_extent;

/** The piece that the tensor `v` describes. What is wrong with it is said without the path of the file. */
fc_code fc_pt_find_extent(const pt_file *f, fc_pv v, fc_torch_tensor *t, fc_arena *arena, pt_extent **out,
                          fc_error *err);

/** Whether two pieces of equal type and sizes hold the same bytes: by the CRCs of their records, else by reading them;
 *  false also where that is more than a few MiB. */
fc_code fc_pt_same_extent(const fc_checkpoint *checkpoint, fc_dtype dtype, int ndim, const int64_t *sizes,
                          const pt_extent *a, const pt_extent *b, bool *same, fc_error *err);

/** What is kept of a value that is no tensor: fc_tensor.detail, in the arena. As fc_tensor data it is the torch.save
 *  archive of that value alone, made when it is asked for. */
typedef struct pt_object {
    const unsigned char *pickle;
    size_t size;
    pt_record *storages; /* of tensors within */
    size_t nstorages;
    uint64_t length; /* of the archive */
} pt_object;

fc_code fc_pt_object_new(const pt_file *f, fc_pv v, fc_arena *arena, pt_object **out, fc_error *err);

bool fc_pt_same_object(const pt_object *a, const pt_object *b);

/** Sets the fields of a tensor that is an object. */
fc_code fc_pt_object_tensor(const pt_object *object, uint32_t file, fc_arena *arena, fc_tensor *t, fc_error *err);

/** Sets the fields of a tensor that is there but cannot be had; the reason is copied. */
fc_code fc_pt_refused_tensor(const char *reason, uint32_t file, fc_arena *arena, fc_tensor *t, fc_error *err);

/** The tensors and objects of one file, whose number in checkpoint->files is to be `index`; in the arena. */
fc_code fc_pt_read_file(fc_checkpoint *checkpoint, const char *path, uint32_t index, fc_tensor **tensors, size_t *count,
                        fc_error *err);

/** The manifest of the file that checkpoint->path names. */
fc_code fc_pt_open_file(fc_checkpoint *checkpoint, fc_error *err);

/** The file of `directory` that says where the parts of a model are, as Hugging Face's save_pretrained leaves them:
 *  pytorch_model.bin.index.json, or pytorch_model.bin, which is all of it. @return false where it has neither. */
bool fc_pt_find_index(const char *directory, char path[PATH_MAX]);
bool fc_pt_is_index(const char *path);

/** The manifest of the files that the index at `path` names. */
fc_code fc_pt_open_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err);

/** Shapes whose bytes fit 63 bits, so that sums and products of boxes do, too. */
bool fc_pt_shape_fits(fc_dtype dtype, int ndim, const int64_t *shape);

fc_code fc_pt_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                     fc_error *err);
fc_code fc_pt_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);
fc_code fc_pt_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                          fc_error *err);
fc_code fc_pt_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err);
fc_code fc_pt_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                     fc_error *err);

#endif
