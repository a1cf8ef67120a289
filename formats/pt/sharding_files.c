/*
 * The files of a torch_checkpointing checkpoint: metadata.pkl says in which file each rank wrote an item that can be
 * resharded. It does not list the other items, which are in numbered files next to these.
 */
#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"
#include "pt/sharding.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool fc_pt_sharding_is_in(const char *directory, fc_error *err) {
    static const char first_key[] = "metadata";
    unsigned char head[64];
    char path[PATH_MAX];
    size_t size = sizeof head;
    if (!fc_find_in(directory, FC_PT_SHARDING, path, err) || fc_read_head(path, head, &size, NULL) != FC_OK) {
        return false;
    }
    return size > 2 && head[0] == 0x80 && memmem(head, size, first_key, sizeof first_key - 1) != NULL;
}

/* The file of an item on a rank: the one that is recorded, or the default. */
static fc_code file_of(const fc_pt_sharding *s, const fc_pt_item *item, fc_pv layout, int64_t rank, const char **out,
                       fc_error *err) {
    size_t n;
    const fc_pv path = fc_pv_typeof(layout) == FC_PV_DICT ? fc_torch_dict_get(s->p, layout, "file_path") : 0;
    *out = fc_pv_typeof(path) == FC_PV_STR ? fc_pickle_bytes(s->p, path, &n)
                                           : fc_arena_printf(s->arena, "%s_%" PRId64 ".pt", item->name, rank);
    FC_NEED(*out, err, s->path);
    if (!fc_path_is_safe(*out) || strlen(*out) >= NAME_MAX) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: item %.256s: the file of rank %" PRId64 " is %.128s, which is outside of the directory",
                       s->path, item->name, rank, *out);
    }
    *out = fc_arena_strndup(s->arena, *out, strlen(*out)); /* the pickle is freed before the checkpoint */
    return *out ? FC_OK : fc_no_memory(err, s->path);
}

/* A rank without a part of the item may have no file of it. */
static bool is_absent(const char *directory, const fc_pt_item *item, const char *file, int64_t rank) {
    char path[PATH_MAX];
    return !item->has_parts[rank] && snprintf(path, sizeof path, "%s/%s", directory, file) < PATH_MAX &&
           fc_access(path, F_OK) != 0;
}

/* Fails if two parts are in one file. */
static fc_code claim_file(const fc_pt_sharding *s, fc_name_table *claimed, const char *file, size_t number,
                          fc_error *err) {
    const size_t at = fc_name_table_put(claimed, file, strlen(file), number);
    FC_NEED(at != FC_NO_NAME, err, s->path);
    return at == number
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: two ranks or two items have the same file, %.128s", s->path, file);
}

/* Finds the files of one item. @param number of its first file among those of all items. */
static fc_code item_files(const fc_pt_sharding *s, const char *directory, const fc_pt_item *item, fc_pv layouts,
                          bool by_item, size_t number, fc_name_table *claimed, fc_pt_set *set, fc_error *err) {
    torch_dict ranks;
    fc_code rc = FC_OK;
    set->files = fc_arena_calloc(s->arena, (size_t)s->ranks, sizeof *set->files);
    set->owners = fc_arena_calloc(s->arena, (size_t)s->ranks, sizeof *set->owners);
    FC_NEED(set->files && set->owners && fc_torch_dict_begin(&ranks, s->p, layouts), err, s->path);
    for (int64_t r = 0; r < s->ranks && rc == FC_OK; r++) {
        const char *file = NULL;
        fc_pv layout = fc_torch_dict_find_number(&ranks, r);
        layout = by_item && fc_pv_typeof(layout) == FC_PV_DICT ? fc_torch_dict_get(s->p, layout, item->name) : layout;
        FC_TRY_GOTO(file_of(s, item, layout, r, &file, err), rc, out);
        if (!is_absent(directory, item, file, r)) {
            FC_TRY_GOTO(claim_file(s, claimed, file, number + (size_t)r, err), rc, out);
            set->owners[set->nfiles] = r;
            set->files[set->nfiles++] = file;
        }
    }
out:
    fc_torch_dict_free(&ranks);
    return rc;
}

/* Adds the numbered sets of as many ranks whose files are not those of an item. */
static fc_code add_others(const fc_pt_sharding *s, const char *directory, const fc_name_table *claimed,
                          fc_pt_set **sets, size_t *count, fc_error *err) {
    fc_pt_set *others = NULL, *all;
    size_t n = 0;
    FC_TRY(fc_pt_find_numbered(directory, NULL, s->arena, &others, &n, err));
    all = fc_arena_calloc(s->arena, *count + n, sizeof *all);
    FC_NEED(all, err, s->path);
    if (*count > 0) {
        memcpy(all, *sets, *count * sizeof *all);
    }
    for (size_t i = 0; i < n; i++) {
        char name[NAME_MAX + 1];
        snprintf(name, sizeof name, "%s%0*d%s", others[i].head, others[i].width, 0, others[i].tail);
        if (others[i].first && others[i].ranks == s->ranks &&
            fc_name_table_find(claimed, name, strlen(name)) == FC_NO_NAME) {
            all[(*count)++] = others[i];
        }
    }
    *sets = all;
    return FC_OK;
}

fc_code fc_pt_sharding_sets(fc_pt_sharding *s, const char *directory, fc_pt_set **out, size_t *count, fc_error *err) {
    fc_name_table *claimed = fc_name_table_new(s->arena, s->nitems * (size_t)s->ranks);
    fc_pt_set *sets = fc_arena_calloc(s->arena, s->nitems, sizeof *sets);
    FC_NEED(claimed && sets, err, s->path);
    for (size_t i = 0; i < s->nitems; i++) {
        const fc_pt_item *item = &s->items[i];
        sets[i] = (fc_pt_set){
            .name = item->name, .head = item->name, .tail = "", .ranks = s->ranks, .counted = true, .listed = true};
        FC_TRY(item_files(s, directory, item, item->layouts ? item->layouts : s->layouts, !item->layouts,
                          i * (size_t)s->ranks, claimed, &sets[i], err));
    }
    *count = s->nitems;
    *out = sets;
    return add_others(s, directory, claimed, out, count, err);
}
