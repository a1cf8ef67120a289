/*
 * The smallest program that uses the installed training library: two ranks as threads take part in an all-gather mesh.
 */
#include <fsdpckpt/gather/device_comm.h>
#include <fsdpckpt/gather/dtensor_data.h>
#include <fsdpckpt/train/fsdp.h>

#include <stdio.h>

static fc_code work(fc_comm *comm, void *context, fc_error *err) {
    fc_mesh mesh = {.ndim = 1, .sizes = {2}, .names = {"dp"}};
    fc_device_mesh devices;
    (void)context;
    fc_code rc = fc_device_mesh_new(comm, &mesh, &devices, err);
    if (rc == FC_OK) {
        fc_device_mesh_free(&devices);
    }
    return rc;
}

int main(void) {
    fc_error err;
    fc_code rc = fc_device_run_local(2, work, NULL, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
    }
    printf("%s\n", fc_fsdp_action_name((fc_fsdp_action)0));
    return fc_exit_status(rc);
}
