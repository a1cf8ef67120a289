/*
 * An HDF5 file made without libhdf5: its headers as bytes, in the part of HDF5's format that our schema needs. libhdf5
 * needs some 60 µs for a dataset with its attributes; this needs less than one.
 *
 * The file is: the superblock (version 2), global heaps with the strings and the lists of mappings, object headers
 * (version 2) with what groups, tables and chunk indexes need, and then the data of the datasets, which the engine
 * writes: contiguous ones, then chunks. Names of the parts are those of the HDF5 File Format Specification 3.0.
 *
 * Order of calls: fc_h5_image_open; texts, mappings and datasets in any order; fc_h5_image_close_heap; groups, each
 * after its members; fc_h5_image_lay_out; fc_h5_image_create; chunks; fc_h5_image_write. fc_h5_image_free at any time.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_IMAGE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "hdf5/writer/buffer.h"

#include <hdf5.h>

enum {
    FC_H5_LARGE = 65536,      /**< data of this many bytes … */
    FC_H5_LARGE_ALIGN = 4096, /**< … starts at a multiple of this: O_DIRECT, reflinks, huge pages */
    FC_H5_SMALL_ALIGN = 64    /**< smaller data at a multiple of this: a cache line, as torch.save does */
};

#define FC_H5_UNDEFINED UINT64_MAX /**< HDF5's address of nothing */

/** A string, or a list of mappings, in a global heap. */
typedef struct fc_h5_heap_id {
    uint64_t collection; /**< its address; 0 for an empty string */
    uint32_t object, size;
} fc_h5_heap_id;

/** An object header among fc_h5_image.objects. */
typedef struct fc_h5_made_object {
    size_t start, end; /**< from its signature to its checksum */
} fc_h5_made_object;

struct fc_h5_chunk_index; /* image_chunks.h */

typedef struct fc_h5_image {
    const char *path;
    int fd; /**< the file, once something was written; -1 */
    fc_h5_buffer heap;
    uint64_t heap_at;     /**< address of heap.data; what was before it is in the file */
    uint64_t heap_sum;    /**< bare CRC-64 of that, the superblock taken as 0 */
    size_t collection;    /**< where the open collection begins in `heap`; SIZE_MAX: none is open */
    uint32_t next_object; /**< its next number */
    fc_h5_buffer objects;
    uint64_t objects_at; /**< its address; known when the heap is closed */
    fc_h5_made_object *made;
    size_t nmade, made_capacity;
    size_t *places; /**< where in `objects` the addresses of data are: relative to data_at until fc_h5_image_lay_out */
    size_t nplaces, places_capacity;
    size_t *inner; /**< where in `objects` addresses of its own parts are: relative to objects_at until then */
    size_t ninner, inner_capacity;
    struct fc_h5_chunk_index *indexes; /**< of chunks */
    size_t nindexes, indexes_capacity;
    unsigned children;           /**< of a node of them, at most */
    size_t extension;            /**< 1 + where the superblock extension is in `objects`; 0: there is none */
    uint64_t data_size;          /**< of all datasets so far, with gaps */
    bool data_large;             /**< some dataset starts at a page */
    uint64_t data_at, file_size; /**< the size grows with every chunk that gets its place */
    uint64_t root;               /**< address of the root group */
    size_t header_crc64;         /**< where its attribute's value is in `objects` */
    struct {
        unsigned char *bytes;
        size_t size;
    } types[FC_DTYPE_COUNT]; /**< datatype messages, made when first used */
} fc_h5_image;

/** Starts an image of the file that will be at `path` (borrowed). Nothing is written yet. */
void fc_h5_image_open(fc_h5_image *image, const char *path);
void fc_h5_image_free(fc_h5_image *image);

/** Puts bytes into the global heap; on failure (out of memory) the image remembers it. */
fc_h5_heap_id fc_h5_image_heap_add(fc_h5_image *image, const void *bytes, size_t size);

/** Writes what the heap has so far, if it is much. Only for a file without data: it exists from then on. */
fc_code fc_h5_image_flush_heap(fc_h5_image *image, fc_error *err);

/** No texts or mappings after this. Addresses of objects are known from here on. */
void fc_h5_image_close_heap(fc_h5_image *image);

/** Starts an object header. @param attributes room for this many before libhdf5 would store them elsewhere; 0: 8.
 *  @return what fc_h5_object_end takes, and where it is in `objects`. */
size_t fc_h5_object_begin(fc_h5_image *image, unsigned attributes);
void fc_h5_object_end(fc_h5_image *image, size_t start);

/** A message in `to`. @return what fc_h5_message_end takes. */
size_t fc_h5_message_begin(fc_h5_buffer *to, int type);
void fc_h5_message_end(fc_h5_buffer *to, size_t start);

/** Types of messages. */
enum {
    FC_H5_M_DATASPACE = 1,
    FC_H5_M_LINK_INFO = 2,
    FC_H5_M_DATATYPE = 3,
    FC_H5_M_FILL = 5,
    FC_H5_M_LINK = 6,
    FC_H5_M_FILES = 7,
    FC_H5_M_LAYOUT = 8,
    FC_H5_M_GROUP_INFO = 10,
    FC_H5_M_FILTERS = 11,
    FC_H5_M_ATTRIBUTE = 12,
    FC_H5_M_BTREE_K = 19
};

/** A fill value message. @param how when space is allocated and fill values are written. @param value may be NULL */
void fc_h5_image_fill(fc_h5_buffer *to, int how, const unsigned char *value, size_t size);

/** A layout message of contiguous bytes. */
void fc_h5_image_add_contiguous(fc_h5_buffer *to, uint64_t address, uint64_t bytes);

/** Adds the address of what is at `at` in `objects`. */
void fc_h5_image_add_inner(fc_h5_image *image, size_t at);

/** Dataspace and datatype of a dataset. The datatype is that of fc_h5_type_new. */
fc_code fc_h5_image_shape(fc_h5_image *image, fc_dtype dtype, int ndim, const int64_t *shape, fc_error *err);

/** The same, in the words of libhdf5: a datatype, which is closed, and one dimension. */
fc_code fc_h5_image_list_shape(fc_h5_image *image, hid_t type, uint64_t count, fc_error *err);

/** Fill value and layout of a contiguous dataset of `bytes`. @return where they will be, relative to the data. */
uint64_t fc_h5_image_contiguous(fc_h5_image *image, uint64_t bytes);

/** The same of a dataset whose bytes are at `address` among the headers. */
void fc_h5_image_among_headers(fc_h5_image *image, uint64_t address, uint64_t bytes);

/** The same of a virtual dataset with the list of mappings `list`. */
void fc_h5_image_virtual(fc_h5_image *image, fc_dtype dtype, const fc_h5_heap_id *list);

/** A member of a group. */
typedef struct fc_h5_member {
    const char *link;
    uint64_t address;
} fc_h5_member;

/** What a group becomes. */
typedef struct fc_h5_group {
    const fc_h5_member *members; /**< in their order of creation */
    size_t count;
    const unsigned char *messages; /**< its attributes, as messages */
    size_t size;
    unsigned attributes; /**< how many it may have before libhdf5 would store them elsewhere; 0: 8, as it does itself */
    uint64_t address;    /**< out */
    size_t messages_at;  /**< out: where `messages` is in fc_h5_image.objects */
} fc_h5_group;

fc_code fc_h5_image_group(fc_h5_image *image, fc_h5_group *group, fc_error *err);

/** Decides where the data begins: after the headers. `root`, `header_crc64` and all objects are there.
 *  @return FC_ENOMEM when the image is not complete. */
fc_code fc_h5_image_lay_out(fc_h5_image *image, fc_error *err);

/** Creates the file, as long as it is without chunks; its headers come with fc_h5_image_write. */
fc_code fc_h5_image_create(fc_h5_image *image, fc_error *err);

/** Sets the digest of the headers and all checksums, and writes the headers. A file with chunks gets its final length.
 *  @param header_crc64 receives that digest; may be NULL. */
fc_code fc_h5_image_write(fc_h5_image *image, uint64_t *header_crc64, fc_error *err);

#endif
