/*
 * h5_make OUT [NAME=SIZE ...]: writes the made-up checkpoint of tests/support/h5_make.h on that mesh as HDF5 to OUT, a
 * new file without a mesh, else an existing empty directory. tests/oracle/h5_write.py reads the result with h5py.
 * h5_make --list: what is in it, one record a value: name, dtype, shape, keys, JSON; records end in RS, fields are
 * separated by US.
 */
#include "h5_make.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void list(void) {
    h5_made made;
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_zoo(&made);
    for (size_t i = 0; i < made.target.ntensors; i++) {
        const fc_target_tensor *t = &made.tensors[i];
        printf("%s\x1f%s\x1f", t->name, fc_dtype_get(t->dtype)->torch_name);
        for (int d = 0; d < t->source->ndim; d++) {
            printf("%s%lld", d ? "," : "", (long long)t->source->shape[d]);
        }
        for (size_t e = 0; e < t->path.count; e++) {
            printf("\x1f%s%s", t->path.elements[e].is_index ? "#" : "=", t->path.elements[e].key);
        }
        printf("\x1f%s\x1e", t->source->object ? (const char *)t->source->detail : "");
    }
    h5_made_end(&made);
}

int main(int argc, char **argv) {
    const char *names[FC_MAX_MESH_DIMS];
    int64_t sizes[FC_MAX_MESH_DIMS];
    if (argc < 2 || argc - 2 > FC_MAX_MESH_DIMS) {
        fprintf(stderr, "usage: h5_make OUT [NAME=SIZE ...]\n");
        return 2;
    }
    if (strcmp(argv[1], "--list") == 0) {
        list();
        return 0;
    }
    for (int i = 2; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals) {
            fprintf(stderr, "h5_make: %s: not NAME=SIZE\n", argv[i]);
            return 2;
        }
        *equals = '\0';
        names[i - 2] = argv[i];
        sizes[i - 2] = atoll(equals + 1);
    }
    h5_made made;
    fc_error err;
    h5_made_begin(&made, argc - 2, names, sizes);
    h5_made_zoo(&made);
    fc_code rc = h5_made_write(&made, argv[1], &err);
    h5_made_end(&made);
    if (rc != FC_OK) {
        fprintf(stderr, "h5_make: %s\n", err.message);
    }
    return fc_exit_status(rc);
}
