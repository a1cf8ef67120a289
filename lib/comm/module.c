/*
 * Loads the modules with backends for collectives. A module is never unloaded, because MPI and CUDA cannot be started
 * twice in a process.
 */
#include "comm/module.h"

#include "base/module_file.h"
#include "fsdpckpt/try.h"
#include "module_places.h"

#include <stdio.h>
#include <string.h>

enum { MAX_STEM = 32 };

static bool fits(const fc_module_file *file, const void *table) {
    const fc_module *module = table;
    const fc_module_kind *kind = file->context;
    return module->abi == FC_MODULE_ABI && module->comm_size == sizeof(fc_comm) &&
           module->device_size == kind->device_size && strcmp(module->version, FSDPCKPT_VERSION) == 0;
}

/* @param stem receives "comm-mpi". */
static fc_module_file file_of(const fc_module_kind *kind, char stem[MAX_STEM]) {
    snprintf(stem, MAX_STEM, "comm-%s", kind->name);
    return (fc_module_file){.name = kind->name,
                            .stem = stem,
                            .is_built = kind->is_built,
                            .library = kind->library,
                            .symbol = FC_MODULE_SYMBOL_NAME,
                            .fits = fits,
                            .context = kind};
}

fc_code fc_module_load(const fc_module_kind *kind, const fc_module **out, fc_error *err) {
    char stem[MAX_STEM];
    const fc_module_file file = file_of(kind, stem);
    const void *table = NULL;
    fc_code rc = fc_module_file_load(&file, &table, err);
    *out = table;
    return rc;
}

fc_code fc_module_refuse(const fc_module_kind *kind, fc_error *err) {
    char stem[MAX_STEM];
    const fc_module_file file = file_of(kind, stem);
    return fc_module_file_refuse(&file, err);
}

fc_code fc_comm_mpi(fc_comm **out, fc_error *err) {
    static const fc_module_kind kind = {
        .name = "mpi", .is_built = FSDPCKPT_HAVE_MPI, .library = "an MPI library (Debian: libopenmpi-dev)"};
    const fc_module *module = NULL;
    *out = NULL;
    FC_TRY(fc_module_load(&kind, &module, err));
    return module && module->mpi ? module->mpi(out, err) : fc_module_refuse(&kind, err);
}
