/*
 * Verifies the tables: opens the checkpoint again by walking all of its files, and compares the tables with the headers
 * of the files.
 */
#include "hdf5/reader.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"
#include "hdf5/h5.h"
#include "hdf5/verify.h"
#include "sharding/recorded.h"
#include "verify/report.h"

#include <string.h>

static bool same_text(const char *a, const char *b) {
    return (!a && !b) || (a && b && strcmp(a, b) == 0);
}

static bool same_path(const fc_path *a, const fc_path *b) {
    bool same = a->count == b->count;
    for (size_t i = 0; same && i < a->count; i++) {
        const fc_path_element *x = &a->elements[i], *y = &b->elements[i];
        same = same_text(x->key, y->key) && x->is_index == y->is_index && x->is_tuple == y->is_tuple &&
               x->is_number == y->is_number;
    }
    return same;
}

static bool same_digest(const fc_checkpoint *a, const fc_tensor *x, const fc_checkpoint *b, const fc_tensor *y,
                        size_t index) {
    fc_digest p = {.kind = FC_DIGEST_NONE}, q = {.kind = FC_DIGEST_NONE};
    return fc_h5_digest(a, x, index, &p, NULL) == FC_OK && fc_h5_digest(b, y, index, &q, NULL) == FC_OK &&
           p.kind == q.kind && p.value == q.value;
}

/* How the bytes of a chunk become elements. A chunk that cannot be resolved is reported with its tensor. */
static bool same_encoding(const fc_checkpoint *a, const fc_tensor *x, const fc_checkpoint *b, const fc_tensor *y,
                          size_t index) {
    fc_extent p, q;
    if (fc_h5_extent(a, x, index, &p, NULL) != FC_OK || fc_h5_extent(b, y, index, &q, NULL) != FC_OK) {
        return true;
    }
    return p.codec == q.codec && p.decoded == q.decoded && p.filters.count == q.filters.count &&
           p.filters.mask == q.filters.mask &&
           memcmp(p.filters.items, q.filters.items, p.filters.count * sizeof *p.filters.items) == 0 &&
           (x->ndim == 0 || memcmp(p.strides, q.strides, (size_t)x->ndim * sizeof *p.strides) == 0);
}

static bool same_placements(int n, const fc_placement *a, const fc_placement *b) {
    bool same = !a == !b;
    for (int i = 0; same && a && i < n; i++) {
        same = a[i].kind == b[i].kind && a[i].dim == b[i].dim && a[i].split_factor == b[i].split_factor;
    }
    return same;
}

/* @return what differs, for the message; NULL if nothing does. */
static const char *difference(const fc_checkpoint *a, const fc_tensor *x, const fc_checkpoint *b, const fc_tensor *y) {
    const size_t ndim = (size_t)x->ndim;
    const fc_h5_dataset *d = x->detail, *e = y->detail;
    if (!same_text(x->name, y->name) || !same_path(&x->path, &y->path)) {
        return "its name";
    }
    if (x->dtype != y->dtype || !x->object != !y->object) {
        return "its dtype";
    }
    if (!fc_same_sizes(x->ndim, x->shape, y->ndim, y->shape)) {
        return "its shape";
    }
    if (!same_placements(a->mesh.ndim, x->placements, y->placements)) {
        return "its placements";
    }
    if (x->object && (!same_text(x->object->encoding, y->object->encoding) || !same_text(d->json, e->json))) {
        return "its encoding or its JSON";
    }
    if (!same_digest(a, x, b, y, FC_WHOLE_TENSOR)) {
        return "its digest";
    }
    for (size_t i = 0; x->nchunks == y->nchunks && i < x->nchunks; i++) {
        const fc_chunk *p = &x->chunks[i], *q = &y->chunks[i];
        if (!fc_same_place(&p->place, &q->place) ||
            (ndim > 0 && memcmp(p->dims, q->dims, 2 * ndim * sizeof *p->dims) != 0)) {
            return "the offsets of its boxes";
        }
        if (!same_encoding(a, x, b, y, i)) {
            return "the encoding of a box";
        }
        if (!same_digest(a, x, b, y, i)) {
            return "the digest of a box";
        }
    }
    return x->nchunks == y->nchunks ? NULL : "the number of its boxes";
}

static void compare_listed(const fc_checkpoint *listed, const fc_checkpoint *walked, struct fc_findings *findings) {
    const fc_defect place = {.file = listed->files[0].name};
    const char *path = listed->files[0].path;
    if (!fc_mesh_equal(&listed->mesh, &walked->mesh) || listed->ntensors != walked->ntensors) {
        fc_report_defect(findings, &place,
                         "%s: its tables and the files disagree about the mesh or the number of tensors", path);
        return;
    }
    for (size_t i = 0; i < listed->ntensors; i++) {
        const char *what = difference(listed, &listed->tensors[i], walked, &walked->tensors[i]);
        if (what) {
            fc_report_defect(
                findings, &place,
                "%s: its tables and the files disagree about tensor %s: %s: write the checkpoint again, or "
                "restore the file",
                path, walked->tensors[i].name, what);
        }
    }
}

/* Opens the checkpoint again without its tables. */
static fc_code walk(const fc_checkpoint *checkpoint, fc_checkpoint *walked, fc_error *err) {
    const char *index = checkpoint->files[0].path; /* of a sharded checkpoint, it ends in "/index.h5" */
    if (checkpoint->mesh.ndim == 0) {
        return fc_h5_walk_full(walked, err);
    }
    const char *directory = fc_arena_strndup(walked->arena, index, strlen(index) - sizeof "/index.h5" + 1);
    FC_NEED(directory, err, checkpoint->path);
    return fc_h5_walk_sharded(walked, directory, err);
}

fc_code fc_h5_verify_tables(const fc_checkpoint *checkpoint, struct fc_findings *findings, fc_error *err) {
    const fc_h5_state *state = checkpoint->state;
    if (!state->files) {
        return FC_OK;
    }
    fc_arena *arena = fc_arena_new();
    fc_checkpoint walked = {.format = checkpoint->format, .path = checkpoint->path, .arena = arena};
    walked.state = arena ? fc_arena_calloc(arena, 1, sizeof(fc_h5_state)) : NULL;
    fc_error why;
    fc_code rc;
    FC_TRY_GOTO(walked.state ? FC_OK : fc_no_memory(err, checkpoint->path), rc, out);
    rc = walk(checkpoint, &walked, &why);
    if (rc == FC_OK) {
        compare_listed(checkpoint, &walked, findings);
    } else if (rc == FC_ENOMEM || rc == FC_EIO) {
        fc_fail(err, rc, "%s", why.message);
    } else {
        rc = FC_OK;
        const fc_defect place = {.file = checkpoint->files[0].name};
        fc_report_defect(findings, &place, "%s", why.message);
    }
out:
    fc_arena_free(arena);
    return rc;
}
