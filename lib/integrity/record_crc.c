/*
 * Compares records that hold several chunks. See record_crc.h. The runs of a record are sorted, and the gaps between
 * them are read from the file. Sums of overlapping runs cannot be separated, so then the whole record is read.
 */
#include "integrity/record_crc.h"

#include "base/crc.h"
#include "base/grow.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/input.h"

#include <inttypes.h>
#include <stdlib.h>

enum {
    GAP_READ = 256 << 10,
    GAP_FREE = 1 << 20 /* always read; more than this only if as much was moved */
};

/* Bytes of a record that were summed up. */
typedef struct fc_record_run {
    uint64_t offset, length; /* of the record, in its file, in bytes */
    uint64_t first, bytes;   /* of the run, from the start of the record */
    uint64_t moved;          /* bytes of the chunk that were read in any way */
    const fc_tensor *tensor;
    uint32_t file, recorded, sum;
} run;

void fc_record_crcs_free(fc_record_crcs *records) {
    free(records->runs);
}

fc_code fc_record_crcs_add(fc_record_crcs *records, const fc_tensor *tensor, size_t chunk, uint64_t moved, bool known,
                           uint32_t sum, fc_error *err) {
    fc_extent e;
    FC_TRY(fc_checkpoint_extent(records->checkpoint, tensor, chunk, &e, err));
    FC_NEED(fc_grow(&records->runs, &records->capacity, records->count + 1, sizeof *records->runs), err,
            records->checkpoint->path);
    records->runs[records->count++] = (run){.offset = e.offset,
                                            .length = e.length,
                                            .first = known ? e.first : 0,
                                            .bytes = known ? moved : 0,
                                            .moved = moved,
                                            .tensor = tensor,
                                            .file = e.file,
                                            .recorded = e.crc32,
                                            .sum = known ? sum : 0};
    return FC_OK;
}

/* Sorts by record, then by offset; at one offset, empty runs come first. */
static int compare_run_offsets(const void *a, const void *b) {
    const run *x = a, *y = b;
    FC_ORDER_BY(x->file, y->file);
    FC_ORDER_BY(x->offset, y->offset);
    FC_ORDER_BY(x->first, y->first);
    return FC_ORDER(x->bytes, y->bytes);
}

/* Adds the bytes [from, to) of the record of `r`. */
static fc_code add_gap(const fc_input *input, const run *r, uint64_t from, uint64_t to, unsigned char *buffer,
                       uint32_t *sum, fc_error *err) {
    while (from < to) {
        size_t size = to - from < GAP_READ ? (size_t)(to - from) : GAP_READ;
        FC_TRY(fc_pread_full(input->fd, buffer, size, r->offset + from, input->path, err));
        from += size;
        *sum ^= fc_crc32_shift(fc_crc32_bare(buffer, size), r->length - from);
    }
    return FC_OK;
}

/*
 * Returns how many of the `count` runs of a record can be used: all, or none if some overlap. `*missing` receives the
 * bytes that must then be read.
 */
static size_t usable(const run *runs, size_t count, uint64_t *missing) {
    uint64_t at = 0, known = 0;
    for (size_t i = 0; i < count; i++) {
        if (runs[i].first < at) {
            *missing = runs->length;
            return 0;
        }
        at = runs[i].first + runs[i].bytes;
        known += runs[i].bytes;
    }
    *missing = runs->length - known;
    return count;
}

/* Whoever converts one layer of a flat partition does not want to wait for all of it. */
static bool is_affordable(const run *runs, size_t count, uint64_t missing) {
    uint64_t budget = GAP_FREE;
    for (size_t i = 0; i < count && budget < missing; i++) {
        budget += runs[i].moved;
    }
    return missing <= budget;
}

/* Computes the bare CRC of a record from its `count` known runs; `of` is any of them. */
static fc_code sum_record(const fc_input *input, const run *of, const run *runs, size_t count, unsigned char *buffer,
                          uint32_t *sum, fc_error *err) {
    uint64_t at = 0;
    *sum = 0;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(add_gap(input, of, at, runs[i].first, buffer, sum, err));
        *sum ^= runs[i].sum;
        at = runs[i].first + runs[i].bytes;
    }
    return add_gap(input, of, at, of->length, buffer, sum, err);
}

static fc_code open_and_sum(const fc_record_crcs *records, const run *runs, size_t used, unsigned char *buffer,
                            uint32_t *sum, fc_error *err) {
    fc_input input;
    fc_code rc;
    FC_TRY(fc_input_open(&input, records->checkpoint->files[runs->file].path, err));
    FC_TRY_GOTO(fc_identity_check(records->checkpoint, runs->file, input.fd, err), rc, out);
    rc = sum_record(&input, runs, runs, used, buffer, sum, err);
out:
    fc_input_close(&input);
    return rc;
}

static fc_code check_record(const fc_record_crcs *records, const run *runs, size_t count, unsigned char *buffer,
                            fc_error *err) {
    uint32_t sum;
    uint64_t missing;
    const size_t used = usable(runs, count, &missing);
    if (!is_affordable(runs, count, missing)) {
        return FC_OK;
    }
    FC_TRY(open_and_sum(records, runs, used, buffer, &sum, err));
    if (fc_crc32_finish(sum, runs->length) == runs->recorded) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: offset %" PRIu64 ": damaged: the CRC-32 of the %" PRIu64
                   " bytes that contain tensor %s is %08" PRIx32 " but the archive records %08" PRIx32
                   "; fsdpckpt verify lists all damage",
                   records->checkpoint->files[runs->file].path, runs->offset, runs->length, runs->tensor->name,
                   fc_crc32_finish(sum, runs->length), runs->recorded);
}

fc_code fc_record_crcs_check(fc_record_crcs *records, const fc_comm *comm, fc_error *err) {
    if (records->count == 0) {
        return FC_OK;
    }
    const size_t share = comm ? (size_t)comm->rank : 0, shares = comm ? (size_t)comm->size : 1;
    const run *runs = records->runs;
    unsigned char *buffer = malloc(GAP_READ);
    FC_NEED(buffer, err, records->checkpoint->path);
    fc_code rc = FC_OK;
    fc_sort_items(records->runs, records->count, sizeof *records->runs, compare_run_offsets);
    for (size_t i = 0, next, number = 0; i < records->count; i = next, number++) {
        for (next = i + 1;
             next < records->count && runs[next].file == runs[i].file && runs[next].offset == runs[i].offset;) {
            next++;
        }
        if (number % shares == share) {
            FC_TRY_GOTO(check_record(records, runs + i, next - i, buffer, err), rc, out);
        }
    }
out:
    free(buffer);
    return rc;
}
