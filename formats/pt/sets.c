/*
 * Finds the files of checkpoints with one file per rank by their names: <set>_world_size_<N>_rank_<r>.pt, as verl and
 * others write them, and names that scripts choose: <set>_rank_<r>.pt, <set>-rank<r>.pt, pytorch_model_fsdp_rank<r>.bin
 * (accelerate), consolidated.<r>.pth (Llama).
 */
#include "pt/ranks.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/path.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RANKS = 1 << 20, MAX_NAME = 64, MAX_WIDTH = 8 };

/* @param width receives the number of digits if the number has leading zeros, else 1. */
static bool parse_number(const char **at, int64_t most, int64_t *out, int *width) {
    const char *p = *at;
    *out = fc_take_number(&p, most + 1);
    if (*out < 0 || p - *at > MAX_WIDTH) {
        return false;
    }
    *width = **at == '0' ? (int)(p - *at) : 1;
    *at = p;
    return true;
}

static bool is_one_of(char c, const char *set) {
    return c != '\0' && strchr(set, c) != NULL;
}

/* The words before the number of a rank: also fairseq2's sdp_00.pt, and metaseq's reshard-model_part-0.pt. */
static const char *const words[] = {"rank", "sdp", "model_part"};

/* @param len receives the length of the word.
 *  @return the last such word in a name, or NULL. */
static const char *last_rank(const char *file, size_t *len) {
    const char *last = NULL;
    for (size_t i = 0; i < sizeof words / sizeof *words && !last; i++) {
        *len = strlen(words[i]);
        for (const char *at = file; (at = strstr(at, words[i])) != NULL; at++) {
            last = at;
        }
    }
    return last;
}

/* Removes "_world_size_8" from the end of the first `size` bytes of a name. */
static bool take_world_size(const char *file, size_t *size, int64_t *ranks) {
    static const char between[] = "_world_size_";
    const char *at = strstr(file, between);
    if (!at || at >= file + *size) {
        return true;
    }
    const char *number = at + sizeof between - 1;
    int width = 1;
    *size = (size_t)(at - file);
    return parse_number(&number, MAX_RANKS, ranks, &width) && width == 1 && strncmp(number, "_rank_", 6) == 0 &&
           *size > 0;
}

/* Takes the number of ranks of "rank_0_of_8" and "rank-0-of-8", if it follows that of the rank. */
static bool take_of(const char *at, int64_t *ranks) {
    int width;
    if (!is_one_of(at[0], "_-") || strncmp(at + 1, "of", 2) != 0 || !is_one_of(at[3], "_-")) {
        return true;
    }
    at += 4;
    return *ranks == 0 && parse_number(&at, MAX_RANKS, ranks, &width) && *at == '.';
}

/* Parses "consolidated.03.pth", the name of Llama's model-parallel files. */
static bool parse_consolidated(const char *file, fc_pt_rank_name *out) {
    static const char before[] = "consolidated.";
    const char *at = file + sizeof before - 1;
    if (strncmp(file, before, sizeof before - 1) != 0) {
        return false;
    }
    *out = (fc_pt_rank_name){.name = sizeof before - 2, .head = sizeof before - 1};
    bool is = parse_number(&at, MAX_RANKS, &out->rank, &out->width) && strcmp(at, ".pth") == 0;
    out->tail = at;
    return is;
}

bool fc_pt_parse_rank_name(const char *file, fc_pt_rank_name *out) {
    static const char *const tails[] = {".pt", ".pth", ".bin", ".ckpt"};
    size_t len = 0;
    const char *word = last_rank(file, &len), *at = word;
    bool known = false;
    if (parse_consolidated(file, out)) {
        return true;
    }
    *out = (fc_pt_rank_name){.ranks = 0};
    if (!word || (word > file && !is_one_of(word[-1], "_-."))) {
        return false;
    }
    at += len;
    at += is_one_of(*at, "_-");
    out->head = (size_t)(at - file);
    out->name = (size_t)(word - file) - (word > file);
    if (!parse_number(&at, MAX_RANKS, &out->rank, &out->width) || !take_world_size(file, &out->name, &out->ranks)) {
        return false;
    }
    out->tail = at;
    if (!take_of(at, &out->ranks)) {
        return false;
    }
    at = out->ranks > 0 && *at != '.' ? strrchr(at, '.') : at;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        known = known || strcmp(at, tails[i]) == 0;
    }
    return known && out->name < MAX_NAME && (out->ranks == 0 || out->rank < out->ranks);
}

/* @return the first of the digits before `end`, which may be NULL. */
static const char *first_digit(const char *file, const char *end) {
    while (end && end > file && end[-1] >= '0' && end[-1] <= '9') {
        end--;
    }
    return end;
}

bool fc_pt_parse_numbered(const char *file, fc_pt_rank_name *out) {
    static const char *const tails[] = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json"};
    const char *tail = NULL;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        tail = fc_ends_with(file, tails[i]) ? file + strlen(file) - strlen(tails[i]) : tail;
    }
    const char *digits = first_digit(file, tail);
    if (digits && digits > file + 5 && strncmp(digits - 3, "of", 2) == 0) { /* model_0_of_8.pt */
        tail = digits - 4;
        digits = first_digit(file, tail);
    }
    *out = (fc_pt_rank_name){.tail = tail};
    if (!tail || digits == tail || digits < file + 2 || !is_one_of(digits[-1], "_-.") ||
        fc_pt_parse_rank_name(file, out)) {
        return false;
    }
    *out = (fc_pt_rank_name){.name = (size_t)(digits - file) - 1, .head = (size_t)(digits - file), .tail = tail};
    return parse_number(&digits, MAX_RANKS, &out->rank, &out->width) && take_of(tail, &out->ranks) &&
           out->name < MAX_NAME && (out->ranks == 0 || out->rank < out->ranks);
}

/* ---- groups ---- */

/* The parts of one training. Sets whose names differ in nothing else belong together. */
static const char *const parts[] = {"model",     "optimizer",    "optim",     "extra_state", "random_states",
                                    "rng_state", "lr_scheduler", "scheduler", "dataloader",  "extra",
                                    "random",    "rng",          "data"};

enum { PARTS_WITH_TENSORS = 3 }; /* the first of them; each rank has the others for itself */

static bool is_end(const char *at, const char *from, const char *to) {
    return at == from || at == to || is_one_of(*at, "_-.") || is_one_of(at[-1], "_-.");
}

/* Finds the part of a training in the first `size` bytes of a name. @return its start, or NULL. */
static const char *find_part(const char *file, size_t size, size_t *which) {
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const size_t n = strlen(parts[i]);
        for (size_t at = 0; n <= size && at <= size - n; at++) {
            if (strncmp(file + at, parts[i], n) == 0 && is_end(file + at, file, file + size) &&
                is_end(file + at + n, file, file + size)) {
                *which = i;
                return file + at;
            }
        }
    }
    return NULL;
}

bool fc_pt_has_tensors(const char *set) {
    size_t which = 0;
    return find_part(set, strlen(set), &which) && which < PARTS_WITH_TENSORS;
}

void fc_pt_group_of(const char *file, const fc_pt_rank_name *name, char group[NAME_MAX + 1]) {
    size_t which = 0;
    const char *part = find_part(file, name->name, &which);
    const size_t before = part ? (size_t)(part - file) : 0, length = part ? strlen(parts[which]) : 0;
    snprintf(group, NAME_MAX + 1, "%.*s%s%.*s*%s", (int)before, file, part ? "*" : "",
             (int)(name->head - before - length), file + before + length, name->tail);
}

static int order_of(const fc_pt_set *set) {
    return strcmp(set->name, "model") == 0 ? 0 : strcmp(set->name, "optim") == 0 ? 1 : 2;
}

static int compare_sets(const void *a, const void *b) {
    const fc_pt_set *x = a, *y = b;
    return order_of(x) != order_of(y) ? order_of(x) - order_of(y) : strcmp(x->name, y->name);
}

/* Adds a file to a set that was already found. */
static void join_set(const fc_pt_rank_name *name, fc_pt_set *set) {
    if (name->ranks == 0 && name->rank >= set->ranks) {
        set->ranks = name->rank + 1;
    }
    set->width = name->width > set->width ? name->width : set->width;
}

static fc_code add_to_sets(const char *directory, const char *file, const fc_pt_rank_name *name, fc_arena *arena,
                           fc_pt_set *sets, size_t *count, fc_error *err) {
    for (size_t i = 0; i < *count; i++) {
        if (strncmp(sets[i].name, file, name->name) == 0 && sets[i].name[name->name] == '\0') {
            join_set(name, &sets[i]);
            return FC_OK;
        }
    }
    fc_pt_set set = {fc_arena_strndup(arena, file, name->name),
                     fc_arena_strndup(arena, file, name->head),
                     fc_arena_strndup(arena, name->tail, strlen(name->tail)),
                     name->ranks ? name->ranks : name->rank + 1,
                     name->width,
                     name->ranks > 0};
    FC_NEED(set.name && set.head && set.tail, err, directory);
    sets[(*count)++] = set;
    return FC_OK;
}

/* Whether a name is a link to something else than a file of a rank: Composer's latest-rank0.pt leads to a folder with a
   sharded checkpoint, or to a file in it. */
static bool leads_elsewhere(const char *directory, const char *file) {
    char path[PATH_MAX], target[PATH_MAX];
    fc_pt_rank_name name;
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", directory, file) < PATH_MAX && fc_lstat(path, &st) == 0 &&
           S_ISLNK(st.st_mode) && fc_realpath(path, target) && fc_stat(target, &st) == 0 &&
           (S_ISDIR(st.st_mode) || fc_ends_with(target, ".distcp")) &&
           !fc_pt_parse_rank_name(fc_base_name(target), &name);
}

/* A group of a directory. */
typedef struct group_place {
    const char *directory;
    const char *group; /* NULL: any group */
} group_place;

/* Whether `file` is that of a rank in the group. */
static bool is_in_group(const char *file, const void *context) {
    const group_place *place = context;
    fc_pt_rank_name name;
    char own[NAME_MAX + 1];
    if (!fc_pt_parse_rank_name(file, &name)) {
        return false;
    }
    fc_pt_group_of(file, &name, own);
    return (!place->group || strcmp(own, place->group) == 0) && !leads_elsewhere(place->directory, file);
}

/* Lists the names of a group's files. @param group NULL: any group */
static fc_code list_group_files(const char *directory, const char *group, fc_arena *arena, const char ***out,
                                size_t *count, fc_error *err) {
    const group_place place = {directory, group};
    return fc_dir_list(directory, is_in_group, &place, arena, out, count, err);
}

/* Models and optimizers with different numbers of files are not one checkpoint. */
static fc_code check_counts(const char *directory, const fc_pt_set *sets, size_t count, fc_error *err) {
    for (size_t i = 1; i < count; i++) {
        size_t which = 0;
        find_part(sets[i].name, strlen(sets[i].name), &which);
        if (sets[i].ranks != sets[0].ranks && which < PARTS_WITH_TENSORS) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: there are %" PRId64 " files %s<rank>%s, but %" PRId64
                           " files %s<rank>%s: files are missing, or they "
                           "are of two checkpoints; copy all files, or move those of one away",
                           directory, sets[0].ranks, sets[0].head, sets[0].tail, sets[i].ranks, sets[i].head,
                           sets[i].tail);
        }
    }
    return FC_OK;
}

/* fairseq2 has model/pp_00/tp_00/sdp_00.pt. What several stages or tensor-parallel ranks have is not described. */
static fc_code check_fairseq2(const char *directory, const fc_pt_set *sets, size_t count, fc_error *err) {
    static const char *const others[] = {"../tp_01", "../../pp_01"};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (count > 0 && strncmp(sets[0].head, "sdp_", 4) == 0 &&
            snprintf(path, sizeof path, "%s/%s", directory, others[i]) < PATH_MAX && fc_access(path, F_OK) == 0) {
            return fc_fail(
                err, FC_EUNSUPPORTED,
                "%s: a checkpoint of fairseq2 with tensor or pipeline parallelism, whose files do not say how "
                "tensors are sharded; save it with fairseq2's save_hugging_face_model",
                directory);
        }
    }
    return FC_OK;
}

fc_code fc_pt_find_sets(const char *directory, const char *group, fc_arena *arena, fc_pt_set **out, size_t *count,
                        fc_error *err) {
    const char **names;
    size_t nnames;
    *count = 0;
    *out = NULL;
    FC_TRY(list_group_files(directory, group, arena, &names, &nnames, err));
    *out = fc_arena_calloc(arena, nnames + 1, sizeof **out);
    FC_NEED(*out, err, directory);
    for (size_t i = 0; i < nnames; i++) {
        fc_pt_rank_name name;
        fc_pt_parse_rank_name(names[i], &name);
        FC_TRY(add_to_sets(directory, names[i], &name, arena, *out, count, err));
    }
    if (*count == 0) {
        FC_TRY(fc_pt_find_numbered(directory, group, arena, out, count, err));
    }
    fc_sort_items(*out, *count, sizeof **out, compare_sets);
    FC_TRY(check_counts(directory, *out, *count, err));
    return check_fairseq2(directory, *out, *count, err);
}

/* ---- the checkpoints ---- */

/* Ranks that say how many they are, and have the model, are a training's. A part without the model is of one. */
static fc_listed_role role_of(const char *directory, const char *file) {
    size_t which = 0;
    fc_pt_rank_name name;
    char model[NAME_MAX + 1], path[PATH_MAX];
    fc_pt_parse_rank_name(file, &name);
    const char *part = find_part(file, name.name, &which);
    if (strncmp(file, "consolidated.", 13) == 0) {
        return FC_LISTED_COPY; /* Meta's and Mistral's own files of the weights */
    }
    if (!part) {
        return FC_LISTED_OTHER;
    }
    snprintf(model, sizeof model, "%.*smodel%s", (int)(part - file), file, part + strlen(parts[which]));
    const bool has = snprintf(path, sizeof path, "%s/%s", directory, model) < PATH_MAX && fc_access(path, F_OK) == 0;
    if (!has) {
        return which < PARTS_WITH_TENSORS ? FC_LISTED_COPY : FC_LISTED_STATE;
    }
    return name.ranks > 0 ? FC_LISTED_TRAINING : FC_LISTED_OTHER;
}

fc_code fc_pt_list_sets(const char *directory, fc_listing *out, fc_error *err) {
    const char **names;
    char group[NAME_MAX + 1];
    size_t count;
    FC_TRY(list_group_files(directory, NULL, out->arena, &names, &count, err));
    for (size_t i = 0; i < count; i++) {
        fc_pt_rank_name name;
        fc_pt_parse_rank_name(names[i], &name);
        fc_pt_group_of(names[i], &name, group);
        FC_TRY(fc_listing_add(out, group, names[i], role_of(directory, names[i]), err));
    }
    return FC_OK;
}
