/*
 * Lists the regions of a checkpoint. It resolves every extent and recorded digest, so defects in a tensor's headers are
 * found before its data is read.
 */
#include "verify/regions.h"

#include "base/grow.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "verify/report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fc_report_defect(fc_findings *findings, const fc_defect *place, const char *fmt, ...) {
    fc_error line;
    char text[sizeof line.message];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fc_fail(&line, FC_ECORRUPT, "%s", text); /* replaces control characters that come from a file */
    fc_defect defect = *place;
    defect.message = line.message;
    pthread_mutex_lock(&findings->lock);
    findings->count++;
    findings->report(findings->context, &defect);
    pthread_mutex_unlock(&findings->lock);
}

/* Returns whether an error is a defect of the checkpoint, after which verifying continues. */
static bool is_defect(fc_code rc) {
    return rc == FC_ECORRUPT || rc == FC_EUNSUPPORTED || rc == FC_EIO || rc == FC_EUSAGE;
}

/* The list under construction, and the state of the current tensor. */
typedef struct region_lister {
    const fc_checkpoint *checkpoint;
    fc_findings *findings;
    fc_verify_report *report;
    fc_regions *out;
    bool all;      /* see fc_regions_new */
    size_t number; /* index of the tensor */
    bool *counts;  /* one per chunk */
    bool digested; /* whether all its chunks so far have digests */
    bool unread;   /* whether some chunk has no extent */
} region_lister;

/*
 * Reports `found` for a chunk, or for the whole tensor when `chunk` is NULL. Returns FC_OK so that listing continues,
 * unless it is no defect.
 */
static fc_code note_region_defect(region_lister *l, const fc_chunk *chunk, fc_code rc, const fc_error *found,
                                  fc_error *err) {
    const fc_tensor *tensor = &l->checkpoint->tensors[l->number];
    if (!is_defect(rc)) {
        if (err) {
            *err = *found;
        }
        return rc;
    }
    fc_defect place = {.tensor = tensor->name};
    const fc_file *file = chunk ? fc_chunk_file(l->checkpoint, chunk) : NULL;
    if (file) {
        place.file = file->name;
        place.offset = chunk->place.offset;
        place.has_offset = chunk->place.kind == FC_PLACE_BYTES;
    }
    fc_report_defect(l->findings, &place, "%s", found->message);
    l->out->broken[l->number] = 1;
    return FC_OK;
}

static fc_region *add_region(region_lister *l, fc_error *err) {
    fc_regions *r = l->out;
    if (!fc_grow(&r->items, &r->capacity, r->count + 1, sizeof *r->items)) {
        fc_no_memory(err, l->checkpoint->path);
        return NULL;
    }
    fc_region *region = &r->items[r->count++];
    memset(region, 0, sizeof *region);
    region->number = l->number;
    region->tensor = &l->checkpoint->tensors[l->number];
    region->own = *region->tensor;
    return region;
}

/* Adds the box of `count` chunks from `first` on. @param dims the box; borrowed until the regions are freed */
static fc_code add_box(region_lister *l, size_t first, size_t count, const int64_t *dims, const fc_digest *digest,
                       fc_error *err) {
    fc_region *r = add_region(l, err);
    if (!r) {
        return FC_ENOMEM;
    }
    const fc_chunk *chunk = &r->tensor->chunks[first];
    r->kind = digest ? FC_REGION_CRC64 : FC_REGION_BOX;
    r->expected = digest ? digest->value : 0;
    r->own.chunks = chunk;
    r->own.nchunks = count;
    r->dims = dims;
    r->file = chunk->place.file;
    r->offset = chunk->place.offset;
    r->length = chunk->place.length;
    r->counts = l->counts[first];
    return FC_OK;
}

static fc_code add_group(region_lister *l, const fc_digest *digest, fc_error *err) {
    const fc_tensor *tensor = &l->checkpoint->tensors[l->number];
    const size_t n = (size_t)tensor->ndim;
    int64_t *dims = fc_arena_calloc(l->out->arena, 2 * n + 1, sizeof *dims);
    FC_NEED(dims, err, l->checkpoint->path);
    for (size_t d = 0; d < n; d++) {
        dims[d] = digest->offsets ? digest->offsets[d] : 0;
        dims[n + d] = digest->sizes[d];
    }
    return add_box(l, digest->first, digest->count, dims, digest, err);
}

static fc_code add_bytes(region_lister *l, const fc_chunk *chunk, const fc_digest *digest, fc_error *err) {
    fc_region *r = add_region(l, err);
    if (!r) {
        return FC_ENOMEM;
    }
    r->kind = FC_REGION_BYTES;
    r->expected = digest->value;
    r->file = chunk->place.file;
    r->offset = digest->offset;
    r->length = digest->length;
    return FC_OK;
}

static fc_code find_chunk(region_lister *l, const fc_tensor *tensor, size_t index, fc_extent *extent, fc_digest *digest,
                          fc_error *err) {
    const fc_format *format = l->checkpoint->format;
    if (format->verifier.verify_chunk) {
        return format->verifier.verify_chunk(l->checkpoint, tensor, index, extent, digest, l->findings, err);
    }
    FC_TRY(fc_checkpoint_extent(l->checkpoint, tensor, index, extent, err));
    return fc_checkpoint_digest(l->checkpoint, tensor, index, digest, err);
}

/*
 * Adds chunk `index` and the chunks that share its digest. @param next receives the index of the first chunk after them
 */
static fc_code add_chunk(region_lister *l, size_t index, size_t *next, fc_error *err) {
    const fc_tensor *tensor = &l->checkpoint->tensors[l->number];
    const fc_chunk *chunk = &tensor->chunks[index];
    fc_extent extent;
    fc_digest digest;
    fc_error found;
    *next = index + 1;
    fc_code rc = find_chunk(l, tensor, index, &extent, &digest, &found);
    if (rc != FC_OK) {
        l->unread = true;
        return note_region_defect(l, chunk, rc, &found, err);
    }
    switch (digest.kind) {
    case FC_DIGEST_CRC64:
        return add_box(l, index, 1, chunk->dims, &digest, err);
    case FC_DIGEST_GROUP:
        *next = digest.first + digest.count > index ? digest.first + digest.count : index + 1;
        return add_group(l, &digest, err);
    case FC_DIGEST_CRC32:
        rc = add_bytes(l, chunk, &digest, err);
        break;
    case FC_DIGEST_NONE:
        l->digested &= l->out->whole[l->number].kind == FC_DIGEST_CRC64;
        break;
    }
    FC_TRY(rc);
    bool needed = l->all || digest.kind == FC_DIGEST_NONE || l->out->whole[l->number].kind == FC_DIGEST_CRC64;
    return needed ? add_box(l, index, 1, chunk->dims, NULL, err) : FC_OK;
}

static fc_code mark(void *context, const fc_overlap *overlap, fc_error *err) {
    bool *counts = context;
    (void)err;
    counts[overlap->chunk] = true;
    return FC_OK;
}

/* Proves coverage, and marks the chunks that make up the tensor: one of each set of replicas. */
static fc_code check_coverage(region_lister *l, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_tensor *tensor = &l->checkpoint->tensors[l->number];
    const fc_box whole = {tensor->ndim, origin, tensor->shape};
    fc_coverage *coverage = NULL;
    fc_error found;
    fc_code rc;
    FC_TRY_GOTO(fc_coverage_within(l->checkpoint, tensor, NULL, &coverage, &found), rc, out);
    if (tensor->nchunks > 0) {
        FC_TRY_GOTO(fc_coverage_visit(coverage, &whole, mark, l->counts, &found), rc, out);
    }
out:
    fc_coverage_free(coverage);
    return rc == FC_OK ? rc : note_region_defect(l, NULL, rc, &found, err);
}

/* Fails for an object that runs code, and counts those of unknown classes. */
static fc_code judge_object(region_lister *l, const fc_tensor *object, fc_error *err) {
    fc_object_verdict verdict;
    FC_TRY(fc_checkpoint_object_verdict(l->checkpoint, object, &verdict, err));
    if (verdict.risk == FC_OBJECT_RUNS) {
        return fc_fail(err, FC_ECORRUPT, "%s: object %.256s: %s", l->checkpoint->path, object->name, verdict.reason);
    }
    if (verdict.risk == FC_OBJECT_UNKNOWN && l->report->unknown++ == 0) {
        l->report->unknown_object = object->name;
        memcpy(l->report->unknown_reason, verdict.reason, sizeof verdict.reason);
    }
    return FC_OK;
}

/* Reads an object and judges what it does. */
static fc_code read_and_judge(region_lister *l, const fc_tensor *object, fc_arena *scratch, fc_error *found) {
    const char *json;
    FC_TRY(fc_checkpoint_object_json(l->checkpoint, object, scratch, &json, found));
    FC_TRY(fc_checkpoint_check_object_json(l->checkpoint, object, scratch, found));
    return judge_object(l, object, found);
}

static fc_code check_object(region_lister *l, fc_error *err) {
    const fc_tensor *object = &l->checkpoint->tensors[l->number];
    fc_error found;
    fc_arena *scratch = fc_arena_new();
    FC_NEED(scratch, err, l->checkpoint->path);
    fc_code rc = read_and_judge(l, object, scratch, &found);
    fc_arena_free(scratch);
    return rc == FC_OK ? rc : note_region_defect(l, object->nchunks > 0 ? &object->chunks[0] : NULL, rc, &found, err);
}

/* What to read of the tensor whose counts are allocated. */
static fc_code list_regions(region_lister *l, const fc_tensor *tensor, fc_error *err) {
    fc_error found;
    fc_code digest = fc_checkpoint_digest(l->checkpoint, tensor, FC_WHOLE_TENSOR, &l->out->whole[l->number], &found);
    FC_TRY(digest == FC_OK ? FC_OK : note_region_defect(l, NULL, digest, &found, err));
    FC_TRY(check_coverage(l, err));
    for (size_t i = 0; i < tensor->nchunks;) {
        FC_TRY(add_chunk(l, i, &i, err));
    }
    /* The bytes of a broken object may be unreadable, which is already reported. */
    return tensor->object && !l->out->broken[l->number] ? check_object(l, err) : FC_OK;
}

static fc_code list_tensor(region_lister *l, fc_error *err) {
    const fc_tensor *tensor = &l->checkpoint->tensors[l->number];
    if (tensor->object && tensor->object->refusal) { /* intact, as far as the format's own check can tell */
        l->report->objects++;
        l->report->undigested++;
        l->report->undigested_bytes += (uint64_t)tensor->shape[0];
        return FC_OK;
    }
    l->digested = true;
    l->unread = false;
    l->counts = calloc(tensor->nchunks + 1, sizeof *l->counts);
    FC_NEED(l->counts, err, l->checkpoint->path);
    fc_code rc = list_regions(l, tensor, err);
    free(l->counts);
    /* Objects of DCP and torch.save count as undigested here; the format's own check covers their records. */
    l->report->tensors += !tensor->object;
    l->report->objects += tensor->object != NULL;
    if (l->unread) { /* a chunk without an extent was not read, so it is neither digested nor undigested */
        return rc;
    }
    l->report->digested += l->digested;
    l->report->undigested += !l->digested;
    for (size_t i = 0; !l->digested && i < tensor->nchunks; i++) {
        const fc_box box = fc_chunk_box(tensor, &tensor->chunks[i]);
        l->report->undigested_bytes += (uint64_t)fc_box_volume(&box) * fc_dtype_size(tensor->dtype);
    }
    return rc;
}

void fc_verify_covered(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_verify_report *report) {
    fc_digest digest;
    bool counted = !object->object->refusal &&
                   fc_checkpoint_digest(checkpoint, object, FC_WHOLE_TENSOR, &digest, NULL) == FC_OK &&
                   digest.kind == FC_DIGEST_CRC64;
    if (!counted) {
        report->digested++;
        report->undigested--;
        report->undigested_bytes -= (uint64_t)object->shape[0];
    }
}

static int compare_region_offsets(const void *a, const void *b) {
    const fc_region *x = a, *y = b;
    int order = (x->kind == FC_REGION_BYTES) - (y->kind == FC_REGION_BYTES);
    order = order ? order : (x->file > y->file) - (x->file < y->file);
    order = order ? order : (x->offset > y->offset) - (x->offset < y->offset);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

/* Sorts the regions by file. A record that several tensors share (tied weights, views) is read once. */
static void sort_regions(fc_regions *r) {
    size_t kept = 0;
    fc_sort_items(r->items, r->count, sizeof *r->items, compare_region_offsets);
    for (size_t i = 0; i < r->count; i++) {
        const fc_region *last = kept ? &r->items[kept - 1] : NULL;
        const fc_region *x = &r->items[i];
        if (last && x->kind == FC_REGION_BYTES && last->kind == FC_REGION_BYTES && x->file == last->file &&
            x->offset == last->offset && x->length == last->length) {
            continue;
        }
        if (kept != i) {
            r->items[kept] = *x;
        }
        kept++;
    }
    r->count = kept;
}

fc_code fc_regions_new(const fc_checkpoint *checkpoint, bool all, fc_findings *findings, fc_verify_report *report,
                       fc_regions *out, fc_error *err) {
    region_lister l = {.checkpoint = checkpoint, .findings = findings, .report = report, .out = out, .all = all};
    memset(out, 0, sizeof *out);
    out->arena = fc_arena_new();
    out->broken = calloc(checkpoint->ntensors + 1, 1);
    out->whole = calloc(checkpoint->ntensors + 1, sizeof *out->whole);
    FC_NEED(out->arena && out->broken && out->whole, err, checkpoint->path);
    fc_code rc = FC_OK;
    for (; l.number < checkpoint->ntensors; l.number++) {
        FC_TRY_GOTO(list_tensor(&l, err), rc, out);
    }
out:
    sort_regions(out);
    return rc;
}

/* The size of a sealed file, which must be the size that the seal records if that is to be compared. */
static fc_code size_of_sealed(const fc_sealed_file *sealed, bool compare, uint64_t *size, fc_error *err) {
    int fd;
    FC_TRY(fc_open_input(sealed->path, &fd, size, err));
    close(fd);
    return !compare || *size == sealed->bytes
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: has %" PRIu64 " bytes but had %" PRIu64 " when it was sealed",
                         sealed->path, *size, sealed->bytes);
}

static fc_code add_file(fc_regions *out, uint32_t number, fc_sealed_file *sealed, bool compare, fc_findings *findings,
                        fc_error *err) {
    const fc_defect place = {.file = sealed->name};
    fc_region *r = &out->items[out->count];
    fc_error found;
    uint64_t size;
    fc_code rc = size_of_sealed(sealed, compare, &size, &found);
    if (rc != FC_OK) {
        fc_report_defect(findings, &place, "%s", found.message);
        return rc == FC_ENOMEM ? fc_fail(err, rc, "%s", found.message) : FC_OK;
    }
    *r = (fc_region){.kind = FC_REGION_FILE, .file = number, .length = size, .sealed = sealed};
    r->expected = sealed->crc64;
    sealed->bytes = size;
    out->count++;
    return FC_OK;
}

fc_code fc_regions_of_files(const fc_checkpoint *checkpoint, fc_seal *seal, bool compare, fc_findings *findings,
                            fc_regions *out, fc_error *err) {
    memset(out, 0, sizeof *out);
    out->items = calloc(checkpoint->nfiles + 1, sizeof *out->items);
    FC_NEED(out->items, err, checkpoint->path);
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        FC_TRY(add_file(out, (uint32_t)i, &seal->files[i], compare, findings, err));
    }
    return FC_OK;
}

void fc_regions_free(fc_regions *regions) {
    fc_arena_free(regions->arena);
    free(regions->broken);
    free(regions->whole);
    free(regions->items);
}
