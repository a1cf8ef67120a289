/*
 * Copies full versions. See stage.h.
 */
#include "delta/stage.h"

#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/sync.h"
#include "safetensors/files.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 256 << 10 };

static fc_code path_in(char out[PATH_MAX], const char *folder, const char *name, fc_error *err) {
    return snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "%s: the path is too long", folder);
}

static fc_code copy_bytes(int from, int to, uint64_t size, const char *path, fc_progress *progress, fc_error *err) {
    unsigned char *buffer = malloc(BLOCK);
    fc_code rc = buffer ? FC_OK : fc_no_memory(err, path);
    for (uint64_t at = 0; rc == FC_OK && at < size;) {
        const size_t some = size - at < BLOCK ? (size_t)(size - at) : BLOCK;
        rc = fc_pread_full(from, buffer, some, at, path, err);
        rc = rc == FC_OK ? fc_pwrite_full(to, buffer, some, at, path, err) : rc;
        rc = rc == FC_OK ? fc_progress_count(progress, some, err) : rc;
        at += some;
    }
    free(buffer);
    return rc;
}

static fc_code copy_file(const char *from, const char *to, fc_progress *progress, fc_error *err) {
    uint64_t size;
    int in;
    FC_TRY(fc_open_input(from, &in, &size, err));
    const int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    fc_code rc = out < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be created", to) : FC_OK;
    if (rc == FC_OK) {
        fc_progress_begin(progress, FC_PHASE_COPYING, FC_COUNTED_BYTES, size);
        rc = copy_bytes(in, out, size, from, progress, err);
    }
    close(in);
    return fc_close_written(out, rc, to, err);
}

static fc_code stage_file(const fc_dir *dir, const char *staged, const char *name, fc_progress *progress,
                          fc_error *err) {
    char from[PATH_MAX], to[PATH_MAX];
    bool folder;
    FC_TRY(fc_dir_is_folder(dir, name, &folder, err));
    if (folder) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s/%.256s: a full version must not have folders", dir->path, name);
    }
    FC_TRY(path_in(from, dir->path, name, err));
    FC_TRY(path_in(to, staged, name, err));
    return copy_file(from, to, progress, err);
}

fc_code fc_stage_version(const char *version, const char *model, fc_progress *progress, fc_error *err) {
    char staged[PATH_MAX];
    fc_dir dir;
    FC_TRY(path_in(staged, model, SYNC_STAGED, err));
    fc_stage_remove(model);
    if (mkdir(staged, 0777) != 0) {
        return fc_fail_errno(err, errno, "%s: the folder cannot be created", staged);
    }
    fc_code rc = fc_dir_open(&dir, version, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        rc = name[0] == '.' ? FC_OK : stage_file(&dir, staged, name, progress, err);
    }
    return fc_dir_close(&dir, rc, err);
}

static fc_code add_replaced(const char *staged, fc_journal *journal, fc_error *err) {
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, staged, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        rc = fc_journal_replaces(journal, name, err);
    }
    return fc_dir_close(&dir, rc, err);
}

/* Weights of the model that the full version lacks would be read with it. */
static fc_code add_removed(const char *model, const char *staged, fc_journal *journal, fc_error *err) {
    char path[PATH_MAX];
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, model, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        const bool weights = fnmatch("*" ST_EXTENSION, name, FNM_PERIOD) == 0 || strcmp(name, ST_INDEX_NAME) == 0;
        fc_error missing = {FC_OK};
        if (weights && !fc_find_in(staged, name, path, &missing)) {
            rc = missing.code == FC_OK ? fc_journal_removes(journal, name, err)
                                       : fc_fail(err, missing.code, "%s", missing.message);
        }
    }
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_stage_finish(const char *model, fc_journal *journal, fc_progress *progress, fc_error *err) {
    char staged[PATH_MAX];
    FC_TRY(path_in(staged, model, SYNC_STAGED, err));
    fc_progress_begin(progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, fc_sync_count(staged));
    FC_TRY(fc_sync_tree(staged, progress, err));
    FC_TRY(add_replaced(staged, journal, err));
    return add_removed(model, staged, journal, err);
}

void fc_stage_remove(const char *model) {
    char staged[PATH_MAX];
    if (path_in(staged, model, SYNC_STAGED, NULL) == FC_OK) {
        fc_remove_tree(AT_FDCWD, staged);
    }
}
