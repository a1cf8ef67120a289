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
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_COMMIT = 64, MOST_REF = 4096, MOST_INDEX = 64 << 20 };

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

/* ---- names of the hub ---- */

/* @return whether the path fits */
static bool find_cache(char out[PATH_MAX]) {
    static const struct {
        const char *variable, *below;
    } places[] = {{"HF_HUB_CACHE", ""},
                  {"HUGGINGFACE_HUB_CACHE", ""},
                  {"HF_HOME", "/hub"},
                  {"XDG_CACHE_HOME", "/huggingface/hub"},
                  {"HOME", "/.cache/huggingface/hub"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *value = getenv(places[i].variable);
        if (value && *value) {
            return snprintf(out, PATH_MAX, "%s%s", value, places[i].below) < PATH_MAX;
        }
    }
    return false;
}

/* Whether the files in an index are in the snapshot. A link to a blob that is missing is none. */
static bool has_indexed(const char *snapshot, const char *index) {
    char *text = NULL, path[PATH_MAX];
    size_t size = 0;
    fc_error unused;
    json_error_t mistake;
    const char *key, *file;
    json_t *value;
    bool has = fc_read_whole(index, "an index", MOST_INDEX, &text, &size, &unused) == FC_OK;
    json_t *root = has ? json_loadb(text, size, 0, &mistake) : NULL;
    json_t *map = json_object_get(root, "weight_map");
    has = json_object_size(map) > 0;
    json_object_foreach(map, key, value) {
        file = json_string_value(value);
        has = has && file && snprintf(path, sizeof path, "%s/%s", snapshot, file) < (int)sizeof path &&
              access(path, F_OK) == 0;
    }
    json_decref(root);
    free(text);
    return has;
}

/* Whether a snapshot has all files of a model. What was not downloaded is known only from an index, and from names
   such as model-00001-of-00002.safetensors. */
static bool is_complete(const char *snapshot) {
    static const char index[] = ".index.json", *const data[] = {".safetensors", ".bin", ".msgpack"};
    char path[PATH_MAX];
    fc_error unused;
    fc_dir dir;
    bool has = true, has_index = false, has_part = false, has_whole = false;
    fc_code rc = fc_dir_open(&dir, snapshot, &unused);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        const size_t n = strlen(name);
        const bool fits = snprintf(path, sizeof path, "%s/%s", snapshot, name) < (int)sizeof path;
        if (n > sizeof index - 1 && strcmp(name + n - sizeof index + 1, index) == 0) {
            has_index = true;
            has = has && fits && has_indexed(snapshot, path);
        }
        for (size_t i = 0; i < sizeof data / sizeof *data; i++) {
            const size_t e = strlen(data[i]);
            if (n > e && strcmp(name + n - e, data[i]) == 0) {
                has_part = has_part || strstr(name, "-of-");
                has_whole = has_whole || !strstr(name, "-of-");
                has = has && fits && access(path, F_OK) == 0;
            }
        }
    }
    rc = fc_dir_close(&dir, rc, &unused);
    return rc == FC_OK && has && (has_index || (has_whole && !has_part));
}

/* Finds the snapshot of "owner/model[@revision][/path]". @param out receives what the name means there; NULL: it is
   not there, or not all of it */
static fc_code find_cached(const char *name, fc_arena *arena, const char **out, fc_error *err) {
    char cache[PATH_MAX], ref[PATH_MAX], commit[MOST_COMMIT + 1];
    const int owner = (int)strcspn(name, "/");
    const char *model = name + owner + (name[owner] == '/');
    const int size = (int)strcspn(model, "@/");
    const char *revision = model[size] == '@' ? model + size + 1 : "main";
    const int length = (int)strcspn(revision, "/");
    const char *rest = model[size] == '@' ? revision + length : model + size;
    fc_error unused;
    if (!owner || !size || !length || revision[0] == '.' || strstr(rest, "/..") || !find_cache(cache)) {
        return FC_OK;
    }
    const char *folder = fc_arena_printf(arena, "%s/models--%.*s--%.*s", cache, owner, name, size, model);
    FC_NEED(folder, err, name);
    if (snprintf(ref, sizeof ref, "%s/refs/%.*s", folder, length, revision) >= (int)sizeof ref ||
        access(ref, F_OK) != 0 || read_commit(ref, commit, &unused) != FC_OK) {
        if (length > MOST_COMMIT) {
            return FC_OK;
        }
        snprintf(commit, sizeof commit, "%.*s", length, revision); /* a commit has no file in refs/ */
    }
    const char *snapshot = fc_arena_printf(arena, "%s/snapshots/%s", folder, commit);
    const char *whole = snapshot ? fc_arena_printf(arena, "%s%s", snapshot, rest) : NULL;
    FC_NEED(whole, err, name);
    *out = (rest[0] && rest[1] ? access(whole, F_OK) == 0 : is_complete(snapshot)) ? whole : NULL;
    return FC_OK;
}

fc_code fc_hub_snapshot(const char *path, fc_arena *arena, const char **out, fc_error *err) {
    static const char hub[] = "hf://";
    char real[PATH_MAX], ref[PATH_MAX], snapshots[PATH_MAX], commit[MOST_COMMIT + 1];
    fc_error found = {0};
    *out = NULL;
    if (strncmp(path, hub, sizeof hub - 1) == 0) {
        return find_cached(path + sizeof hub - 1, arena, out, err);
    }
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
