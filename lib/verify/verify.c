/*
 * Verifies a checkpoint: worker threads read its regions tile by tile, digest them while they are in the cache, and
 * compare. A defect is reported and the work continues.
 */
#include "verify/regions.h"

#include "base/crc.h"
#include "base/pages.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "read/portions.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"
#include "report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A region that is being read. Its last tile frees it. */
typedef struct active {
    const fc_region *region;
    fc_coverage *coverage;
    fc_target_item item; /* the region's box, as the engine digests it */
    uint64_t sum;        /* bare CRC-32 for FC_REGION_BYTES, bare CRC-64 for FC_REGION_FILE */
    fc_item_digest digest;
    bool failed; /* already reported */
    unsigned users;
} active;

/* One unit of work. */
typedef struct tile {
    active *of;
    fc_portion portion; /* of a box */
    uint64_t at;        /* of stored bytes: offset from the start of the region */
    size_t size;        /* bytes to read */
    fc_tile_digest sums;
} tile;

typedef struct verifier {
    const fc_checkpoint *checkpoint;
    fc_regions *regions;
    fc_findings *findings;
    fc_progress *progress; /* may be NULL */
    fc_seal *new_seal;     /* receives the digests; NULL when verifying */
    fc_decoded *decoded;
    size_t tile_bytes;
    int threads;
    uint64_t *sums;       /* one per tensor */
    pthread_mutex_t lock; /* guards the fields below, the sums and all `active` regions */
    size_t next;          /* index of the next region */
    active *current;      /* the region that still has tiles to hand out */
    fc_portions portions;
    uint64_t at;
    uint64_t bytes;
    bool stop;
    fc_code code;
    fc_error error;
} verifier;

/* One worker's state. */
typedef struct worker {
    verifier *v;
    fc_source *source;
    unsigned char *buffer;
} worker;

static void stop(verifier *v, fc_code code, const fc_error *err) {
    if (v->code == FC_OK) {
        v->code = code;
        v->error = *err;
    }
    v->stop = true;
}

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
static void note(verifier *v, active *a, fc_code rc, const fc_error *err) {
    if (rc == FC_ENOMEM || rc == FC_EINTERRUPTED) {
        stop(v, rc, err);
    } else if (!a->failed) {
        const fc_defect place = place_of(v, a->region);
        if (a->region->tensor) {
            v->regions->broken[a->region->number] = 1;
        }
        fc_report_defect(v->findings, &place, "%s", err->message);
    }
    a->failed = true;
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

/* Called with the lock held. */
static void drop(verifier *v, active *a) {
    if (--a->users > 0) {
        return;
    }
    if (!a->failed && !v->stop && a->region->kind == FC_REGION_FILE) {
        end_file(v, a);
    } else if (!a->failed && !v->stop && a->region->kind == FC_REGION_BYTES) {
        compare_bytes(v, a);
    } else if (!a->failed && !v->stop) {
        compare_box(v, a);
    }
    fc_coverage_free(a->coverage);
    free(a);
}

/* Makes the next region the current one. A box that its chunks do not cover is reported and skipped. */
static fc_code open_next(verifier *v, fc_error *err) {
    const fc_region *r = &v->regions->items[v->next++];
    active *a = calloc(1, sizeof *a);
    if (!a) {
        return fc_no_memory(err, v->checkpoint->path);
    }
    a->region = r;
    a->users = 1;
    v->at = 0;
    if (is_stored(r)) {
        v->current = a;
        return FC_OK;
    }
    const fc_box box = {r->tensor->ndim, r->dims, r->dims + r->tensor->ndim};
    fc_error found;
    a->item = (fc_target_item){.tensor = 0, .owned = true, .dims = r->dims};
    a->digest = (fc_item_digest){&a->item, r->counts ? &v->sums[r->number] : NULL, 0, 0};
    fc_code rc = fc_coverage_within(v->checkpoint, &r->own, &box, &a->coverage, &found);
    if (rc == FC_OK) {
        const fc_portions_side side = {v->checkpoint, &r->own, a->coverage};
        const int64_t limit = (int64_t)(v->tile_bytes / fc_dtype_size(r->tensor->dtype));
        rc = fc_portions_begin(&v->portions, &side, 1, &box, limit, &found);
    }
    if (rc != FC_OK) {
        note(v, a, rc, &found);
        drop(v, a);
        return FC_OK;
    }
    v->current = a;
    return FC_OK;
}

/* Takes the next tile of a box. An error is a defect, and ends the region. */
static bool next_of_box(verifier *v, tile *t) {
    active *a = v->current;
    bool any = false;
    fc_error found;
    fc_code rc = fc_portions_next(&v->portions, &t->portion, &any, &found);
    if (rc != FC_OK) {
        note(v, a, rc, &found);
        return false;
    }
    const uint32_t element = fc_dtype_size(a->region->tensor->dtype);
    t->size = any && !t->portion.repeats ? (size_t)t->portion.count * element : 0;
    return any;
}

/* Takes the next tile of the current region. Returns false when none is left. */
static bool next_tile(verifier *v, tile *t) {
    active *a = v->current;
    const fc_region *r = a->region;
    memset(t, 0, sizeof *t);
    t->of = a;
    if (!is_stored(r)) {
        return next_of_box(v, t);
    }
    if (v->at >= r->length) {
        return false;
    }
    uint64_t left = r->length - v->at;
    t->at = v->at;
    t->size = left < v->tile_bytes ? (size_t)left : v->tile_bytes;
    v->at += t->size;
    return true;
}

/* Takes the next tile of any region. Returns false at the end. Called with the lock held. */
static bool take_tile(verifier *v, tile *t) {
    fc_error err;
    fc_code rc = fc_progress_count(v->progress, 0, &err);
    if (rc != FC_OK) {
        stop(v, rc, &err);
    }
    while (!v->stop) {
        if (v->current && next_tile(v, t)) {
            v->current->users++;
            return true;
        }
        if (v->current) {
            active *a = v->current;
            v->current = NULL;
            drop(v, a);
        }
        if (v->next == v->regions->count) {
            return false;
        }
        rc = open_next(v, &err);
        if (rc != FC_OK) {
            stop(v, rc, &err);
        }
    }
    return false;
}

static fc_code read_bytes(worker *w, tile *t, fc_error *err) {
    const fc_region *r = t->of->region;
    FC_TRY(fc_source_bytes(w->source, r->file, r->offset + t->at, w->buffer, t->size, err));
    if (r->kind == FC_REGION_FILE) {
        t->sums.item = fc_crc64_shift(fc_crc64_bare(w->buffer, t->size), r->length - t->at - t->size);
    } else {
        t->sums.item32 = fc_crc32_shift(fc_crc32_bare(w->buffer, t->size), r->length - t->at - t->size);
    }
    return FC_OK;
}

static fc_code read_tile(worker *w, tile *t, fc_error *err) {
    active *a = t->of;
    const fc_region *r = a->region;
    if (is_stored(r)) {
        return read_bytes(w, t, err);
    }
    const fc_box box = fc_portion_box(&t->portion, r->tensor->ndim);
    const fc_target_tensor target = {.source = r->tensor, .name = r->tensor->name, .dtype = r->tensor->dtype};
    if (t->portion.repeats) {
        FC_TRY(fc_source_fill_one(w->source, a->coverage, &r->own, &box, w->buffer, err));
        t->sums = fc_repeat_digest(r->tensor, &a->item, &box, w->buffer);
        return FC_OK;
    }
    FC_TRY(fc_source_fill(w->source, a->coverage, &r->own, &box, w->buffer, err));
    return fc_tile_digest_make(&target, &a->item, &box, w->buffer, false, &t->sums, err);
}

/* Called with the lock held. */
static void give_back(verifier *v, tile *t, fc_code rc, const fc_error *err) {
    active *a = t->of;
    if (rc != FC_OK) {
        note(v, a, rc, err);
    } else if (is_stored(a->region)) {
        a->sum ^= t->sums.item ^ t->sums.item32;
    } else {
        fc_item_digest_add(&a->digest, &t->sums);
    }
    v->bytes += t->size;
    drop(v, a);
    if (v->progress) {
        atomic_fetch_add_explicit(&v->progress->done, t->size, memory_order_relaxed);
    }
}

static fc_code begin_work(worker *w, fc_error *err) {
    const verifier *v = w->v;
    FC_TRY(
        fc_source_new(v->checkpoint, v->decoded, FC_SCRATCH_BYTES, fc_files_per_worker(v->threads), &w->source, err));
    w->buffer = fc_pages_new(v->tile_bytes);
    return w->buffer ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory for a buffer of %zu bytes", v->tile_bytes);
}

/* A worker thread. */
static void *verify_tiles(void *context) {
    verifier *v = context;
    worker w = {.v = v};
    fc_error err;
    tile t;
    fc_code rc = begin_work(&w, &err);
    pthread_mutex_lock(&v->lock);
    if (rc != FC_OK) {
        stop(v, rc, &err);
    }
    while (take_tile(v, &t)) {
        pthread_mutex_unlock(&v->lock);
        rc = read_tile(&w, &t, &err);
        pthread_mutex_lock(&v->lock);
        give_back(v, &t, rc, &err);
    }
    pthread_mutex_unlock(&v->lock);
    fc_source_free(w.source);
    fc_pages_free(w.buffer, v->tile_bytes);
    return NULL;
}

static fc_code read_all(verifier *v, const fc_work_options *options, fc_error *err) {
    uint64_t memory = options && options->memory ? options->memory : FC_DEFAULT_MEMORY;
    int threads = options && options->threads > 0 ? options->threads : fc_default_threads();
    threads = threads > FC_MOST_THREADS ? FC_MOST_THREADS : threads;
    const uint64_t each = FC_TILE_BYTES + FC_SCRATCH_BYTES + fc_source_overhead();
    uint64_t fit = memory / 2 / each;
    v->threads = (uint64_t)threads < fit ? threads : fit < 1 ? 1 : (int)fit;
    v->tile_bytes = memory < 2 * each ? FC_LEAST_TILE_BYTES : FC_TILE_BYTES;
    v->decoded = fc_decoded_new(memory / 2);
    v->sums = calloc(v->checkpoint->ntensors + 1, sizeof *v->sums);
    if (!v->decoded || !v->sums) {
        return fc_no_memory(err, v->checkpoint->path);
    }
    pthread_mutex_init(&v->lock, NULL);
    fc_threads_run(v->threads, verify_tiles, v);
    if (v->current) { /* stopped early */
        drop(v, v->current);
    }
    fc_portions_free(&v->portions);
    pthread_mutex_destroy(&v->lock);
    if (v->code != FC_OK && err) {
        *err = v->error;
    }
    return v->code;
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
static fc_code pass(verifier *v, const fc_work_options *options, bool data, fc_verify_report *out, fc_error *err) {
    uint64_t total = 0;
    for (size_t i = 0; i < v->regions->count; i++) {
        total += v->regions->items[i].length;
    }
    fc_progress_begin(v->progress, FC_PHASE_VERIFYING, FC_COUNTED_BYTES, total);
    fc_code rc;
    FC_TRY_GOTO(read_all(v, options, err), rc, out);
    if (data) {
        compare_whole(v);
    }
    if (data && v->new_seal) {
        keep_whole(v);
    }
out:
    out->bytes += v->bytes;
    fc_decoded_free(v->decoded);
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
    FC_TRY_GOTO(pass(v, options, false, out, err), rc, out);
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
    const verifier fresh = {
        .checkpoint = checkpoint, .findings = findings, .progress = options->work.progress, .new_seal = options->seal};
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
        FC_TRY_GOTO(pass(&v, &options->work, true, out, err), rc, out);
    }
out:
    fc_regions_free(&regions);
    return rc;
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
    rc = fc_checkpoint_unchanged(checkpoint, err);
out:
    out->defects = findings.count;
    pthread_mutex_destroy(&findings.lock);
    return rc;
}
