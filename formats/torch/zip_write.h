/*
 * The zip archive of torch.save, written: a whole `.pt` file, or an item of a DCP `.distcp`.
 *
 * Input: the pickle, other small records, and the sizes of the tensors' storages. Output: first where everything goes
 * (all from the archive's start), then, once the engine has written the data and their CRCs are known, the headers
 * around them. Byte for byte the layout of torch 2.15: stored records, data at multiples of 64 through the padding
 * field "FB", data descriptors, zip64 where numbers need it and its end record always. (torch.load can be told to
 * compute where data is instead of looking, so the layout is a contract.)
 *
 *     fc_torch_zip_begin(&zip, "archive", pickle, pickle_size, err)     zeroed before the first time
 *     fc_torch_zip_add_data(&zip, bytes, &offset, err) …                data/0, data/1 …; the engine fills them
 *     fc_torch_zip_end(&zip, err)                                       zip.length is known now
 *     fc_torch_zip_set_crc32(&zip, 0, crc) …                            after the data
 *     fc_torch_zip_write(&zip, fd, path, start, err)                    all bytes but the data
 */
#ifndef FSDPCKPT_FORMATS_TORCH_ZIP_WRITE_H
#define FSDPCKPT_FORMATS_TORCH_ZIP_WRITE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum { FC_TORCH_ALIGNMENT = 64 }; /**< of every record's bytes, from the start of the archive */

/** A record of the archive. */
typedef struct fc_torch_zip_record {
    const char *name;  /**< below the archive's folder; borrowed. NULL: data/<number> */
    const void *bytes; /**< borrowed; NULL: data that others write */
    uint64_t size;
    uint64_t header, data; /**< where they begin, from the start of the archive */
    uint64_t number;       /**< of the data */
    uint32_t crc32;
} fc_torch_zip_record;

/** An archive being laid out. Zeroed at first; may be begun anew after it was written. */
typedef struct fc_torch_zip {
    const char *folder; /**< borrowed */
    fc_torch_zip_record *records;
    size_t nrecords, capacity;
    size_t first_data; /**< index of data/0; data/n follow it without a gap */
    uint64_t ndata;
    uint64_t end;            /**< where the next record begins; of all records once it has ended */
    uint64_t directory_size; /**< once it has ended */
    uint64_t length;         /**< of the whole archive, once it has ended */
} fc_torch_zip;

/**
 * Starts an archive: data.pkl and the records that say how it is written.
 * @param folder of all records; the stem of the file's name where torch writes a file, else "archive". Borrowed.
 * @param pickle data.pkl; borrowed until the archive is written.
 */
fc_code fc_torch_zip_begin(fc_torch_zip *zip, const char *folder, const void *pickle, uint64_t size, fc_error *err);

/**
 * Makes room for the next data record. All of them come before other records.
 * @param offset receives where the bytes go, from the start of the archive.
 */
fc_code fc_torch_zip_add_data(fc_torch_zip *zip, uint64_t size, uint64_t *offset, fc_error *err);

/** Likewise a data record whose bytes are here. @param bytes borrowed until the archive is written. */
fc_code fc_torch_zip_add_bytes(fc_torch_zip *zip, const void *bytes, uint64_t size, fc_error *err);

/** Adds a small record. @param name, bytes borrowed until the archive is written. */
fc_code fc_torch_zip_add(fc_torch_zip *zip, const char *name, const void *bytes, uint64_t size, fc_error *err);

/** After the last record: adds those that torch writes at the end and sets `length`. */
fc_code fc_torch_zip_end(fc_torch_zip *zip, fc_error *err);

/** Sets the CRC-32 of data/`number`. 0, as at first, means that there is none: torch.load does not check it. */
static inline void fc_torch_zip_set_crc32(fc_torch_zip *zip, uint64_t number, uint32_t crc32) {
    zip->records[zip->first_data + number].crc32 = crc32;
}

/**
 * Writes all bytes of the archive but those of the data records.
 * @param path for messages; @param start where the archive begins in the file: a multiple of 64.
 */
fc_code fc_torch_zip_write(fc_torch_zip *zip, int fd, const char *path, uint64_t start, fc_error *err);

/** Likewise into memory of zip->length bytes. */
fc_code fc_torch_zip_write_memory(fc_torch_zip *zip, unsigned char *bytes, fc_error *err);

/** Frees what `zip` holds; a zeroed one is allowed. */
void fc_torch_zip_free(fc_torch_zip *zip);

#endif
