/*
 * Finds the files of an iteration's model-parallel ranks. Their directories are called
 * mp_rank_<tensor>[_<pipeline>][_<expert>] (training/checkpointing.py of Megatron-LM); each has model_optim_rng.pt or
 * model_rng.pt. If there are two numbers, the second is the pipeline stage, or the expert-parallel rank if args says
 * that there is no pipeline.
 */
#include "megatron/grid.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_RANKS = 1 << 16 };

static const char distributed[] = "distrib_optim.pt";

typedef struct found_rank {
    char name[48];
    int64_t numbers[3]; /* tensor, and those that follow */
    int nnumbers;
    const char *file;
    bool optimizer;
} found_rank;

static bool exists(const char *directory, const char *rank, const char *name, fc_error *err) {
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s/%s", directory, rank, name) < (int)sizeof path &&
           fc_path_exists(path, NULL, err);
}

/* Parses the name of a rank's directory and looks for its file. @param err receives an error of looking. */
static bool parse(const char *directory, const char *name, found_rank *out, fc_error *err) {
    static const char *const files[] = {"model_optim_rng.pt", "model_rng.pt"};
    const char *p = name;
    *out = (found_rank){0};
    if (!fc_take_text(&p, "mp_rank_") || strlen(name) >= sizeof out->name) {
        return false;
    }
    for (; out->nnumbers < 3; p++) {
        const int64_t value = fc_take_number(&p, MAX_RANKS);
        if (value < 0) {
            return false;
        }
        out->numbers[out->nnumbers++] = value;
        if (*p != '_') {
            break;
        }
    }
    if (*p != '\0') {
        return false;
    }
    for (size_t i = 0; i < 2 && !out->file; i++) {
        out->file = exists(directory, name, files[i], err) ? files[i] : NULL;
    }
    out->optimizer = exists(directory, name, distributed, err);
    memcpy(out->name, name, strlen(name) + 1);
    return out->file != NULL;
}

bool fc_mg_has_ranks(const char *directory, fc_error *err) {
    fc_dir dir;
    found_rank rank;
    bool found = false;
    struct stat st;
    if (!fc_path_exists(directory, &st, err) || !S_ISDIR(st.st_mode)) {
        return false;
    }
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; !found && err->code == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        found = parse(directory, name, &rank, err);
    }
out:
    return fc_dir_close(&dir, rc, err) == FC_OK && found;
}

static fc_code list(const char *directory, found_rank **out, size_t *count, fc_error *err) {
    size_t capacity = 0;
    fc_dir dir;
    found_rank rank;
    fc_error failed = {FC_OK, ""};
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        bool parsed = parse(directory, name, &rank, &failed);
        FC_TRY_GOTO(failed.code == FC_OK ? FC_OK : fc_fail(err, failed.code, "%s", failed.message), rc, out);
        if (!parsed) {
            continue;
        }
        if (fc_grow(out, &capacity, *count + 1, sizeof **out)) {
            (*out)[(*count)++] = rank;
        } else {
            rc = fc_no_memory(err, directory);
            goto out;
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* Orders by stage, expert and tensor, or by expert and tensor if the second number turns out to be the expert. */
static int compare_rank_places(const void *a, const void *b) {
    static const int order[] = {1, 2, 0};
    const found_rank *x = a, *y = b;
    for (size_t i = 0; i < 3; i++) {
        FC_ORDER_BY(x->numbers[order[i]], y->numbers[order[i]]);
    }
    return 0;
}

static fc_code check_names(const char *directory, const found_rank *ranks, size_t count, fc_error *err) {
    for (size_t i = 1; i < count; i++) {
        if (ranks[i].nnumbers != ranks[0].nnumbers) {
            return fc_fail(err, FC_ECORRUPT, "%s: %s and %s belong to two checkpoints: move one of them away",
                           directory, ranks[0].name, ranks[i].name);
        }
        if (compare_rank_places(&ranks[i - 1], &ranks[i]) == 0) {
            return fc_fail(err, FC_ECORRUPT, "%s: %s and %s are the same rank: move one of them away", directory,
                           ranks[i - 1].name, ranks[i].name);
        }
    }
    return FC_OK;
}

static bool name_file(const fc_checkpoint *checkpoint, const found_rank *rank, const char *name, fc_file *out) {
    out->name = fc_arena_printf(checkpoint->arena, "%s/%s", rank->name, name);
    out->path = out->name ? fc_arena_printf(checkpoint->arena, "%s/%s", checkpoint->path, out->name) : NULL;
    return out->path != NULL;
}

static fc_code take_ranks(fc_checkpoint *checkpoint, const found_rank *ranks, size_t count, fc_mg_grid *grid,
                          fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    fc_file *files = fc_arena_calloc(arena, 2 * count, sizeof *files);
    grid->names = fc_arena_calloc(arena, count, sizeof *grid->names);
    grid->places = fc_arena_calloc(arena, count, sizeof *grid->places);
    grid->count = count;
    grid->nnumbers = ranks[0].nnumbers;
    bool good = files && grid->names && grid->places;
    for (size_t i = 0; good && i < count; i++) {
        grid->optimizers += ranks[i].optimizer;
        grid->places[i] = (fc_mg_place){ranks[i].numbers[0], ranks[i].numbers[1], ranks[i].numbers[2]};
        grid->names[i] = fc_arena_strndup(arena, ranks[i].name, strlen(ranks[i].name));
        good = grid->names[i] && name_file(checkpoint, &ranks[i], ranks[i].file, &files[i]) &&
               name_file(checkpoint, &ranks[i], distributed, &files[count + i]);
    }
    checkpoint->files = files;
    checkpoint->nfiles = !good ? 0 : grid->optimizers == count ? 2 * count : count;
    return good ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_mg_find_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_mg_grid *out, fc_error *err) {
    found_rank *ranks = NULL;
    size_t count = 0;
    fc_code rc;
    *out = (fc_mg_grid){0};
    FC_TRY_GOTO(list(checkpoint->path, &ranks, &count, err), rc, out);
    if (count == 0) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: the files of the ranks are missing", checkpoint->path);
        goto out;
    }
    fc_sort_items(ranks, count, sizeof *ranks, compare_rank_places);
    FC_TRY_GOTO(check_names(checkpoint->path, ranks, count, err), rc, out);
    FC_TRY_GOTO(take_ranks(checkpoint, ranks, count, out, err), rc, out);
    FC_TRY_GOTO(fc_identities_take(checkpoint, options, err), rc, out);
    if (!options->follow_external) {
        rc = fc_check_links(checkpoint->path, checkpoint->files, checkpoint->nfiles, err);
    }
out:
    free(ranks);
    return rc;
}

/* ---- the meaning of the numbers ---- */

static void measure(fc_mg_grid *grid) {
    grid->tp = grid->stages = grid->ep = 1;
    for (size_t i = 0; i < grid->count; i++) {
        const fc_mg_place *p = &grid->places[i];
        grid->tp = p->tensor >= grid->tp ? p->tensor + 1 : grid->tp;
        grid->stages = p->stage >= grid->stages ? p->stage + 1 : grid->stages;
        grid->ep = p->expert >= grid->ep ? p->expert + 1 : grid->ep;
    }
}

static int compare_places(const void *a, const void *b) {
    const fc_mg_place *x = a, *y = b;
    int64_t way = x->stage != y->stage     ? x->stage - y->stage
                  : x->expert != y->expert ? x->expert - y->expert
                                           : x->tensor - y->tensor;
    return way < 0 ? -1 : way > 0;
}

static fc_code missing(const fc_checkpoint *checkpoint, const fc_mg_grid *grid, const fc_mg_place *place,
                       fc_error *err) {
    char stage[24] = "", expert[24] = "", experts[64] = "";
    if (grid->nnumbers == 3 || (grid->nnumbers == 2 && grid->ep == 1)) {
        snprintf(stage, sizeof stage, "_%03" PRId64, place->stage);
    }
    if (grid->nnumbers == 3 || (grid->nnumbers == 2 && grid->ep > 1)) {
        snprintf(expert, sizeof expert, "_%03" PRId64, place->expert);
        snprintf(experts, sizeof experts, ", %" PRId64 " expert-parallel ranks", grid->ep);
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: mp_rank_%02" PRId64 "%s%s and its file are missing; there are files of %" PRId64
                   " tensor-parallel ranks%s and %" PRId64 " pipeline stages; copy the whole directory",
                   checkpoint->path, place->tensor, stage, expert, grid->tp, experts, grid->stages);
}

/*
 * Within a stage, rank l has the tensor-parallel rank l mod tp and the expert-parallel rank l / expert_tp mod ep, so
 * not every pair exists. Of several ranks with the same shard, the first one saves it.
 */
static fc_code check_whole(const fc_checkpoint *checkpoint, const fc_mg_grid *grid, fc_error *err) {
    int64_t ranks = grid->expert_tp * grid->ep > grid->tp ? grid->expert_tp * grid->ep : grid->tp;
    for (int64_t stage = 0; stage < grid->stages; stage++) {
        for (int64_t l = 0; l < ranks; l++) {
            const fc_mg_place place = {l % grid->tp, stage, l / grid->expert_tp % grid->ep};
            if (!fc_find_item(&place, grid->places, grid->count, sizeof place, compare_places)) {
                return missing(checkpoint, grid, &place, err);
            }
        }
    }
    return FC_OK;
}

fc_code fc_mg_arrange(const fc_checkpoint *checkpoint, const fc_mg_args *args, fc_mg_grid *grid, fc_error *err) {
    for (size_t i = 0; grid->nnumbers == 2 && args->stages <= 1 && args->ep > 1 && i < grid->count; i++) {
        grid->places[i].expert = grid->places[i].stage;
        grid->places[i].stage = 0;
    }
    measure(grid);
    grid->expert_tp = args->expert_tp > 0 ? args->expert_tp : grid->tp;
    FC_TRY(fc_mg_check_args(checkpoint, args, grid, err));
    return check_whole(checkpoint, grid, err);
}
