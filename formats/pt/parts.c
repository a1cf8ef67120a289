/*
 * Finds models in several torch.save files without an index: pytorch_model-00001-of-00002.bin of transformers, and
 * hf_model_0001_0.pt, hf_model_0002_0.pt, ... of torchtune, which have the number of the file and that of the epoch.
 */
#include "pt/parts.h"
#include "pt/pt.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_PARTS = 1 << 20 };

/* The name of a part. */
typedef struct part_name {
    const char *stem;             /* what is before the number */
    const char *tail;             /* what is after it */
    int64_t number, count, epoch; /* count 0: the name does not tell it */
    int width;                    /* digits of the number */
} part_name;

/* What is before the number of a part. Only torchtune's names have no number of files. */
static const char *const stems[] = {"hf_model_", "pytorch_model-", "diffusion_pytorch_model-"};

static const char *find_stem(const char *name) {
    const char *found = NULL;
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        found = strncmp(name, stems[i], strlen(stems[i])) == 0 ? stems[i] : found;
    }
    return found;
}

static bool is_torchtune(const char *stem) {
    return stem == stems[0];
}

/* Parses what is after the number: "_0.pt" or "-of-00002.bin". */
static bool parse_tail(part_name *p) {
    const char *at = p->tail;
    if (is_torchtune(p->stem)) {
        p->epoch = fc_take_text(&at, "_") ? fc_take_number(&at, MOST_PARTS) : -1;
        return p->epoch >= 0 && strcmp(at, ".pt") == 0;
    }
    p->count = fc_take_text(&at, "-of-") ? fc_take_number(&at, MOST_PARTS) : -1;
    return p->count > 0 && strcmp(at, ".bin") == 0;
}

static bool parse_part(const char *name, part_name *out) {
    *out = (part_name){.stem = find_stem(name)};
    if (!out->stem) {
        return false;
    }
    const char *number = name + strlen(out->stem), *at = number;
    out->number = fc_take_number(&at, MOST_PARTS);
    out->width = (int)(at - number);
    out->tail = at;
    return out->number > 0 && out->width < 10 && parse_tail(out) && (out->count == 0 || out->number <= out->count);
}

bool fc_pt_is_parts(const char *group) {
    part_name p = {.stem = find_stem(group)};
    const char *star = p.stem ? group + strlen(p.stem) : "";
    p.tail = star + 1;
    return *star == '*' && parse_tail(&p);
}

/* Whether an index of the same stem has the files: pytorch_model.bin.index.json. */
static bool has_index(const char *directory, const part_name *p, fc_arena *arena, fc_error *err) {
    struct stat st;
    const int n = (int)strlen(p->stem) - 1;
    const char *path = fc_arena_printf(arena, "%s/%.*s.bin.index.json", directory, n, p->stem);
    if (!path) {
        fc_no_memory(err, directory);
    }
    return path && !is_torchtune(p->stem) && fc_path_exists(path, &st, err);
}

/* What torchtune saved is next to a copy of the model that the training began with. */
static fc_listed_role role_of(const part_name *p) {
    return is_torchtune(p->stem) ? FC_LISTED_TRAINING : FC_LISTED_MODEL_PT;
}

/* Whether the name is that of a part. @param group of this model; NULL: of any */
static bool is_part(const char *name, const void *group) {
    const char *pattern = group;
    part_name p;
    return parse_part(name, &p) && (!pattern || (strncmp(pattern, name, strlen(p.stem)) == 0 &&
                                                 strcmp(pattern + strlen(p.stem) + 1, p.tail) == 0));
}

fc_code fc_pt_list_parts(const char *directory, fc_listing *out, fc_error *err) {
    const char **names;
    size_t count;
    FC_TRY(fc_dir_list(directory, is_part, NULL, out->arena, &names, &count, err));
    for (size_t i = 0; i < count; i++) {
        part_name p;
        parse_part(names[i], &p);
        const bool indexed = has_index(directory, &p, out->arena, err);
        FC_TRY(err->code);
        const char *group = fc_arena_printf(out->arena, "%s*%s", p.stem, p.tail);
        FC_NEED(group, err, directory);
        FC_TRY(indexed ? FC_OK : fc_listing_add(out, group, names[i], role_of(&p), err));
    }
    return FC_OK;
}

/* The names count from 1. They are sorted, and a trainer writes all numbers with the same digits. */
static fc_code check_numbers(const char *directory, const char *const *names, size_t count, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        part_name p;
        parse_part(names[i], &p);
        const int64_t next = (int64_t)i + 1;
        const bool last = i + 1 == count && next < p.count;
        if (p.number != next || last) {
            return fc_fail(err, FC_ECORRUPT, "%s: the file %s%0*" PRId64 "%s is missing; there is %s", directory,
                           p.stem, p.width, p.number != next ? next : next + 1, p.tail, names[i]);
        }
    }
    return FC_OK;
}

/* The number of torchtune's files is in none of them. */
static fc_code note_assumed(fc_checkpoint *checkpoint, fc_error *err) {
    if (checkpoint->nfiles > 1 && is_torchtune(find_stem(checkpoint->group))) {
        checkpoint->note =
            fc_arena_printf(checkpoint->arena, "%zu files, no index: assumed complete", checkpoint->nfiles);
        FC_NEED(checkpoint->note, err, checkpoint->path);
    }
    return FC_OK;
}

fc_code fc_pt_open_parts(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char **names, *directory = checkpoint->path;
    fc_st_files files = {.kind = ST_MANY, .directory = directory};
    FC_TRY(fc_dir_list(directory, is_part, checkpoint->group, arena, &names, &files.nfiles, err));
    FC_TRY(check_numbers(directory, names, files.nfiles, err));
    fc_file *all = fc_arena_calloc(arena, files.nfiles + 1, sizeof *all);
    bool good = all != NULL;
    for (size_t i = 0; good && i < files.nfiles; i++) {
        good = fc_file_in(arena, directory, names[i], &all[i]);
    }
    FC_NEED(good, err, directory);
    files.files = all;
    FC_TRY(options->follow_external ? FC_OK : fc_check_links(directory, all, files.nfiles, err));
    checkpoint->producer = "torch.save, in several files";
    FC_TRY(fc_pt_join_files(checkpoint, &files, directory, options, err));
    return note_assumed(checkpoint, err);
}
