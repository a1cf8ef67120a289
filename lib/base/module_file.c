/*
 * Finds and loads modules by name ("comm-mpi").
 *
 * If FSDPCKPT_MODULE_PATH is set, only that directory is searched. Otherwise the search goes through the directory of
 * the binary that contains this code (a build directory), the modules of an installation relative to that binary (the
 * installation may have been moved), and the installed directory. A module is never unloaded, because MPI and CUDA
 * cannot be started twice in a process.
 */
#include "base/module_file.h"

#include "base/module_place.h"
#include "fsdpckpt/try.h"
#include "module_places.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DIRECTORIES = 8 };

/* dladdr finds the binary that contains this address. */
static const char anchor = 0;

/* The directories to search, in order. */
typedef struct search_path {
    char directories[MAX_DIRECTORIES][PATH_MAX];
    int count;
} search_path;

static void add_directory(search_path *p, const char *directory, size_t length, const char *below) {
    if (p->count < MAX_DIRECTORIES && length > 0) {
        char *added = p->directories[p->count];
        int n = snprintf(added, PATH_MAX, "%.*s%s%s", (int)length, directory, *below ? "/" : "", below);
        bool known = false; /* the command contains this code itself, unless the library is shared */
        for (int i = 0; i < p->count; i++) {
            known |= strcmp(p->directories[i], added) == 0;
        }
        p->count += n > 0 && n < PATH_MAX && !known;
    }
}

/* Adds the directories where an installation that contains `binary` has its modules. */
static void add_next_to(search_path *p, const char *binary) {
    const char *slash = strrchr(binary, '/');
    if (binary[0] == '/' && slash) { /* the working directory may have changed since a relative path was valid */
        size_t length = (size_t)(slash - binary);
        add_directory(p, binary, length, "");
        add_directory(p, binary, length, FSDPCKPT_MODULES_FROM_BIN);
        add_directory(p, binary, length, "fsdpckpt");
    }
}

static void fill_search_path(search_path *p) {
    const char *given = getenv("FSDPCKPT_MODULE_PATH");
    p->count = 0;
    if (given && *given) {
        add_directory(p, given, strlen(given), "");
        return;
    }
    char binary[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", binary, sizeof binary - 1);
    if (length > 0) {
        binary[length] = '\0';
        add_next_to(p, binary);
    }
    Dl_info info;
    if (dladdr(&anchor, &info) && info.dli_fname) { /* a shared library */
        add_next_to(p, info.dli_fname);
    }
    add_directory(p, FSDPCKPT_MODULES_INSTALLED, strlen(FSDPCKPT_MODULES_INSTALLED), "");
}

static fc_code check_table(const char *path, const fc_module_file *file, const void *table, fc_error *err) {
    if (!table || !file->fits(file, table)) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: belongs to another build than this fsdpckpt %s: install both together", path,
                       FSDPCKPT_VERSION);
    }
    return FC_OK;
}

/* Checks that only this user and root can change the file. @param real receives its path without links. */
static fc_code check_place(const char *path, char real[PATH_MAX], fc_error *err) {
    if (path[0] != '/') {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: modules are loaded only from absolute paths: set FSDPCKPT_MODULE_PATH to one", path);
    }
    if (!realpath(path, real)) {
        return fc_fail_errno(err, errno, "%s: cannot be found", path);
    }
    return fc_module_place_check(real, err);
}

/* Loads the module in `path` and checks its table. Nobody else can change what is at the path after it was checked. */
static fc_code load_file(const char *path, const fc_module_file *file, const void **out, fc_error *err) {
    char real[PATH_MAX];
    FC_TRY(check_place(path, real, err));
    void *handle = dlopen(real, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        return fc_fail(err, FC_EUNSUPPORTED, "%s: cannot be loaded: %s", path, why ? why : "unknown error");
    }
    const void *table = dlsym(handle, file->symbol);
    fc_code rc = check_table(path, file, table, err);
    *out = rc == FC_OK ? table : NULL;
    return rc;
}

static fc_code not_found(const fc_module_file *file, const search_path *p, fc_error *err) {
    char where[600] = "";
    for (int i = 0; i < p->count; i++) {
        size_t used = strlen(where);
        snprintf(where + used, sizeof where - used, "%s%s", i ? ", " : "", p->directories[i]);
    }
    if (!file->is_built) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: this build does not contain it: %s%sinstall %s, then configure and build fsdpckpt again",
                       file->name, file->instead ? file->instead : "", file->instead ? ", or " : "", file->library);
    }
    return fc_fail(
        err, FC_EUNSUPPORTED,
        "%s: libfsdpckpt-%s.so was not found in %s: install it, or set FSDPCKPT_MODULE_PATH to its directory",
        file->name, file->stem, where);
}

fc_code fc_module_file_load(const fc_module_file *file, const void **out, fc_error *err) {
    search_path *p = malloc(sizeof *p);
    FC_NEED(p, err, file->name);
    fill_search_path(p);
    for (int i = 0; i < p->count; i++) {
        char path[PATH_MAX + 64];
        snprintf(path, sizeof path, "%s/libfsdpckpt-%s.so", p->directories[i], file->stem);
        if (access(path, F_OK) == 0) {
            fc_code rc = load_file(path, file, out, err);
            free(p);
            return rc;
        }
    }
    fc_code rc = not_found(file, p, err);
    free(p);
    return rc;
}

fc_code fc_module_file_refuse(const fc_module_file *file, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED, "libfsdpckpt-%s.so: contains another module: install fsdpckpt again",
                   file->stem);
}
