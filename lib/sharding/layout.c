/*
 * Layouts: turns sizes (replicas, dp, tp) into a mesh, and a tensor's TP dimension into placements.
 */
#include "fsdpckpt/layout.h"

#include "base/checked.h"

#include <stdio.h>
#include <string.h>

enum { MAX_RANKS = 1 << 20 };

fc_code fc_layout_mesh(const fc_layout_spec *spec, fc_mesh *mesh, fc_error *err) {
    const struct {
        const char *name;
        int64_t size;
    } dims[] = {{"replicate", spec->replicas}, {"dp", spec->dp}, {"tp", spec->tp}};
    memset(mesh, 0, sizeof *mesh);
    int64_t ranks = 1;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        int64_t size = dims[i].size;
        if (size == 0) {
            continue;
        }
        if (size < 0) {
            return fc_fail(err, FC_EUSAGE, "mesh dimension %s has %lld ranks; it needs at least 1", dims[i].name,
                           (long long)size);
        }
        if (!fc_mul_i64(ranks, size, &ranks) || ranks > MAX_RANKS) {
            return fc_fail(err, FC_EUSAGE, "mesh dimension %s with %lld ranks: the mesh has more than %d ranks",
                           dims[i].name, (long long)size, MAX_RANKS);
        }
        mesh->sizes[mesh->ndim] = size;
        snprintf(mesh->names[mesh->ndim], sizeof mesh->names[0], "%s", dims[i].name);
        mesh->ndim++;
    }
    if (mesh->ndim == 0) {
        return fc_advise(err, fc_fail(err, FC_EUSAGE, "no layout is given"), FC_HINT_LAYOUT, NULL);
    }
    return FC_OK;
}

int64_t fc_mesh_size(const fc_mesh *mesh, const char *name) {
    for (int m = 0; m < mesh->ndim; m++) {
        if (strcmp(mesh->names[m], name) == 0) {
            return mesh->sizes[m];
        }
    }
    return 1;
}

void fc_layout_placements(const fc_mesh *mesh, int ndim, int tp_dim, fc_placement *placements) {
    int64_t tp = fc_mesh_size(mesh, "tp");
    for (int m = 0; m < mesh->ndim; m++) {
        fc_placement p = {FC_REPLICATE, 0, 0};
        if (ndim > 0 && strcmp(mesh->names[m], "dp") == 0) {
            /* As in fully_shard, a tp of 1 yields Shard(0), because nothing is split. */
            p.kind = tp_dim == 0 && tp > 1 ? FC_STRIDED_SHARD : FC_SHARD;
            p.split_factor = p.kind == FC_STRIDED_SHARD ? tp : 0;
        } else if (tp_dim >= 0 && tp_dim < ndim && strcmp(mesh->names[m], "tp") == 0) {
            p.kind = FC_SHARD;
            p.dim = tp_dim;
        }
        placements[m] = p;
    }
}
