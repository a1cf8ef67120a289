/*
 * Writes the archive of torch.save: first the location of each record, then the headers, each byte once. See write.h.
 *
 * The layout follows PyTorchStreamWriter and its miniz: a local header has no sizes and no CRC; these are in a data
 * descriptor after the bytes. An empty record has no descriptor. A number that does not fit in 32 bits is in a zip64
 * field of both headers, and then the sizes in the descriptor have 64 bits, too.
 */
#include "torch/zip/write.h"

#include "base/checked.h"
#include "base/crc.h"
#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/staged_objects.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    LOCAL_SIZE = 30,
    CENTRAL_SIZE = 46,
    END_SIZE = 22,
    LOCATOR_SIZE = 20,
    END64_SIZE = 56,
    TAG_SIZE = 4, /* the tag and the length of an extra field */
    DESCRIPTOR_SIZE = 16,
    DESCRIPTOR64_SIZE = 24,
    MAX_NAME = 512,
    ID_SIZE = 40, /* .data/serialization_id: two numbers of 20 digits */
    BUFFER = 64 << 10,
    SMALL_BUFFER = 4 << 10, /* has room for any header */
};

enum { FLAG_DESCRIPTOR = 1 << 3, FLAG_UTF8 = 1 << 11, VERSION_MADE = 0x031e, VERSION_ZIP64 = 45 };

static const char id_name[] = ".data/serialization_id";
static const char no_id[ID_SIZE] = {0}; /* a placeholder until the id is made, which depends on the CRCs of the data */

/* A buffered output. Data that others write interrupts it. */
typedef struct output {
    const char *path;
    int fd;
    uint64_t at; /* offset of the buffer's first byte in the file */
    size_t used, room;
    unsigned char *buffer; /* of `room` bytes */
    unsigned char *memory; /* NULL: the output is the file */
} output;

static uint64_t narrow_number(uint64_t value) {
    return value < UINT32_MAX ? value : UINT32_MAX;
}

static bool is_wide(uint64_t value) {
    return value >= UINT32_MAX;
}

/* Writes the name of a record: "archive/data.pkl" or "archive/data/7". @return its length */
static size_t full_name(const fc_torch_zip *zip, const fc_torch_zip_record *record, char name[2 * MAX_NAME]) {
    const size_t size = 2 * (size_t)MAX_NAME;
    return (size_t)(record->name ? snprintf(name, size, "%s/%s", zip->folder, record->name)
                                 : snprintf(name, size, "%s/data/%" PRIu64, zip->folder, record->number));
}

/* @return the size of the zip64 field, which has the numbers that do not fit in 32 bits. */
static size_t extra64_size(const fc_torch_zip_record *record) {
    size_t numbers = (is_wide(record->size) ? 2u : 0u) + (is_wide(record->header) ? 1u : 0u);
    return numbers ? TAG_SIZE + numbers * 8 : 0;
}

static size_t descriptor_size(const fc_torch_zip_record *record) {
    return record->size == 0 ? 0 : extra64_size(record) ? DESCRIPTOR64_SIZE : DESCRIPTOR_SIZE;
}

static fc_code too_large(fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED, "the torch.save archive would be too large");
}

/* Lays out the next record after the others. */
static fc_code add_record(fc_torch_zip *zip, const fc_torch_zip_record *record, fc_error *err) {
    char name[2 * MAX_NAME];
    FC_NEED(fc_grow(&zip->records, &zip->capacity, zip->nrecords + 1, sizeof *zip->records), err, NULL);
    fc_torch_zip_record *r = &zip->records[zip->nrecords];
    *r = *record;
    r->header = zip->end;
    size_t len = full_name(zip, r, name);
    uint64_t data = r->header + LOCAL_SIZE + len + extra64_size(r) + TAG_SIZE;
    r->data = (data + FC_TORCH_ALIGNMENT - 1) / FC_TORCH_ALIGNMENT * FC_TORCH_ALIGNMENT;
    /* This leaves room for headers and the directory, so that nothing overflows. */
    if (!fc_add_u64(r->data, r->size, &zip->end) || zip->end > (uint64_t)INT64_MAX / 2) {
        return too_large(err);
    }
    zip->end += descriptor_size(r);
    zip->directory_size += CENTRAL_SIZE + len + extra64_size(r);
    zip->nrecords++;
    return FC_OK;
}

fc_code fc_torch_zip_add(fc_torch_zip *zip, const char *name, const void *bytes, uint64_t size, fc_error *err) {
    if (strlen(name) >= MAX_NAME) {
        return fc_fail(err, FC_EUNSUPPORTED, "a record's name of %zu bytes is too long", strlen(name));
    }
    fc_torch_zip_record record = {.name = name, .bytes = bytes, .size = size};
    record.crc32 = fc_crc32(0, bytes, (size_t)size);
    return add_record(zip, &record, err);
}

static fc_code add_data(fc_torch_zip *zip, fc_torch_zip_record record, fc_error *err) {
    record.number = zip->ndata;
    fc_code rc = add_record(zip, &record, err);
    zip->ndata += rc == FC_OK;
    return rc;
}

fc_code fc_torch_zip_add_data(fc_torch_zip *zip, uint64_t size, uint64_t *offset, fc_error *err) {
    FC_TRY(add_data(zip, (fc_torch_zip_record){.size = size}, err));
    *offset = zip->records[zip->nrecords - 1].data;
    return FC_OK;
}

fc_code fc_torch_zip_add_bytes(fc_torch_zip *zip, const void *bytes, uint64_t size, fc_error *err) {
    uint32_t crc = fc_crc32(0, bytes, (size_t)size);
    return add_data(zip, (fc_torch_zip_record){.bytes = bytes, .size = size, .crc32 = crc}, err);
}

fc_code fc_torch_zip_begin(fc_torch_zip *zip, const char *folder, const void *pickle, uint64_t size, fc_error *err) {
    if (strlen(folder) >= MAX_NAME) {
        return fc_fail(err, FC_EUNSUPPORTED, "the name of the archive's folder, %zu bytes, is too long",
                       strlen(folder));
    }
    fc_torch_zip_record *records = zip->records;
    *zip = (fc_torch_zip){.folder = folder, .records = records, .capacity = zip->capacity};
    fc_code rc;
    FC_TRY_GOTO(fc_torch_zip_add(zip, "data.pkl", pickle, size, err), rc, out);
    FC_TRY_GOTO(fc_torch_zip_add(zip, ".format_version", "1", 1, err), rc, out);
    FC_TRY_GOTO(fc_torch_zip_add(zip, ".storage_alignment", "64", 2, err), rc, out);
    rc = fc_torch_zip_add(zip, "byteorder", "little", 6, err);
out:
    zip->first_data = zip->nrecords;
    return rc;
}

fc_code fc_torch_zip_end(fc_torch_zip *zip, fc_error *err) {
    fc_code rc;
    FC_TRY_GOTO(fc_torch_zip_add(zip, "version", "3\n", 2, err), rc, out);
    rc = fc_torch_zip_add(zip, id_name, no_id, ID_SIZE, err);
out:
    zip->length = zip->end + zip->directory_size + END64_SIZE + LOCATOR_SIZE + END_SIZE;
    return rc;
}

/*
 * torch's id consists of hashes of the names and of the CRCs, so equal records have the same id. Ours is a different
 * number, because std::hash is not specified; nothing compares it with the content.
 */
static void make_id(const fc_torch_zip *zip, char id[ID_SIZE + 1]) {
    char name[2 * MAX_NAME];
    uint64_t names = 0, contents = 0;
    for (size_t i = 0; i + 1 < zip->nrecords; i++) {
        names = XXH3_64bits_withSeed(name, full_name(zip, &zip->records[i], name), names);
        unsigned char crc[4];
        fc_store_little(crc, zip->records[i].crc32, 4);
        contents = XXH3_64bits_withSeed(crc, sizeof crc, contents);
    }
    snprintf(id, ID_SIZE + 1, "%020" PRIu64 "%020" PRIu64, names, contents);
}

/* Writes bytes that will not change any more. */
static fc_code put_out(output *out, const void *bytes, size_t size, fc_error *err) {
    fc_code rc = FC_OK;
    if (out->memory && size > 0) {
        memcpy(out->memory + out->at, bytes, size);
    } else if (size > 0) {
        rc = fc_pwrite_full(out->fd, bytes, size, out->at, out->path, err);
        rc = rc == FC_OK ? fc_staged_final(out->path, out->at, size, err) : rc;
    }
    out->at += size;
    return rc;
}

static fc_code flush_headers(output *out, fc_error *err) {
    fc_code rc = put_out(out, out->buffer, out->used, err);
    out->used = 0;
    return rc;
}

/* @return room for `size` bytes (at most SMALL_BUFFER) in the buffer, or NULL after a failed write. */
static unsigned char *reserve_bytes(output *out, size_t size, fc_error *err) {
    if (out->used + size > out->room && flush_headers(out, err) != FC_OK) {
        return NULL;
    }
    unsigned char *p = out->buffer + out->used;
    out->used += size;
    return p;
}

/* @param stored the second size, which miniz does not know yet when it writes a local header. */
static void put_extra64(unsigned char *p, const fc_torch_zip_record *r, uint64_t stored) {
    fc_store_little(p, 1, 2);
    fc_store_little(p + 2, extra64_size(r) - TAG_SIZE, 2);
    p += TAG_SIZE;
    if (is_wide(r->size)) {
        fc_store_little(p, r->size, 8);
        fc_store_little(p + 8, stored, 8);
        p += 16;
    }
    if (is_wide(r->header)) {
        fc_store_little(p, r->header, 8);
    }
}

static unsigned flags_of(const fc_torch_zip_record *r) {
    return FLAG_UTF8 | (r->size ? FLAG_DESCRIPTOR : 0u);
}

/* Writes the local header, with the padding that aligns the bytes. */
static fc_code write_local(const fc_torch_zip *zip, const fc_torch_zip_record *r, output *out, fc_error *err) {
    char name[2 * MAX_NAME];
    size_t len = full_name(zip, r, name), extra64 = extra64_size(r);
    size_t size = (size_t)(r->data - r->header), extra = size - LOCAL_SIZE - len;
    unsigned char *p = reserve_bytes(out, size, err);
    if (!p) {
        return FC_EIO;
    }
    memset(p, 0, LOCAL_SIZE);
    fc_store_little(p, 0x04034b50, 4);
    fc_store_little(p + 6, flags_of(r), 2);
    fc_store_little(p + 26, len, 2);
    fc_store_little(p + 28, extra, 2);
    memcpy(p + LOCAL_SIZE, name, len);
    p += LOCAL_SIZE + len;
    if (extra64) {
        put_extra64(p, r, 0);
        p += extra64;
    }
    size_t padding = extra - extra64 - TAG_SIZE;
    fc_store_little(p, 0x4246, 2);
    fc_store_little(p + 2, padding, 2);
    memset(p + TAG_SIZE, 'Z', padding);
    return FC_OK;
}

static fc_code write_record_bytes(const void *bytes, uint64_t size, output *out, fc_error *err) {
    if (size == 0) {
        return FC_OK;
    }
    if (size <= out->room / 2) {
        unsigned char *p = reserve_bytes(out, (size_t)size, err);
        if (!p) {
            return FC_EIO;
        }
        memcpy(p, bytes, (size_t)size);
        return FC_OK;
    }
    FC_TRY(flush_headers(out, err));
    return put_out(out, bytes, (size_t)size, err);
}

static fc_code write_descriptor(const fc_torch_zip_record *r, output *out, fc_error *err) {
    size_t size = descriptor_size(r);
    int wide = size == DESCRIPTOR64_SIZE ? 8 : 4;
    unsigned char *p = reserve_bytes(out, size, err);
    if (!p) {
        return FC_EIO;
    }
    if (size) {
        fc_store_little(p, 0x08074b50, 4);
        fc_store_little(p + 4, r->crc32, 4);
        fc_store_little(p + 8, r->size, wide);
        fc_store_little(p + 8 + wide, r->size, wide);
    }
    return FC_OK;
}

/* Whether the caller writes the bytes of a record. */
static bool is_data(const fc_torch_zip_record *r) {
    return !r->bytes && r->size > 0;
}

/*
 * Writes the records from number `*at` on, up to the bytes of the next one that the caller writes, or else up to the
 * id, which depends on the CRCs of all others. `*at` receives the number of that record.
 */
static fc_code write_records(const fc_torch_zip *zip, size_t *at, output *out, fc_error *err) {
    for (; *at + 1 < zip->nrecords; (*at)++) {
        const fc_torch_zip_record *r = &zip->records[*at];
        FC_TRY(write_local(zip, r, out, err));
        if (is_data(r)) {
            return FC_OK;
        }
        FC_TRY(write_record_bytes(r->bytes, r->size, out, err));
        FC_TRY(write_descriptor(r, out, err));
    }
    return FC_OK;
}

/* Writes what follows the bytes of record `*at`, as write_records does. */
static fc_code write_after(const fc_torch_zip *zip, size_t *at, output *out, fc_error *err) {
    FC_TRY(write_descriptor(&zip->records[(*at)++], out, err));
    return write_records(zip, at, out, err);
}

static fc_code write_central(const fc_torch_zip *zip, const fc_torch_zip_record *r, output *out, fc_error *err) {
    char name[2 * MAX_NAME];
    size_t len = full_name(zip, r, name), extra64 = extra64_size(r);
    unsigned char *p = reserve_bytes(out, CENTRAL_SIZE + len + extra64, err);
    if (!p) {
        return FC_EIO;
    }
    memset(p, 0, CENTRAL_SIZE);
    fc_store_little(p, 0x02014b50, 4);
    fc_store_little(p + 8, flags_of(r), 2);
    fc_store_little(p + 16, r->crc32, 4);
    fc_store_little(p + 20, narrow_number(r->size), 4);
    fc_store_little(p + 24, narrow_number(r->size), 4);
    fc_store_little(p + 28, len, 2);
    fc_store_little(p + 30, extra64, 2);
    fc_store_little(p + 42, narrow_number(r->header), 4);
    memcpy(p + CENTRAL_SIZE, name, len);
    if (extra64) {
        put_extra64(p + CENTRAL_SIZE + len, r, r->size);
    }
    return FC_OK;
}

/* Writes the end records, with 64 and 32 bits. torch always writes both. */
static fc_code write_end(const fc_torch_zip *zip, output *out, fc_error *err) {
    unsigned char *p = reserve_bytes(out, END64_SIZE + LOCATOR_SIZE + END_SIZE, err);
    if (!p) {
        return FC_EIO;
    }
    memset(p, 0, END64_SIZE + LOCATOR_SIZE + END_SIZE);
    fc_store_little(p, 0x06064b50, 4);
    fc_store_little(p + 4, END64_SIZE - 12, 8);
    fc_store_little(p + 12, VERSION_MADE, 2);
    fc_store_little(p + 14, VERSION_ZIP64, 2);
    fc_store_little(p + 24, zip->nrecords, 8);
    fc_store_little(p + 32, zip->nrecords, 8);
    fc_store_little(p + 40, zip->directory_size, 8);
    fc_store_little(p + 48, zip->end, 8);
    p += END64_SIZE;
    fc_store_little(p, 0x07064b50, 4);
    fc_store_little(p + 8, zip->end + zip->directory_size, 8);
    fc_store_little(p + 16, 1, 4);
    p += LOCATOR_SIZE;
    uint64_t count = zip->nrecords < UINT16_MAX ? zip->nrecords : UINT16_MAX;
    fc_store_little(p, 0x06054b50, 4);
    fc_store_little(p + 8, count, 2);
    fc_store_little(p + 10, count, 2);
    fc_store_little(p + 12, narrow_number(zip->directory_size), 4);
    fc_store_little(p + 16, narrow_number(zip->end), 4);
    return FC_OK;
}

/* Writes the id, then the directory. */
static fc_code write_directory(fc_torch_zip *zip, output *out, fc_error *err) {
    char id[ID_SIZE + 1];
    fc_torch_zip_record *last = &zip->records[zip->nrecords - 1]; /* the id, which can be computed now */
    make_id(zip, id);
    last->bytes = id;
    last->crc32 = fc_crc32(0, id, ID_SIZE);
    fc_code rc;
    FC_TRY_GOTO(write_local(zip, last, out, err), rc, out);
    FC_TRY_GOTO(write_record_bytes(id, ID_SIZE, out, err), rc, out);
    FC_TRY_GOTO(write_descriptor(last, out, err), rc, out);
    for (size_t i = 0; i < zip->nrecords; i++) {
        FC_TRY_GOTO(write_central(zip, &zip->records[i], out, err), rc, out);
    }
    rc = write_end(zip, out, err);
out:
    last->bytes = no_id;
    return rc;
}

static fc_code begin_output(output *out, fc_error *err) {
    out->buffer = malloc(BUFFER);
    out->room = BUFFER;
    FC_NEED(out->buffer, err, out->path);
    return FC_OK;
}

static fc_code end_output(output *out, fc_code rc, fc_error *err) {
    rc = rc == FC_OK ? flush_headers(out, err) : rc;
    free(out->buffer);
    return rc;
}

static fc_code write_all(fc_torch_zip *zip, output *out, fc_error *err) {
    size_t at = 0;
    fc_code rc;
    FC_TRY(begin_output(out, err));
    FC_TRY_GOTO(write_records(zip, &at, out, err), rc, out);
    while (at + 1 < zip->nrecords) {
        FC_TRY_GOTO(flush_headers(out, err), rc, out);
        out->at += zip->records[at].size;
        FC_TRY_GOTO(write_after(zip, &at, out, err), rc, out);
    }
    rc = write_directory(zip, out, err);
out:
    return end_output(out, rc, err);
}

fc_code fc_torch_zip_write(fc_torch_zip *zip, int fd, const char *path, uint64_t start, fc_error *err) {
    output out = {.path = path, .fd = fd, .at = start};
    return write_all(zip, &out, err);
}

fc_code fc_torch_zip_write_memory(fc_torch_zip *zip, unsigned char *bytes, fc_error *err) {
    output out = {.path = "an archive in memory", .fd = -1, .memory = bytes};
    return write_all(zip, &out, err);
}

fc_code fc_torch_zip_write_first(const fc_torch_zip *zip, int fd, const char *path, fc_error *err) {
    output out = {.path = path, .fd = fd};
    size_t at = 0;
    FC_TRY(begin_output(&out, err));
    return end_output(&out, write_records(zip, &at, &out, err), err);
}

fc_code fc_torch_zip_write_after(const fc_torch_zip *zip, uint64_t number, int fd, const char *path, fc_error *err) {
    unsigned char buffer[SMALL_BUFFER];
    size_t at = zip->first_data + (size_t)number;
    output out = {.path = path, .fd = fd, .at = zip->records[at].data + zip->records[at].size};
    out.buffer = buffer;
    out.room = sizeof buffer;
    FC_TRY(write_after(zip, &at, &out, err));
    return flush_headers(&out, err);
}

fc_code fc_torch_zip_write_last(fc_torch_zip *zip, int fd, const char *path, fc_error *err) {
    output out = {.path = path, .fd = fd, .at = zip->records[zip->nrecords - 1].header};
    FC_TRY(begin_output(&out, err));
    return end_output(&out, write_directory(zip, &out, err), err);
}

void fc_torch_zip_free(fc_torch_zip *zip) {
    free(zip->records);
    *zip = (fc_torch_zip){0};
}
