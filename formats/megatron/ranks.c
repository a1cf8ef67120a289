/*
 * Reads the files of all model-parallel ranks: gives their values the names of the whole model (names.c) and determines
 * how they are sharded (rules.c, gates.c).
 */
#include "fsdpckpt/try.h"
#include "megatron/stages.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- the model ---- */

/* Whether a member of the file is a chunk of the model, and its number: "model" is 0, "model3" is 3. */
static bool is_model(const char *key, size_t *chunk) {
    *chunk = 0;
    if (strncmp(key, "model", 5) != 0 || strlen(key) > 8) {
        return false;
    }
    for (const char *p = key + 5; *p; p++) {
        if (*p < '0' || *p > '9') {
            return false;
        }
        *chunk = *chunk * 10 + (size_t)(*p - '0');
    }
    return true;
}

/* Whether the directory names have a second number and args does not determine its meaning. */
static bool is_vague(const fc_mg_reader *r) {
    return r->grid.nnumbers == 2 && (r->args.stages < 0 || r->args.ep < 0);
}

static fc_code add_parameter(fc_mg_reader *r, torch_leaf *leaf, size_t chunk) {
    size_t start, end;
    int64_t number;
    fc_code rc = fc_mg_rename(r, leaf, chunk);
    fc_mg_value *value = rc == FC_OK ? fc_mg_add_leaf(r, leaf->name, &leaf->path, leaf->v) : NULL;
    if (!value) {
        return r->err->code;
    }
    fc_mg_expert expert = fc_mg_expert_of(leaf->name, &start, &end, &number);
    value->chunk = chunk;
    value->shared = value->extent && !fc_mg_is_extra_state(leaf->name);
    value->sharding = value->shared ? fc_mg_rule_of(leaf->name) : (fc_mg_sharding){MG_UNKNOWN, 0};
    value->expert = value->shared && expert != MG_NO_EXPERT;
    value->grouped = value->shared && expert == MG_ALL_EXPERTS ? r->local_experts : 0;
    if (value->expert && is_vague(r)) {
        return fc_fail(
            r->err, FC_EUNSUPPORTED,
            "%s: %.256s: args does not record whether ranks are pipeline stages or expert-parallel; save with "
            "Megatron's --ckpt-format torch_dist",
            r->f.path, leaf->name);
    }
    return FC_OK;
}

static fc_code read_chunk(fc_mg_reader *r, fc_pv v, size_t chunk, bool count) {
    static const fc_path_element model = {.key = "model"};
    const fc_path prefix = {&model, 1};
    torch_leaves leaves;
    fc_code rc;
    FC_TRY_GOTO(fc_mg_flatten(r, &prefix, v, &leaves), rc, out);
    if (!count) {
        FC_TRY_GOTO(fc_mg_count_experts(r, &leaves), rc, out);
    }
    for (size_t i = 0; i < leaves.count; i++) {
        FC_TRY_GOTO(count ? fc_mg_count_layer(r, &leaves.items[i], chunk) : add_parameter(r, &leaves.items[i], chunk),
                    rc, out);
    }
out:
    free(leaves.items);
    return rc;
}

/* ---- files ---- */

/* Reads a member of the file's dict. Everything but the model and the optimizer is added unchanged. */
static fc_code read_member(fc_mg_reader *r, const char *key, fc_pv v, fc_pv *optimizer, bool count) {
    size_t chunk;
    fc_path_element *element = fc_arena_calloc(r->checkpoint->arena, 1, sizeof *element);
    FC_NEED(element, r->err, r->checkpoint->path);
    *element = (fc_path_element){.key = key};
    const fc_path path = {element, 1};
    if (is_model(key, &chunk) && chunk < r->chunks) {
        return read_chunk(r, v, chunk, count);
    }
    if (!count && strcmp(key, "optimizer") == 0) {
        *optimizer = v;
        return FC_OK;
    }
    return count ? FC_OK : fc_mg_add(r, &path, v);
}

static fc_code count_chunks(fc_mg_reader *r) {
    size_t n, chunk;
    const fc_pv *pairs = fc_pickle_items(r->f.p, r->f.p->root, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length;
        bool text = fc_pv_typeof(pairs[i]) == FC_PV_STR;
        if (text && is_model(fc_pickle_bytes(r->f.p, pairs[i], &length), &chunk) && chunk >= r->chunks) {
            r->chunks = chunk + 1;
        }
    }
    if (r->chunks == 0) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: 'model' is missing: this is not a file of a Megatron checkpoint",
                       r->f.path);
    }
    return FC_OK;
}

static fc_code read_members(fc_mg_reader *r, bool count) {
    size_t n, first = r->nvalues, end = first;
    fc_pv optimizer = 0;
    const fc_pv *pairs = fc_pickle_items(r->f.p, r->f.p->root, &n);
    for (size_t pass = 0; pass < 2; pass++) { /* the model first, so that it is values[first] to values[end - 1] */
        for (size_t i = 0; i + 1 < n; i += 2) {
            size_t length, chunk;
            const char *key = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(r->f.p, pairs[i], &length) : NULL;
            const char *copy = key ? fc_arena_strndup(r->checkpoint->arena, key, strlen(key)) : NULL;
            if (!copy) {
                return key ? fc_mg_no_memory(r)
                           : fc_fail(r->err, FC_EUNSUPPORTED, "%s: the key of a member is not a string", r->f.path);
            }
            if (is_model(copy, &chunk) == (pass == 0)) {
                FC_TRY(read_member(r, copy, pairs[i + 1], &optimizer, count));
            }
        }
        if (pass == 0 && !count && r->grid.tp > 1) {
            FC_TRY(fc_mg_find_gates(r, first));
        }
        end = pass == 0 ? r->nvalues : end;
    }
    if (optimizer) {
        FC_TRY(fc_mg_read_optimizer(r, optimizer, first, end));
    }
    if (count || r->grid.optimizers < r->grid.count) {
        return FC_OK;
    }
    return fc_mg_read_distributed(r, first, end);
}

/* Opens the file of a rank. On failure nothing stays open. */
static fc_code open_file(fc_mg_reader *r, uint32_t rank) {
    r->rank = rank;
    FC_TRY(fc_torch_open_one(r->checkpoint, rank, &r->f, r->err));
    if (fc_pv_typeof(r->f.p->root) != FC_PV_DICT) {
        fc_fail(r->err, FC_ECORRUPT, "%s: it does not hold a dict: this is not a file of a Megatron checkpoint",
                r->f.path);
        fc_torch_file_close(&r->f);
        return FC_ECORRUPT;
    }
    return FC_OK;
}

/* Reads what the first file determines for all files. */
static fc_code read_first(fc_mg_reader *r) {
    FC_TRY(open_file(r, 0));
    fc_mg_read_args(&r->f, &r->args);
    fc_code rc;
    FC_TRY_GOTO(count_chunks(r), rc, out);
    FC_TRY_GOTO(fc_mg_arrange(r->checkpoint, &r->args, &r->grid, r->err), rc, out);
out:
    fc_torch_file_close(&r->f);
    return rc;
}

static fc_code read_file(fc_mg_reader *r, uint32_t rank, bool count, int64_t *wrote) {
    fc_code rc = FC_OK;
    FC_TRY(open_file(r, rank));
    if (!count) {
        fc_mg_args args;
        fc_mg_read_args(&r->f, &args);
        *wrote = args.rank;
        FC_TRY_GOTO(fc_mg_check_alike(r, &args), rc, out);
    }
    FC_TRY_GOTO(read_members(r, count), rc, out);
out:
    fc_torch_file_close(&r->f);
    return rc;
}

/* Counts the layers of each stage in the file of its first rank. With one chunk the layers keep their numbers. */
static fc_code count_stages(fc_mg_reader *r) {
    bool several = r->chunks > 1 || r->grid.stages > 1;
    for (uint32_t i = 0; several && i < r->grid.count; i++) {
        if (i == 0 || r->grid.places[i].stage != r->grid.places[i - 1].stage) {
            FC_TRY(read_file(r, i, true, NULL));
        }
    }
    return FC_OK;
}

static fc_code read_files(fc_mg_reader *r) {
    int64_t *wrote = calloc(r->grid.count, sizeof *wrote);
    fc_code rc;
    FC_NEED(wrote, r->err, r->checkpoint->path);
    fc_progress_begin(r->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, r->grid.count);
    for (uint32_t i = 0; i < r->grid.count; i++) {
        FC_TRY_GOTO(read_file(r, i, false, &wrote[i]), rc, out);
        FC_TRY_GOTO(fc_progress_count(r->progress, 1, r->err), rc, out);
    }
    rc = fc_mg_check_writers(r, wrote);
out:
    free(wrote);
    return rc;
}

static fc_code check_layers(const fc_mg_reader *r) {
    int64_t sum = 0;
    size_t chunks = r->chunks * (size_t)r->grid.stages;
    for (size_t i = 0; r->nlayers == 1 && i < chunks; i++) {
        sum += r->layers[0].counts[i];
    }
    if (r->nlayers == 1 && r->args.layers >= 0 && r->args.layers != sum) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: the stages hold %" PRId64 " layers, but according to args there are %" PRId64
                       ", so the layers cannot be numbered",
                       r->checkpoint->path, sum, r->args.layers);
    }
    return FC_OK;
}

/* @return NULL when out of memory. */
static const char *add_note(const fc_checkpoint *checkpoint, const char *note, const char *text) {
    return note && *note ? fc_arena_printf(checkpoint->arena, "%s; %s", note, text) : text;
}

/* Notes everything that was read differently than a user would expect. */
static fc_code set_note(const fc_mg_reader *r) {
    fc_arena *arena = r->checkpoint->arena;
    const char *notes[3] = {NULL}, *all = "";
    size_t n = 0;
    if (r->unnamed) {
        notes[n++] =
            fc_arena_printf(arena, "the optimizer's state keeps its numbers, separately for each rank: %s", r->unnamed);
    }
    if (r->undistributed) {
        notes[n++] = fc_arena_printf(arena, "the distributed optimizer's state, in distrib_optim.pt, is not read: %s",
                                     r->undistributed);
    }
    if (r->differing) {
        notes[n++] =
            fc_arena_printf(arena,
                            "%zu tensor%s, such as %.128s, should be equal on all ranks but differ, or cannot be "
                            "compared; as in Megatron's own tools, the first rank's values are used",
                            r->ndiffering, r->ndiffering == 1 ? "" : "s", r->differing);
    }
    for (size_t i = 0; i < n; i++) {
        all = notes[i] && all ? add_note(r->checkpoint, all, notes[i]) : NULL;
    }
    r->checkpoint->note = n > 0 ? all : NULL;
    return all ? FC_OK : fc_mg_no_memory(r);
}

/* If the states of one rank are missing, those of the others are of no use. */
static void drop_distributed(fc_mg_reader *r) {
    size_t kept = 0;
    for (size_t i = 0; i < r->nvalues; i++) {
        if (r->values[i].file < r->grid.count) {
            r->values[kept++] = r->values[i];
        }
    }
    r->nvalues = kept;
}

fc_code fc_mg_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_mg_reader r = {.checkpoint = checkpoint, .f = {.fd = -1}, .progress = options->progress, .err = err};
    fc_code rc;
    FC_TRY_GOTO(fc_mg_find_ranks(checkpoint, options, &r.grid, r.err), rc, out);
    FC_TRY_GOTO(read_first(&r), rc, out);
    FC_TRY_GOTO(count_stages(&r), rc, out);
    FC_TRY_GOTO(check_layers(&r), rc, out);
    FC_TRY_GOTO(read_files(&r), rc, out);
    if (r.grid.optimizers > 0 && r.grid.optimizers < r.grid.count) {
        r.undistributed = "some ranks lack the file";
    }
    if (r.undistributed) {
        drop_distributed(&r);
    }
    FC_TRY_GOTO(fc_mg_ungroup(&r), rc, out);
    FC_TRY_GOTO(fc_mg_join(&r), rc, out);
    rc = set_note(&r);
out:
    free(r.values);
    free(r.layers);
    return rc;
}
