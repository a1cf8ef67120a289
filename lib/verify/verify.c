/*
 * Verifies a checkpoint: fc_scan_run reads its regions tile by tile, which are digested while they are in the cache,
 * and compared. A defect is reported and the work continues.
 */
#include "verify/regions.h"

#include "base/crc.h"
#include "checkpoint/identity.h"
#include "derived/derived.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "read/scan.h"
#include "verify/report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A region that is being read. */
typedef struct active {
    const fc_region *region;
    fc_target_item item; /* the region's box, as the engine digests it */
    uint64_t sum;        /* bare CRC-32 for FC_REGION_BYTES, bare CRC-64 for FC_REGION_FILE */
    fc_item_digest digest;
} active;

typedef struct verifier {
    const fc_checkpoint *checkpoint;
    fc_regions *regions;
    fc_findings *findings;
    fc_seal *new_seal; /* receives the digests; NULL when verifying */
    uint64_t *sums;    /* one per tensor */
} verifier;

static fc_defect place_of(const verifier *v, const fc_region *r) {
    return (fc_defect){.file = r->file < v->checkpoint->nfiles ? v->checkpoint->files[r->file].name : NULL,
                       .tensor = r->tensor ? r->tensor->name : NULL,
                       .has_offset = r->tensor != NULL,
                       .offset = r->offset};
}

static const char *path_of(const verifier *v, const fc_region *r) {
    return r->file < v->checkpoint->nfiles ? v->checkpoint->files[r->file].path : v->checkpoint->path;
}

/*
 * Reports an error while a region is read as a defect, once per region. Out of memory and interruption stop the work
 * instead.
 */
static fc_code verify_report_region(void *context, const fc_scan_item *item, fc_code rc, const fc_error *found) {
    const verifier *v = context;
    const fc_region *r = &v->regions->items[item->index];
    if (rc == FC_ENOMEM || rc == FC_EINTERRUPTED) {
        return rc;
    }
    if (!item->failed) {
        const fc_defect place = place_of(v, r);
        if (r->tensor) {
            v->regions->broken[r->number] = 1;
        }
        fc_report_defect(v->findings, &place, "%s", found->message);
    }
    return FC_OK;
}

static void compare_box(verifier *v, active *a) {
    const fc_region *r = a->region;
    const fc_target_tensor target = {.source = r->tensor, .dtype = r->tensor->dtype};
    const fc_target all = {.tensors = &target, .ntensors = 1};
    fc_item_digest_end(&a->digest, &all, false);
    if (r->kind == FC_REGION_CRC64 && a->item.crc64 != r->expected) {
        const fc_defect place = place_of(v, r);
        const fc_box box = {r->tensor->ndim, r->dims, r->dims + r->tensor->ndim};
        v->regions->broken[r->number] = 1;
        fc_report_defect(v->findings, &place,
                         "%s: offset %" PRIu64 ": tensor %s, box %s: damaged: the CRC-64 of its data is %016" PRIx64
                         " but %016" PRIx64 " is recorded",
                         path_of(v, r), r->offset, r->tensor->name, fc_box_to_text(&box).s, a->item.crc64, r->expected);
    }
}

static void compare_bytes(verifier *v, active *a) {
    const fc_region *r = a->region;
    uint32_t found = fc_crc32_finish((uint32_t)a->sum, r->length);
    if (found != r->expected) {
        const fc_defect place = place_of(v, r);
        v->regions->broken[r->number] = 1;
        fc_report_defect(v->findings, &place,
                         "%s: offset %" PRIu64 ": tensor %s: damaged: the CRC-32 of the %" PRIu64
                         " bytes of its record is %08" PRIx32 " but the archive records %08" PRIx32,
                         path_of(v, r), r->offset, r->tensor->name, r->length, found, (uint32_t)r->expected);
    }
}

static void end_file(verifier *v, active *a) {
    const fc_region *r = a->region;
    uint64_t found = fc_crc64_finish(a->sum, r->length);
    if (v->new_seal) {
        r->sealed->crc64 = found;
    } else if (found != r->expected) {
        const fc_defect place = place_of(v, r);
        fc_report_defect(v->findings, &place,
                         "%s: changed since it was sealed, or damaged: its CRC-64 is %016" PRIx64
                         " but %s records %016" PRIx64,
                         path_of(v, r), found, v->checkpoint->seal->path, r->expected);
    }
}

static bool is_stored(const fc_region *r) {
    return r->kind == FC_REGION_BYTES || r->kind == FC_REGION_FILE;
}

static fc_code verify_begin_region(void *context, fc_scan_item *item, fc_error *err) {
    const verifier *v = context;
    const fc_region *r = &v->regions->items[item->index];
    active *a = item->state;
    (void)err;
    a->region = r;
    if (is_stored(r)) {
        item->file = r->file;
        item->offset = r->offset;
        item->length = r->length;
        return FC_OK;
    }
    item->tensors[0] = &r->own;
    item->box = (fc_box){r->tensor->ndim, r->dims, r->dims + r->tensor->ndim};
    a->item = (fc_target_item){.tensor = 0, .owned = true, .dims = r->dims};
    a->digest = (fc_item_digest){&a->item, r->counts ? &v->sums[r->number] : NULL, 0, 0};
    return FC_OK;
}

static void verify_end_region(void *context, const fc_scan_item *item, bool complete) {
    verifier *v = context;
    active *a = item->state;
    if (complete && a->region->kind == FC_REGION_FILE) {
        end_file(v, a);
    } else if (complete && a->region->kind == FC_REGION_BYTES) {
        compare_bytes(v, a);
    } else if (complete) {
        compare_box(v, a);
    }
}

static fc_code verify_digest_tile(void *context, const fc_scan_tile *tile, fc_error *err) {
    const active *a = tile->item->state;
    const fc_region *r = a->region;
    fc_tile_digest *sums = tile->scratch;
    (void)context;
    *sums = (fc_tile_digest){0};
    if (r->kind == FC_REGION_FILE) {
        sums->item = fc_crc64_shift(fc_crc64_bare(tile->bytes[0], tile->size), r->length - tile->at - tile->size);
    } else if (r->kind == FC_REGION_BYTES) {
        sums->item32 = fc_crc32_shift(fc_crc32_bare(tile->bytes[0], tile->size), r->length - tile->at - tile->size);
    } else if (tile->size == 0) { /* one element that stands for many */
        *sums = fc_repeat_digest(r->tensor, &a->item, &tile->box, tile->bytes[0]);
    } else {
        const fc_target_tensor target = {.source = r->tensor, .name = r->tensor->name, .dtype = r->tensor->dtype};
        return fc_tile_digest_make(&target, &a->item, &tile->box, tile->bytes[0], false, sums, err);
    }
    return FC_OK;
}

static bool verify_add_tile(void *context, const fc_scan_tile *tile) {
    (void)context;
    active *a = tile->item->state;
    const fc_tile_digest *sums = tile->scratch;
    if (is_stored(a->region)) {
        a->sum ^= sums->item ^ sums->item32;
    } else {
        fc_item_digest_add(&a->digest, sums);
    }
    return true;
}

/* Returns the digest of a whole tensor. */
static uint64_t digest_of(const verifier *v, size_t tensor) {
    const fc_tensor *t = &v->checkpoint->tensors[tensor];
    const fc_box whole = {t->ndim, NULL, t->shape};
    return fc_crc64_finish(v->sums[tensor], (uint64_t)fc_box_volume(&whole) * fc_dtype_size(t->dtype));
}

/* Compares the digests of whole tensors, except those with defects that are already reported. */
static void compare_whole(const verifier *v) {
    const fc_checkpoint *c = v->checkpoint;
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        const fc_digest *recorded = &v->regions->whole[i];
        uint64_t found = digest_of(v, i);
        if (recorded->kind == FC_DIGEST_CRC64 && !v->regions->broken[i] && found != recorded->value) {
            const fc_defect place = {.tensor = t->name};
            fc_report_defect(v->findings, &place,
                             "%s: tensor %s: damaged: the CRC-64 of its data is %016" PRIx64 " but %016" PRIx64
                             " is recorded",
                             c->path, t->name, found, recorded->value);
        }
    }
}

/* Stores the digests of whole tensors in a new seal. */
static void keep_whole(const verifier *v) {
    for (size_t i = 0; i < v->checkpoint->ntensors; i++) {
        v->new_seal->crc64[i] = digest_of(v, i);
        v->new_seal->has[i] = !v->regions->broken[i];
    }
}

/* Reads all regions. If they are boxes (`data`), then compares whole tensors. */
static fc_code verify_regions(verifier *v, const fc_work_options *work, bool data, fc_verify_report *out,
                              fc_error *err) {
    fc_scan scan = {.count = v->regions->count,
                    .sides = 1,
                    .checkpoints = {v->checkpoint},
                    .phase = FC_PHASE_VERIFYING,
                    .counts_stored = true,
                    .read = &out->bytes,
                    .state = sizeof(active),
                    .scratch = sizeof(fc_tile_digest),
                    .context = v,
                    .begin = verify_begin_region,
                    .look = verify_digest_tile,
                    .add = verify_add_tile,
                    .fail = verify_report_region,
                    .end = verify_end_region};
    for (size_t i = 0; i < v->regions->count; i++) {
        scan.total += v->regions->items[i].length;
    }
    fc_code rc;
    v->sums = calloc(v->checkpoint->ntensors + 1, sizeof *v->sums);
    FC_TRY_GOTO(v->sums ? FC_OK : fc_no_memory(err, v->checkpoint->path), rc, out);
    FC_TRY_GOTO(fc_scan_run(&scan, work, err), rc, out);
    if (data) {
        compare_whole(v);
    }
    if (data && v->new_seal) {
        keep_whole(v);
    }
out:
    free(v->sums);
    return rc;
}

/* Reads every byte of every file, to compare with the existing seal or to make a new one. */
static fc_code verify_files(verifier *v, fc_seal *seal, const fc_work_options *options, fc_verify_report *out,
                            fc_error *err) {
    fc_regions files;
    v->regions = &files;
    fc_code rc;
    FC_TRY_GOTO(fc_regions_of_files(v->checkpoint, seal, !v->new_seal, v->findings, &files, err), rc, out);
    FC_TRY_GOTO(verify_regions(v, options, false, out, err), rc, out);
    for (size_t i = v->checkpoint->nfiles; i < seal->nfiles; i++) {
        FC_TRY_GOTO(fc_digest_header_file(&seal->files[i], !v->new_seal, v->findings, err), rc, out);
    }
    if (!v->new_seal && seal->missing > 0) {
        const fc_defect place = {.tensor = seal->missed};
        fc_report_defect(v->findings, &place, "%s: %s was sealed and is now missing or has another shape or dtype%s",
                         v->checkpoint->path, seal->missed, seal->missing > 1 ? "; others are affected too" : "");
    }
out:
    v->regions = NULL;
    fc_regions_free(&files);
    return rc;
}

static fc_code verify_all(const fc_checkpoint *checkpoint, const fc_verify_options *options, fc_findings *findings,
                          fc_verify_report *out, fc_error *err) {
    const verifier fresh = {.checkpoint = checkpoint, .findings = findings, .new_seal = options->seal};
    fc_seal *seal = options->seal;
    fc_regions regions;
    if (!seal && checkpoint->seal) {
        seal = (fc_seal *)(uintptr_t)checkpoint->seal; /* read-only: no new seal is made */
    }
    fc_code rc;
    FC_TRY_GOTO(fc_regions_new(checkpoint, options->seal != NULL, findings, out, &regions, err), rc, out);
    const uint64_t before = findings->count;
    if (seal) {
        verifier v = fresh;
        FC_TRY_GOTO(verify_files(&v, seal, &options->work, out, err), rc, out);
        out->sealed = true;
    }
    /* Intact sealed files hold intact data. Otherwise find out which tensors are damaged. */
    if (!seal || options->seal || findings->count > before) {
        verifier v = fresh;
        v.regions = &regions;
        FC_TRY_GOTO(verify_regions(&v, &options->work, true, out, err), rc, out);
    }
out:
    fc_regions_free(&regions);
    return rc;
}

/* Compares what a derived checkpoint has read of others, unless a defect explains why some of that is missing. */
static fc_code verify_inputs(const fc_checkpoint *checkpoint, fc_findings *findings, fc_verify_report *out,
                             fc_error *err) {
    const fc_defect place = {NULL};
    fc_error found;
    if (findings->count > 0) {
        return FC_OK;
    }
    const fc_code rc = fc_checkpoint_check_inputs(checkpoint, NULL, &found);
    if (rc == FC_ECORRUPT) {
        fc_report_defect(findings, &place, "%s", found.message);
    } else if (rc != FC_OK) {
        *err = found;
        return rc;
    }
    for (size_t i = 0; i < checkpoint->ntensors && rc == FC_OK; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const fc_box whole = {t->ndim, NULL, t->shape};
        if (t->nchunks > 0 && fc_derived_checks(checkpoint, t)) {
            out->digested++;
            out->undigested--;
            out->undigested_bytes -= (uint64_t)fc_box_volume(&whole) * fc_dtype_size(t->dtype);
        }
    }
    return FC_OK;
}

fc_code fc_verify(const fc_checkpoint *checkpoint, const fc_verify_options *options,
                  void (*report)(void *context, const fc_defect *defect), void *context, fc_verify_report *out,
                  fc_error *err) {
    static const fc_verify_options defaults;
    fc_findings findings = {.report = report, .context = context};
    memset(out, 0, sizeof *out);
    if (checkpoint->format->layout_only) {
        return fc_fail(err, FC_EUSAGE, "%s: a schema has no data to verify", checkpoint->path);
    }
    pthread_mutex_init(&findings.lock, NULL);
    out->files = checkpoint->nfiles;
    fc_code rc;
    FC_TRY_GOTO(verify_all(checkpoint, options ? options : &defaults, &findings, out, err), rc, out);
    if (checkpoint->format->verifier.verify) {
        FC_TRY_GOTO(checkpoint->format->verifier.verify(checkpoint, &findings, out, err), rc, out);
    }
    FC_TRY_GOTO(verify_inputs(checkpoint, &findings, out, err), rc, out);
    rc = fc_checkpoint_unchanged(checkpoint, err);
out:
    out->defects = findings.count;
    pthread_mutex_destroy(&findings.lock);
    return rc;
}
