/*
 * The files next to the weights of a model: its configuration, its tokenizer, its card. They are copied as they are.
 */
#include "fsdpckpt/export.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"
#include "plan/quantized_config.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct lister {
    const char *root;
    bool dequantized;
    const char *real_root; /* realpath() of it; NULL: links may lead anywhere */
    fc_arena *arena;
    const char **names; /* malloc'ed */
    size_t count, capacity;
    fc_error *err;
} lister;

/* The endings of files with weights, and of lists of such files. */
static bool is_weights(const char *name) {
    static const char *const ends[] = {".safetensors", ".bin",     ".pt",     ".pth",     ".ckpt",
                                       ".h5",          ".msgpack", ".gguf",   ".onnx",    ".onnx_data",
                                       ".ot",          ".distcp",  ".tflite", ".mlmodel", NULL};
    const char *const *end = ends;
    while (*end && !fc_ends_with(name, *end)) {
        end++;
    }
    return *end != NULL || fc_is_index_of(name, "");
}

static fc_code add_file(lister *l, const char *folder, const char *name) {
    FC_NEED(fc_grow(&l->names, &l->capacity, l->count + 2, sizeof *l->names), l->err, l->root);
    l->names[l->count] = fc_arena_printf(l->arena, "%s%s%s", folder, *folder ? "/" : "", name);
    return l->names[l->count++] ? FC_OK : fc_no_memory(l->err, l->root);
}

/* Refuses a link out of the directory: an export would copy a private file into what people publish. */
static fc_code check_link(const lister *l, const char *path) {
    return l->real_root ? fc_check_link(path, path + strlen(l->root) + 1, l->real_root, l->err) : FC_OK;
}

/* Lists a directory and, on the first level, the folders in it, such as additional_chat_templates. Links are followed:
   in the hub's cache all files are links. */
static fc_code list(lister *l, const char *folder) { // NOLINT(misc-no-recursion): two levels
    char path[PATH_MAX];
    struct stat st;
    fc_dir dir = {0};
    const char *here = fc_arena_printf(l->arena, "%s%s%s", l->root, *folder ? "/" : "", folder);
    fc_code rc;
    FC_TRY_GOTO(here ? fc_dir_open(&dir, here, l->err) : fc_no_memory(l->err, l->root), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        if (name[0] == '.' || is_weights(name) || (l->dequantized && fc_is_quantizer_file(name)) ||
            snprintf(path, sizeof path, "%s/%s", here, name) >= PATH_MAX) {
            continue;
        }
        if (fc_stat(path, &st) != 0) {
            rc = fc_fail_errno(l->err, errno, "%s: cannot be examined", path);
            goto out;
        }
        if (S_ISREG(st.st_mode) || (S_ISDIR(st.st_mode) && !*folder)) {
            FC_TRY_GOTO(check_link(l, path), rc, out);
        }
        if (S_ISDIR(st.st_mode) && !*folder) {
            const char *below = fc_arena_strndup(l->arena, name, strlen(name));
            FC_TRY_GOTO(below ? list(l, below) : fc_no_memory(l->err, l->root), rc, out);
        } else if (S_ISREG(st.st_mode)) {
            FC_TRY_GOTO(add_file(l, folder, name), rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, l->err);
}

fc_code fc_has_weights(const char *path, bool *has, fc_error *err) {
    fc_listing listing = {.arena = fc_arena_new()};
    fc_error own;
    FC_NEED(listing.arena, err, path);
    const fc_code rc = fc_folder_list(path, NULL, &listing, err ? err : &own);
    *has = listing.count > 0;
    fc_arena_free(listing.arena);
    return rc;
}

fc_code fc_side_files(const char *path, bool follow_external, bool dequantized, fc_arena *arena,
                      const char *const **out, fc_error *err) {
    char real_root[PATH_MAX];
    lister l = {.root = path, .dequantized = dequantized, .arena = arena, .err = err};
    fc_code rc;
    if (!follow_external) {
        l.real_root = fc_realpath(path, real_root);
        FC_TRY(l.real_root ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", path));
    }
    FC_TRY_GOTO(list(&l, ""), rc, out);
    const char **names = fc_arena_calloc(arena, l.count + 1, sizeof *names);
    FC_TRY_GOTO(names ? FC_OK : fc_no_memory(err, path), rc, out);
    if (l.count > 0) {
        fc_sort_texts(l.names, l.count);
        memcpy(names, l.names, l.count * sizeof *names);
    }
    *out = names;
out:
    free(l.names);
    return rc;
}

static fc_code copy_bytes(int from, uint64_t size, const char *source, int to, const char *target, fc_error *err) {
    char buf[1 << 16];
    for (uint64_t at = 0; at < size;) {
        const size_t n = size - at < sizeof buf ? (size_t)(size - at) : sizeof buf;
        FC_TRY(fc_pread_full(from, buf, n, at, source, err));
        FC_TRY(fc_pwrite_full(to, buf, n, at, target, err));
        at += n;
    }
    return FC_OK;
}

static fc_code copy_file(const char *source, const char *target, fc_error *err) {
    int from = -1, to = -1;
    uint64_t size = 0;
    struct stat st;
    fc_code rc;
    FC_TRY_GOTO(fc_open_input(source, &from, &size, err), rc, out);
    FC_TRY_GOTO(fc_fstat(from, &st) == 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", source), rc,
                out);
    to = fc_open(target, O_WRONLY | O_CREAT | O_EXCL, 0666 & st.st_mode);
    FC_TRY_GOTO(to >= 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be created", target), rc, out);
    rc = copy_bytes(from, size, source, to, target, err);
out:
    rc = fc_close_written(to, rc, target, err);
    if (from >= 0) {
        close(from);
    }
    return rc;
}

/* Makes the folder of a name such as "additional_chat_templates/rag.jinja". */
static fc_code make_folder(const char *to, const char *name, fc_error *err) {
    char path[PATH_MAX];
    const char *slash = strchr(name, '/');
    if (!slash) {
        return FC_OK;
    }
    snprintf(path, sizeof path, "%s/%.*s", to, (int)(slash - name), name);
    return fc_mkdir(path) == 0 || errno == EEXIST ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be created", path);
}

fc_code fc_side_files_copy(const char *from, const char *const *names, const char *to, fc_error *err) {
    char source[PATH_MAX], target[PATH_MAX];
    for (; *names; names++) {
        if (snprintf(source, sizeof source, "%s/%s", from, *names) >= PATH_MAX ||
            snprintf(target, sizeof target, "%s/%s", to, *names) >= PATH_MAX) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s/%s: the path is too long", from, *names);
        }
        FC_TRY(make_folder(to, *names, err));
        FC_TRY(copy_file(source, target, err));
    }
    return FC_OK;
}
