/*
 * Makes the headers of an HDF5 file without libhdf5, using only the parts of HDF5's format that our schema needs.
 * libhdf5 takes about 60 µs for a dataset with its attributes; this takes less than 1 µs.
 *
 * The file has, in this order: the superblock (version 2); global heaps with the strings and the lists of mappings;
 * object headers (version 2), with the parts of groups, the tables and the chunk indexes among them; and the data of
 * the datasets, which the engine writes: first contiguous datasets, then chunks. The parts have the names that the HDF5
 * File Format Specification 3.0 gives them.
 *
 * Order of calls: fc_h5_image_open; texts, mappings and datasets in any order; fc_h5_image_close_heap; groups, each
 * after its members; fc_h5_image_lay_out; fc_h5_image_create; chunks; fc_h5_image_write. Call fc_h5_image_free in any
 * case, even after a failure.
 */
#pragma once

#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "hdf5/writer/buffer.h"

#include <hdf5.h>

enum {
    FC_H5_LARGE = 65536,      /**< data of this many bytes … */
    FC_H5_LARGE_ALIGN = 4096, /**< … starts at a multiple of this: O_DIRECT, reflinks, huge pages */
    FC_H5_SMALL_ALIGN = 64    /**< smaller data at a multiple of this: a cache line, as torch.save does */
};

#define FC_H5_UNDEFINED UINT64_MAX /**< HDF5's undefined address */

/** A string, or a list of mappings, in a global heap. */
typedef struct fc_h5_heap_id {
    uint64_t collection; /**< the address of its collection; 0 for an empty string */
    uint32_t object, size;
} fc_h5_heap_id;

/** An object header in fc_h5_image.objects. */
typedef struct fc_h5_made_object {
    size_t start, end; /**< offsets of its signature and its checksum in `objects` */
} fc_h5_made_object;

struct fc_h5_chunk_index; /* image_chunks.h */

typedef struct fc_h5_image {
    const char *path;
    int fd; /**< -1 until something is written */
    fc_h5_buffer heap;
    uint64_t heap_at;     /**< address of heap.data in the file; everything before it was written */
    uint64_t heap_sum;    /**< bare CRC-64 of the written part, with zeros for the superblock */
    size_t collection;    /**< offset of the open collection in `heap`; SIZE_MAX: none is open */
    uint32_t next_object; /**< the next object number in the open collection */
    fc_h5_buffer objects;
    uint64_t objects_at; /**< address of `objects` in the file; known after the heap is closed */
    fc_h5_made_object *made;
    size_t nmade, made_capacity;
    size_t *places; /**< offsets in `objects` of the addresses of data, which are relative to data_at until
                       fc_h5_image_lay_out */
    size_t nplaces, places_capacity;
    size_t *inner; /**< offsets in `objects` of addresses of its own parts, which are relative to objects_at until
                      fc_h5_image_lay_out */
    size_t ninner, inner_capacity;
    struct fc_h5_chunk_index *indexes; /**< chunk indexes */
    size_t nindexes, indexes_capacity;
    unsigned children;             /**< the most children of a node of a chunk index */
    size_t extension;              /**< offset of the superblock extension in `objects`, plus 1; 0: none */
    uint64_t data_size;            /**< bytes of all datasets so far, including gaps */
    bool data_large;               /**< whether some dataset starts at a page boundary */
    uint64_t data_at, file_size;   /**< file_size grows with every chunk that is placed */
    uint64_t root;                 /**< address of the root group */
    size_t header_crc64;           /**< offset of the value of header_crc64 in `objects` */
    size_t tables_at, tables_size; /**< where the tables are in `objects`; 0 bytes: there are none */
    struct {
        unsigned char *bytes;
        size_t size;
    } types[FC_DTYPE_COUNT]; /**< datatype messages, made when first used */
} fc_h5_image;

/** Starts an image of the file that will be at `path` (borrowed). Nothing is written yet. */
void fc_h5_image_open(fc_h5_image *image, const char *path);
void fc_h5_image_free(fc_h5_image *image);

/** Adds bytes to the global heap. If memory runs out, the image records that. */
fc_h5_heap_id fc_h5_image_heap_add(fc_h5_image *image, const void *bytes, size_t size);

/** Writes the heap so far if it is large, which creates the file. Only for files without data. */
fc_code fc_h5_image_flush_heap(fc_h5_image *image, fc_error *err);

/** Ends the heap: no texts or mappings may follow. From now on, addresses of objects are known. */
void fc_h5_image_close_heap(fc_h5_image *image);

/** Starts an object header. @return its offset in `objects`, for fc_h5_object_end. */
size_t fc_h5_object_begin(fc_h5_image *image);
void fc_h5_object_end(fc_h5_image *image, size_t start);

/** Starts a message in `to`. @return its start, for fc_h5_message_end. */
size_t fc_h5_message_begin(fc_h5_buffer *to, int type);
void fc_h5_message_end(fc_h5_buffer *to, size_t start);

/**
 * Adds the message that says that the attributes are in the object header. It must precede them: libhdf5 counts no
 * attributes without it, and some readers expect at least 28 bytes from its start on.
 */
void fc_h5_attributes_begin(fc_h5_buffer *to);

/** Message types. */
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
    FC_H5_M_BTREE_K = 19,
    FC_H5_M_ATTRIBUTE_INFO = 21
};

/**
 * Adds a fill value message. @param how when space is allocated and fill values are written. @param value may be NULL
 */
void fc_h5_image_fill(fc_h5_buffer *to, int how, const unsigned char *value, size_t size);

/** Adds a layout message of contiguous bytes. */
void fc_h5_image_add_contiguous(fc_h5_buffer *to, uint64_t address, uint64_t bytes);

/** Adds the address of the part at offset `at` in `objects`. */
void fc_h5_image_add_inner(fc_h5_image *image, size_t at);

/** Adds the dataspace and datatype of a dataset. The datatype is that of fc_h5_type_new. */
fc_code fc_h5_image_shape(fc_h5_image *image, fc_dtype dtype, int ndim, const int64_t *shape, fc_error *err);

/** Like fc_h5_image_shape, with one dimension and a datatype of libhdf5, which it closes. */
fc_code fc_h5_image_list_shape(fc_h5_image *image, hid_t type, uint64_t count, fc_error *err);

/**
 * Adds the fill value and layout of a contiguous dataset of `bytes` bytes. @return the offset in `objects` of their
 * address, which is known after fc_h5_image_lay_out; SIZE_MAX if there are no bytes.
 */
size_t fc_h5_image_contiguous(fc_h5_image *image, uint64_t bytes);

/** Like fc_h5_image_contiguous, for a dataset whose bytes are at `address`, among the headers. */
void fc_h5_image_among_headers(fc_h5_image *image, uint64_t address, uint64_t bytes);

/** Like fc_h5_image_contiguous, for a virtual dataset with the list of mappings `list`. */
void fc_h5_image_virtual(fc_h5_image *image, fc_dtype dtype, const fc_h5_heap_id *list);

/** A member of a group. */
typedef struct fc_h5_member {
    const char *link;
    uint64_t address;
} fc_h5_member;

/** A group to make. */
typedef struct fc_h5_group {
    const fc_h5_member *members; /**< in the order of creation */
    size_t count;
    const unsigned char *messages; /**< its attributes, as messages */
    size_t size;
    uint64_t address;   /**< out: its address in the file */
    size_t messages_at; /**< out: offset of `messages` in fc_h5_image.objects */
} fc_h5_group;

fc_code fc_h5_image_group(fc_h5_image *image, fc_h5_group *group, fc_error *err);

/** Call it before what was added is read. @return FC_ENOMEM if memory ran out, so that something is missing. */
fc_code fc_h5_image_check(const fc_h5_image *image, fc_error *err);

/** Sets the start of the data, after the headers. `root`, `header_crc64` and all objects must be complete.
 *  @return FC_ENOMEM if the image is incomplete. */
fc_code fc_h5_image_lay_out(fc_h5_image *image, fc_error *err);

/** Creates the file with its length without chunks. fc_h5_image_write writes its headers. */
fc_code fc_h5_image_create(fc_h5_image *image, fc_error *err);

/** Sets the digest of the headers and all checksums, and writes the headers. A file with chunks gets its final length.
 *  @param header_crc64 receives that digest; may be NULL. */
fc_code fc_h5_image_write(fc_h5_image *image, uint64_t *header_crc64, fc_error *err);
