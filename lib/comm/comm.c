/*
 * Communicators along a mesh dimension, for every backend.
 */
#include "fsdpckpt/comm.h"

fc_code fc_comm_split_mesh(fc_comm *comm, const fc_mesh *mesh, int dim, fc_comm **out, fc_error *err) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    *out = NULL;
    if (dim < 0 || dim >= mesh->ndim) {
        return fc_fail(err, FC_EUSAGE, "a mesh of %d dimensions has no dimension %d", mesh->ndim, dim);
    }
    if (fc_mesh_ranks(mesh) != comm->size) {
        return fc_fail(err, FC_EUSAGE, "a mesh of %lld ranks needs a communicator of as many, not of %d",
                       (long long)fc_mesh_ranks(mesh), comm->size);
    }
    fc_mesh_coordinate(mesh, comm->rank, coordinate);
    coordinate[dim] = 0; /* the first rank along `dim` gives the color */
    return comm->split(comm, (int)fc_mesh_rank(mesh, coordinate), out, err);
}
