/*
 * Notes the files next to a checkpoint that are not part of it. Trainers put torch.save files there, and a save over an
 * earlier one with more ranks leaves old shard files. The user should know that a conversion does not read them.
 */
#include "checkpoint/other_files.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

bool fc_holds_data(const char *name) {
    static const char *const ends[] = {".distcp",   ".pt",          ".pth",           ".bin",
                                       ".ckpt",     ".pkl",         ".safetensors",   ".pth.tar",
                                       ".pth.lora", ".pth.adapter", ".pth.adapter_v2"}; /* the last three: LitGPT */
    bool found = false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !found; i++) {
        found = fc_ends_with(name, ends[i]);
    }
    return found && name[0] != '.';
}

/* Whether it is the file of a rank without data. On a server, each would be asked for, so all count as files with data.
 */
static bool is_empty(const fc_dir *dir, const char *name) {
    struct stat st;
    return dir->dir && fstatat(dirfd(dir->dir), name, &st, 0) == 0 && st.st_size == 0;
}

/* Counts the files with data that the checkpoint does not list. `first`: the first in order of names, so that the note
 * does not depend on the file system. */
static fc_code count_unknown(const char *directory, const fc_name_table *known, char first[NAME_MAX + 1], size_t *count,
                             fc_error *err) {
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        if (!fc_holds_data(name) || fc_name_table_find(known, name, strlen(name)) != FC_NO_NAME ||
            is_empty(&dir, name)) {
            continue;
        }
        if ((*count)++ == 0 || strcmp(name, first) < 0) {
            snprintf(first, NAME_MAX + 1, "%s", name);
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_note_other_files(fc_checkpoint *checkpoint, const char *directory, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    fc_name_table *known = fc_name_table_new(arena, checkpoint->nfiles + 1);
    char first[NAME_MAX + 1] = "";
    size_t count = 0;
    FC_NEED(known, err, directory);
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        fc_name_table_put(known, checkpoint->files[i].name, strlen(checkpoint->files[i].name), i);
    }
    FC_TRY(count_unknown(directory, known, first, &count, err));
    if (count == 0) {
        return FC_OK;
    }
    const char *before = checkpoint->note ? checkpoint->note : "", *and = checkpoint->note ? "; " : "";
    if (count == 1) {
        checkpoint->note = fc_arena_printf(arena,
                                           "%s%s%s in the same directory is not part of the checkpoint and is "
                                           "not read",
                                           before, and, first);
    } else {
        checkpoint->note = fc_arena_printf(arena,
                                           "%s%s%zu files in the same directory are not part of the checkpoint "
                                           "and are not read, the first is %s",
                                           before, and, count, first);
    }
    return checkpoint->note ? FC_OK : fc_no_memory(err, directory);
}
