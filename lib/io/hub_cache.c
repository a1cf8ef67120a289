/*
 * The cache of huggingface_hub: see hub_cache.h.
 */
#include "io/hub_cache.h"

#include "base/file_name.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_COMMIT = 64, MOST_REF = 4096 };

/* Whether the first `len` bytes of a path end with the name of a model's folder in the cache. */
static bool is_model_folder(const char *path, size_t len) {
    static const char before[] = "models--";
    size_t start = len;
    while (start > 0 && path[start - 1] != '/') {
        start--;
    }
    return len - start > sizeof before - 1 && strncmp(path + start, before, sizeof before - 1) == 0;
}

bool fc_is_hub_blob(const char *target, const char *directory) {
    static const char snapshots[] = "/snapshots/", blobs[] = "/blobs/";
    bool is = false;
    for (const char *at = directory; !is && (at = strstr(at, snapshots)) != NULL; at++) {
        const size_t n = (size_t)(at - directory);
        const char *blob = target + n + sizeof blobs - 1;
        is = is_model_folder(directory, n) && strncmp(target, directory, n) == 0 &&
             strncmp(target + n, blobs, sizeof blobs - 1) == 0 && *blob && !strchr(blob, '/');
    }
    return is;
}

/* Reads a commit, and removes the newline that people add. */
static fc_code read_commit(const char *path, char commit[MOST_COMMIT + 1], fc_error *err) {
    char *text = NULL;
    size_t size = 0, n = 0;
    FC_TRY(fc_read_whole(path, "a branch of the cache of huggingface_hub", MOST_REF, &text, &size, err));
    while (n < size && n < MOST_COMMIT && isalnum((unsigned char)text[n])) {
        commit[n] = text[n];
        n++;
    }
    commit[n] = '\0';
    while (n < size && isspace((unsigned char)text[n])) {
        n++;
    }
    const bool good = commit[0] && n == size;
    free(text);
    return good ? FC_OK : fc_fail(err, FC_ECORRUPT, "%s: is not the name of a commit; download the model again", path);
}

fc_code fc_hub_snapshot(const char *path, fc_arena *arena, const char **out, fc_error *err) {
    char real[PATH_MAX], ref[PATH_MAX], snapshots[PATH_MAX], commit[MOST_COMMIT + 1];
    fc_error found = {0};
    *out = NULL;
    if (!fc_realpath(path, real) || !is_model_folder(real, strlen(real)) ||
        !fc_find_in(path, "snapshots", snapshots, &found)) {
        return FC_OK;
    }
    if (!fc_find_in(path, "refs/main", ref, &found)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: a model in the cache of huggingface_hub, without refs/main; give the path of one of its "
                       "snapshots",
                       path);
    }
    FC_TRY(read_commit(ref, commit, err));
    *out = fc_arena_printf(arena, "%s/%s", snapshots, commit);
    FC_NEED(*out, err, path);
    return fc_access(*out, F_OK) == 0
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: refs/main names %s, which is not there; download the model again", path,
                         *out);
}
