/*
 * Lists the links of a group before any of them is followed.
 *
 * libhdf5 finds the links of a large group in the order of the hashes of their names, so it comes back to each block of
 * the group's heap thousands of times. With its usual cache of 2 MiB, the blocks of 100,000 links are read and summed
 * again for most of them. A cache that is large while objects are opened and closed is no remedy: libhdf5 1.10 looks
 * through all of it each time that an object is closed. So it is large only while links are listed.
 */
#include "hdf5/reader_process/links.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/child.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = 4096, LISTING_CACHE = 64 << 20 };

static herr_t add_link(hid_t group, const char *name, const H5L_info_t *info, void *context) {
    fc_h5_links *links = context;
    (void)group;
    if (!fc_grow(&links->items, &links->capacity, links->count + 1, sizeof *links->items)) {
        fc_h5_child_no_memory();
    }
    fc_h5_link *link = &links->items[links->count++];
    link->name = strcpy(fc_h5_child_calloc(strlen(name) + 1, 1), name);
    link->type = info->type;
    link->address = info->type == H5L_TYPE_HARD ? info->u.address : HADDR_UNDEF;
    link->order = info->corder_valid ? info->corder : 0;
    return 0;
}

static int compare_link_orders(const void *a, const void *b) {
    const fc_h5_link *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

static int compare_link_names(const void *a, const void *b) {
    return strcmp(((const fc_h5_link *)a)->name, ((const fc_h5_link *)b)->name);
}

/* Whether the group keeps its links in the order of their creation. */
static bool keeps_order(hid_t group) {
    unsigned order = 0;
    const hid_t plist = H5Gget_create_plist(group);
    if (plist >= 0) {
        H5Pget_link_creation_order(plist, &order);
        H5Pclose(plist);
    }
    return (order & H5P_CRT_ORDER_TRACKED) != 0;
}

static bool has_many(hid_t group) {
    H5G_info_t info;
    return H5Gget_info(group, &info) >= 0 && info.nlinks > MANY;
}

/* Sets the size of the cache of headers. @return that before; 0 if it was left alone */
static size_t set_cache(hid_t file, size_t size) {
    H5AC_cache_config_t cache = {.version = H5AC__CURR_CACHE_CONFIG_VERSION};
    if (H5Fget_mdc_config(file, &cache) < 0) {
        return 0;
    }
    const size_t before = cache.initial_size;
    cache.set_initial_size = true;
    cache.initial_size = size;
    cache.max_size = cache.max_size < size ? size : cache.max_size;
    return H5Fset_mdc_config(file, &cache) < 0 ? 0 : before;
}

herr_t fc_h5_links_read(hid_t file, hid_t group, fc_h5_links *links) {
    hsize_t at = 0;
    const bool ordered = keeps_order(group);
    const size_t before = has_many(group) ? set_cache(file, LISTING_CACHE) : 0;
    *links = (fc_h5_links){0};
    const herr_t rc =
        H5Literate(group, ordered ? H5_INDEX_CRT_ORDER : H5_INDEX_NAME, H5_ITER_NATIVE, &at, add_link, links);
    if (before > 0) {
        set_cache(file, before);
    }
    fc_sort_items(links->items, links->count, sizeof *links->items, ordered ? compare_link_orders : compare_link_names);
    return rc;
}

void fc_h5_links_ask(const fc_h5_source *source, const fc_h5_links *links, size_t from) {
    uint64_t places[FC_H5_MOST_PARTS];
    size_t count = 0;
    if (!source->asking || from % FC_H5_MOST_PARTS != 0) {
        return;
    }
    for (size_t i = from; i < links->count && i < from + FC_H5_MOST_PARTS; i++) {
        const fc_h5_link *link = &links->items[i];
        if (link->type != H5L_TYPE_HARD || !fc_add_u64(source->base, link->address, &places[count])) {
            continue;
        }
        count++;
    }
    (void)fc_h5_ask_ahead(source->asking, places, count);
}

void fc_h5_links_free(fc_h5_links *links) {
    for (size_t i = 0; i < links->count; i++) {
        free(links->items[i].name);
    }
    free(links->items);
    *links = (fc_h5_links){0};
}
