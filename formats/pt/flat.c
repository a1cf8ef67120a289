/*
 * FSDP1's flat parameters in checkpoints of one file per rank: the views of parameters that are stored next to them,
 * and optimizer state that is sharded in the same way. An optimizer's state_dict() numbers its parameters, does not
 * mention shards, and contains the padding.
 */
#include "base/grow.h"
#include "derived/flat_units.h"
#include "fsdpckpt/try.h"
#include "pt/merge.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool is_flat(const torch_leaf *leaf) {
    size_t module;
    return leaf->kind == TORCH_SHARDED_TENSOR && fc_is_flat_key(leaf->name, &module);
}

/* Notes where the storage of a flat parameter is, if this rank holds any of it. */
static fc_code note_flat(fc_pt_builder *m, const torch_leaf *leaf) {
    fc_pt_shard own;
    fc_torch_tensor t = {0};
    torch_extent *extent = NULL;
    FC_TRY(fc_pt_sharded_shard(m->f, leaf->v, 0, &own, m->err));
    if (!own.local) {
        return FC_OK;
    }
    FC_TRY_CONTEXT(fc_torch_find_extent(m->f, own.local, &t, m->scratch, &extent, m->err), m->err, "%s", m->f->path);
    FC_NEED(fc_grow(&m->flat, &m->flat_capacity, m->nflat + 1, sizeof *m->flat), m->err, m->checkpoint->path);
    m->flat[m->nflat++] = extent->record.offset;
    return FC_OK;
}

fc_code fc_pt_find_flat(fc_pt_builder *m, const torch_leaves *leaves) {
    m->nflat = 0;
    for (size_t i = 0; i < leaves->count; i++) {
        if (is_flat(&leaves->items[i])) {
            FC_TRY_CONTEXT(note_flat(m, &leaves->items[i]), m->err, "%.256s", leaves->items[i].name);
        }
    }
    return FC_OK;
}

fc_code fc_pt_add_flat(fc_pt_builder *m, int64_t ranks, fc_pt_flat **out) {
    FC_NEED(fc_grow(&m->flats, &m->flats_capacity, m->nflats + 1, sizeof *m->flats), m->err, m->checkpoint->path);
    fc_pt_flat *flat = *out = &m->flats[m->nflats++];
    *flat = (fc_pt_flat){.ranks = ranks,
                         .offsets = fc_arena_calloc(m->checkpoint->arena, (size_t)ranks, sizeof *flat->offsets)};
    for (int64_t r = 0; flat->offsets && r < ranks; r++) {
        flat->offsets[r] = -1;
    }
    return flat->offsets ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

fc_code fc_pt_note_flats(fc_pt_builder *m, const torch_leaves *leaves, int64_t ranks) {
    size_t n = 0;
    fc_pt_flat *added;
    for (size_t i = 0; i < leaves->count; i++) {
        fc_pt_shard own;
        if (!is_flat(&leaves->items[i])) {
            continue;
        }
        FC_TRY(fc_pt_sharded_shard(m->f, leaves->items[i].v, 0, &own, m->err));
        m->nflats = m->rank == 0 && n == 0 ? 0 : m->nflats; /* from an earlier set */
        if (m->rank == 0) {
            FC_TRY(fc_pt_add_flat(m, ranks, &added));
        }
        fc_pt_flat *flat = n < m->nflats ? &m->flats[n++] : NULL;
        if (flat && own.local && own.ndim == 1) {
            flat->numel = own.shape[0];
            flat->shard = own.sizes[0] > flat->shard ? own.sizes[0] : flat->shard;
            flat->offsets[m->rank] = own.offsets[0];
        }
    }
    return FC_OK;
}

size_t fc_pt_count_numbers(const fc_pt_builder *m, const torch_leaves *leaves, size_t *count) {
    size_t groups = 0;
    *count = 0;
    for (size_t i = 0; i < leaves->count; i++) {
        const fc_path *path = &leaves->items[i].path;
        if (path->count >= 3 && strcmp(path->elements[path->count - 1].key, "params") == 0 &&
            strcmp(path->elements[path->count - 3].key, "param_groups") == 0 &&
            fc_pv_typeof(leaves->items[i].v) == FC_PV_LIST) {
            fc_pickle_items(m->f->p, leaves->items[i].v, count);
            groups++;
        }
    }
    return groups;
}

void fc_pt_match_numbers(fc_pt_builder *m, const torch_leaves *leaves) {
    size_t count, groups = fc_pt_count_numbers(m, leaves, &count);
    m->numbered = m->nflats > 0;
    m->numbers_fit = groups == 1 && count == m->nflats;
}

static bool is_some_shard(const fc_pt_builder *m, int64_t size) {
    for (size_t i = 0; i < m->nflats; i++) {
        if (m->flats[i].shard == size && m->flats[i].numel != size) {
            return true;
        }
    }
    return false;
}

/* Fills in the shard of this rank: the elements of the flat parameter that are not padding. */
static void place_state(const fc_pt_builder *m, const fc_pt_flat *flat, fc_pt_shard *out) {
    int64_t offset = flat->offsets[m->rank], left = flat->numel - offset;
    out->shape[0] = flat->numel;
    if (offset < 0) { /* only padding */
        out->local = 0;
        return;
    }
    out->offsets[0] = offset;
    out->sizes[0] = left < flat->shard ? left : flat->shard;
    out->padding = flat->shard - out->sizes[0];
}

/* Fills in the elements of a parameter that this rank has: those after the ones of lower ranks. */
static fc_code place_piece(const fc_pt_builder *m, const fc_pt_flat *flat, const torch_leaf *leaf, int64_t size,
                           fc_pt_shard *out, fc_error *err) {
    const size_t at = fc_name_table_find(m->names, leaf->name, strlen(leaf->name));
    const fc_pt_value *v = at == FC_NO_NAME ? NULL : &m->values[at];
    const fc_chunk *last = v && v->nchunks > 0 ? &v->chunks[v->nchunks - 1] : NULL;
    out->shape[0] = flat->numel;
    out->offsets[0] = last ? last->dims[0] + last->dims[1] : 0; /* within the parameter */
    out->sizes[0] = size;
    return size <= flat->numel - out->offsets[0]
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "%s: the ranks have more elements of it than the parameter", m->f->path);
}

fc_code fc_pt_state_shard(const fc_pt_builder *m, const torch_leaf *leaf, fc_pt_shard *out, bool *is, fc_error *err) {
    const fc_path_element *e = leaf->path.count >= 3 ? &leaf->path.elements[leaf->path.count - 3] : NULL;
    fc_torch_tensor t = {0};
    *is = false;
    *out = (fc_pt_shard){.local = leaf->v, .ndim = 1};
    if (m->checkpoint->omits_views || !e || strcmp(e[0].key, "state") != 0 || !e[1].is_number ||
        leaf->kind != TORCH_TENSOR) {
        return FC_OK;
    }
    unsigned long long number = strtoull(e[1].key, NULL, 10);
    FC_TRY(fc_torch_tensor_decode(m->f->p, leaf->v, &t, err));
    if (t.ndim != 1) {
        return FC_OK;
    }
    const fc_pt_flat *flat = e[1].key[0] != '-' && number < m->nflats ? &m->flats[number] : NULL;
    if (!m->numbers_fit && is_some_shard(m, t.sizes[0])) {
        return fc_fail(
            err, FC_EUNSUPPORTED,
            "%s: optimizer state of flat parameters, numbered together with other parameters or in several groups: "
            "it is unknown which is which; save FSDP.optim_state_dict(model, optimizer), or leave the file out",
            m->f->path);
    }
    if (m->numbers_fit && flat && flat->pieces) {
        *is = true;
        return place_piece(m, flat, leaf, t.sizes[0], out, err);
    }
    if (!m->numbers_fit || !flat || t.sizes[0] != flat->shard) {
        return FC_OK;
    }
    if (m->rank >= flat->ranks) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: optimizer state of flat parameters that %" PRId64
                       " ranks saved, but this file is that of a higher rank: the files are of two checkpoints; give "
                       "the path of one of "
                       "their sets",
                       m->f->path, flat->ranks);
    }
    *is = true;
    place_state(m, flat, out);
    return FC_OK;
}
