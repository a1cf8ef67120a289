/*
 * Writes the zip archive of torch.save: a whole `.pt` file, or an item of a DCP `.distcp`.
 *
 * The caller gives the pickle, other small records, and the sizes of the tensors' storages. This first computes the
 * location of everything, from the start of the archive. Then it writes the headers around the data: all at once when
 * the engine has written the data and its CRCs are known, or those between two tensors as soon as the first is written.
 * The layout is that of torch 2.15 byte for byte: stored records, data at multiples of
 * 64 through the padding field "FB", data descriptors, zip64 fields if numbers need them, and always a zip64 end
 * record. (torch.load has an option to compute the location of data instead of reading it, so the layout is a
 * contract.)
 *
 *     fc_torch_zip_begin(&zip, "archive", pickle, pickle_size, err)     zero `zip` before the first use
 *     fc_torch_zip_add_data(&zip, bytes, &offset, err) …                data/0, data/1 …; the engine fills them
 *     fc_torch_zip_end(&zip, err)                                       sets zip.length
 *     fc_torch_zip_set_crc32(&zip, 0, crc) …                            after the data was written
 *     fc_torch_zip_write(&zip, fd, path, start, err)                    writes everything except the data
 *
 * A file with many tensors, instead of the last two:
 *
 *     fc_torch_zip_write_first(&zip, fd, path, err)                     writes what is before the data
 *     fc_torch_zip_set_crc32(&zip, 0, crc)                              after data/0 was written
 *     fc_torch_zip_write_after(&zip, 0, fd, path, err) …                writes what is between it and the next data
 *     fc_torch_zip_write_last(&zip, fd, path, err)                      when all CRCs are set: writes the directory
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum {
    FC_TORCH_ALIGNMENT = 64
}; /**< every record's bytes begin at a multiple of this, from the start of the archive */

/** A record of the archive. */
typedef struct fc_torch_zip_record {
    const char *name;  /**< within the archive's folder; borrowed. NULL: data/<number> */
    const void *bytes; /**< borrowed; NULL: the caller writes the data */
    uint64_t size;
    uint64_t header, data; /**< offsets of the local header and of the bytes in the archive */
    uint64_t number;       /**< the number in data/<number> */
    uint32_t crc32;
} fc_torch_zip_record;

/** An archive under construction. Start with zeros; it can be reused after it was written. */
typedef struct fc_torch_zip {
    const char *folder; /**< borrowed */
    fc_torch_zip_record *records;
    size_t nrecords, capacity;
    size_t first_data; /**< index of data/0; data/1, … follow it */
    uint64_t ndata;
    uint64_t end;            /**< where the next record begins; after fc_torch_zip_end, the end of all records */
    uint64_t directory_size; /**< in bytes; set by fc_torch_zip_end */
    uint64_t length;         /**< size of the whole archive in bytes; set by fc_torch_zip_end */
} fc_torch_zip;

/**
 * Starts an archive with data.pkl and the records that describe the archive itself.
 * @param folder the folder of all records: the stem of a file's name, as in torch, or "archive". Borrowed.
 * @param pickle data.pkl; borrowed until the archive is written.
 */
fc_code fc_torch_zip_begin(fc_torch_zip *zip, const char *folder, const void *pickle, uint64_t size, fc_error *err);

/**
 * Makes room for the next data record. Data records come before all others.
 * @param offset receives the offset of the bytes in the archive.
 */
fc_code fc_torch_zip_add_data(fc_torch_zip *zip, uint64_t size, uint64_t *offset, fc_error *err);

/** Adds a data record whose bytes are given. @param bytes borrowed until the archive is written. */
fc_code fc_torch_zip_add_bytes(fc_torch_zip *zip, const void *bytes, uint64_t size, fc_error *err);

/** Adds a small record. @param name, bytes borrowed until the archive is written. */
fc_code fc_torch_zip_add(fc_torch_zip *zip, const char *name, const void *bytes, uint64_t size, fc_error *err);

/** Ends the archive: adds the records that torch writes last, and sets `length`. */
fc_code fc_torch_zip_end(fc_torch_zip *zip, fc_error *err);

/** Sets the CRC-32 of data/`number`. 0, the default, means no CRC; then torch.load does not check it. */
static inline void fc_torch_zip_set_crc32(fc_torch_zip *zip, uint64_t number, uint32_t crc32) {
    zip->records[zip->first_data + number].crc32 = crc32;
}

/**
 * Writes the archive except for the bytes of the data records.
 * @param path for messages. @param start offset of the archive in the file, a multiple of 64.
 */
fc_code fc_torch_zip_write(fc_torch_zip *zip, int fd, const char *path, uint64_t start, fc_error *err);

/** Likewise writes to memory of zip->length bytes. */
fc_code fc_torch_zip_write_memory(fc_torch_zip *zip, unsigned char *bytes, fc_error *err);

/**
 * Writes an archive at the start of a file in pieces: what is before the first data that the caller writes; what
 * follows data/`number`, whose CRC is set and which is not empty; and, when all CRCs are set, the rest. Each byte is in
 * one piece. Several threads may write what follows different data.
 */
fc_code fc_torch_zip_write_first(const fc_torch_zip *zip, int fd, const char *path, fc_error *err);
fc_code fc_torch_zip_write_after(const fc_torch_zip *zip, uint64_t number, int fd, const char *path, fc_error *err);
fc_code fc_torch_zip_write_last(fc_torch_zip *zip, int fd, const char *path, fc_error *err);

/** Frees the content of `zip`, which may be zeroed. */
void fc_torch_zip_free(fc_torch_zip *zip);
