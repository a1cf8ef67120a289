/*
 * Makes devices and communicators for training: on the processor, by the modules for GPUs, and along a mesh dimension.
 */
#include "fsdpckpt/try.h"
#include "gather/local_scatter.h"
#include "gather/module.h"
#include "module_places.h"

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

/* The work of the ranks that are threads, and the device that they share. */
typedef struct local_work {
    fc_code (*work)(fc_comm *comm, void *context, fc_error *err);
    void *context;
    fc_device *device;
} local_work;

static fc_code work_on_device(fc_comm *comm, void *context, fc_error *err) {
    const local_work *w = context;
    comm->device = w->device;
    comm->on_device = &fc_local_on_device;
    return w->work(comm, w->context, err);
}

fc_code fc_device_run_local(int size, fc_code (*work)(fc_comm *comm, void *context, fc_error *err), void *context,
                            fc_error *err) {
    local_work w = {.work = work, .context = context};
    FC_TRY(fc_device_cpu(&w.device, err));
    fc_code rc = fc_comm_run_local(size, work_on_device, &w, err);
    w.device->destroy(w.device);
    return rc;
}

static const fc_module_kind cuda_kind = {
    .name = "cuda", .is_built = FSDPCKPT_HAVE_CUDA, .library = "CUDA (of NVIDIA)", .device_size = sizeof(fc_device)};
static const fc_module_kind nccl_kind = {.name = "nccl",
                                         .is_built = FSDPCKPT_HAVE_NCCL,
                                         .library = "CUDA and NCCL (of NVIDIA)",
                                         .device_size = sizeof(fc_device)};

/* Loads a module. `out` receives its functions: none from a module that has the name of another. */
static fc_code load_devices(const fc_module_kind *kind, struct fc_device_module *out, fc_error *err) {
    const fc_module *module = NULL;
    *out = (struct fc_device_module){0};
    FC_TRY(fc_module_load(kind, &module, err));
    if (module && module->devices) {
        *out = *module->devices;
    }
    return FC_OK;
}

fc_code fc_device_mpi(fc_device *device, fc_comm **out, fc_error *err) {
    static const fc_module_kind kind = {.name = "mpi", .is_built = FSDPCKPT_HAVE_MPI};
    struct fc_device_module module;
    *out = NULL;
    if (!device->is_host) {
        return fc_fail(err, FC_EUNSUPPORTED, "mpi: memory of %s is not supported: use nccl, or host memory",
                       device->name);
    }
    FC_TRY(fc_comm_mpi(out, err));
    FC_TRY(load_devices(&kind, &module, err)); /* it is loaded */
    (*out)->device = device;
    (*out)->on_device = module.on_mpi;
    return FC_OK;
}

fc_code fc_device_cuda(int index, fc_device **out, fc_error *err) {
    struct fc_device_module module;
    *out = NULL;
    FC_TRY(load_devices(&cuda_kind, &module, err));
    return module.cuda ? module.cuda(index, out, err) : fc_module_refuse(&cuda_kind, err);
}

fc_code fc_comm_nccl(fc_comm *bootstrap, fc_device *device, fc_comm **out, fc_error *err) {
    struct fc_device_module module;
    *out = NULL;
    FC_TRY(load_devices(&nccl_kind, &module, err));
    return module.nccl ? module.nccl(bootstrap, device, out, err) : fc_module_refuse(&nccl_kind, err);
}

fc_code fc_comm_nccl_file(const char *path, int rank, int size, int seconds, fc_device *device, fc_comm **out,
                          fc_error *err) {
    struct fc_device_module module;
    *out = NULL;
    FC_TRY(load_devices(&nccl_kind, &module, err));
    return module.nccl_file ? module.nccl_file(path, rank, size, seconds, device, out, err)
                            : fc_module_refuse(&nccl_kind, err);
}
