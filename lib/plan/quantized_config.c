/*
 * Finds the file that says that weights are quantized: see quantized_config.h.
 */
#include "plan/quantized_config.h"

#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/json_file.h"
#include "io/path.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Folders that are looked into. The files of a checkpoint of many ranks are mostly in one. */
enum { MOST_FOLDERS = 64 };

/* Files that only quantizers write, besides config.json: ModelOpt, GPTQ, AWQ, quanto. */
static const char *const own_files[] = {"hf_quant_config.json", "quantize_config.json", "quant_config.json",
                                        "quanto_qmap.json"};

bool fc_is_quantizer_file(const char *name) {
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++) {
        if (strcmp(name, own_files[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Whether a configuration, or that of the language model in it, has the member that quantizers add. */
static bool says_quantized(const char *path, fc_arena *arena) {
    static const char *const members[] = {"quantization_config", "compression_config"};
    const char *file;
    json_t *root = NULL;
    fc_error ignored = {0};
    bool found = false;
    if (fc_json_load_config(path, arena, &file, &root, &ignored) != FC_OK) {
        return false;
    }
    const json_t *inner = json_object_get(root, "text_config");
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        found = found || json_object_size(json_object_get(root, members[i])) +
                                 json_object_size(json_object_get(inner, members[i])) >
                             0;
    }
    json_decref(root);
    return found;
}

/* Looks into one folder, whose path has `len` bytes and ends in a slash, or is empty. */
static fc_code look(const char *folder, size_t len, fc_arena *arena, const char **out, fc_error *err) {
    const char *config = fc_arena_printf(arena, "%.*sconfig.json", (int)len, folder);
    FC_NEED(config, err, folder);
    if (fc_access(config, R_OK) == 0 && says_quantized(config, arena)) {
        *out = config;
    }
    for (size_t i = 0; !*out && i < sizeof own_files / sizeof *own_files; i++) {
        const char *own = fc_arena_printf(arena, "%.*s%s", (int)len, folder, own_files[i]);
        FC_NEED(own, err, folder);
        *out = fc_access(own, F_OK) == 0 ? own : NULL;
    }
    return FC_OK;
}

fc_code fc_quantized_config_find(const fc_checkpoint *source, fc_arena *arena, const char **out, fc_error *err) {
    const char *last = "";
    size_t last_len = 0;
    *out = NULL;
    char *inside = fc_arena_printf(arena, "%s/", source->path);
    FC_TRY(inside ? look(inside, strlen(inside), arena, out, err) : fc_no_memory(err, source->path));
    if (!*out) {
        last = source->path;
        last_len = (size_t)(fc_base_name(last) - last);
        FC_TRY(look(last, last_len, arena, out, err));
    }
    for (size_t i = 0, looked = 0; !*out && i < source->nfiles && looked < MOST_FOLDERS; i++) {
        const char *path = source->files[i].path;
        const size_t len = path ? (size_t)(fc_base_name(path) - path) : 0;
        if (path && !(len == last_len && memcmp(path, last, len) == 0)) {
            FC_TRY(look(path, len, arena, out, err));
            last = path;
            last_len = len;
            looked++;
        }
    }
    return FC_OK;
}
