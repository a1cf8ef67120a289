/*
 * Finding and opening the modules of lib/comm. From a name ("mpi") to the module's table, or to the reason why not.
 *
 * Looked at in this order: $FSDPCKPT_MODULE_PATH, and only there if it is set; else beside the binary that contains
 * this code (the build directory), where an installation puts them as seen from there (it may have been moved), and
 * where it put them. A module is never closed: MPI and CUDA cannot be started twice in a process.
 */
#include "comm/module.h"
#include "base/try.h"
#include "module_places.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_PLACES = 8 };

/* Its address tells which binary this code is in. */
static const char anchor = 0;

/* Directories to look into. */
typedef struct places {
    char paths[MOST_PLACES][PATH_MAX];
    int count;
} places;

static void add_place(places *p, const char *directory, size_t length, const char *below) {
    if (p->count < MOST_PLACES && length > 0) {
        int n = snprintf(p->paths[p->count], PATH_MAX, "%.*s%s%s", (int)length, directory, *below ? "/" : "", below);
        p->count += n > 0 && n < PATH_MAX;
    }
}

/* The places of an installation, from where a binary of it lies. */
static void add_beside(places *p, const char *binary) {
    const char *slash = strrchr(binary, '/');
    if (binary[0] == '/' && slash) { /* a relative name may be one of another time's working directory */
        size_t length = (size_t)(slash - binary);
        add_place(p, binary, length, "");
        add_place(p, binary, length, FSDPCKPT_MODULES_FROM_BIN);
        add_place(p, binary, length, "fsdpckpt");
    }
}

static void find_places(places *p) {
    const char *given = getenv("FSDPCKPT_MODULE_PATH");
    p->count = 0;
    if (given && *given) {
        add_place(p, given, strlen(given), "");
        return;
    }
    char binary[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", binary, sizeof binary - 1);
    if (length > 0) {
        binary[length] = '\0';
        add_beside(p, binary);
    }
    Dl_info info;
    if (dladdr(&anchor, &info) && info.dli_fname) { /* a shared library */
        add_beside(p, info.dli_fname);
    }
    add_place(p, FSDPCKPT_MODULES_INSTALLED, strlen(FSDPCKPT_MODULES_INSTALLED), "");
}

static fc_code check_table(const char *path, const fc_module *module, fc_error *err) {
    if (!module || module->abi != FC_MODULE_ABI || module->comm_size != sizeof(fc_comm) ||
        module->device_size != sizeof(fc_device) || strcmp(module->version, FSDPCKPT_VERSION) != 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: was not built with this fsdpckpt %s: install both together", path,
                       FSDPCKPT_VERSION);
    }
    return FC_OK;
}

/* The module in `path`. */
static fc_code open_module(const char *path, const fc_module **out, fc_error *err) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        return fc_fail(err, FC_EUNSUPPORTED, "%s: cannot be loaded: %s", path, why ? why : "no reason is given");
    }
    const fc_module *module = dlsym(handle, FC_MODULE_SYMBOL_NAME);
    fc_code rc = check_table(path, module, err);
    *out = rc == FC_OK ? module : NULL;
    return rc;
}

static fc_code not_found(const char *name, bool built, const places *p, fc_error *err) {
    char where[600] = "";
    for (int i = 0; i < p->count; i++) {
        size_t used = strlen(where);
        snprintf(where + used, sizeof where - used, "%s%s", i ? ", " : "", p->paths[i]);
    }
    if (!built) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: this build does not contain it", name);
    }
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: no libfsdpckpt-comm-%s.so in %s: install it, or name its directory in FSDPCKPT_MODULE_PATH",
                   name, name, where);
}

static fc_code load(const char *name, bool built, const fc_module **out, fc_error *err) {
    places *p = malloc(sizeof *p);
    if (!p) {
        return fc_no_memory(err, name);
    }
    find_places(p);
    for (int i = 0; i < p->count; i++) {
        char path[PATH_MAX + 64];
        snprintf(path, sizeof path, "%s/libfsdpckpt-comm-%s.so", p->paths[i], name);
        if (access(path, F_OK) == 0) {
            free(p);
            return open_module(path, out, err);
        }
    }
    fc_code rc = not_found(name, built, p, err);
    free(p);
    return rc;
}

/* A module that has not what its name says. */
static fc_code lacks(const char *name, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED, "libfsdpckpt-comm-%s.so: is another module under this name", name);
}

fc_code fc_comm_mpi(fc_device *device, fc_comm **out, fc_error *err) {
    const fc_module *module = NULL;
    *out = NULL;
    FC_TRY(load("mpi", FSDPCKPT_HAVE_MPI, &module, err));
    return module && module->mpi ? module->mpi(device, out, err) : lacks("mpi", err);
}

fc_code fc_device_cuda(int index, fc_device **out, fc_error *err) {
    const fc_module *module = NULL;
    *out = NULL;
    FC_TRY(load("cuda", FSDPCKPT_HAVE_CUDA, &module, err));
    return module && module->cuda ? module->cuda(index, out, err) : lacks("cuda", err);
}

fc_code fc_comm_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err) {
    const fc_module *module = NULL;
    *out = NULL;
    FC_TRY(load("nccl", FSDPCKPT_HAVE_NCCL, &module, err));
    return module && module->nccl ? module->nccl(bootstrap, device, out, err) : lacks("nccl", err);
}

fc_code fc_comm_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                          fc_error *err) {
    const fc_module *module = NULL;
    *out = NULL;
    FC_TRY(load("nccl", FSDPCKPT_HAVE_NCCL, &module, err));
    return module && module->nccl_file ? module->nccl_file(path, rank, size, seconds, device, out, err)
                                       : lacks("nccl", err);
}
