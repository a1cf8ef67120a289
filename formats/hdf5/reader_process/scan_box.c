/*
 * In the reader process: reads boxes of datasets that only libhdf5 can decode. If their bytes are in other files, it
 * checks that these exist, because libhdf5 silently reads missing ones as fill values.
 */
#include "base/checked.h"
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/child.h"
#include "hdf5/reader_process/scan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- other files ---- */

int fc_h5_indirect(hid_t dcpl) {
    if (H5Pget_layout(dcpl) == H5D_VIRTUAL) {
        return 1;
    }
    return H5Pget_external_count(dcpl) > 0 ? 2 : 0;
}

/* Resolves `name` relative to the directory of `file_path`. @return false if the result does not fit. */
static bool next_to(const char *file_path, const char *name, char *out, size_t size) {
    const char *slash = name[0] == '/' ? NULL : strrchr(file_path, '/');
    int n = slash ? snprintf(out, size, "%.*s/%s", (int)(slash - file_path), file_path, name)
                  : snprintf(out, size, "%s", name);
    return n >= 0 && (size_t)n < size;
}

/* Sets `directory` to the directory that relative names refer to: the file's directory, or "" for the current one. */
static bool external_files_exist(const char *file_path, hid_t dcpl, struct fc_h5_names *others, char *directory,
                                 size_t size, char *why, size_t why_size) {
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
        bool is_next_to = next_to(file_path, name, path, sizeof path) && stat(path, &st) == 0;
        if (!is_next_to && stat(name, &st) != 0) {
            snprintf(why, why_size, "its external file %.300s is missing", name);
            return false;
        }
        bool unlimited = length == H5F_UNLIMITED;
        if (!S_ISREG(st.st_mode) || offset < 0 || !fc_add_u64((uint64_t)offset, unlimited ? 0 : length, &end) ||
            end > (uint64_t)st.st_size) {
            snprintf(why, why_size, "its external file %.300s is truncated", name);
            return false;
        }
        fc_h5_note_other(others, is_next_to ? path : name);
        if (is_next_to && name[0] != '/' && !next_to(file_path, ".", directory, size)) {
            return false;
        }
    }
    return true;
}

/* In the source name of a mapping, "%%" stands for a percent sign. */
static void unescape_percent(char *name) {
    char *to = name;
    for (const char *from = name; *from; from++) {
        *to++ = *from;
        from += from[0] == '%' && from[1] == '%';
    }
    *to = '\0';
}

/* A source in the file itself may have its bytes in other files, as in a view. */
static bool own_source_exists(const char *file_path, hid_t dataset, struct fc_h5_names *others, char *directory,
                              size_t dsize, char *why, size_t size) {
    char found[4096] = "";
    hid_t dcpl = H5Dget_create_plist(dataset);
    bool ok = dcpl >= 0 && (H5Pget_external_count(dcpl) <= 0 ||
                            external_files_exist(file_path, dcpl, others, found, sizeof found, why, size));
    if (ok && H5Pget_external_count(dcpl) > 0 && found[0]) {
        snprintf(directory, dsize, "%s", found);
    }
    if (dcpl >= 0) {
        H5Pclose(dcpl);
    }
    return ok;
}

static bool virtual_sources_exist(hid_t file, const char *file_path, hid_t dcpl, struct fc_h5_names *others,
                                  char *directory, size_t dsize, char *why, size_t size) {
    size_t count = 0;
    char name[4096], object[4096], path[8192];
    hid_t fapl = H5Fget_access_plist(file);
    bool ok = H5Pget_virtual_count(dcpl, &count) >= 0;
    for (size_t i = 0; ok && i < count; i++) {
        ssize_t a = H5Pget_virtual_filename(dcpl, i, name, sizeof name);
        ssize_t b = H5Pget_virtual_dsetname(dcpl, i, object, sizeof object);
        ok = a > 0 && (size_t)a < sizeof name && b > 0 && (size_t)b < sizeof object;
        if (ok) {
            unescape_percent(name);
            unescape_percent(object);
        }
        bool same = ok && strcmp(name, ".") == 0;
        if (!ok || (!same && !next_to(file_path, name, path, sizeof path))) {
            break;
        }
        hid_t source = same ? file : H5Fopen(path, H5F_ACC_RDONLY, fapl);
        hid_t dataset = source >= 0 ? H5Dopen2(source, object, H5P_DEFAULT) : H5I_INVALID_HID;
        ok = dataset >= 0;
        if (ok) {
            ok = !same || own_source_exists(file_path, dataset, others, directory, dsize, why, size);
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

bool fc_h5_sources_exist(hid_t file, const char *file_path, hid_t dcpl, bool follow, struct fc_h5_names *others,
                         char *directory, size_t size, char *why, size_t why_size) {
    int indirect = fc_h5_indirect(dcpl);
    directory[0] = '\0';
    if (indirect != 0 && !follow) {
        snprintf(why, why_size,
                 indirect == 1 ? "a virtual dataset over other data, which is not followed"
                               : "its bytes are in external files, which are not followed");
        return false;
    }
    return indirect == 0   ? true
           : indirect == 1 ? virtual_sources_exist(file, file_path, dcpl, others, directory, size, why, why_size)
                           : external_files_exist(file_path, dcpl, others, directory, size, why, why_size);
}

/* ---- boxes for the parent ---- */

/* Opens the dataset so that names of external files are relative to its own file. @return it, or a negative number. */
static hid_t open_dataset(hid_t file, const fc_h5_scan *scan, char *why, size_t size) {
    char directory[4096];
    hid_t dataset = H5Dopen2(file, scan->dataset, H5P_DEFAULT);
    if (dataset < 0) {
        fc_h5_library_error(why, size);
        return dataset;
    }
    hid_t dcpl = H5Dget_create_plist(dataset);
    bool is_virtual = fc_h5_indirect(dcpl) == 1;
    bool ok = fc_h5_sources_exist(file, scan->inputs->path, dcpl, scan->follow_external, NULL, directory,
                                  sizeof directory, why, size);
    H5Pclose(dcpl);
    if (ok && !directory[0]) {
        return dataset;
    }
    if (ok && is_virtual) { /* the prefix does not apply to the sources, so change to the directory that their names are
                               relative to */
        if (chdir(directory) != 0) {
            snprintf(why, size, "%.500s cannot be entered", directory);
            H5Dclose(dataset);
            dataset = H5I_INVALID_HID;
        }
        return dataset;
    }
    /* The prefix is used only when the dataset is opened for the first time, so close it first. */
    H5Dclose(dataset);
    dataset = H5I_INVALID_HID;
    if (ok) {
        hid_t dapl = H5Pcreate(H5P_DATASET_ACCESS);
        H5Pset_efile_prefix(dapl, directory);
        dataset = H5Dopen2(file, scan->dataset, dapl);
        H5Pclose(dapl);
    }
    return dataset;
}

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

/* Reads the box in the type of the file. @return its bytes, or NULL. */
static unsigned char *read_box(const fc_h5_scan *scan, hid_t dataset, char *why, size_t size) {
    hid_t space = H5Dget_space(dataset), type = H5Dget_type(dataset), memory = H5I_INVALID_HID;
    unsigned char *bytes = fc_h5_child_calloc(1, scan->bytes + 1);
    hssize_t n = 0;
    bool ok = select_box(scan, space, &memory);
    if (ok) {
        /* The file may have changed since it was opened, so the box must still have the expected size. */
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
    const uint64_t block = 1 << 20;
    char why[600] = "";
    fc_h5_sink out = {.fd = fd};
    fc_h5_capture capture = {0};
    fc_h5_source source = {.path = scan->inputs->path,
                           .fd = scan->inputs->fd,
                           .st = &scan->inputs->st,
                           .may_open = scan->follow_external,
                           .capture = &capture,
                           .base = scan->inputs->span.offset};
    const uint64_t lent = scan->inputs->lent;
    source.asking = lent > 0 ? fc_h5_asking_new(&out, source.fd, lent) : NULL;
    fc_h5_walk walk = {.out = &out};
    unsigned char *bytes = NULL;
    snprintf(shared->where, sizeof shared->where, "dataset /%s", scan->dataset);
    hid_t fapl = fc_h5_vfd_fapl(scan->driver, &source);
    hid_t file = H5Fopen(source.path, H5F_ACC_RDONLY, fapl);
    hid_t dataset = H5I_INVALID_HID;
    if (file < 0) {
        fc_h5_library_error(why, sizeof why);
    } else {
        dataset = open_dataset(file, scan, why, sizeof why);
    }
    if (dataset >= 0) {
        bytes = read_box(scan, dataset, why, sizeof why);
        H5Dclose(dataset);
    }
    if (file >= 0) {
        H5Fclose(file);
    }
    H5Pclose(fapl);
    fc_h5_asking_free(source.asking);
    if (capture.errnum != 0) {
        free(bytes);
        bytes = NULL;
        fc_h5_scan_failure(&walk, FC_EIO, "dataset /%s: reading failed: %s", scan->dataset, strerror(capture.errnum));
    } else if (!bytes) {
        fc_h5_scan_failure(&walk, FC_ECORRUPT, "dataset /%s cannot be read (%s)", scan->dataset, why);
    }
    for (uint64_t at = 0; bytes && at < scan->bytes; at += block) {
        fc_h5_begin(&out, FC_H5_DATA);
        fc_h5_put_bytes(&out, bytes + at, scan->bytes - at < block ? scan->bytes - at : block);
        fc_h5_end(&out);
    }
    free(bytes);
    fc_h5_flush(&out);
    return out.failed;
}
