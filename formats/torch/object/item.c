/*
 * Opens a torch.save archive in a range of a file, and decodes the tensors in its pickle: where their bytes are, and
 * their strides. The bytes themselves are not read.
 */
#include "torch/object/item.h"
#include "torch/object/torchao.h"

#include "base/checked.h"
#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WRAPPERS = 8, MAX_NAME = 512 };

/*
 * Whether it is a file of torch before 1.6, or of _use_new_zipfile_serialization=False: it begins with a magic number.
 */
static bool is_legacy(int fd, const char *path, uint64_t offset, uint64_t length) {
    static const unsigned char magic[] = {0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9};
    unsigned char head[sizeof magic];
    return length >= sizeof magic && fc_pread_full(fd, head, sizeof head, offset, path, NULL) == FC_OK &&
           memcmp(head, magic, sizeof magic) == 0;
}

static fc_code find_record(const fc_torch_item *item, const char *name, const fc_zip_entry **out, fc_error *err) {
    char full[MAX_NAME];
    int n = snprintf(full, sizeof full, "%.*s/%s", (int)item->prefix, item->zip.entries[0].name, name);
    *out = n > 0 && (size_t)n < sizeof full ? fc_zip_find(&item->zip, full) : NULL;
    return *out ? FC_OK
                : fc_fail(err, FC_ECORRUPT,
                          "%s: offset %" PRIu64 ": the torch.save archive is damaged: it has no record %.*s/%s",
                          item->zip.path, item->zip.offset, (int)item->prefix, item->zip.entries[0].name, name);
}

static fc_code read_byteorder(fc_torch_item *item, fc_error *err) {
    const fc_zip_entry *entry;
    unsigned char *bytes = NULL;
    if (find_record(item, "byteorder", &entry, NULL) != FC_OK) {
        return FC_OK; /* torch before 2.1 does not write it on little-endian machines */
    }
    FC_TRY(entry->size <= 6 ? fc_zip_read(&item->zip, entry, &bytes, err) : FC_OK);
    item->big_endian = entry->size == 3 && memcmp(bytes, "big", 3) == 0;
    bool known = item->big_endian || (entry->size == 6 && memcmp(bytes, "little", 6) == 0);
    free(bytes);
    return known ? FC_OK
                 : fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": record %s says neither \"little\" nor \"big\"",
                           item->zip.path, entry->data, entry->name);
}

static fc_code read_pickle(fc_torch_item *item, fc_error *err) {
    const fc_zip_entry *entry;
    unsigned char *bytes;
    FC_TRY(find_record(item, "data.pkl", &entry, err));
    item->pickle_size = entry->size;
    bool possible = entry->method == FC_ZIP_STORED || entry->size / FC_ZIP_MAX_RATIO <= entry->stored;
    uint64_t most = entry->method == FC_ZIP_STORED ? item->max_pickle : FC_TORCH_MAX_PICKLE;
    if (entry->size > most && possible) { /* fc_zip_read refuses an impossible size */
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: offset %" PRIu64 ": record %s has %" PRIu64 " bytes; at most %" PRIu64 " are read",
                       item->zip.path, entry->data, entry->name, entry->size, most);
    }
    FC_TRY(fc_zip_read(&item->zip, entry, &bytes, err));
    fc_pickle_source source = {item->zip.path, entry->data, entry->size, -1, bytes};
    fc_code rc = fc_pickle_load(&source, FC_PICKLE_ITEM, &item->pickle, err);
    free(bytes);
    return rc;
}

/* Zip archives of other functions and programs, by a record that each of them has. */
static const struct {
    const char *record, *what;
} others[] = {
    {"archive_format",
     "a torch.export archive, which contains a program; save the module's state_dict() with torch.save"},
    {"serialized_exported_program.json", "a torch.export archive: unzip it, and use its serialized_state_dict.pt"},
    {"model.weights.h5", "a Keras model: unzip it, and use its model.weights.h5"},
    {".npy", "a NumPy archive (.npz): load it, and save a dict of tensors with torch.save"},
};

/* Whether it is the record, in a folder or not, or ends with an extension. */
static bool is_record(const char *name, const char *record) {
    const char *slash = strchr(name, '/');
    return record[0] == '.' ? fc_ends_with(name, record)
                            : strcmp(name, record) == 0 || (slash && strcmp(slash + 1, record) == 0);
}

/* @return what an archive is that torch.save did not write; NULL: unknown. */
static const char *find_other(const fc_torch_item *item) {
    for (size_t o = 0; o < sizeof others / sizeof *others; o++) {
        for (size_t i = 0; i < item->zip.nentries; i++) {
            if (is_record(item->zip.entries[i].name, others[o].record)) {
                return others[o].what;
            }
        }
    }
    return NULL;
}

static fc_code read_records(fc_torch_item *item, fc_error *err) {
    const char *slash = strchr(item->zip.entries[0].name, '/');
    if (!slash) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": not an archive of torch.save: record %s has no folder", item->zip.path,
                       item->zip.offset, item->zip.entries[0].name);
    }
    item->prefix = (size_t)(slash - item->zip.entries[0].name);
    FC_TRY(read_byteorder(item, err));
    return read_pickle(item, err);
}

/* Reads what every archive has: the root folder, the byte order, the pickle. After a failure the item is closed. */
static fc_code read_item(fc_torch_item *item, fc_error *err) {
    fc_code rc = read_records(item, err);
    const char *other = rc == FC_ECORRUPT ? find_other(item) : NULL;
    if (other) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: %s", item->zip.path, other);
    }
    if (rc != FC_OK) {
        fc_torch_item_close(item);
    }
    return rc;
}

static fc_code open_range(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes,
                          uint64_t max_pickle, fc_torch_item *item, fc_error *err) {
    *item = (fc_torch_item){.max_pickle = max_pickle};
    fc_code rc = fc_zip_open_read(fd, path, offset, length, bytes, &item->zip, err);
    if (rc == FC_ECORRUPT && is_legacy(fd, path, offset, length)) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: offset %" PRIu64 ": an item in the format of torch before 1.6; load and save it "
                       "again with a newer PyTorch",
                       path, offset);
    }
    return rc == FC_OK ? read_item(item, err) : rc;
}

fc_code fc_torch_item_open(int fd, const char *path, uint64_t offset, uint64_t length, fc_torch_item *item,
                           fc_error *err) {
    return fc_torch_item_open_read(fd, path, offset, length, NULL, item, err);
}

fc_code fc_torch_item_open_read(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes,
                                fc_torch_item *item, fc_error *err) {
    return open_range(fd, path, offset, length, bytes, FC_TORCH_MAX_PICKLE, item, err);
}

fc_code fc_torch_item_open_to_judge(int fd, const char *path, uint64_t offset, uint64_t length, fc_torch_item *item,
                                    fc_error *err) {
    return open_range(fd, path, offset, length, NULL, FC_TORCH_MAX_FILE_PICKLE, item, err);
}

fc_code fc_torch_item_open_memory(unsigned char *bytes, uint64_t length, const char *path, fc_torch_item *item,
                                  fc_error *err) {
    *item = (fc_torch_item){.max_pickle = FC_TORCH_MAX_FILE_PICKLE};
    FC_TRY(fc_zip_open_read(-1, path, 0, length, bytes, &item->zip, err));
    return read_item(item, err);
}

fc_code fc_torch_item_open_file(int fd, const char *path, uint64_t length, fc_torch_item *item, fc_error *err) {
    *item = (fc_torch_item){.max_pickle = FC_TORCH_MAX_FILE_PICKLE};
    FC_TRY(fc_zip_open(fd, path, 0, length, &item->zip, err));
    return read_item(item, err);
}

/* Whether a small record of an open head is not there as a whole. */
static bool ends_later(const fc_zip *zip) {
    bool later = false;
    for (size_t i = 0; i < zip->nentries; i++) {
        const fc_zip_entry *e = &zip->entries[i];
        later = later || (!strstr(e->name, "/data/") &&
                          (e->stored > zip->head.size || e->data - zip->offset + e->stored > zip->head.size));
    }
    return later;
}

fc_code fc_torch_item_open_head(const char *path, uint64_t offset, unsigned char *bytes, size_t size,
                                fc_torch_item *item, bool *short_of, fc_error *err) {
    *item = (fc_torch_item){.max_pickle = FC_TORCH_MAX_PICKLE};
    *short_of = false;
    FC_TRY(fc_zip_open_head(path, offset, bytes, size, &item->zip, err));
    *short_of = ends_later(&item->zip);
    if (*short_of) {
        fc_torch_item_close(item);
        return FC_OK;
    }
    return read_item(item, err);
}

void fc_torch_item_close(fc_torch_item *item) {
    fc_pickle_free(item->pickle);
    item->pickle = NULL;
    fc_zip_close(&item->zip);
}

static bool rebuild_of(const fc_pickle *p, fc_pv callee, uint32_t *which) {
    return fc_pv_typeof(callee) == FC_PV_GLOBAL && fc_pickle_global(p, callee, which) == FC_GLOBAL_REBUILD;
}

bool fc_torch_is_tensor(const fc_pickle *p, fc_pv v) {
    uint32_t which;
    return fc_pv_typeof(v) == FC_PV_CALL && rebuild_of(p, fc_pickle_callee(p, v), &which);
}

static fc_code malformed_tensor(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the pickled tensor is damaged: %s", what);
}

/* Gets the items of a tuple or torch.Size. */
static bool tuple_items(const fc_pickle *p, fc_pv v, const fc_pv **items, size_t *n) {
    if (fc_pv_typeof(v) != FC_PV_TUPLE && fc_pv_typeof(v) != FC_PV_SIZE) {
        return false;
    }
    *items = fc_pickle_tuple(p, v, n);
    return true;
}

/*
 * @return the function that rebuilds a tensor. `cls` receives the tensor's class, or 0 if the pickle does not name it.
 */
static fc_pv rebuilt_with(const fc_pickle *p, fc_pv v, fc_pv *cls) {
    fc_pv function = 0;
    *cls = 0;
    for (int depth = 0; depth < MAX_WRAPPERS && fc_pv_typeof(v) == FC_PV_CALL; depth++) {
        const fc_pv *args;
        uint32_t which;
        size_t n;
        function = fc_pickle_callee(p, v);
        if (!rebuild_of(p, function, &which)) {
            break;
        }
        args = fc_pickle_call_items(p, v, &n);
        if (which == FC_REBUILD_FROM_TYPE && n >= 3) {
            function = args[0];
            *cls = args[1];
            break;
        }
        v = which == FC_REBUILD_PARAMETER && n >= 1 ? args[0] : 0;
    }
    return function;
}

/* Reports the kind of a tensor that is not dense. */
static fc_code refuse_tensor(const fc_pickle *p, fc_pv v, fc_error *err) {
    static const char nested[] = "a nested tensor, which torch.load(weights_only=True) refuses, too: save the list of "
                                 "tensors that unbind() gives";
    static const struct {
        const char *function, *what;
    } kinds[] = {
        {"_rebuild_sparse_tensor", "a sparse tensor"},
        {"_rebuild_sparse_csr_tensor", "a sparse tensor"},
        {"_rebuild_qtensor", "a quantized tensor"},
        {"_rebuild_nested_tensor", nested},
        {"_rebuild_njt", nested},
        {"_rebuild_meta_tensor_no_storage", "a tensor on the device meta, which has no data"},
    };
    char name[256] = "?";
    const char *what = "a tensor of an unknown kind";
    fc_pv cls, function = rebuilt_with(p, v, &cls);
    fc_torchao ao;
    const bool jagged = fc_pickle_is_global(p, function, NULL, "_rebuild_njt");
    if (fc_pv_typeof(cls) == FC_PV_GLOBAL && !jagged) {
        fc_pickle_global_name(p, cls, name, sizeof name);
        fc_fail(err, FC_EUNSUPPORTED,
                "only dense tensors are supported, this one is a %s, which only that class can rebuild", name);
        return fc_torchao_find(p, v, &ao) ? fc_advise(err, FC_EUNSUPPORTED, FC_HINT_DEQUANTIZE, NULL) : FC_EUNSUPPORTED;
    }
    if (fc_pv_typeof(function) == FC_PV_GLOBAL) {
        fc_pickle_global_name(p, function, name, sizeof name);
    }
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        what = strcmp(dot ? dot + 1 : name, kinds[i].function) == 0 ? kinds[i].what : what;
    }
    return fc_fail(err, FC_EUNSUPPORTED, "only dense tensors are supported, this one is %s", what);
}

/* Unwraps parameters and typed wrappers down to the call that rebuilds the plain tensor. */
static fc_code unwrap_call(const fc_pickle *p, fc_pv v, uint32_t *which, const fc_pv **args, size_t *n, fc_error *err) {
    fc_pv callee, tuple;
    const fc_pv whole = v;
    if (fc_pv_typeof(v) != FC_PV_CALL) {
        return malformed_tensor("the value is not a tensor", err);
    }
    callee = fc_pickle_callee(p, v);
    tuple = fc_pickle_arguments(p, v);
    for (int depth = 0; depth < MAX_WRAPPERS; depth++) {
        if (!rebuild_of(p, callee, which)) {
            return depth > 0 ? refuse_tensor(p, whole, err) : malformed_tensor("the value is not a tensor", err);
        }
        if (!tuple_items(p, tuple, args, n)) {
            return malformed_tensor("its arguments are not a tuple", err);
        }
        if (*which == FC_REBUILD_PARAMETER && *n >= 1 && fc_pv_typeof((*args)[0]) == FC_PV_CALL) {
            v = (*args)[0];
            callee = fc_pickle_callee(p, v);
            tuple = fc_pickle_arguments(p, v);
        } else if (*which == FC_REBUILD_FROM_TYPE && *n >= 3) { /* function, type, arguments, state */
            callee = (*args)[0];
            tuple = (*args)[2];
        } else {
            return FC_OK;
        }
    }
    return malformed_tensor("it is wrapped too many times", err);
}

const fc_pv *fc_torch_sparse_arguments(const fc_pickle *p, fc_pv v, size_t *n) {
    uint32_t which = FC_REBUILD_OTHER;
    const fc_pv *args = NULL;
    const bool is = fc_torch_is_tensor(p, v) && unwrap_call(p, v, &which, &args, n, NULL) == FC_OK;
    return is && which == FC_REBUILD_SPARSE ? args : NULL;
}

/* Decodes ('storage', class, key, location, number of elements). */
static fc_code decode_storage(const fc_pickle *p, fc_pv v, bool typed, fc_torch_tensor *out, fc_error *err) {
    const fc_pv *id;
    size_t n;
    uint32_t dtype;
    int64_t numel;
    if (fc_pv_typeof(v) != FC_PV_PERSID || !tuple_items(p, fc_pickle_persid(p, v), &id, &n) || n < 5 ||
        !fc_pickle_is_str(p, id[0], "storage") || fc_pv_typeof(id[1]) != FC_PV_GLOBAL ||
        fc_pickle_global(p, id[1], &dtype) != FC_GLOBAL_STORAGE || fc_pv_typeof(id[2]) != FC_PV_STR ||
        !fc_pickle_int(p, id[4], &numel) || numel < 0) {
        return malformed_tensor("its storage was not written by torch.save", err);
    }
    if (dtype == FC_DTYPE_COUNT) {
        return fc_fail(err, FC_EUNSUPPORTED, "quantized tensors are not supported");
    }
    uint64_t element = fc_dtype_size((fc_dtype)dtype); /* FC_OPAQUE: an untyped storage counts bytes */
    if (typed) {
        if (dtype == FC_OPAQUE) {
            return malformed_tensor("the element type of its storage is missing", err);
        }
        out->dtype = (fc_dtype)dtype;
    }
    out->storage_key = id[2];
    out->location = id[3];
    return fc_mul_u64((uint64_t)numel, element, &out->storage_bytes)
               ? FC_OK
               : malformed_tensor("its storage is too large", err);
}

static fc_code decode_sizes(const fc_pickle *p, fc_pv sizes, fc_pv strides, fc_torch_tensor *out, fc_error *err) {
    const fc_pv *size, *stride;
    size_t ndim, n;
    if (!tuple_items(p, sizes, &size, &ndim) || !tuple_items(p, strides, &stride, &n) || n != ndim) {
        return malformed_tensor("its sizes and strides do not match", err);
    }
    if (ndim > FC_MAX_DIMS) {
        return fc_fail(err, FC_EUNSUPPORTED, "the tensor has %zu dimensions; at most %d are supported", ndim,
                       FC_MAX_DIMS);
    }
    out->ndim = (int)ndim;
    for (size_t i = 0; i < ndim; i++) {
        if (!fc_pickle_int(p, size[i], &out->sizes[i]) || out->sizes[i] < 0) {
            return malformed_tensor("a size is not an integer >= 0", err);
        }
        if (!fc_pickle_int(p, stride[i], &out->strides[i]) || out->strides[i] < 0) {
            return malformed_tensor("a stride is not an integer >= 0", err);
        }
    }
    return FC_OK;
}

/* Checks that every element is within the storage, and sets out->first. */
static fc_code check_reach(fc_torch_tensor *out, int64_t offset, fc_error *err) {
    uint64_t element = fc_dtype_size(out->dtype), last = (uint64_t)offset, end, step;
    bool empty = false;
    bool ok = offset >= 0 && fc_mul_u64((uint64_t)offset, element, &out->first);
    for (int i = 0; ok && i < out->ndim; i++) {
        empty = empty || out->sizes[i] == 0;
        if (out->sizes[i] > 0) {
            ok = fc_mul_u64((uint64_t)(out->sizes[i] - 1), (uint64_t)out->strides[i], &step) &&
                 fc_add_u64(last, step, &last);
        }
    }
    ok = ok && (empty || (fc_add_u64(last, 1, &end) && fc_mul_u64(end, element, &end) && end <= out->storage_bytes));
    return ok ? FC_OK : malformed_tensor("its elements are outside its storage", err);
}

/* Reads set_tensor_metadata's flags of lazy views, whose values differ from the stored ones in a sign. */
static fc_code read_flags(const fc_pickle *p, fc_pv flags, fc_torch_tensor *out, fc_error *err) {
    size_t n;
    if (fc_pv_typeof(flags) != FC_PV_DICT) {
        return FC_OK;
    }
    const fc_pv *pairs = fc_pickle_items(p, flags, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        bool *flag = fc_pickle_is_str(p, pairs[i], "conj")  ? &out->conjugate
                     : fc_pickle_is_str(p, pairs[i], "neg") ? &out->negate
                                                            : NULL;
        if (flag) {
            *flag = fc_pv_is_true(pairs[i + 1]);
        }
    }
    fc_dtype_class cls = fc_dtype_get(out->dtype)->cls;
    /* Flipping the top bit negates IEEE numbers, but not integers and not every float8. */
    bool ieee = cls == FC_CLASS_COMPLEX || (cls == FC_CLASS_FLOAT && fc_dtype_size(out->dtype) > 1);
    if ((out->conjugate && cls != FC_CLASS_COMPLEX) || (out->negate && !ieee)) {
        return malformed_tensor("it is a lazy view of a type that has no such views", err);
    }
    return FC_OK;
}

fc_code fc_torch_tensor_decode(const fc_pickle *p, fc_pv v, fc_torch_tensor *out, fc_error *err) {
    const fc_pv *args = NULL;
    size_t n = 0;
    uint32_t which = FC_REBUILD_OTHER, dtype;
    int64_t offset = 0;
    FC_TRY(unwrap_call(p, v, &which, &args, &n, err));
    out->negate = out->conjugate = false;
    if (which != FC_REBUILD_TENSOR_V2 && which != FC_REBUILD_TENSOR_V3) {
        return refuse_tensor(p, v, err);
    }
    bool typed = which == FC_REBUILD_TENSOR_V2;
    if (n < (typed ? 4u : 7u)) {
        return malformed_tensor("it has too few arguments", err);
    }
    if (!typed) {
        if (fc_pv_typeof(args[6]) != FC_PV_GLOBAL || fc_pickle_global(p, args[6], &dtype) != FC_GLOBAL_DTYPE) {
            return malformed_tensor("its type is not a dtype", err);
        }
        if (dtype == FC_OPAQUE) {
            char name[128];
            fc_pickle_global_name(p, args[6], name, sizeof name);
            return fc_fail(err, FC_EUNSUPPORTED, "the element type %s is not supported", name);
        }
        out->dtype = (fc_dtype)dtype;
    }
    FC_TRY(decode_storage(p, args[0], typed, out, err));
    FC_TRY(fc_pickle_int(p, args[1], &offset) ? FC_OK : malformed_tensor("its offset is not an integer", err));
    FC_TRY(decode_sizes(p, args[2], args[3], out, err));
    FC_TRY(check_reach(out, offset, err));
    size_t flags = typed ? 6 : 7;
    return n > flags ? read_flags(p, args[flags], out, err) : FC_OK;
}

fc_code fc_torch_storage_decode(const fc_pickle *p, fc_pv persid, fc_torch_tensor *out, fc_error *err) {
    return decode_storage(p, persid, false, out, err);
}

fc_code fc_torch_item_record(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                             fc_error *err) {
    char name[MAX_NAME];
    size_t n;
    snprintf(name, sizeof name, "data/%s", fc_pickle_bytes(item->pickle, tensor->storage_key, &n));
    FC_TRY(find_record(item, name, out, err));
    if ((*out)->size != tensor->storage_bytes) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": record %s has %" PRIu64 " bytes, but the pickle says %" PRIu64,
                       item->zip.path, (*out)->data, (*out)->name, (*out)->size, tensor->storage_bytes);
    }
    return FC_OK;
}

fc_code fc_torch_item_storage(const fc_torch_item *item, const fc_torch_tensor *tensor, const fc_zip_entry **out,
                              fc_error *err) {
    FC_TRY(fc_torch_item_record(item, tensor, out, err));
    if ((*out)->method != FC_ZIP_STORED) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: offset %" PRIu64 ": record %s is compressed; unpack and save the checkpoint again",
                       item->zip.path, (*out)->data, (*out)->name);
    }
    return FC_OK;
}

bool fc_torch_is_script(const fc_torch_item *item) {
    for (size_t i = 0; i < item->zip.nentries; i++) {
        const char *slash = strchr(item->zip.entries[i].name, '/');
        if (slash && strcmp(slash + 1, "constants.pkl") == 0) {
            return true;
        }
    }
    return false;
}
