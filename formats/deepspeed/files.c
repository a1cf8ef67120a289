/*
 * Finds the files of one step. The path is the directory of the step, or the directory that was given to
 * save_checkpoint. In the latter a file `latest` (or `latest_universal`) names the step.
 */
#include "deepspeed/files.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/folder.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TAG = 255, MAX_RANKS = 1 << 20 };

typedef enum ds_role { DS_OTHER, DS_MODEL, DS_OPTIM, DS_LAYER, DS_EXPERT } ds_role;

static bool take_rank(const char **s, uint32_t *out) {
    const int64_t rank = fc_take_number(s, MAX_RANKS);
    *out = (uint32_t)rank;
    return rank >= 0;
}

/* "[bf16_|fp16_][zero_pp_rank_3_]mp_rank_00_{model,optim}_states.pt"; without zero_pp_rank `*rank` is UINT32_MAX. */
static ds_role role_of(const char *name, uint32_t *rank, uint32_t *model_rank) {
    const char *s = name;
    *rank = UINT32_MAX;
    *model_rank = 0;
    if (strstr(name, "expert") && strstr(name, "_states.pt")) {
        return DS_EXPERT;
    }
    if (strncmp(name, "layer_", 6) == 0 && strstr(name, "-model_states.pt")) {
        return DS_LAYER;
    }
    if (!fc_take_text(&s, "bf16_")) {
        fc_take_text(&s, "fp16_");
    }
    if (fc_take_text(&s, "zero_pp_rank_") && !(take_rank(&s, rank) && fc_take_text(&s, "_"))) {
        return DS_OTHER;
    }
    if (!fc_take_text(&s, "mp_rank_") || !take_rank(&s, model_rank)) {
        return DS_OTHER;
    }
    if (strcmp(s, "_model_states.pt") == 0) {
        return DS_MODEL;
    }
    return strcmp(s, "_optim_states.pt") == 0 && *rank != UINT32_MAX ? DS_OPTIM : DS_OTHER;
}

static bool has_role(const char *name) {
    uint32_t rank, model;
    return role_of(name, &rank, &model) != DS_OTHER;
}

static bool is_step(const char *directory, fc_error *err) {
    return fc_dir_find(directory, has_role, err);
}

/* ---- the step ---- */

/* Reads the tag from the file `name`. @return false if there is none. */
static bool read_tag(const char *directory, const char *name, char tag[MAX_TAG + 1], fc_error *err) {
    char path[PATH_MAX];
    int fd;
    uint64_t size;
    if (!fc_find_in(directory, name, path, err) || fc_open_input(path, &fd, &size, err) != FC_OK) {
        return false;
    }
    bool good = size > 0 && size <= MAX_TAG && fc_pread_full(fd, tag, (size_t)size, 0, path, err) == FC_OK;
    close(fd);
    if (good) {
        tag[size] = '\0';
        tag[strcspn(tag, "\r\n")] = '\0';
    }
    return good && fc_path_is_safe(tag);
}

/* The trainer's file takes precedence over that of ds_to_universal.py. */
static const char *read_latest(const char *directory, char tag[MAX_TAG + 1], fc_error *err) {
    static const char *const names[] = {"latest", "latest_universal"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (err->code == FC_OK && read_tag(directory, names[i], tag, err)) {
            return names[i];
        }
    }
    return NULL;
}

/* Whether `tag` is the directory of a step. A missing directory is not an error. */
static bool step_at(const char *directory, const char *tag, char path[PATH_MAX], fc_error *err) {
    struct stat st;
    return snprintf(path, PATH_MAX, "%s/%s", directory, tag) < PATH_MAX && fc_path_exists(path, &st, err) &&
           S_ISDIR(st.st_mode) && is_step(path, err);
}

/* Counts the directories global_step*; `path` is the last one. */
static fc_code find_steps(const char *directory, char path[PATH_MAX], size_t *count, fc_error *err) {
    char found[PATH_MAX];
    fc_dir dir;
    fc_error failed = {FC_OK, ""};
    *count = 0;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; failed.code == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        if (strncmp(name, "global_step", 11) == 0 && step_at(directory, name, found, &failed)) {
            strcpy(path, found);
            ++*count;
        }
    }
    if (failed.code != FC_OK) {
        rc = fc_fail(err, failed.code, "%s", failed.message);
    }
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_ds_list_steps(const char *directory, fc_listing *out, fc_error *err) {
    static const char states[] = "*_states.pt", steps[] = "global_step*";
    char tag[MAX_TAG + 1], path[PATH_MAX];
    size_t count = 0;
    const char *name = is_step(directory, err) ? states : NULL;
    if (!name && err->code == FC_OK && read_latest(directory, tag, err) && step_at(directory, tag, path, err)) {
        name = tag;
    }
    FC_TRY(err->code);
    if (!name) {
        FC_TRY(find_steps(directory, path, &count, err));
        name = count == 0 ? NULL : count == 1 ? fc_base_name(path) : steps;
    }
    return name ? fc_listing_add(out, name, name, FC_LISTED_TRAINING, err) : FC_OK;
}

static fc_code find_step(fc_arena *arena, const char *path, fc_ds_files *out, fc_error *err) {
    char tag[MAX_TAG + 1], found[PATH_MAX];
    size_t count;
    fc_error failed = {FC_OK, ""};
    if (is_step(path, &failed)) {
        out->directory = path;
        return FC_OK;
    }
    const char *latest = failed.code == FC_OK ? read_latest(path, tag, &failed) : NULL;
    bool tagged = latest && step_at(path, tag, found, &failed);
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    if (latest) {
        if (!tagged) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s/%s: the directory of the step '%.64s' is missing or has no checkpoint; give the path "
                           "of another step",
                           path, latest, tag);
        }
    } else {
        FC_TRY(find_steps(path, found, &count, err));
        if (count != 1) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: the directory holds %zu steps and no file 'latest'; give the path of one step", path,
                           count);
        }
    }
    out->directory = fc_arena_strndup(arena, found, strlen(found));
    return out->directory ? FC_OK : fc_no_memory(err, path);
}

/* ---- the files of the step ---- */

typedef struct found_file {
    char *name;
    ds_role role;
    uint32_t rank;
} found_file;

static int compare_file_ranks(const void *a, const void *b) {
    const found_file *x = a, *y = b;
    FC_ORDER_BY(x->role, y->role);
    return FC_ORDER(x->rank, y->rank);
}

static fc_code refuse_file(const fc_ds_files *files, const char *name, ds_role role, uint32_t model_rank,
                           fc_error *err) {
    if (role == DS_LAYER) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s/%s: pipeline-parallel checkpoints, with one file per layer, are not supported; convert it "
                       "with DeepSpeed's ds_to_universal.py",
                       files->directory, name);
    }
    if (role == DS_EXPERT) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s/%s: checkpoints with expert parallelism are not supported; convert it with DeepSpeed's "
                       "ds_to_universal.py",
                       files->directory, name);
    }
    return fc_fail(
        err, FC_EUNSUPPORTED,
        "%s/%s: the model is sharded over at least %u model-parallel ranks, and the files do not record the sharded "
        "dimensions; convert it with DeepSpeed's ds_to_universal.py",
        files->directory, name, model_rank + 1);
}

/* Files of other model-parallel ranks are accepted in universal checkpoints, whose parameters are not sharded. */
static fc_code other_model_rank(fc_ds_files *files, const char *name, ds_role role, uint32_t model_rank,
                                fc_error *err) {
    if (role >= DS_LAYER || !files->universal) {
        return refuse_file(files, name, role, model_rank, err);
    }
    files->model_parallel = files->model_parallel > model_rank ? files->model_parallel : (size_t)model_rank + 1;
    return FC_OK;
}

/* @param list malloc'ed, with malloc'ed names; owned by the caller, also after a failure. */
static fc_code list_files(fc_ds_files *files, found_file **list, size_t *count, fc_error *err) {
    size_t capacity = 0;
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, files->directory, err), rc, out);
    for (const char *found; (found = fc_dir_next(&dir)) != NULL;) {
        uint32_t rank, model_rank;
        ds_role role = role_of(found, &rank, &model_rank);
        if (role == DS_OTHER) {
            continue;
        }
        if (role >= DS_LAYER || model_rank > 0) {
            FC_TRY_GOTO(other_model_rank(files, found, role, model_rank, err), rc, out);
            continue;
        }
        char *name = fc_grow(list, &capacity, *count + 1, sizeof **list) ? strdup(found) : NULL;
        FC_TRY_GOTO(name ? FC_OK : fc_no_memory(err, files->directory), rc, out);
        (*list)[(*count)++] = (found_file){name, role, rank};
    }
out:
    return fc_dir_close(&dir, rc, err);
}

/* The ranks must count from 0 without a gap, and each must have one file per role. */
static fc_code check_ranks(const fc_ds_files *files, const found_file *list, size_t count, fc_error *err) {
    uint32_t next = 0;
    for (size_t i = 0; i < count; i++) {
        bool again = i > 0 && list[i].role == list[i - 1].role, ranked = list[i].rank != UINT32_MAX;
        next = again ? next + 1 : 0;
        if (list[i].rank == next || (!ranked && !again)) {
            continue;
        }
        if (list[i].rank < next || !ranked) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: %s and %s do not belong together: files of two checkpoints are mixed here",
                           files->directory, list[i - 1].name, list[i].name);
        }
        return fc_fail(err, FC_ECORRUPT, "%s: the file of rank %u is missing; the next one is %s", files->directory,
                       next, list[i].name);
    }
    return FC_OK;
}

static fc_code take_files(fc_arena *arena, const found_file *list, size_t count, fc_ds_files *out, fc_error *err) {
    out->files = fc_arena_calloc(arena, count, sizeof *out->files);
    out->models = fc_arena_calloc(arena, count, sizeof *out->models);
    out->optims = fc_arena_calloc(arena, count, sizeof *out->optims);
    bool good = out->files && out->models && out->optims;
    for (size_t i = 0; good && i < count; i++) {
        good = fc_file_in(arena, out->directory, list[i].name, &out->files[i]);
        *(list[i].role == DS_MODEL ? &out->models[out->nmodels++] : &out->optims[out->noptims++]) = (uint32_t)i;
    }
    out->nfiles = count;
    FC_NEED(good, err, out->directory);
    if (out->nmodels == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: the file *_model_states.pt is missing", out->directory);
    }
    return FC_OK;
}

fc_code fc_ds_find_files(fc_arena *arena, const char *path, fc_ds_files *out, fc_error *err) {
    found_file *list = NULL;
    size_t count = 0;
    fc_code rc;
    FC_TRY(find_step(arena, path, out, err));
    fc_error failed = {FC_OK, ""};
    out->universal = fc_ds_is_universal(out->directory, &failed);
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    out->model_parallel = 1;
    FC_TRY_GOTO(list_files(out, &list, &count, err), rc, out);
    fc_sort_items(list, count, sizeof *list, compare_file_ranks);
    FC_TRY_GOTO(check_ranks(out, list, count, err), rc, out);
    FC_TRY_GOTO(take_files(arena, list, count, out, err), rc, out);
    if (out->universal) {
        rc = fc_ds_find_universal(arena, out, err);
    }
out:
    for (size_t i = 0; i < count; i++) {
        free(list[i].name);
    }
    free(list);
    return rc;
}
