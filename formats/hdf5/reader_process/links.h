/*
 * In the reader process: the links of a group.
 */
#pragma once

#include "hdf5/reader_process/vfd.h"

typedef struct fc_h5_link {
    char *name; /**< from malloc */
    H5L_type_t type;
    haddr_t address; /**< of a hard link's object */
    int64_t order;   /**< of creation */
} fc_h5_link;

typedef struct fc_h5_links {
    fc_h5_link *items; /**< from malloc */
    size_t count, capacity;
} fc_h5_links;

/**
 * Lists the links of a group in the order of their creation, if the group tracks it, or of their names. The list must
 * be freed even after a failure.
 */
herr_t fc_h5_links_read(hid_t file, hid_t group, fc_h5_links *links);
/**
 * Before link number `from` is followed: asks for the headers of the objects that come next, if the file is on a
 * server.
 */
void fc_h5_links_ask(const fc_h5_source *source, const fc_h5_links *links, size_t from);
void fc_h5_links_free(fc_h5_links *links);
