/*
 * What else is in the folder of a checkpoint: trainers put files of torch.save beside it, and a save into the folder of
 * an earlier one, of more ranks, leaves its files there. They are no part of the checkpoint, but who converts it should
 * know that they stay behind.
 */
#include "checkpoint/other_files.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "io/directory.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

bool fc_holds_data(const char *name) {
    static const char *const ends[] = {".distcp", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors"};
    bool found = false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !found; i++) {
        found = fc_ends_with(name, ends[i]);
    }
    return found && name[0] != '.';
}

fc_code fc_note_beside(fc_checkpoint *checkpoint, const char *directory, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    fc_name_table *known = fc_name_table_new(arena, checkpoint->nfiles + 1);
    char first[NAME_MAX + 1] = ""; /* by name, so that the note does not depend on the file system */
    size_t count = 0;
    if (!known) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", directory);
    }
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        fc_name_table_put(known, checkpoint->files[i].name, strlen(checkpoint->files[i].name), i);
    }
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, directory, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        struct stat st;
        if (!fc_holds_data(name) || fc_name_table_find(known, name, strlen(name)) != FC_NO_NAME ||
            fstatat(dirfd(dir.dir), name, &st, 0) != 0 || st.st_size == 0) { /* a rank that had nothing to write */
            continue;
        }
        if (count++ == 0 || strcmp(name, first) < 0) {
            snprintf(first, sizeof first, "%s", name);
        }
    }
    rc = fc_dir_close(&dir, rc, err);
    if (rc != FC_OK || count == 0) {
        return rc;
    }
    const char *before = checkpoint->note ? checkpoint->note : "", *and = checkpoint->note ? "; " : "";
    checkpoint->note =
        count == 1
            ? fc_arena_printf(arena, "%s%s%s beside it is no part of it and is not read", before, and, first)
            : fc_arena_printf(arena, "%s%s%zu files beside it are no part of it and are not read, %s the first of them",
                              before, and, count, first);
    return checkpoint->note ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", directory);
}
