/*
 * Lists the files of a directory of shards, and checks what else is in the directory.
 */
#include "hdf5/shard_files.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fc_code fc_h5_name_shards(fc_checkpoint *checkpoint, const char *directory, int64_t ranks, fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    size_t n = (size_t)ranks + 1;
    fc_file *files = fc_arena_calloc(arena, n, sizeof *files);
    FC_NEED(files, err, checkpoint->path);
    files[0] = checkpoint->files[0];
    for (size_t i = 1; i < n; i++) {
        files[i].name = fc_arena_printf(arena, "shard-%05zu-of-%05lld.h5", i - 1, (long long)ranks);
        files[i].path = files[i].name ? fc_arena_printf(arena, "%s/%s", directory, files[i].name) : NULL;
        FC_NEED(files[i].path, err, checkpoint->path);
    }
    checkpoint->files = files;
    checkpoint->nfiles = n;
    return FC_OK;
}

fc_code fc_h5_check_directory(const char *directory, int64_t ranks, fc_error *err) {
    char expected[64];
    fc_dir dir;
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, directory, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        long long rank = -1, of = -1;
        int end = -1;
        if (sscanf(name, "shard-%lld-of-%lld.h5%n", &rank, &of, &end) != 2 || end < 0 || name[end]) {
            continue;
        }
        snprintf(expected, sizeof expected, "shard-%05lld-of-%05lld.h5", rank, (long long)ranks);
        if (of != ranks || rank < 0 || rank >= ranks || strcmp(expected, name) != 0) {
            rc =
                fc_fail(err, FC_ECORRUPT, "%s: %s does not belong here, because index.h5 has %lld shards; move it away",
                        directory, name, (long long)ranks);
            goto out;
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}
