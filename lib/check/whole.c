/*
 * Checks whether a checkpoint is complete: existence and sizes of its data files, and the coverage of its tensors.
 */
#include "check/check.h"

#include "base/checked.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "io/path.h"
#include "io/stand_in.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/stat.h>

/* What the manifest expects in a file. */
typedef struct contents {
    uint64_t needed;           /* bytes */
    const fc_tensor *first;    /* any tensor with a chunk in it */
    const fc_tensor *furthest; /* the tensor that ends last */
    uint64_t tensors, objects; /* number with a chunk in it */
} contents;

static contents *list_contents(fc_check_run *c) {
    const fc_checkpoint *checkpoint = c->checkpoint;
    contents *files = fc_check_alloc(c, checkpoint->nfiles, sizeof *files);
    const fc_tensor **last = fc_check_alloc(c, checkpoint->nfiles, sizeof *last);
    for (size_t t = 0; files && last && t < checkpoint->ntensors; t++) {
        const fc_tensor *tensor = &checkpoint->tensors[t];
        for (size_t i = 0; i < tensor->nchunks; i++) {
            const fc_chunk *chunk = &tensor->chunks[i];
            uint64_t end;
            if (!fc_chunk_file(checkpoint, chunk) || !fc_add_u64(chunk->place.offset, chunk->place.length, &end)) {
                continue;
            }
            contents *f = &files[chunk->place.file];
            if (last[chunk->place.file] != tensor) {
                *(tensor->object ? &f->objects : &f->tensors) += 1;
            }
            last[chunk->place.file] = tensor;
            f->first = f->first ? f->first : tensor;
            if (end > f->needed) {
                f->needed = end;
                f->furthest = tensor;
            }
        }
    }
    return last ? files : NULL;
}

/* Returns "data of 12 tensors and 3 objects, e.g. wq.weight". */
static const char *contents_text(fc_check_run *c, const contents *has) {
    uint64_t both = has->tensors + has->objects;
    if (!has->first) {
        return "no data";
    }
    if (both == 1) {
        return fc_check_text(c, "data of %s", has->first->name);
    }
    const char *tensors = fc_check_text(c, "%" PRIu64 " tensor%s", has->tensors, has->tensors == 1 ? "" : "s");
    const char *objects = fc_check_text(c, "%" PRIu64 " object%s", has->objects, has->objects == 1 ? "" : "s");
    return fc_check_text(c, "data of %s%s%s, e.g. %s", has->tensors ? tensors : "",
                         has->tensors && has->objects ? " and " : "", has->objects ? objects : "", has->first->name);
}

static void file_missing(fc_check_run *c, const fc_file *file, const contents *has) {
    fc_check_add(c, &(fc_finding){.kind = FC_FOUND_FILE_MISSING,
                                  .name = file->path,
                                  .detail = contents_text(c, has),
                                  .count = has->tensors + has->objects});
}

static void file_damaged(fc_check_run *c, const fc_file *file, const char *text) {
    fc_check_add(
        c, &(fc_finding){.kind = FC_FOUND_FILE_DAMAGED, .name = file->path, .detail = fc_check_text(c, "%s", text)});
}

static void file_too_short(fc_check_run *c, const fc_file *file, uint64_t size, const contents *has) {
    fc_error why;
    if (fc_check_stand_in(file->path, &why) != FC_OK) {
        file_damaged(c, file, why.message);
        return;
    }
    fc_check_add(c, &(fc_finding){.kind = FC_FOUND_FILE_TRUNCATED,
                                  .name = file->path,
                                  .other = has->furthest->name,
                                  .found = fc_check_text(c, "%" PRIu64, size),
                                  .expected = fc_check_text(c, "%" PRIu64, has->needed)});
}

static void check_file(fc_check_run *c, size_t index, const contents *has) {
    const fc_file *file = &c->checkpoint->files[index];
    const fc_format *format = c->checkpoint->format;
    struct stat st;
    fc_error why;
    c->present[index] = UINT64_MAX;
    if (fc_stat(file->path, &st) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        file_missing(c, file, has);
    } else if (fc_stat(file->path, &st) != 0) {
        (void)fc_fail_errno(&why, errno, "%s: cannot read its attributes", file->path);
        file_damaged(c, file, why.message);
    } else if (!S_ISREG(st.st_mode)) {
        (void)fc_fail(&why, FC_ECORRUPT, "%s: not a regular file", file->path);
        file_damaged(c, file, why.message);
    } else if ((uint64_t)st.st_size < has->needed) {
        c->present[index] = (uint64_t)st.st_size;
        file_too_short(c, file, (uint64_t)st.st_size, has);
    } else if (format->reader.check_file && format->reader.check_file(c->checkpoint, index, &why) != FC_OK) {
        file_damaged(c, file, why.message);
    }
}

void fc_check_files(fc_check_run *c) {
    const contents *files = list_contents(c);
    c->present = fc_check_alloc(c, c->checkpoint->nfiles, sizeof *c->present);
    for (size_t i = 0; files && c->present && i < c->checkpoint->nfiles; i++) {
        check_file(c, i, &files[i]);
    }
    if (c->checkpoint->ntensors == 0) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_EMPTY, .name = c->path});
    }
}

/* Whether an object lies in bytes whose absence is already reported for its file. */
static bool is_cut_off(const fc_check_run *c, const fc_tensor *object) {
    for (size_t i = 0; c->present && i < object->nchunks; i++) {
        const fc_chunk *chunk = &object->chunks[i];
        uint64_t end;
        if (fc_chunk_file(c->checkpoint, chunk) && fc_add_u64(chunk->place.offset, chunk->place.length, &end) &&
            end > c->present[chunk->place.file]) {
            return true;
        }
    }
    return false;
}

/* Adds a finding if the headers record another value of an object than its bytes have. @param judged what examining the
 * bytes returned. */
static void check_recorded(fc_check_run *c, const fc_tensor *object, fc_code judged) {
    const bool damaged = object->object->damaged || is_cut_off(c, object);
    fc_error why;
    if (judged != FC_OK || damaged || !c->checkpoint->format->reader.records_json) {
        return; /* there is nothing to compare, or it is already reported */
    }
    fc_arena *scratch = fc_arena_new();
    fc_code rc =
        scratch ? fc_checkpoint_check_object_json(c->checkpoint, object, scratch, &why) : fc_no_memory(&why, c->path);
    if (!fc_check_failed(c, rc, &why) && rc == FC_ECORRUPT) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_OBJECT_DAMAGED,
                                      .name = object->name,
                                      .detail = fc_check_text(c, "%s", why.message)});
    }
    fc_arena_free(scratch);
}

/* Checks what an object does when it is loaded. Returns whether it runs code. */
static bool check_object(fc_check_run *c, const fc_named *name) {
    fc_object_verdict verdict;
    fc_error why;
    fc_code rc = fc_checkpoint_object_verdict(c->checkpoint, name->tensor, &verdict, &why);
    if (fc_check_failed(c, rc, &why)) {
        return false;
    }
    if (rc == FC_ECORRUPT && is_cut_off(c, name->tensor)) {
        return false;
    }
    if (rc == FC_ECORRUPT) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_OBJECT_DAMAGED,
                                      .name = name->tensor->name,
                                      .detail = fc_check_text(c, "%s", why.message)});
    } else if (rc == FC_OK && verdict.risk != FC_OBJECT_HARMLESS) { /* a missing file is already reported */
        fc_check_add(c, &(fc_finding){.kind = verdict.risk == FC_OBJECT_RUNS ? FC_FOUND_RUNS : FC_FOUND_UNKNOWN_CLASS,
                                      .name = name->tensor->name,
                                      .found = fc_check_text(c, "%s", verdict.global),
                                      .detail = fc_check_text(c, "%s", verdict.reason),
                                      .fix = fc_check_fix(c, FC_SETTING_EXCLUDE, name->tensor->name)});
    }
    check_recorded(c, name->tensor, rc);
    return rc == FC_OK && verdict.risk == FC_OBJECT_RUNS;
}

void fc_check_objects(fc_check_run *c) {
    bool runs = false;
    for (size_t i = 0; i < c->names.count; i++) {
        if (c->names.items[i].tensor->object) {
            runs |= check_object(c, &c->names.items[i]);
        }
    }
    if (c->checkpoint->risk && !runs) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_FILE_RUNS, .name = c->path, .detail = c->checkpoint->risk});
    }
}

static void add_unsupported(fc_check_run *c, const fc_tensor *tensor, const char *why) {
    fc_check_add(c, &(fc_finding){.kind = FC_FOUND_UNSUPPORTED,
                                  .name = tensor->name,
                                  .detail = fc_check_text(c, "%s", why),
                                  .fix = fc_check_fix(c, FC_SETTING_EXCLUDE, tensor->name)});
}

/* Adds a finding for a value that cannot be read, although the others can. */
static void check_readable(fc_check_run *c, const fc_tensor *tensor) {
    fc_error why;
    fc_extent extent;
    const fc_object *object = tensor->object;
    if (object && object->refusal) {
        add_unsupported(c, tensor, object->refusal);
        return;
    }
    /* Objects of the other encodings are examined by check_object. */
    const fc_object_encoding *encoding = object ? fc_object_encoding_find(object->encoding) : NULL;
    if (!object || tensor->nchunks == 0 || (encoding && encoding->examine)) {
        return;
    }
    fc_code rc = fc_checkpoint_extent(c->checkpoint, tensor, 0, &extent, &why);
    if (rc == FC_EUNSUPPORTED) {
        add_unsupported(c, tensor, why.message);
    } else if (rc == FC_ECORRUPT && object->damaged) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_OBJECT_DAMAGED,
                                      .name = tensor->name,
                                      .detail = fc_check_text(c, "%s", why.message)});
    } else {
        (void)fc_check_failed(c, rc, &why);
    }
}

void fc_check_coverage(fc_check_run *c) {
    if (c->checkpoint->format->layout_only) {
        return;
    }
    for (size_t i = 0; i < c->names.count; i++) {
        fc_coverage *coverage = NULL;
        fc_error why;
        const fc_tensor *tensor = c->names.items[i].tensor;
        check_readable(c, tensor);
        fc_code rc = fc_coverage_within(c->checkpoint, tensor, NULL, &coverage, &why);
        if (rc != FC_OK && !fc_check_failed(c, rc, &why)) {
            fc_check_add(c, &(fc_finding){.kind = FC_FOUND_COVERAGE,
                                          .name = tensor->name,
                                          .found = fc_check_type(c, tensor),
                                          .detail = fc_check_text(c, "%s", why.message)});
        }
        fc_coverage_free(coverage);
    }
}
