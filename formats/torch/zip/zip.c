/*
 * Reads the directory of a torch.save archive: end record, zip64 end record, central directory, local headers. zip.h
 * says what is refused. read.c reads the content of records.
 */
#include "torch/zip/zip.h"

#include "base/checked.h"
#include "base/little.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "torch/zip/window.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    END_SIZE = 22,
    LOCATOR_SIZE = 20,
    END64_SIZE = 56,
    CENTRAL_SIZE = 46,
    LOCAL_SIZE = 30,
    DESCRIPTOR_SIZE = 16,
    MAX_COMMENT = 65535,
    WHOLE = 64 * 1024, /* bytes; archives up to this size are read at once */
    EDGE = 4096        /* bytes at both ends of larger archives: the pickle and the directory of a DCP item */
};

enum { FLAG_ENCRYPTED = 1 << 0, FLAG_DESCRIPTOR = 1 << 3, FLAG_STRONG_ENCRYPTION = 1 << 6, FLAG_MASKED = 1 << 13 };

static const uint32_t end_signature = 0x06054b50, locator_signature = 0x07064b50, end64_signature = 0x06064b50,
                      central_signature = 0x02014b50, local_signature = 0x04034b50, descriptor_signature = 0x08074b50;

/* The location of the central directory, according to the end record. */
typedef struct directory {
    uint64_t count, size, offset; /* as recorded; `offset` is from the start of the archive, in bytes */
    uint64_t end;                 /* its end, from the start of the range, in bytes */
} directory;

static fc_code damaged_archive(const fc_zip *zip, uint64_t at, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the torch.save archive is damaged: %s", zip->path,
                   zip->offset + at, what);
}

/* Finds the end record in the last bytes of the range. Its comment ends where the range ends. */
static fc_code find_end_record(fc_zip *zip, uint64_t *position, fc_error *err) {
    uint64_t span = zip->length < EDGE ? zip->length : EDGE;
    for (;;) {
        const unsigned char *bytes;
        FC_TRY(fc_zip_view(zip, zip->length - span, span, &bytes, err));
        for (uint64_t i = span - END_SIZE + 1; span >= END_SIZE && i-- > 0;) {
            if (fc_load_little(bytes + i, 4) == end_signature &&
                i + END_SIZE + fc_load_little(bytes + i + 20, 2) == span) {
                *position = zip->length - span + i;
                return FC_OK;
            }
        }
        uint64_t most = zip->length < END_SIZE + MAX_COMMENT ? zip->length : END_SIZE + MAX_COMMENT;
        if (span == most) {
            return damaged_archive(
                zip, 0, "the end record is missing; the archive may be truncated, or its offset in the file is wrong",
                err);
        }
        span = most;
    }
}

/* Whether a field of 16 or 32 bits in the end record agrees with the one of 64 bits. */
static bool agrees_with_wide(uint64_t narrow, uint64_t wide, uint64_t all_ones) {
    return narrow == all_ones || narrow == wide;
}

static fc_code read_end64(fc_zip *zip, uint64_t locator, const unsigned char *end, directory *dir, fc_error *err) {
    const unsigned char *p;
    if (locator < END64_SIZE) {
        return damaged_archive(zip, locator, "no room for the zip64 end record", err);
    }
    uint64_t at = locator - END64_SIZE;
    unsigned char saved[END_SIZE];
    memcpy(saved, end, sizeof saved); /* the next view may move the window that holds it */
    FC_TRY(fc_zip_view(zip, at, END64_SIZE, &p, err));
    if (fc_load_little(p, 4) != end64_signature || fc_load_little(p + 4, 8) != END64_SIZE - 12) {
        return damaged_archive(zip, at, "the zip64 end record is not at its recorded offset", err);
    }
    if (fc_load_little(p + 16, 4) != 0 || fc_load_little(p + 20, 4) != 0 ||
        fc_load_little(p + 24, 8) != fc_load_little(p + 32, 8)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: offset %" PRIu64 ": a zip archive in several parts is not supported",
                       zip->path, zip->offset + at);
    }
    *dir = (directory){fc_load_little(p + 32, 8), fc_load_little(p + 40, 8), fc_load_little(p + 48, 8), at};
    if (!agrees_with_wide(fc_load_little(saved + 10, 2), dir->count, UINT16_MAX) ||
        !agrees_with_wide(fc_load_little(saved + 12, 4), dir->size, UINT32_MAX) ||
        !agrees_with_wide(fc_load_little(saved + 16, 4), dir->offset, UINT32_MAX)) {
        return damaged_archive(zip, at, "the two end records disagree", err);
    }
    return FC_OK;
}

static fc_code read_end(fc_zip *zip, directory *dir, fc_error *err) {
    const unsigned char *p;
    uint64_t at = 0;
    FC_TRY(find_end_record(zip, &at, err));
    uint64_t before = at < LOCATOR_SIZE ? 0 : LOCATOR_SIZE;
    FC_TRY(fc_zip_view(zip, at - before, before + END_SIZE, &p, err));
    const unsigned char *end = p + before;
    if (before && fc_load_little(p, 4) == locator_signature) {
        return read_end64(zip, at - LOCATOR_SIZE, end, dir, err);
    }
    if (fc_load_little(end + 4, 2) != 0 || fc_load_little(end + 6, 2) != 0 ||
        fc_load_little(end + 8, 2) != fc_load_little(end + 10, 2)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: offset %" PRIu64 ": a zip archive in several parts is not supported",
                       zip->path, zip->offset + at);
    }
    *dir = (directory){fc_load_little(end + 10, 2), fc_load_little(end + 12, 4), fc_load_little(end + 16, 4), at};
    return FC_OK;
}

/* Reads the values of fields that are all ones from the extra field with tag 1, which has 64 bits for each. */
static bool read_extra64(const unsigned char *extra, size_t n, fc_zip_entry *entry, uint64_t *header) {
    uint64_t *wanted[3] = {&entry->size, &entry->stored, header};
    while (n >= 4) {
        uint16_t tag = fc_load_little(extra, 2);
        size_t size = fc_load_little(extra + 2, 2);
        if (size > n - 4) {
            return false;
        }
        const unsigned char *p = extra + 4;
        for (int i = 0; tag == 1 && i < 3; i++) {
            if (*wanted[i] == UINT32_MAX) {
                if (size < 8) {
                    return false;
                }
                *wanted[i] = fc_load_little(p, 8);
                p += 8;
                size -= 8;
            }
        }
        size = fc_load_little(extra + 2, 2);
        extra += 4 + size;
        n -= 4 + size;
    }
    return true;
}

/* Checks one entry of the directory. `header` is an offset from the start of the archive. */
static fc_code parse_central(fc_zip *zip, const unsigned char *p, uint64_t at, fc_zip_entry *entry, fc_error *err) {
    uint64_t header = fc_load_little(p + 42, 4);
    uint32_t attributes = fc_load_little(p + 38, 4);
    size_t name_len = fc_load_little(p + 28, 2);
    entry->flags = fc_load_little(p + 8, 2);
    entry->method = fc_load_little(p + 10, 2);
    entry->crc = fc_load_little(p + 16, 4);
    entry->stored = fc_load_little(p + 20, 4);
    entry->size = fc_load_little(p + 24, 4);
    if (name_len == 0 || memchr(p + CENTRAL_SIZE, 0, name_len)) {
        return damaged_archive(zip, at, "a record's name is empty or contains NUL", err);
    }
    if (!read_extra64(p + CENTRAL_SIZE + name_len, fc_load_little(p + 30, 2), entry, &header)) {
        return damaged_archive(zip, at, "a record's extra field is cut off", err);
    }
    if (entry->flags & (FLAG_ENCRYPTED | FLAG_STRONG_ENCRYPTION | FLAG_MASKED)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: offset %" PRIu64 ": the archive is encrypted", zip->path,
                       zip->offset + at);
    }
    if (entry->method != FC_ZIP_STORED && entry->method != FC_ZIP_DEFLATED) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: offset %" PRIu64 ": zip compression method %u is not supported",
                       zip->path, zip->offset + at, (unsigned)entry->method);
    }
    /* torch.load returns uninitialised memory for a record with a directory bit. */
    if ((attributes & 0x10) || (attributes >> 16 & 0170000) == 0040000 || p[CENTRAL_SIZE + name_len - 1] == '/') {
        return damaged_archive(zip, at, "a record is marked as a directory", err);
    }
    if (entry->method == FC_ZIP_STORED && entry->stored != entry->size) {
        return damaged_archive(zip, at, "the two sizes of an uncompressed record differ", err);
    }
    if (header >= zip->length) {
        return damaged_archive(zip, at, "a record is outside the archive", err);
    }
    entry->header = zip->offset + header;
    return FC_OK;
}

static fc_code read_central(fc_zip *zip, const directory *dir, fc_error *err) {
    const unsigned char *p;
    if (dir->size > dir->end || dir->offset > dir->end - dir->size || dir->count > dir->size / CENTRAL_SIZE ||
        dir->count == 0) {
        return damaged_archive(zip, dir->end, "the numbers in the end record are invalid", err);
    }
    uint64_t start = dir->end - dir->size;
    if (dir->offset != start) {
        return damaged_archive(zip, 0, "it does not begin with its first record", err);
    }
    FC_TRY(fc_zip_view(zip, start, dir->size, &p, err));
    zip->records_end = zip->offset + start;
    zip->entries = calloc((size_t)dir->count, sizeof *zip->entries);
    zip->sorted = calloc((size_t)dir->count, sizeof *zip->sorted);
    zip->names = malloc((size_t)dir->size + 1);
    FC_NEED(zip->entries && zip->sorted && zip->names, err, zip->path);
    char *name = zip->names;
    uint64_t at = 0;
    for (size_t i = 0; i < dir->count; i++) {
        const unsigned char *record = p + at;
        size_t size = CENTRAL_SIZE;
        if (dir->size - at >= CENTRAL_SIZE) {
            size += (size_t)fc_load_little(record + 28, 2) + fc_load_little(record + 30, 2) +
                    fc_load_little(record + 32, 2);
        }
        if (size > dir->size - at || fc_load_little(record, 4) != central_signature) {
            return damaged_archive(zip, start + at, "the central directory is inconsistent", err);
        }
        FC_TRY(parse_central(zip, record, start + at, &zip->entries[i], err));
        size_t len = fc_load_little(record + 28, 2);
        memcpy(name, record + CENTRAL_SIZE, len);
        name[len] = '\0';
        zip->entries[i].name = name;
        name += len + 1;
        zip->sorted[i] = &zip->entries[i];
        zip->nentries = i + 1;
        at += size;
    }
    return at == dir->size ? FC_OK : damaged_archive(zip, start + at, "extra bytes follow the central directory", err);
}

/* Checks the local header against the central directory, and finds the start of the data. */
static fc_code check_local_header(fc_zip *zip, fc_zip_entry *entry, fc_error *err) {
    const unsigned char *p;
    uint64_t at = entry->header - zip->offset;
    size_t len = strlen(entry->name);
    uint64_t limit = zip->records_end - zip->offset;
    if (!fc_range_within(at, LOCAL_SIZE + len, limit)) {
        return damaged_archive(zip, at, "a record runs into the directory", err);
    }
    FC_TRY(fc_zip_view(zip, at, LOCAL_SIZE + len, &p, err));
    bool descriptor = entry->flags & FLAG_DESCRIPTOR;
    uint32_t stored = fc_load_little(p + 18, 4), size = fc_load_little(p + 22, 4);
    if (fc_load_little(p, 4) != local_signature || fc_load_little(p + 8, 2) != entry->method ||
        fc_load_little(p + 26, 2) != len ||
        ((fc_load_little(p + 6, 2) ^ entry->flags) & (FLAG_ENCRYPTED | FLAG_DESCRIPTOR)) ||
        memcmp(p + LOCAL_SIZE, entry->name, len) != 0 ||
        !(fc_load_little(p + 14, 4) == entry->crc || (descriptor && fc_load_little(p + 14, 4) == 0)) ||
        !(agrees_with_wide(stored, entry->stored, UINT32_MAX) || (descriptor && stored == 0)) ||
        !(agrees_with_wide(size, entry->size, UINT32_MAX) || (descriptor && size == 0))) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": the torch.save archive is damaged: the header of record %s disagrees "
                       "with the directory",
                       zip->path, entry->header, entry->name);
    }
    uint64_t data = at + LOCAL_SIZE + len + fc_load_little(p + 28, 2);
    if (!fc_range_within(data, entry->stored, limit)) {
        return damaged_archive(zip, at, "a record runs into the directory", err);
    }
    entry->data = zip->offset + data;
    return FC_OK;
}

static int compare_entry_headers(const void *a, const void *b) {
    uint64_t x = (*(fc_zip_entry *const *)a)->header, y = (*(fc_zip_entry *const *)b)->header;
    return x < y ? -1 : x > y;
}

/* PyTorch finds records without regard to the case of ASCII letters. */
static int fold_case(char c) {
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : (unsigned char)c;
}

static int compare_folded_names(const void *a, const void *b) {
    const char *x = (*(fc_zip_entry *const *)a)->name, *y = (*(fc_zip_entry *const *)b)->name;
    while (*x && fold_case(*x) == fold_case(*y)) {
        x++;
        y++;
    }
    return fold_case(*x) - fold_case(*y);
}

static fc_code check_record_names(fc_zip *zip, fc_error *err) {
    fc_sort_items(zip->sorted, zip->nentries, sizeof *zip->sorted, compare_folded_names);
    for (size_t i = 1; i < zip->nentries; i++) {
        const fc_zip_entry *a = zip->sorted[i - 1], *b = zip->sorted[i];
        if (compare_folded_names(&a, &b) == 0) {
            const bool same = strcmp(a->name, b->name) == 0;
            return fc_fail(err, FC_ECORRUPT,
                           "%s: offset %" PRIu64 ": the torch.save archive is damaged: two records are called %s%s%s",
                           zip->path, b->header, a->name, same ? "" : " and ", same ? "" : b->name);
        }
    }
    fc_sort_items(zip->sorted, zip->nentries, sizeof *zip->sorted, fc_order_named);
    return FC_OK;
}

/*
 * The range begins with a record: PyTorch goes by the first bytes, and would load others as a pickle of their own. No
 * two records overlap or have one name.
 */
static fc_code check_records(fc_zip *zip, fc_error *err) {
    for (size_t i = 0; i < zip->nentries; i++) {
        FC_TRY(check_local_header(zip, &zip->entries[i], err));
    }
    fc_sort_items(zip->sorted, zip->nentries, sizeof *zip->sorted, compare_entry_headers);
    if (zip->sorted[0]->header != zip->offset) {
        return damaged_archive(zip, 0, "it does not begin with its first record", err);
    }
    for (size_t i = 1; i < zip->nentries; i++) {
        const fc_zip_entry *before = zip->sorted[i - 1];
        if (before->data + before->stored > zip->sorted[i]->header) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: offset %" PRIu64 ": the torch.save archive is damaged: records %s and %s overlap",
                           zip->path, zip->sorted[i]->header, before->name, zip->sorted[i]->name);
        }
    }
    return check_record_names(zip, err);
}

static fc_code read_directory(fc_zip *zip, fc_error *err) {
    directory dir = {0, 0, 0, 0};
    FC_TRY(read_end(zip, &dir, err));
    FC_TRY(read_central(zip, &dir, err));
    return check_records(zip, err);
}

fc_code fc_zip_open(int fd, const char *path, uint64_t offset, uint64_t length, fc_zip *zip, fc_error *err) {
    return fc_zip_open_read(fd, path, offset, length, NULL, zip, err);
}

fc_code fc_zip_open_read(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes, fc_zip *zip,
                         fc_error *err) {
    uint64_t end;
    *zip = (fc_zip){.path = path, .fd = fd, .offset = offset, .length = length};
    if (!fc_add_u64(offset, length, &end) || end > INT64_MAX) {
        free(bytes);
        return damaged_archive(zip, 0, "its offset or length is invalid", err);
    }
    fc_code rc = FC_OK;
    if (bytes) {
        zip->head = (fc_zip_window){bytes, offset, (size_t)length};
    } else if (length <= WHOLE) {
        FC_TRY_GOTO(fc_zip_load(zip, &zip->head, 0, length, err), rc, out);
    } else {
        FC_TRY_GOTO(fc_zip_load(zip, &zip->tail, length - EDGE, EDGE, err), rc, out);
        FC_TRY_GOTO(fc_zip_load(zip, &zip->head, 0, EDGE, err), rc, out);
    }
    rc = read_directory(zip, err);
out:
    if (rc != FC_OK) {
        fc_zip_close(zip);
    }
    return rc;
}

fc_code fc_zip_open_windows(const char *path, uint64_t offset, uint64_t length, fc_zip_window head, fc_zip_window tail,
                            fc_zip *zip, fc_error *err) {
    *zip = (fc_zip){.path = path, .fd = -1, .offset = offset, .length = length, .head = head, .tail = tail};
    const fc_code rc = read_directory(zip, err);
    if (rc != FC_OK) {
        fc_zip_close_windows(zip);
    }
    return rc;
}

void fc_zip_close_windows(fc_zip *zip) {
    zip->head.bytes = zip->tail.bytes = NULL;
    fc_zip_close(zip);
}

/*
 * Finds the sizes of a record from the descriptor after its data, as torch.save writes them into a stream that it
 * cannot rewind. `*next` receives the place after it. @return false if the head has none that fits.
 */
static bool find_descriptor(const fc_zip *zip, uint64_t data, fc_zip_entry *entry, uint64_t *next) {
    const unsigned char *bytes = zip->head.bytes;
    for (uint64_t at = data; at + DESCRIPTOR_SIZE <= zip->head.size; at++) {
        const uint64_t length = at - data;
        if (fc_load_little(bytes + at, 4) == descriptor_signature && fc_load_little(bytes + at + 8, 4) == length &&
            fc_load_little(bytes + at + 12, 4) == length) {
            entry->crc = fc_load_little(bytes + at + 4, 4);
            entry->stored = entry->size = length;
            *next = at + DESCRIPTOR_SIZE;
            return true;
        }
    }
    return false;
}

/* Reads the local header at `*at` of the head, and advances to the next. `*end` is set if none is there as a whole, or
 * if this one is the last that can be found. */
static fc_code take_local_header(fc_zip *zip, uint64_t *at, char *name, bool *end, fc_error *err) {
    const unsigned char *p = zip->head.bytes + *at;
    const uint64_t left = zip->head.size - *at;
    fc_zip_entry *entry = &zip->entries[zip->nentries];
    uint64_t ignored = 0, next = 0;
    *end = left < LOCAL_SIZE || fc_load_little(p, 4) != local_signature;
    const size_t name_len = *end ? 0 : fc_load_little(p + 26, 2), extra_len = *end ? 0 : fc_load_little(p + 28, 2);
    if (*end || left < LOCAL_SIZE + name_len + extra_len) {
        *end = true;
        return FC_OK;
    }
    const uint64_t data = *at + LOCAL_SIZE + name_len + extra_len;
    *entry = (fc_zip_entry){.name = name,
                            .data = zip->offset + data,
                            .stored = fc_load_little(p + 18, 4),
                            .size = fc_load_little(p + 22, 4),
                            .header = zip->offset + *at,
                            .crc = fc_load_little(p + 14, 4),
                            .method = fc_load_little(p + 8, 2),
                            .flags = fc_load_little(p + 6, 2)};
    memcpy(name, p + LOCAL_SIZE, name_len);
    name[name_len] = '\0';
    bool good = name_len > 0 && !memchr(name, 0, name_len);
    if (good && entry->flags & FLAG_DESCRIPTOR) {
        *end = strstr(name, "/data/") || !find_descriptor(zip, data, entry, &next);
        entry->size = entry->stored = *end ? FC_ZIP_UNKNOWN : entry->size;
    } else {
        good = good && read_extra64(p + LOCAL_SIZE + name_len, extra_len, entry, &ignored) &&
               (entry->method != FC_ZIP_STORED || entry->stored == entry->size) &&
               fc_add_u64(data, entry->stored, &next) && next <= INT64_MAX - zip->offset;
    }
    zip->sorted[zip->nentries++] = entry;
    *at = next;
    return good ? FC_OK : damaged_archive(zip, entry->header - zip->offset, "the header of a record is invalid", err);
}

fc_code fc_zip_open_head(const char *path, uint64_t offset, unsigned char *bytes, size_t size, fc_zip *zip,
                         fc_error *err) {
    *zip = (fc_zip){.path = path, .fd = -1, .offset = offset, .length = size, .head = {bytes, offset, size}};
    const size_t most = size / LOCAL_SIZE + 1;
    zip->entries = calloc(most, sizeof *zip->entries);
    zip->sorted = calloc(most, sizeof *zip->sorted);
    zip->names = malloc(size + most);
    fc_code rc = zip->entries && zip->sorted && zip->names ? FC_OK : fc_no_memory(err, path);
    bool end = false;
    char *name = zip->names;
    for (uint64_t at = 0; rc == FC_OK && !end && at < size;) {
        rc = take_local_header(zip, &at, name, &end, err);
        name += strlen(name) + 1;
    }
    rc = rc == FC_OK && zip->nentries == 0 ? damaged_archive(zip, 0, "it does not begin with a record", err) : rc;
    rc = rc == FC_OK ? check_record_names(zip, err) : rc;
    if (rc != FC_OK) {
        fc_zip_close(zip);
    }
    return rc;
}

const fc_zip_entry *fc_zip_find(const fc_zip *zip, const char *name) {
    return fc_find_named(zip->sorted, zip->nentries, name);
}
