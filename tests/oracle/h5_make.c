/*
 * h5_make OUT [NAME=SIZE ...]: writes the made-up checkpoint of tests/support/h5_make.h on that mesh as HDF5 to OUT, a
 * new file without a mesh, else an existing empty directory. tests/oracle/h5_write.py reads the result with h5py.
 */
#include "h5_make.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    const char *names[FC_MAX_MESH_DIMS];
    int64_t sizes[FC_MAX_MESH_DIMS];
    if (argc < 2 || argc - 2 > FC_MAX_MESH_DIMS) {
        fprintf(stderr, "usage: h5_make OUT [NAME=SIZE ...]\n");
        return 2;
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
