/*
 * One dataset, in the reader process: its type, shape, and where its bytes are, as a DATASET record and CHUNKS.
 * Also reading the boxes of those that only libhdf5 can decode.
 */
#include "core/checked.h"
#include "scan.h"
#include "types_read.h"
#include "values.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TEXT_OBJECT = 16 << 20, MAX_FILL = 64 };

/* Everything about the dataset being described; buffers that the record borrows. */
typedef struct description {
    fc_h5_walk *walk;
    hid_t dataset, type, space, dcpl;
    fc_h5_dataset record;
    hsize_t dims[H5S_MAX_RANK], chunk[H5S_MAX_RANK + 1];
    int64_t shape[FC_MAX_DIMS], chunk64[FC_MAX_DIMS], global_shape[FC_MAX_DIMS], offsets[FC_MAX_DIMS];
    uint64_t total; /* bytes of all elements */
    unsigned char fill[MAX_FILL];
    unsigned char *inline_bytes;
    fc_h5_text text;
    char *names[5];
} description;

void fc_h5_scan_unreadable(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists, fc_code code,
                           const char *fmt, ...) {
    char message[700];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    fc_h5_make_utf8(message);
    fc_h5_dataset d = {.path = path,
                       .lists = {lists, nlists},
                       .kind = FC_H5_UNREADABLE,
                       .where = FC_H5_NOWHERE,
                       .code = code,
                       .message = message,
                       .owner = -1,
                       .nglobal_shape = -1,
                       .noffsets = -1};
    fc_h5_put_dataset(walk->out, &d);
}

/* ---- other files ---- */

int fc_h5_indirect(hid_t dcpl) {
    if (H5Pget_layout(dcpl) == H5D_VIRTUAL) {
        return 1;
    }
    return H5Pget_external_count(dcpl) > 0 ? 2 : 0;
}

/* `name` beside `file_path`, or as it is when absolute. @return false when it does not fit. */
static bool beside(const char *file_path, const char *name, char *out, size_t size) {
    const char *slash = name[0] == '/' ? NULL : strrchr(file_path, '/');
    int n = slash ? snprintf(out, size, "%.*s/%s", (int)(slash - file_path), file_path, name)
                  : snprintf(out, size, "%s", name);
    return n >= 0 && (size_t)n < size;
}

static bool virtual_sources_exist(hid_t file, const char *file_path, hid_t dcpl, char *why, size_t size) {
    size_t count = 0;
    char name[4096], object[4096], path[8192];
    hid_t fapl = H5Fget_access_plist(file);
    bool ok = H5Pget_virtual_count(dcpl, &count) >= 0;
    for (size_t i = 0; ok && i < count; i++) {
        ssize_t a = H5Pget_virtual_filename(dcpl, i, name, sizeof name);
        ssize_t b = H5Pget_virtual_dsetname(dcpl, i, object, sizeof object);
        ok = a > 0 && (size_t)a < sizeof name && b > 0 && (size_t)b < sizeof object;
        bool same = ok && strcmp(name, ".") == 0;
        if (!ok || (!same && !beside(file_path, name, path, sizeof path))) {
            break;
        }
        hid_t source = same ? file : H5Fopen(path, H5F_ACC_RDONLY, fapl);
        hid_t dataset = source >= 0 ? H5Dopen2(source, object, H5P_DEFAULT) : H5I_INVALID_HID;
        ok = dataset >= 0;
        if (ok) {
            H5Dclose(dataset);
        } else {
            snprintf(why, size, "its virtual source %.300s:%.200s is missing or unreadable", same ? file_path : path,
                     object);
        }
        if (source >= 0 && !same) {
            H5Fclose(source);
        }
    }
    H5Pclose(fapl);
    return ok;
}

/* Sets `directory` to what relative names are relative to: the file's directory, or "" for the current one. */
static bool external_files_exist(const char *file_path, hid_t dcpl, char *directory, size_t size, char *why,
                                 size_t why_size) {
    char name[4096], path[8192];
    struct stat st;
    int count = H5Pget_external_count(dcpl);
    directory[0] = '\0';
    for (int i = 0; i < count; i++) {
        off_t offset = 0;
        hsize_t length = 0;
        uint64_t end;
        if (H5Pget_external(dcpl, (unsigned)i, sizeof name, name, &offset, &length) < 0 ||
            !memchr(name, '\0', sizeof name)) {
            snprintf(why, why_size, "its external storage cannot be examined");
            return false;
        }
        bool is_beside = beside(file_path, name, path, sizeof path) && stat(path, &st) == 0;
        if (!is_beside && stat(name, &st) != 0) {
            snprintf(why, why_size, "its external file %.300s is missing", name);
            return false;
        }
        bool unlimited = length == H5F_UNLIMITED;
        if (!S_ISREG(st.st_mode) || offset < 0 || !fc_add_u64((uint64_t)offset, unlimited ? 0 : length, &end) ||
            end > (uint64_t)st.st_size) {
            snprintf(why, why_size, "its external file %.300s is truncated", name);
            return false;
        }
        if (is_beside && name[0] != '/' && !beside(file_path, ".", directory, size)) {
            return false;
        }
    }
    return true;
}

hid_t fc_h5_open_dataset(hid_t file, const char *file_path, const char *path, bool follow, char *why, size_t size) {
    char directory[4096] = "";
    hid_t dataset = H5Dopen2(file, path, H5P_DEFAULT);
    if (dataset < 0) {
        fc_h5_library_error(why, size);
        return dataset;
    }
    hid_t dcpl = H5Dget_create_plist(dataset);
    int indirect = fc_h5_indirect(dcpl);
    bool ok = true;
    if (indirect != 0 && !follow) {
        snprintf(why, size,
                 indirect == 1 ? "a virtual dataset onto other data, which is not followed (--follow-external does)"
                               : "its bytes are in external files, which are not followed (--follow-external does)");
        ok = false;
    } else if (indirect == 1) {
        ok = virtual_sources_exist(file, file_path, dcpl, why, size);
    } else if (indirect == 2) {
        ok = external_files_exist(file_path, dcpl, directory, sizeof directory, why, size);
    }
    H5Pclose(dcpl);
    if (!ok || directory[0]) {
        H5Dclose(dataset);
        dataset = H5I_INVALID_HID;
    }
    if (ok && directory[0]) {
        hid_t dapl = H5Pcreate(H5P_DATASET_ACCESS);
        H5Pset_efile_prefix(dapl, directory);
        dataset = H5Dopen2(file, path, dapl);
        H5Pclose(dapl);
    }
    return dataset;
}

/* ---- filters ---- */

static bool engine_decodes(uint32_t filter) {
    return filter == H5Z_FILTER_DEFLATE || filter == H5Z_FILTER_SHUFFLE || filter == H5Z_FILTER_FLETCHER32;
}

/* Known by number in the registry of The HDF Group, for filters whose files do not say their name. */
static const char *filter_name(uint32_t id) {
    switch (id) {
    case 32000:
        return "lzf";
    case 32001:
        return "blosc";
    case 32004:
        return "lz4";
    case 32008:
        return "bitshuffle";
    case 32013:
        return "zfp";
    case 32015:
        return "zstd";
    case 32026:
        return "blosc2";
    case H5Z_FILTER_SZIP:
        return "szip";
    default:
        return "a filter";
    }
}

/* Reads the pipeline into the record. @return false, having reported it, when it cannot be decoded. */
static bool read_filters(description *d, bool *library) {
    int n = H5Pget_nfilters(d->dcpl), deflates = 0;
    *library = n > 4;
    for (int i = 0; i < n && i < FC_H5_MAX_FILTERS; i++) {
        char name[128] = "";
        unsigned flags, config = 0;
        size_t nvalues = 0;
        H5Z_filter_t id = H5Pget_filter2(d->dcpl, (unsigned)i, &flags, &nvalues, NULL, sizeof name, name, &config);
        d->record.filters[d->record.nfilters++] = (uint32_t)id;
        if (id >= 0 && engine_decodes((uint32_t)id)) {
            deflates += id == H5Z_FILTER_DEFLATE;
            *library |= deflates > 1; /* nested: the engine's bound on what a chunk can swell to would not hold */
            continue;
        }
        *library = true;
        if (id < 0 || H5Zfilter_avail(id) <= 0) {
            name[sizeof name - 1] = '\0';
            fc_h5_scan_unreadable(d->walk, d->record.path, d->record.lists.data, d->record.lists.size, FC_EUNSUPPORTED,
                                  "compressed with %s (HDF5 filter %d), which this libhdf5 cannot decode: rewrite it "
                                  "with gzip or uncompressed",
                                  id >= 32000 || !name[0] ? filter_name((uint32_t)id) : name, (int)id);
            return false;
        }
    }
    return n >= 0;
}

/* ---- chunks ---- */

typedef struct chunk_list {
    description *d;
    uint64_t count; /* in the open record */
    size_t count_at;
} chunk_list;

static void begin_chunks(chunk_list *list) {
    fc_h5_begin(list->d->walk->out, FC_H5_CHUNKS);
    list->count_at = list->d->walk->out->used;
    list->count = 0;
    fc_h5_put_u64(list->d->walk->out, 0);
}

static void end_chunks(chunk_list *list) {
    fc_h5_sink *out = list->d->walk->out;
    if (!out->failed) {
        memcpy(out->buf + list->count_at, &list->count, sizeof list->count);
    }
    fc_h5_end(out);
}

/* Finds the chunk at `at`, if it is stored, and adds it. @return false when the index is damaged. */
static bool add_chunk(chunk_list *list, const hsize_t *at) {
    description *d = list->d;
    fc_h5_capture *capture = d->walk->capture;
    hsize_t size = 0;
    uint32_t mask = 0;
    char nothing;
    if (H5Dget_chunk_storage_size(d->dataset, at, &size) < 0) {
        H5Eclear2(H5E_DEFAULT);
        return true; /* libhdf5's way of saying that it is not stored */
    }
    if (size == 0) {
        return true;
    }
    *capture = (fc_h5_capture){.armed = true};
    /* Nothing is read into the buffer: the driver only notes the address. */
    herr_t rc = H5Dread_chunk(d->dataset, H5P_DEFAULT, at, &mask, &nothing);
    capture->armed = false;
    if (rc < 0 || !capture->hit || capture->size != size) {
        return false;
    }
    fc_h5_sink *out = d->walk->out;
    fc_h5_put_u64(out, capture->address);
    fc_h5_put_u64(out, size);
    fc_h5_put_u64(out, mask);
    for (int k = 0; k < d->record.ndim; k++) {
        fc_h5_put_u64(out, at[k]);
    }
    if (++list->count == FC_H5_CHUNKS_PER_RECORD) {
        end_chunks(list);
        atomic_fetch_add(&d->walk->shared->beats, 1);
        begin_chunks(list);
    }
    return !out->failed;
}

/* Asks for every chunk of the grid: each is found at once. */
static bool list_by_grid(chunk_list *list) {
    const description *d = list->d;
    hsize_t at[H5S_MAX_RANK] = {0};
    int k = d->record.ndim;
    while (k >= 0) {
        if (!add_chunk(list, at)) {
            return false;
        }
        for (k = d->record.ndim - 1; k >= 0; k--) {
            at[k] += d->chunk[k];
            if (at[k] < d->dims[k]) {
                break;
            }
            at[k] = 0;
        }
    }
    return true;
}

/* Asks for the stored chunks by number: each costs a walk over the index. For grids that are nearly empty. */
static bool list_by_number(chunk_list *list, hsize_t stored) {
    const description *d = list->d;
    for (hsize_t i = 0; i < stored; i++) {
        hsize_t at[H5S_MAX_RANK] = {0};
        unsigned mask;
        haddr_t address;
        hsize_t size;
        if (H5Dget_chunk_info(d->dataset, d->space, i, at, &mask, &address, &size) < 0 || !add_chunk(list, at)) {
            return false;
        }
    }
    return true;
}

/* How to list the chunks, decided before the dataset is announced. */
typedef enum chunk_way { NO_CHUNKS, BY_GRID, BY_NUMBER, TOO_SPARSE, DAMAGED } chunk_way;

static chunk_way choose_way(const description *d, hsize_t *stored) {
    const double by_grid_cost = 0.5e-6, by_number_cost = 50e-9, patience = 120; /* seconds, measured on 1.10.8 */
    double grid = 1;
    *stored = 0;
    for (int k = 0; k < d->record.ndim; k++) {
        grid *= (double)((d->dims[k] - 1) / d->chunk[k] + 1);
    }
    if (H5Dget_num_chunks(d->dataset, d->space, stored) < 0) {
        return DAMAGED;
    }
    if (*stored == 0) {
        return NO_CHUNKS;
    }
    double by_grid = grid * by_grid_cost, by_number = (double)*stored * (double)*stored * by_number_cost;
    if (by_grid > patience && by_number > patience) {
        return TOO_SPARSE;
    }
    return by_grid <= by_number ? BY_GRID : BY_NUMBER;
}

static bool send_chunks(description *d, chunk_way way, hsize_t stored) {
    chunk_list list = {d, 0, 0};
    begin_chunks(&list);
    bool ok = way == BY_GRID ? list_by_grid(&list) : list_by_number(&list, stored);
    end_chunks(&list);
    return ok;
}

/* ---- the record ---- */

static void refuse(description *d, fc_code code, const char *text) {
    char why[256];
    fc_h5_library_error(why, sizeof why);
    fc_h5_scan_unreadable(d->walk, d->record.path, d->record.lists.data, d->record.lists.size, code, text, why);
}

static bool read_shape(description *d) {
    H5S_class_t cls = H5Sget_simple_extent_type(d->space);
    if (cls == H5S_NULL) { /* h5py.Empty: a type and no elements */
        d->record.ndim = 1;
        d->shape[0] = 0;
        d->total = 0;
        return true;
    }
    d->record.ndim = cls == H5S_NO_CLASS ? -1 : H5Sget_simple_extent_ndims(d->space);
    if (d->record.ndim < 0 || H5Sget_simple_extent_dims(d->space, d->dims, NULL) < 0) {
        return false;
    }
    d->total = d->record.element;
    for (int k = 0; k < d->record.ndim; k++) {
        if (d->dims[k] > INT64_MAX) {
            return false;
        }
        d->shape[k] = (int64_t)d->dims[k];
    }
    for (int k = 0; k < d->record.ndim; k++) {
        if (d->dims[k] == 0) {
            d->total = 0;
        }
    }
    for (int k = 0; k < d->record.ndim; k++) {
        if (!fc_mul_u64(d->total, d->dims[k], &d->total)) {
            return false;
        }
    }
    return d->total <= INT64_MAX;
}

static void read_our_attributes(description *d) {
    static const char *const names[] = {"dtype", "placements", "encoding", "json", "fqn"};
    if (!d->walk->ours) {
        d->names[0] = fc_h5_attribute_text(d->dataset, "dtype");
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        d->names[i] = fc_h5_attribute_text(d->dataset, names[i]);
    }
    d->record.dtype_name = d->names[0];
    d->record.placements = d->names[1];
    d->record.encoding = d->names[2];
    d->record.json = d->names[3];
    d->record.fqn = d->names[4];
    int64_t owner;
    d->record.owner = fc_h5_read_i64s(d->dataset, "owner", &owner, 1) == 1 ? owner : -1;
    d->record.nglobal_shape = fc_h5_read_i64s(d->dataset, "global_shape", d->global_shape, FC_MAX_DIMS);
    d->record.noffsets = fc_h5_read_i64s(d->dataset, "offsets", d->offsets, FC_MAX_DIMS);
    d->record.global_shape = d->global_shape;
    d->record.offsets = d->offsets;
}

static void read_fill(description *d) {
    H5D_fill_value_t defined = H5D_FILL_VALUE_UNDEFINED;
    H5Pfill_value_defined(d->dcpl, &defined);
    if (d->record.element <= MAX_FILL && defined == H5D_FILL_VALUE_USER_DEFINED) {
        H5Pget_fill_value(d->dcpl, d->type, d->fill);
    }
    d->record.bytes = (fc_h5_bytes){d->fill, d->record.element};
}

/* All bytes through libhdf5, in the file's own type: nothing is converted. */
static bool read_inline(description *d) {
    d->inline_bytes = malloc((size_t)d->total + 1);
    if (!d->inline_bytes || H5Dread(d->dataset, d->type, H5S_ALL, H5S_ALL, H5P_DEFAULT, d->inline_bytes) < 0) {
        return false;
    }
    d->record.where = FC_H5_IN_RECORD;
    d->record.bytes = (fc_h5_bytes){d->inline_bytes, (size_t)d->total};
    return true;
}

/* Text becomes JSON text: it says its own shape, and variable-length strings have no bytes of their own. */
static void describe_strings(description *d) {
    if (!fc_h5_text_dataset(&d->text, d->dataset) || d->text.size > MAX_TEXT_OBJECT) {
        refuse(d, FC_EUNSUPPORTED, "its strings cannot be read, or are more than 16 MiB (%s)");
        return;
    }
    fc_h5_dataset *r = &d->record;
    r->kind = FC_H5_OBJECT;
    r->encoding = "hdf5.string";
    r->where = FC_H5_IN_RECORD;
    r->bytes = (fc_h5_bytes){(const unsigned char *)d->text.data, d->text.size};
    r->ndim = 1;
    d->shape[0] = (int64_t)d->text.size;
    r->dtype = FC_OPAQUE;
    r->element = 1;
    fc_h5_put_dataset(d->walk->out, r);
}

/* The whole datatype as H5Tencode gives it: with it the bytes can be understood even outside of this file. */
static void append_encoded_type(description *d) {
    size_t size = 0;
    unsigned char *encoded = H5Tencode(d->type, NULL, &size) >= 0 ? malloc(size + 1) : NULL;
    if (encoded && H5Tencode(d->type, encoded, &size) >= 0) {
        fc_h5_text_raw(&d->text, ", \"H5Tencode\": ");
        fc_h5_text_base64(&d->text, encoded, size);
    }
    free(encoded);
}

/* An object's bytes have one dimension, whatever the dataset's shape; a foreign one's is told in `json`. */
static void become_object(description *d) {
    fc_h5_dataset *r = &d->record;
    char type[64], number[32];
    if (!r->encoding) {
        fc_h5_type_text(d->type, type, sizeof type);
        fc_h5_text_raw(&d->text, "{\"$hdf5\": {\"type\": \"");
        fc_h5_text_raw(&d->text, type);
        fc_h5_text_raw(&d->text, "\", \"shape\": [");
        for (int k = 0; k < r->ndim; k++) {
            snprintf(number, sizeof number, "%s%lld", k ? ", " : "", (long long)d->shape[k]);
            fc_h5_text_raw(&d->text, number);
        }
        fc_h5_text_raw(&d->text, "]");
        append_encoded_type(d);
        fc_h5_text_raw(&d->text, "}}");
        fc_h5_text_nul(&d->text);
        r->encoding = "hdf5.bytes";
        r->json = d->text.data;
    }
    r->kind = FC_H5_OBJECT;
    r->ndim = 1;
    r->element = 1;
    d->shape[0] = (int64_t)d->total;
}

/* Where the bytes are. @return false when a record has been sent already or is to be refused with `text`. */
static bool locate(description *d, bool in_other_file, const char **text) {
    fc_h5_dataset *r = &d->record;
    bool library = false, object = r->dtype == FC_OPAQUE;
    H5D_layout_t layout = H5Pget_layout(d->dcpl);
    for (int k = 0; k < r->ndim; k++) {
        d->chunk64[k] = 1;
    }
    r->where = FC_H5_NOWHERE;
    if (d->total == 0) {
        return true;
    }
    if (layout == H5D_VIRTUAL && d->walk->ours) {
        r->where = FC_H5_ELSEWHERE;
        return true;
    }
    if (layout == H5D_CHUNKED) {
        if (H5Pget_chunk(d->dcpl, H5S_MAX_RANK, d->chunk) != r->ndim) {
            *text = "its chunk shape is damaged (%s)";
            return false;
        }
        for (int k = 0; k < r->ndim; k++) {
            d->chunk64[k] = (int64_t)d->chunk[k];
        }
        if (!read_filters(d, &library)) {
            return false;
        }
    }
    int indirect = fc_h5_indirect(d->dcpl);
    if (layout != H5D_COMPACT && indirect == 0 && H5Dget_storage_size(d->dataset) == 0 && !object) {
        return true; /* never written: fill values */
    }
    if (layout == H5D_COMPACT) {
        *text = "its bytes cannot be read (%s)";
        return read_inline(d);
    }
    if (in_other_file || indirect != 0 || library || (object && layout == H5D_CHUNKED)) {
        r->where = FC_H5_BY_LIBRARY;
        return true;
    }
    if (layout == H5D_CHUNKED) {
        r->where = FC_H5_IN_CHUNKS;
        return true;
    }
    haddr_t address = H5Dget_offset(d->dataset);
    if (address == HADDR_UNDEF) {
        r->where = object ? FC_H5_BY_LIBRARY : FC_H5_NOWHERE;
        return true;
    }
    r->where = FC_H5_AT_OFFSET;
    r->offset = address;
    r->length = d->total;
    *text = "its storage is shorter than its shape (%s)";
    return H5Dget_storage_size(d->dataset) == d->total;
}

static void describe(description *d, bool in_other_file) {
    fc_h5_dataset *r = &d->record;
    const char *text = NULL;
    fc_h5_type type = fc_h5_type_read(d->type, d->names[0], d->walk->ours);
    r->dtype = type.dtype;
    r->swap = type.swap;
    r->element = (uint32_t)type.size;
    if (type.size == 0 || type.size > UINT32_MAX || !read_shape(d)) {
        refuse(d, FC_ECORRUPT, "its shape or type is damaged (%s)");
        return;
    }
    char why[600];
    int indirect = fc_h5_indirect(d->dcpl);
    if (indirect && d->total > 0 && !(indirect == 1 && d->walk->ours)) {
        hid_t again = fc_h5_open_dataset(d->walk->file, d->walk->file_path, r->path, d->walk->scan->follow_external,
                                         why, sizeof why);
        if (again < 0) {
            fc_h5_scan_unreadable(d->walk, r->path, r->lists.data, r->lists.size,
                                  d->walk->scan->follow_external ? FC_ECORRUPT : FC_EUNSUPPORTED, "%s", why);
            return;
        }
        H5Dclose(again);
    }
    if (type.cls == FC_H5_STRINGS) {
        describe_strings(d);
        return;
    }
    if (type.cls == FC_H5_POINTERS) {
        fc_h5_type_text(d->type, why, sizeof why);
        fc_h5_scan_unreadable(d->walk, r->path, r->lists.data, r->lists.size, FC_EUNSUPPORTED,
                              "%s: references and variable-length data have no meaning outside this file", why);
        return;
    }
    if (!locate(d, in_other_file, &text)) {
        if (text) {
            refuse(d, FC_ECORRUPT, text);
        }
        return;
    }
    if (r->dtype == FC_OPAQUE) {
        become_object(d);
    } else if (r->where == FC_H5_NOWHERE || r->where == FC_H5_IN_CHUNKS) {
        read_fill(d);
    }
    bool has_unit = r->where == FC_H5_IN_CHUNKS || (r->where == FC_H5_BY_LIBRARY && r->kind == FC_H5_TENSOR);
    r->chunk = has_unit ? d->chunk64 : NULL;
    hsize_t stored = 0;
    chunk_way way = r->where == FC_H5_IN_CHUNKS ? choose_way(d, &stored) : NO_CHUNKS;
    if (way == TOO_SPARSE || way == DAMAGED) {
        refuse(d, way == DAMAGED ? FC_ECORRUPT : FC_EUNSUPPORTED,
               way == DAMAGED ? "its chunk index cannot be read (%s)" : "its chunks are too many and too scattered (%s)");
        return;
    }
    fc_h5_put_dataset(d->walk->out, r);
    if (way != NO_CHUNKS && !send_chunks(d, way, stored)) {
        /* Too late to call only this dataset unreadable, and damage is no reason to go on. */
        fc_h5_library_error(why, sizeof why);
        fc_h5_scan_failure(d->walk, FC_ECORRUPT, "corrupt HDF5 file: the chunk index of dataset /%s cannot be read (%s)",
                           r->path, why);
    }
}

void fc_h5_scan_dataset(fc_h5_walk *walk, hid_t dataset, const char *path, const unsigned char *lists, size_t nlists,
                        bool in_other_file) {
    description *d = calloc(1, sizeof *d);
    if (!d) {
        fc_h5_scan_failure(walk, FC_ENOMEM, "out of memory");
        return;
    }
    d->walk = walk;
    d->dataset = dataset;
    d->record.path = path;
    d->record.lists = (fc_h5_bytes){lists, nlists};
    d->record.shape = d->shape;
    d->record.owner = d->record.nglobal_shape = d->record.noffsets = -1;
    d->type = H5Dget_type(dataset);
    d->space = H5Dget_space(dataset);
    d->dcpl = H5Dget_create_plist(dataset);
    if (d->type < 0 || d->space < 0 || d->dcpl < 0) {
        refuse(d, FC_ECORRUPT, "its header is corrupt (%s)");
    } else {
        read_our_attributes(d);
        describe(d, in_other_file);
    }
    H5Pclose(d->dcpl);
    H5Sclose(d->space);
    H5Tclose(d->type);
    for (size_t i = 0; i < sizeof d->names / sizeof *d->names; i++) {
        free(d->names[i]);
    }
    fc_h5_text_free(&d->text);
    free(d->inline_bytes);
    free(d);
}

/* ---- boxes for the parent ---- */

static bool select_box(const fc_h5_scan *scan, hid_t space, hid_t *memory) {
    hsize_t start[H5S_MAX_RANK], count[H5S_MAX_RANK];
    if (scan->ndim < 0) {
        *memory = H5S_ALL;
        return true;
    }
    for (int k = 0; k < scan->ndim; k++) {
        start[k] = (hsize_t)scan->offsets[k];
        count[k] = (hsize_t)scan->sizes[k];
    }
    if (H5Sget_simple_extent_ndims(space) != scan->ndim) {
        return false;
    }
    if (scan->ndim == 0) {
        *memory = H5Screate(H5S_SCALAR);
        return *memory >= 0;
    }
    *memory = H5Screate_simple(scan->ndim, count, NULL);
    return *memory >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL) >= 0;
}

/* Reads the box in the file's own type. @return its bytes, or NULL. */
static unsigned char *read_box(const fc_h5_scan *scan, hid_t dataset, char *why, size_t size) {
    hid_t space = H5Dget_space(dataset), type = H5Dget_type(dataset), memory = H5I_INVALID_HID;
    unsigned char *bytes = calloc(1, scan->bytes + 1);
    hssize_t n = 0;
    bool ok = bytes && select_box(scan, space, &memory);
    if (ok) {
        /* The file may have changed since it was opened: the box must still have the size that was announced. */
        n = scan->ndim < 0 ? H5Sget_simple_extent_npoints(space) : H5Sget_select_npoints(space);
        ok = n >= 0 && (uint64_t)n * H5Tget_size(type) == scan->bytes;
    }
    if (!ok || H5Dread(dataset, type, memory, scan->ndim < 0 ? H5S_ALL : space, H5P_DEFAULT, bytes) < 0) {
        fc_h5_library_error(why, size);
        free(bytes);
        bytes = NULL;
    }
    if (memory > 0) {
        H5Sclose(memory);
    }
    H5Tclose(type);
    H5Sclose(space);
    return bytes;
}

int fc_h5_box_run(void *context, int fd, fc_h5_shared *shared) {
    const fc_h5_scan *scan = context;
    const uint64_t piece = 1 << 20;
    char why[600] = "";
    fc_h5_sink out = {.fd = fd};
    fc_h5_source source = {scan->inputs->path, scan->inputs->fd, &scan->inputs->st, scan->follow_external, NULL};
    fc_h5_walk walk = {.out = &out};
    unsigned char *bytes = NULL;
    snprintf(shared->where, sizeof shared->where, "dataset /%s", scan->dataset);
    hid_t fapl = fc_h5_vfd_fapl(scan->driver, &source);
    hid_t file = H5Fopen(source.path, H5F_ACC_RDONLY, fapl);
    hid_t dataset = H5I_INVALID_HID;
    if (file < 0) {
        fc_h5_library_error(why, sizeof why);
    } else {
        dataset = fc_h5_open_dataset(file, source.path, scan->dataset, scan->follow_external, why, sizeof why);
    }
    if (dataset >= 0) {
        bytes = read_box(scan, dataset, why, sizeof why);
        H5Dclose(dataset);
    }
    if (file >= 0) {
        H5Fclose(file);
    }
    H5Pclose(fapl);
    if (!bytes) {
        fc_h5_scan_failure(&walk, FC_ECORRUPT, "dataset /%s cannot be read (%s)", scan->dataset, why);
    }
    for (uint64_t at = 0; bytes && at < scan->bytes; at += piece) {
        fc_h5_begin(&out, FC_H5_DATA);
        fc_h5_put_bytes(&out, bytes + at, scan->bytes - at < piece ? scan->bytes - at : piece);
        fc_h5_end(&out);
    }
    free(bytes);
    fc_h5_flush(&out);
    return out.failed;
}
