/*
 * In the reader process, before it is confined: loads the plugins of a folder that the user named, for filters that
 * neither libhdf5 nor the engine has. libhdf5's own loader stays off: it would look in more places, and it would look
 * only when a filter is needed, when files can no longer be opened. What the plugins decode, they decode confined.
 */
#include "base/module_place.h"
#include "hdf5/reader_process/scan.h"

#include <H5PLextern.h>
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_library(const struct dirent *entry) {
    const size_t length = strlen(entry->d_name);
    return length > 3 && strcmp(entry->d_name + length - 3, ".so") == 0;
}

/* Registers the filter of a plugin, unless there is one of that number. The functions are those of H5PLextern.h. */
static void register_filter(void *library) {
    H5PL_type_t (*get_type)(void);
    const void *(*get_info)(void);
    void *type = dlsym(library, "H5PLget_plugin_type"), *info = dlsym(library, "H5PLget_plugin_info");
    if (!type || !info) {
        return;
    }
    memcpy(&get_type, &type, sizeof type); /* a cast of an object's address to a function is not ISO C */
    memcpy(&get_info, &info, sizeof info);
    const H5Z_class2_t *found = get_type() == H5PL_TYPE_FILTER ? get_info() : NULL;
    if (found && found->version == H5Z_CLASS_T_VERS && found->filter && H5Zfilter_avail(found->id) <= 0) {
        H5Zregister(found);
    }
}

void fc_h5_load_filters(const char *folder) {
    struct dirent **names = NULL;
    const int count = folder ? scandir(folder, &names, is_library, alphasort) : 0;
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX], real[PATH_MAX];
        const int length = snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        void *library = NULL;
        if (length < (int)sizeof path && realpath(path, real) && fc_module_place_check(real, NULL) == FC_OK) {
            library = dlopen(real, RTLD_NOW | RTLD_LOCAL);
        }
        if (library) {
            register_filter(library); /* it stays loaded until the process ends */
        }
        free(names[i]);
    }
    free(names);
}
