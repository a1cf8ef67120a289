/*
 * Makes device meshes with their communicators, and DTensors from local tensors.
 */
#include "fsdpckpt/gather/dtensor_data.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "gather/pool.h"

#include <stdlib.h>
#include <string.h>

fc_code fc_device_mesh_new(fc_comm *comm, const fc_mesh *mesh, fc_device_mesh *out, fc_error *err) {
    *out = (fc_device_mesh){.mesh = *mesh, .owns_groups = true, .root = out};
    if (mesh->ndim < 1 || mesh->ndim > FC_MAX_MESH_DIMS || fc_mesh_ranks(mesh) != comm->size) {
        return fc_fail(err, FC_EUSAGE, "a mesh of %d dimensions and %lld ranks does not fit a communicator of %d ranks",
                       mesh->ndim, (long long)fc_mesh_ranks(mesh), comm->size);
    }
    out->pool = calloc(1, sizeof *out->pool);
    FC_NEED(out->pool, err, NULL);
    *out->pool = (fc_pool){.device = comm->device, .spare = 1};
    fc_mesh_coordinate(mesh, comm->rank, out->coordinate);
    for (int d = 0; d < mesh->ndim; d++) {
        fc_code rc = fc_comm_split_mesh(comm, mesh, d, &out->groups[d], err);
        if (rc != FC_OK) {
            fc_device_mesh_free(out);
            return rc;
        }
    }
    return FC_OK;
}

void fc_device_mesh_free(fc_device_mesh *mesh) {
    if (mesh->owns_groups && mesh->pool) {
        fc_pool_clear(mesh->pool);
        free(mesh->pool);
    }
    for (int d = mesh->mesh.ndim; mesh->owns_groups && d-- > 0;) {
        if (mesh->groups[d]) {
            mesh->groups[d]->free(mesh->groups[d]);
        }
    }
    memset(mesh, 0, sizeof *mesh);
}

fc_code fc_device_mesh_slice(const fc_device_mesh *mesh, int dim, fc_device_mesh *out, fc_error *err) {
    if (dim < 0 || dim >= mesh->mesh.ndim) {
        return fc_fail(err, FC_EUSAGE, "a mesh of %d dimensions has no dimension %d", mesh->mesh.ndim, dim);
    }
    *out =
        (fc_device_mesh){.mesh = {.ndim = 1, .sizes = {mesh->mesh.sizes[dim]}}, .pool = mesh->pool, .root = mesh->root};
    memcpy(out->mesh.names[0], mesh->mesh.names[dim], sizeof out->mesh.names[0]);
    out->coordinate[0] = mesh->coordinate[dim];
    out->groups[0] = mesh->groups[dim];
    return FC_OK;
}

/* Infers the global shape like DTensor.from_local: local sizes times the ranks of each mesh dimension that cuts them.
 */
static fc_code infer_shape(const fc_array *local, const fc_mesh *mesh, const fc_placement *placements, int64_t *shape,
                           fc_error *err) {
    for (int d = 0; d < local->ndim; d++) {
        shape[d] = local->sizes[d];
    }
    for (int m = 0; m < mesh->ndim; m++) {
        const fc_placement *p = &placements[m];
        if (p->kind != FC_SHARD && p->kind != FC_STRIDED_SHARD) {
            continue;
        }
        if (p->dim < 0 || p->dim >= local->ndim) {
            return fc_fail(err, FC_EUSAGE, "Shard(%d) does not exist in a tensor of %d dimensions", p->dim,
                           local->ndim);
        }
        if (!fc_mul_i64(shape[p->dim], mesh->sizes[m], &shape[p->dim])) {
            return fc_fail(err, FC_EUNSUPPORTED, "the size of dimension %d over %lld ranks does not fit in 64 bits",
                           p->dim, (long long)mesh->sizes[m]);
        }
    }
    return FC_OK;
}

static fc_torch_device device_name(const fc_device *device) {
    fc_torch_device name = {"cpu", -1};
    fc_torch_device_parse(device->name, strlen(device->name), &name);
    return name;
}

fc_code fc_dtensor_from_local(const fc_array *local, const fc_device_mesh *mesh, const fc_placement *placements,
                              int ndim, const int64_t *shape, fc_fsdp_tensor *out, fc_error *err) {
    int64_t inferred[FC_MAX_DIMS];
    if (!shape) {
        FC_TRY(infer_shape(local, &mesh->mesh, placements, inferred, err));
    }
    fc_fsdp_tensor made = {.local = *local, .is_dtensor = true, .mesh = mesh};
    made.local.memory = NULL;
    FC_TRY(fc_dtensor_init(&made.spec, shape ? ndim : local->ndim, shape ? shape : inferred, &mesh->mesh, placements,
                           mesh->coordinate, err));
    for (int d = 0; d < made.spec.ndim; d++) {
        if (made.spec.ndim != local->ndim || made.spec.local_sizes[d] != local->sizes[d]) {
            return fc_fail(err, FC_EUSAGE, "the local tensor of a DTensor has %lld elements in dimension %d, not %lld",
                           (long long)local->sizes[d], d, (long long)made.spec.local_sizes[d]);
        }
    }
    made.spec.dtype = local->dtype;
    made.spec.requires_grad = local->requires_grad;
    made.spec.device = device_name(local->device);
    *out = made;
    return FC_OK;
}
