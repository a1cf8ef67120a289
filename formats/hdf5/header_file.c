/*
 * Reads object headers from a file: see header_file.h.
 */
#include "hdf5/header_file.h"

#include "base/checked.h"
#include "base/little.h"
#include "io/file.h"

const unsigned char *fc_h5_header_bytes(void *file, uint64_t at, uint64_t size) {
    fc_h5_header_file *f = file;
    if (size > FC_H5_VIEW || !fc_range_within(at, size, f->size)) {
        return NULL;
    }
    f->read = fc_pread_full(f->fd, f->viewed, (size_t)size, at, f->path, f->err);
    return f->read == FC_OK ? f->viewed : NULL;
}

bool fc_h5_root_field(fc_h5_header_file *file, fc_h5_attribute attribute, fc_h5_field *field) {
    const fc_h5_view view = {fc_h5_header_bytes, file};
    uint64_t root;
    return fc_h5_find_root(&view, &root) && fc_h5_find_field(&view, root, fc_h5_attribute_get(attribute)->name, field);
}

bool fc_h5_root_number(fc_h5_header_file *file, fc_h5_attribute attribute, uint64_t *value) {
    fc_h5_field field;
    const unsigned char *p = NULL;
    const bool found =
        fc_h5_root_field(file, attribute, &field) && (p = fc_h5_header_bytes(file, field.value, 8)) != NULL;
    if (found) {
        *value = fc_load_little(p, 8);
    }
    return found;
}
