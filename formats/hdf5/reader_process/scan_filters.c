/*
 * In the reader process: describes the filters of a dataset.
 */
#include "base/text.h"
#include "codec/filter.h"
#include "hdf5/reader_process/scan.h"

#include <stdio.h>

/* The filters in The HDF Group's registry that this program does not have. */
static const struct {
    H5Z_filter_t id;
    const char *name;
} registered[] = {
    {H5Z_FILTER_SZIP, "szip"},
    {305, "lzo"},
    {32002, "mafisc"},
    {32003, "snappy"},
    {32005, "apax"},
    {32006, "cbf"},
    {32007, "jpeg-xr"},
    {32009, "spdp"},
    {32010, "lpc-rice"},
    {32011, "ccsds-123"},
    {32012, "jpeg-ls"},
    {32013, "zfp"},
    {32014, "fpzip"},
    {32016, "b3d"},
    {32017, "sz"},
    {32018, "fcidecomp"},
    {32019, "jpeg"},
    {32020, "vbz"},
    {32021, "fapec"},
    {32022, "bitgroom"},
    {32023, "bitround"},
    {32024, "sz3"},
    {32025, "delta-rice"},
    {32027, "flac"},
    {32028, "sperr"},
    {32029, "terse/prolix"},
    {32030, "ffmpeg"},
};

/* @return the name of a filter, for files that do not contain one. */
static const char *filter_name(H5Z_filter_t id) {
    const fc_filter_info *info = fc_filter_find((uint32_t)id);
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++) {
        if (registered[i].id == id) {
            return registered[i].name;
        }
    }
    return info ? info->name : "an unregistered filter";
}

/* A filter of the pipeline as the file has it. */
typedef struct stored_filter {
    H5Z_filter_t id;
    unsigned values[16];
    size_t nvalues;
    char name[128];
    bool known;          /* the engine can undo it */
    const char *lacking; /* the Debian package that this build lacks for that; NULL: none */
} stored_filter;

static void read_filter(hid_t dcpl, int i, uint32_t element, stored_filter *f, fc_filter *filter) {
    unsigned flags, config = 0;
    *f = (stored_filter){.nvalues = sizeof f->values / sizeof *f->values};
    f->id = H5Pget_filter2(dcpl, (unsigned)i, &flags, &f->nvalues, f->values, sizeof f->name, f->name, &config);
    f->name[sizeof f->name - 1] = '\0';
    f->nvalues = f->nvalues < sizeof f->values / sizeof *f->values ? f->nvalues : sizeof f->values / sizeof *f->values;
    /* A filter may have been made for elements of another size than those of the dataset. */
    f->known = f->id >= 0 && fc_filter_parse((uint32_t)f->id, f->values, f->nvalues, element, filter);
    f->lacking = f->known ? fc_filter_lacking(filter) : NULL;
    f->known = f->known && !f->lacking;
}

static void refuse_filter(fc_h5_walk *walk, const fc_h5_dataset *d, const stored_filter *f) {
    const char *name = f->id >= 32000 || !f->name[0] ? filter_name(f->id) : f->name;
    char message[512], reason[128] = "which cannot be decoded:";
    if (f->lacking) {
        snprintf(reason, sizeof reason, "for which this build lacks a library: build it with the package %s, or",
                 f->lacking);
    } else if (walk->scan->plugins) {
        snprintf(reason, sizeof reason, "for which no plugin could be loaded:");
    }
    snprintf(message, sizeof message,
             "compressed with %s (HDF5 filter %d), %s rewrite it with gzip or uncompressed, as h5repack -f GZIP=1 does",
             name, (int)f->id, reason);
    fc_make_utf8(message);
    fc_h5_scan_without_plugin(walk, d->path, d->lists.data, d->lists.size, message);
}

bool fc_h5_scan_filters(fc_h5_walk *walk, hid_t dcpl, fc_h5_dataset *d, bool *library) {
    int n = H5Pget_nfilters(dcpl), compressions = 0;
    stored_filter lacking, f;
    bool lacks = false;
    *library = n > FC_H5_MAX_FILTERS || d->dtype == FC_OPAQUE;
    for (int i = 0; i < n; i++) {
        fc_filter filter;
        read_filter(dcpl, i, d->element, &f, &filter);
        if (f.id < 0 || H5Zfilter_avail(f.id) <= 0) {
            lacking = f;
            lacks = true;
        }
        compressions += f.known && fc_filter_compresses(&filter);
        *library |= !f.known || compressions > 1; /* the size between two compressions is unknown */
        if (f.known && i < FC_H5_MAX_FILTERS) {
            d->filters[d->nfilters++] = filter;
        }
    }
    if (*library && lacks) {
        refuse_filter(walk, d, &lacking);
        return false;
    }
    return n >= 0;
}
