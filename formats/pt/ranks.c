/*
 * Opens checkpoints with one file per rank: reads the files of a directory's sets one after the other and makes one
 * manifest. merge.c merges their values.
 */
#include "base/checked.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "pt/as_torch.h"
#include "pt/merge.h"
#include "pt/sharding.h"
#include "read/open_files.h"
#include "sharding/recorded.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- files ---- */

/*
 * Whether the files of a set belong to one model. Sets called model and optim are, and so are others, unless their
 * name shows that each rank has its own values.
 */
static bool is_merged(const fc_pt_set *set) {
    static const char *const own[] = {"extra", "rng", "random", "data"};
    bool merged = strstr(set->head, "_world_size_") == NULL;
    if (set->listed) {
        return true;
    }
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        merged = merged && strstr(set->name, own[i]) == NULL;
    }
    return merged || strstr(set->name, "model") || strstr(set->name, "optim");
}

/* One rank's file while it is merged. */
typedef struct rank_file {
    fc_arena *scratch; /* owns the content of the file */
    torch_file f;
    fc_pt_layout layout;
    torch_leaves leaves;
} rank_file;

/* A set while its files are read. */
typedef struct set_reader {
    fc_pt_builder *m;
    const fc_pt_set *set;
    const fc_open_options *options;
    size_t first; /* index of its first file */
    bool several; /* whether there are other sets */
} set_reader;

/*
 * Makes the prefix of the names in a file: the name of the set, if there are several, and the rank, for a set that is
 * not merged (verl's extra_state: random number generators and schedulers, which each rank has for itself).
 */
static fc_code make_prefix(const set_reader *r, fc_arena *arena, int64_t rank, fc_path *out, fc_error *err) {
    const fc_pt_set *set = r->set;
    fc_path_element *elements = fc_arena_calloc(arena, 2, sizeof *elements);
    size_t n = 0;
    FC_NEED(elements, err, r->m->checkpoint->path);
    if (r->several && set->name[0]) {
        elements[n++].key = set->name;
    }
    if (!is_merged(set)) {
        elements[n].key = fc_arena_printf(arena, "rank_%" PRId64, rank);
        FC_NEED(elements[n++].key, err, r->m->checkpoint->path);
    }
    *out = (fc_path){elements, n};
    return FC_OK;
}

static fc_code open_file(void *context, size_t index, void *slot, fc_error *err) {
    const set_reader *r = context;
    rank_file *file = slot;
    const char *path = r->m->checkpoint->files[r->first + index].path;
    const int64_t rank = fc_pt_set_owner(r->set, index);
    fc_path prefix;
    file->f.fd = -1;
    file->scratch = fc_arena_new();
    FC_NEED(file->scratch, err, path);
    file->leaves.arena = file->scratch;
    FC_TRY(make_prefix(r, file->scratch, rank, &prefix, err));
    FC_TRY(fc_pt_open_as_torch(path, (uint32_t)(r->first + index), &file->f, err));
    FC_TRY(fc_pt_layout_load(&file->f, rank, r->set->ranks, &file->layout, err));
    file->leaves.alone = r->set->alone || file->layout.root; /* our own files have objects of every kind */
    FC_TRY(fc_torch_flatten(&file->f, &prefix, &file->leaves, err));
    return fc_torch_check_names(path, &file->leaves, err);
}

static fc_code merge_file(void *context, size_t index, void *slot, fc_error *err) {
    const set_reader *r = context;
    rank_file *file = slot;
    fc_pt_builder *m = r->m;
    m->rank = fc_pt_set_owner(r->set, index);
    m->set = r->set;
    m->item_name = r->several && r->set->name[0] ? strlen(r->set->name) + 1 : 0;
    m->scratch = file->scratch;
    m->f = &file->f;
    m->layout = &file->layout;
    FC_TRY(fc_torch_note_risk(m->checkpoint, &file->f, err));
    FC_TRY(fc_pt_find_flat(m, &file->leaves));
    FC_TRY(fc_pt_note_flats(m, &file->leaves, r->set->ranks));
    FC_TRY(fc_pt_infer_units(m, &file->leaves));
    fc_pt_match_numbers(m, &file->leaves);
    for (size_t i = 0; i < file->leaves.count; i++) {
        FC_TRY_CONTEXT(fc_pt_merge_leaf(m, &file->leaves.items[i]), err, "%s: %.256s", m->directory,
                       file->leaves.items[i].name);
    }
    return fc_progress_count(r->options->progress, 1, err);
}

static void close_file(void *slot) {
    rank_file *file = slot;
    fc_pt_layout_free(&file->layout);
    fc_torch_file_close(&file->f);
    free(file->leaves.items);
    fc_arena_free(file->scratch);
}

static fc_code check_missing(const fc_pt_builder *m, const fc_pt_set *set, size_t first) {
    size_t missing = 0, at = 0;
    for (size_t i = first; i < first + fc_pt_set_files(set); i++) {
        if (fc_access(m->checkpoint->files[i].path, F_OK) != 0 && errno == ENOENT) {
            at = missing++ ? at : i;
        }
    }
    return missing == 0 ? FC_OK
                        : fc_fail(m->err, FC_ECORRUPT,
                                  "%s: the file is missing; %zu files of %" PRId64
                                  " ranks are missing: copy the whole directory",
                                  m->checkpoint->files[at].path, missing, set->ranks);
}

/* Names the files of a set from checkpoint->files[first] on. */
static fc_code name_files(fc_pt_builder *m, const fc_pt_set *set, fc_file *files) {
    char name[NAME_MAX + 1];
    for (size_t i = 0; i < fc_pt_set_files(set); i++) {
        if (set->files) {
            snprintf(name, sizeof name, "%s", set->files[i]);
        } else {
            snprintf(name, sizeof name, "%s%0*zu%s", set->head, set->width, i, set->tail);
        }
        FC_NEED(fc_file_in(m->checkpoint->arena, m->directory, name, &files[i]), m->err, m->checkpoint->path);
    }
    return FC_OK;
}

/* Reads the files of a set, which are checkpoint->files[first] and those after it. */
static fc_code read_set(fc_pt_builder *m, const fc_pt_set *set, bool several, const fc_open_options *options,
                        size_t first) {
    const size_t first_value = m->count;
    set_reader r = {m, set, options, first, several};
    const fc_file_opener how = {.count = fc_pt_set_files(set),
                                .slot_size = sizeof(rank_file),
                                .context = &r,
                                .open = open_file,
                                .take = merge_file,
                                .close = close_file};
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, fc_pt_set_files(set));
    FC_TRY(fc_open_files(&how, m->err));
    return fc_pt_check_shards(m, first_value, set->ranks);
}

static fc_code add_set(fc_pt_builder *m, const fc_pt_set *set, bool several, const fc_open_options *options,
                       fc_file *files) {
    size_t first = m->checkpoint->nfiles;
    m->tp_plan = is_merged(set) ? options->tp_plan : NULL;
    FC_TRY(name_files(m, set, files + first));
    m->checkpoint->nfiles += fc_pt_set_files(set);
    FC_TRY(fc_identities_take(m->checkpoint, options, m->err));
    FC_TRY(check_missing(m, set, first));
    if (!options->follow_external) {
        FC_TRY(fc_check_links(m->directory, m->checkpoint->files + first, fc_pt_set_files(set), m->err));
    }
    return read_set(m, set, several, options, first);
}

/* ---- the manifest ---- */

static fc_code refuse_tensor(const fc_pt_builder *m, const fc_pt_value *v, fc_tensor *t) {
    return fc_torch_refused_tensor(v->refusal, v->hint, v->file, m->checkpoint->arena, t, m->err);
}

static fc_code finish_value(const fc_pt_builder *m, const fc_pt_value *v, fc_tensor *t) {
    fc_arena *arena = m->checkpoint->arena;
    t->name = v->name;
    t->path = v->path;
    if (v->refusal) {
        return refuse_tensor(m, v, t);
    }
    if (v->object) {
        return fc_torch_object_tensor(v->object, v->file, arena, t, m->err);
    }
    fc_chunk *chunks = fc_arena_copy(arena, v->chunks, v->nchunks, sizeof *chunks);
    FC_NEED(chunks, m->err, m->checkpoint->path);
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

/* A tensor that every rank has a copy of is replicated on the mesh of the others. */
static fc_code place_plain(const fc_pt_builder *m, const fc_pt_value *v, fc_tensor *t) {
    if (v->refusal || v->object || !v->plain || m->checkpoint->mesh.ndim == 0) {
        return FC_OK;
    }
    fc_placement *placements =
        fc_arena_calloc(m->checkpoint->arena, (size_t)m->checkpoint->mesh.ndim, sizeof *placements);
    t->placements = placements;
    return placements ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

/* Makes the tensors of a value: one, or the state of each parameter in a flat one. */
static fc_code finish_tensors(const fc_pt_builder *m, const fc_pt_value *v, fc_tensor *tensors, size_t *n) {
    const fc_flat_layout *unit = fc_pt_unit_of(m, v);
    fc_tensor whole = {0}, *t = unit ? &whole : &tensors[*n];
    FC_TRY(finish_value(m, v, t));
    FC_TRY(place_plain(m, v, t));
    FC_TRY(unit ? fc_pt_divide_state(m, v, t, unit, &tensors[*n]) : FC_OK);
    *n += unit ? unit->nparams : 1;
    return FC_OK;
}

static size_t count_tensors(const fc_pt_builder *m) {
    size_t n = 0;
    for (size_t i = 0; i < m->count; i++) {
        const fc_flat_layout *unit = fc_pt_unit_of(m, &m->values[i]);
        n += unit ? unit->nparams : 1;
    }
    return n;
}

static fc_code finish_manifest(fc_pt_builder *m) {
    fc_tensor *tensors = fc_arena_calloc(m->checkpoint->arena, count_tensors(m), sizeof *tensors);
    FC_NEED(tensors, m->err, m->checkpoint->path);
    for (size_t i = 0; i < m->count; i++) { /* the mesh with the most dimensions; the others are its submeshes */
        if (m->values[i].mesh.ndim > m->checkpoint->mesh.ndim) {
            m->checkpoint->mesh = m->values[i].mesh;
        }
    }
    size_t n = 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < m->count; i++) {
        if (!m->values[i].view) {
            FC_TRY_GOTO(finish_tensors(m, &m->values[i], tensors, &n), rc, out);
        }
    }
out:
    m->checkpoint->tensors = tensors;
    m->checkpoint->ntensors = n;
    m->checkpoint->producer = "torch.save, one file per rank";
    m->checkpoint->keeps_order = true;
    return rc;
}

static fc_code add_note(const fc_pt_builder *m, const char *text) {
    fc_checkpoint *c = m->checkpoint;
    c->note = text ? fc_arena_printf(c->arena, "%s%s%s", c->note ? c->note : "", c->note ? "; " : "", text) : NULL;
    return c->note ? FC_OK : fc_no_memory(m->err, c->path);
}

/* Adds a note about tensors that were merged only by the plan. */
static fc_code note_joined(const fc_pt_builder *m) {
    const fc_pt_value *v = NULL;
    for (size_t i = m->count; i-- > 0;) {
        v = m->values[i].shards > 0 ? &m->values[i] : v;
    }
    if (!v) {
        return FC_OK;
    }
    return add_note(m, fc_arena_printf(m->checkpoint->arena,
                                       "%zu tensors were merged according to the plan, which the files cannot confirm: "
                                       "check their shapes, e.g. %.256s along dimension %d",
                                       m->joined, v->name, v->placements[0].dim));
}

/* If the last files of a set are missing, neither names nor content tell: no mesh records the number of ranks. */
static fc_code note_assumed(const fc_pt_builder *m, const fc_pt_set *set) {
    if (set->counted || m->checkpoint->mesh.ndim > 0) {
        return FC_OK;
    }
    return add_note(m, fc_arena_printf(m->checkpoint->arena,
                                       "%" PRId64 " files of ranks, no record of their number: assumed complete",
                                       set->ranks));
}

/* Merges the sets, or the only one that is to be read. */
static fc_code add_sets(fc_pt_builder *m, const fc_pt_set *sets, size_t nsets, const char *only,
                        const fc_open_options *options, fc_file *files) {
    for (size_t i = 0; i < nsets; i++) {
        if (!only || strcmp(only, sets[i].name) == 0) {
            FC_TRY(add_set(m, &sets[i], !only && nsets > 1, options, files));
        }
    }
    FC_TRY(finish_manifest(m));
    for (size_t i = 0; i < nsets; i++) {
        FC_TRY(!only || strcmp(only, sets[i].name) == 0 ? note_assumed(m, &sets[i]) : FC_OK);
    }
    if (options->tp_joined) {
        *options->tp_joined = m->joined;
    }
    return m->joined > 0 ? note_joined(m) : FC_OK;
}

static void free_builder(fc_pt_builder *m) {
    for (size_t i = 0; i < m->count; i++) {
        free(m->values[i].chunks);
    }
    free(m->values);
    free(m->flat);
    free(m->flats);
    fc_arena_free(m->tables);
}

static fc_code begin_tables(fc_pt_builder *m) {
    m->tables = fc_arena_new();
    m->names = m->tables ? fc_name_table_new(m->tables, 0) : NULL;
    m->boxes = m->tables ? fc_name_table_new(m->tables, 0) : NULL;
    return m->names && m->boxes ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

/* Checks that the chunks of each tensor have as many elements as the tensor, which then has no layout. */
static fc_code make_whole(fc_pt_builder *m) {
    for (size_t i = 0; i < m->count; i++) {
        fc_pt_value *v = &m->values[i];
        int64_t whole = 0, held = 0, elements;
        if (v->refusal) {
            continue;
        }
        bool counted = v->object || fc_numel(v->ndim, v->shape, &whole);
        for (size_t c = 0; c < v->nchunks && counted; c++) {
            counted = fc_numel(v->ndim, v->chunks[c].dims + v->ndim, &elements) && fc_add_i64(held, elements, &held);
            v->chunks[c].rank = FC_NO_RANK;
        }
        v->mesh.ndim = 0;
        if (!counted || held != whole) {
            return fc_torch_fail_shard(m->checkpoint->path, v->name, m->err);
        }
    }
    return FC_OK;
}

fc_code fc_pt_open_alone(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    static const fc_pt_set alone = {.name = "", .head = "", .tail = "", .ranks = 1, .counted = true, .alone = true};
    fc_pt_builder m = {.checkpoint = checkpoint, .directory = checkpoint->path, .err = err};
    fc_code rc;
    FC_TRY_GOTO(begin_tables(&m), rc, out);
    FC_TRY_GOTO(read_set(&m, &alone, false, options, 0), rc, out);
    FC_TRY_GOTO(make_whole(&m), rc, out);
    FC_TRY_GOTO(finish_manifest(&m), rc, out);
    checkpoint->producer = "torch.save";
out:
    free_builder(&m);
    return rc;
}

/* Makes the manifest of `nsets` sets. @param extra the number of further files that the list has room for. */
static fc_code open_sets(fc_pt_builder *m, const fc_pt_set *sets, size_t nsets, size_t extra, const char *only,
                         const fc_open_options *options) {
    size_t total = extra;
    for (size_t i = 0; i < nsets; i++) {
        total += fc_pt_set_files(&sets[i]);
    }
    fc_file *files = fc_arena_calloc(m->checkpoint->arena, total, sizeof *files);
    FC_NEED(files, m->err, m->checkpoint->path);
    m->checkpoint->files = files;
    fc_code rc = begin_tables(m);
    rc = rc == FC_OK ? add_sets(m, sets, nsets, only, options, files) : rc;
    free_builder(m);
    return rc;
}

fc_code fc_pt_open_ranks(fc_checkpoint *checkpoint, const char *directory, const char *only,
                         const fc_open_options *options, fc_error *err) {
    fc_pt_builder m = {.checkpoint = checkpoint, .directory = directory, .err = err};
    fc_pt_set *sets = NULL;
    size_t nsets = 0;
    FC_TRY(fc_pt_find_sets(directory, checkpoint->group, checkpoint->arena, &sets, &nsets, err));
    return open_sets(&m, sets, nsets, 0, only, options);
}

fc_code fc_pt_open_sharding(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options,
                            fc_error *err) {
    fc_pt_sharding sharding = {0};
    fc_pt_builder m = {.checkpoint = checkpoint, .directory = directory, .sharding = &sharding, .err = err};
    fc_pt_set *sets = NULL;
    size_t nsets = 0;
    fc_code rc;
    const char *path = fc_arena_printf(checkpoint->arena, "%s/" FC_PT_SHARDING, directory);
    FC_NEED(path, err, checkpoint->path);
    FC_TRY(fc_identities_add_header(checkpoint, path, options, err));
    FC_TRY_GOTO(fc_pt_sharding_load(path, checkpoint->arena, &sharding, err), rc, out);
    FC_TRY_GOTO(fc_pt_sharding_sets(&sharding, directory, &sets, &nsets, err), rc, out);
    FC_TRY_GOTO(open_sets(&m, sets, nsets, 1, NULL, options), rc, out);
    fc_file *files = (fc_file *)(uintptr_t)checkpoint->files; /* the list that open_sets made */
    FC_TRY_GOTO(fc_file_in(checkpoint->arena, directory, FC_PT_SHARDING, &files[checkpoint->nfiles])
                    ? FC_OK
                    : fc_no_memory(err, path),
                rc, out);
    checkpoint->nfiles++;
    checkpoint->producer = "torch_checkpointing";
out:
    fc_pt_sharding_free(&sharding);
    return rc;
}
