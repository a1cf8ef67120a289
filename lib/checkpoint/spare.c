/*
 * Keeps a target from replacing what is read: see fc_checkpoint_spare. A target may take the place of the checkpoint
 * itself if it holds everything that is lost with it.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include "base/name_table.h"
#include "checkpoint/identity.h"
#include "io/directory.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool is_same_file(const struct stat *a, const char *path) {
    struct stat b;
    return stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

/* Whether the target takes the place of the whole checkpoint. One file of several must stay with the others. */
static bool replaces_whole(const fc_checkpoint *checkpoint, const struct stat *target) {
    return is_same_file(target, checkpoint->path) &&
           (S_ISDIR(target->st_mode) || (!checkpoint->format->header_name && checkpoint->nfiles <= 1));
}

/* ---- files of another checkpoint in the same directory ---- */

/* The directory of a checkpoint, and the names of its files relative to it. */
typedef struct home {
    const fc_checkpoint *checkpoint;
    const char *path;
    fc_name_table *names;
} home;

static void put_name(const home *h, const char *name) {
    fc_name_table_put(h->names, name, strlen(name), 0);
}

static fc_code list_names(home *h, fc_arena *arena, fc_error *err) {
    const fc_checkpoint *checkpoint = h->checkpoint;
    const size_t length = strlen(checkpoint->path);
    size_t count = 0;
    const char **headers = fc_identities_headers(checkpoint, &count);
    h->names = headers ? fc_name_table_new(arena, checkpoint->nfiles + count + 1) : NULL;
    for (size_t i = 0; h->names && i < checkpoint->nfiles; i++) {
        put_name(h, checkpoint->files[i].name);
    }
    for (size_t i = 0; h->names && i < count; i++) {
        const char *name = headers[i] && strncmp(headers[i], checkpoint->path, length) == 0 ? headers[i] + length : "";
        put_name(h, name + strspn(name, "/"));
    }
    if (h->names && checkpoint->format->header_name) {
        put_name(h, checkpoint->format->header_name);
    }
    free(headers);
    return h->names ? FC_OK : fc_no_memory(err, checkpoint->path);
}

/* Refuses a file that a target could replace, but that is not part of the checkpoint. The commit refuses all others. */
static fc_code check_file(const home *h, const char *name, fc_error *err) {
    char path[PATH_MAX];
    struct stat st;
    bool own = false;
    if (fc_name_table_find(h->names, name, strlen(name)) != FC_NO_NAME ||
        snprintf(path, sizeof path, "%s/%s", h->path, name) >= PATH_MAX || lstat(path, &st) != 0 ||
        !S_ISREG(st.st_mode) || st.st_size == 0) {
        return FC_OK;
    }
    FC_TRY(fc_is_own_file(path, name, &own, err));
    return !own ? FC_OK
                : fc_fail(err, FC_EUSAGE,
                          "%s: is read, and replacing it would delete '%s', which is not part of the checkpoint: move "
                          "it away first, or name another target",
                          h->path, name);
}

/* @param folder "": the directory itself. */
static fc_code check_files(const home *h, const char *folder, fc_error *err) { // NOLINT(misc-no-recursion): two levels
    char path[PATH_MAX], name[PATH_MAX];
    fc_dir dir = {0};
    fc_code rc;
    snprintf(path, sizeof path, "%s/%s", h->path, folder);
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL;) {
        bool is_folder;
        snprintf(name, sizeof name, "%s%s%s", folder, *folder ? "/" : "", entry);
        FC_TRY_GOTO(fc_dir_is_folder(&dir, entry, &is_folder, err), rc, out);
        FC_TRY_GOTO(!is_folder ? check_file(h, name, err) : *folder ? FC_OK : check_files(h, name, err), rc, out);
    }
out:
    return fc_dir_close(&dir, rc, err);
}

static fc_code check_directory(const fc_checkpoint *checkpoint, const char *path, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    home h = {.checkpoint = checkpoint, .path = path};
    fc_code rc;
    FC_TRY_GOTO(arena ? list_names(&h, arena, err) : fc_no_memory(err, path), rc, out);
    rc = check_files(&h, "", err);
out:
    fc_arena_free(arena);
    return rc;
}

/* ---- the target ---- */

/* Refuses a target that is or contains a file of the checkpoint. */
static fc_code check_files_read(const fc_checkpoint *checkpoint, const char *target, fc_error *err) {
    const char *header = checkpoint->format->header_name;
    char *header_path = NULL;
    size_t count = 0, headers = 0;
    const char **more = fc_identities_headers(checkpoint, &headers);
    const char **inputs = calloc(checkpoint->nfiles + headers + 3, sizeof *inputs);
    if (!inputs || !more || (header && asprintf(&header_path, "%s/%s", checkpoint->path, header) < 0)) {
        free(more);
        free(inputs);
        return fc_no_memory(err, target);
    }
    inputs[count++] = checkpoint->path;
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        inputs[count++] = checkpoint->files[i].path;
    }
    for (size_t i = 0; i < headers; i++) {
        inputs[count++] = more[i];
    }
    inputs[count] = header_path;
    fc_code rc = fc_check_inputs(target, inputs, "a file of the checkpoint", err);
    free(header_path);
    free(more);
    free(inputs);
    return rc;
}

/* Whether the checkpoint is in the memory of a program. Then its path is only a name for messages. */
static bool is_in_memory(const fc_checkpoint *checkpoint) {
    const fc_format *format = checkpoint->format;
    return checkpoint->nfiles == 0 && !format->file_sign && !format->directory_sign;
}

fc_code fc_checkpoint_spare(const fc_checkpoint *checkpoint, const char *target, bool holds_all, fc_error *err) {
    const char *const read[] = {checkpoint->path, NULL};
    struct stat st;
    if (is_in_memory(checkpoint)) {
        return FC_OK;
    }
    if (fc_is_remote(target)) { /* it becomes visible object by object, so it replaces nothing that is read */
        return fc_check_inputs(target, read, "a file of the checkpoint", err);
    }
    if (stat(target, &st) != 0) {
        return FC_OK;
    }
    if (!holds_all || !replaces_whole(checkpoint, &st)) {
        return check_files_read(checkpoint, target, err);
    }
    return S_ISDIR(st.st_mode) ? check_directory(checkpoint, target, err) : FC_OK;
}
