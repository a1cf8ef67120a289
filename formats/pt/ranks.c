/*
 * One file per rank: reads the files of a directory's sets one after another and makes one manifest. merge.c merges
 * what they hold.
 */
#include "base/try.h"
#include "pt/merge.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- files ---- */

static fc_code add_file(pt_merger *m, const pt_set *set, size_t first, int64_t rank, const fc_path *prefix) {
    torch_leaves leaves = {.arena = m->checkpoint->arena};
    uint32_t index = (uint32_t)first + (uint32_t)rank;
    const fc_file *file = &m->checkpoint->files[index];
    m->rank = rank;
    m->scratch = fc_arena_new();
    fc_code rc =
        m->scratch ? fc_torch_file_open(file->path, index, &m->f, m->err) : fc_no_memory(m->err, m->checkpoint->path);
    if (rc == FC_OK) {
        leaves.arena = rank == 0 ? m->checkpoint->arena : m->scratch;
        rc = fc_pt_layout_load(&m->f, rank, set->ranks, &m->layout, m->err);
        rc = rc == FC_OK ? fc_torch_flatten(&m->f, prefix, &leaves, m->err) : rc;
        rc = rc == FC_OK ? fc_torch_check_names(file->path, &leaves, m->err) : rc;
        rc = rc == FC_OK ? fc_pt_find_flat(m, &leaves) : rc;
        rc = rc == FC_OK ? fc_pt_note_cuts(m, &leaves, set->ranks) : rc;
        if (rc == FC_OK) {
            fc_pt_match_numbers(m, &leaves);
        }
        for (size_t i = 0; i < leaves.count && rc == FC_OK; i++) {
            rc = fc_pt_merge_leaf(m, &leaves.items[i]);
            rc = rc == FC_OK ? rc : fc_context(m->err, rc, "%s: %.256s", m->directory, leaves.items[i].name);
        }
        fc_pt_layout_free(&m->layout);
        fc_torch_file_close(&m->f);
    }
    free(leaves.items);
    fc_arena_free(m->scratch);
    m->scratch = NULL;
    return rc;
}

static fc_code check_missing(const pt_merger *m, const pt_set *set, size_t first) {
    size_t missing = 0, at = 0;
    for (int64_t r = 0; r < set->ranks; r++) {
        if (access(m->checkpoint->files[first + (size_t)r].path, F_OK) != 0) {
            at = missing++ ? at : first + (size_t)r;
        }
    }
    return missing == 0
               ? FC_OK
               : fc_fail(m->err, FC_ECORRUPT,
                         "%s: the file is missing, %zu of the %" PRId64 " ranks' files are: copy the whole directory",
                         m->checkpoint->files[at].path, missing, set->ranks);
}

static fc_code check_links(const pt_merger *m, const fc_open_options *options, size_t first, size_t count) {
    char root[PATH_MAX];
    fc_code rc = FC_OK;
    if (options->follow_external) {
        return rc;
    }
    if (!realpath(m->directory, root)) {
        return fc_fail_errno(m->err, errno, "%s: cannot be examined", m->directory);
    }
    for (size_t i = first; i < first + count && rc == FC_OK; i++) {
        rc = fc_check_link(m->checkpoint->files[i].path, m->checkpoint->files[i].name, root, m->err);
    }
    return rc;
}

/* Names the files of a set from checkpoint->files[first] on. */
static fc_code name_files(pt_merger *m, const pt_set *set, fc_file *files) {
    fc_arena *arena = m->checkpoint->arena;
    size_t n = strlen(m->directory);
    const char *slash = n > 0 && m->directory[n - 1] == '/' ? "" : "/";
    for (int64_t r = 0; r < set->ranks; r++) {
        files[r].name = fc_arena_printf(arena, "%s%0*" PRId64 "%s", set->head, set->width, r, set->tail);
        files[r].path = files[r].name ? fc_arena_printf(arena, "%s%s%s", m->directory, slash, files[r].name) : NULL;
        if (!files[r].path) {
            return fc_no_memory(m->err, m->checkpoint->path);
        }
    }
    return FC_OK;
}

/* Whether the files of a set are parts of one whole: model and optimizer, and what is called otherwise unless the name
   tells of something that each rank has for itself. */
static bool is_merged(const pt_set *set) {
    static const char *const own[] = {"extra", "rng", "random", "data"};
    bool merged = strstr(set->head, "_world_size_") == NULL;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        merged = merged && strstr(set->name, own[i]) == NULL;
    }
    return merged || strstr(set->name, "model") || strstr(set->name, "optim");
}

/* What precedes the names of a file of a set: the set's, if there are several; and the rank, for a set of which nothing
 * is known (verl's extra_state: random number generators and schedulers, each rank's own). */
static fc_code make_prefix(const pt_merger *m, const pt_set *set, bool several, int64_t rank, fc_path *out) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, 2, sizeof *elements);
    size_t n = 0;
    if (!elements) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    if (several && set->name[0]) {
        elements[n++].key = set->name;
    }
    if (!is_merged(set)) {
        elements[n].key = fc_arena_printf(arena, "rank_%" PRId64, rank);
        if (!elements[n++].key) {
            return fc_no_memory(m->err, m->checkpoint->path);
        }
    }
    *out = (fc_path){elements, n};
    return FC_OK;
}

static fc_code add_set(pt_merger *m, const pt_set *set, bool several, const fc_open_options *options, fc_file *files) {
    size_t first = m->checkpoint->nfiles, first_value = m->count;
    fc_code rc = name_files(m, set, files + first);
    m->tp_plan = is_merged(set) ? options->tp_plan : NULL;
    m->checkpoint->nfiles += rc == FC_OK ? (size_t)set->ranks : 0;
    rc = rc == FC_OK ? check_missing(m, set, first) : rc;
    rc = rc == FC_OK ? check_links(m, options, first, (size_t)set->ranks) : rc;
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, (uint64_t)set->ranks);
    for (int64_t r = 0; r < set->ranks && rc == FC_OK; r++) {
        fc_path prefix;
        rc = make_prefix(m, set, several, r, &prefix);
        rc = rc == FC_OK ? add_file(m, set, first, r, &prefix) : rc;
        rc = rc == FC_OK ? fc_progress_count(options->progress, 1, m->err) : rc;
    }
    return rc == FC_OK ? fc_pt_check_parts(m, first_value, set->ranks) : rc;
}

/* ---- the manifest ---- */

static fc_code finish_value(const pt_merger *m, const pt_value *v, fc_tensor *t) {
    fc_arena *arena = m->checkpoint->arena;
    t->name = v->name;
    t->path = v->path;
    if (v->object) {
        return fc_torch_object_tensor(v->object, v->file, arena, t, m->err);
    }
    fc_chunk *chunks = fc_arena_alloc(arena, v->nchunks * sizeof *chunks);
    if (!chunks) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    if (v->nchunks > 0) {
        memcpy(chunks, v->chunks, v->nchunks * sizeof *chunks);
    }
    t->dtype = v->dtype;
    t->ndim = v->ndim;
    t->shape = v->shape;
    t->chunks = chunks;
    t->nchunks = v->nchunks;
    if (v->mesh.ndim > 0 && fc_mesh_equal(&v->mesh, &m->checkpoint->mesh)) {
        t->placements = v->placements;
    }
    return FC_OK;
}

/* Copies of every rank are, on the mesh of the others, replicated. */
static fc_code place_plain(const pt_merger *m, const pt_value *v, fc_tensor *t) {
    if (v->object || !v->plain || m->checkpoint->mesh.ndim == 0) {
        return FC_OK;
    }
    fc_placement *placements =
        fc_arena_calloc(m->checkpoint->arena, (size_t)m->checkpoint->mesh.ndim, sizeof *placements);
    t->placements = placements;
    return placements ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

static fc_code finish(pt_merger *m) {
    fc_tensor *tensors = fc_arena_calloc(m->checkpoint->arena, m->count, sizeof *tensors);
    if (!tensors) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    for (size_t i = 0; i < m->count; i++) { /* the mesh with the most dimensions: others are parts of it */
        if (m->values[i].mesh.ndim > m->checkpoint->mesh.ndim) {
            m->checkpoint->mesh = m->values[i].mesh;
        }
    }
    size_t n = 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < m->count; i++) {
        if (!m->values[i].view) {
            FC_TRY_GOTO(finish_value(m, &m->values[i], &tensors[n]), rc, out);
            FC_TRY_GOTO(place_plain(m, &m->values[i], &tensors[n++]), rc, out);
        }
    }
out:
    m->checkpoint->tensors = tensors;
    m->checkpoint->ntensors = n;
    m->checkpoint->producer = "torch.save, one file a rank";
    m->checkpoint->keeps_order = true;
    return rc;
}

/* What was put together by a plan alone. */
static fc_code note_joined(const pt_merger *m) {
    fc_checkpoint *c = m->checkpoint;
    const pt_value *v = NULL;
    for (size_t i = m->count; i-- > 0;) {
        v = m->values[i].parts > 0 ? &m->values[i] : v;
    }
    if (!v) {
        return FC_OK;
    }
    c->note =
        fc_arena_printf(c->arena,
                        "%s%s%zu tensors were put together as the plan says, which nothing in the files confirms: "
                        "look at their shapes; %.256s along dimension %d",
                        c->note ? c->note : "", c->note ? "; " : "", c->tp_joined, v->name, v->placements[0].dim);
    return c->note ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

fc_code fc_pt_open_ranks(fc_checkpoint *checkpoint, const char *directory, const char *only,
                         const fc_open_options *options, fc_error *err) {
    pt_merger m = {.checkpoint = checkpoint, .directory = directory, .f = {.fd = -1}, .err = err};
    pt_set *sets = NULL;
    size_t nsets = 0, total = 0;
    fc_code rc = fc_pt_find_sets(directory, checkpoint->arena, &sets, &nsets, err);
    if (rc != FC_OK) {
        return rc;
    }
    for (size_t i = 0; i < nsets; i++) {
        total += (size_t)sets[i].ranks;
    }
    fc_file *files = fc_arena_calloc(checkpoint->arena, total, sizeof *files);
    if (!files) {
        return fc_no_memory(m.err, m.checkpoint->path);
    }
    checkpoint->files = files;
    for (size_t i = 0; i < nsets && rc == FC_OK; i++) {
        if (!only || strcmp(only, sets[i].name) == 0) {
            rc = add_set(&m, &sets[i], !only && nsets > 1, options, files);
        }
    }
    rc = rc == FC_OK ? finish(&m) : rc;
    rc = rc == FC_OK && checkpoint->tp_joined > 0 ? note_joined(&m) : rc;
    for (size_t i = 0; i < m.count; i++) {
        free(m.values[i].chunks);
    }
    free(m.values);
    free(m.flat);
    free(m.cuts);
    free(m.slots);
    return rc;
}
