/*
 * GPU number 1000 is refused with the reason, on machines with and without GPUs, and NCCL refuses host memory.
 */
#include "gpu.h"

#include <string.h>

int main(void) {
    fc_error err = {FC_OK, ""};
    fc_device *device = NULL, *cpu;
    fc_comm *comm = NULL;
    fc_code rc = fc_device_cuda(1000, &device, &err);
    const char *reasons[] = {"cuda:1000: no GPU is usable: ", "cuda:1000: no such GPU: this process has "};
    if (rc != FC_EUNSUPPORTED || device ||
        (strncmp(err.message, reasons[0], strlen(reasons[0])) != 0 &&
         strncmp(err.message, reasons[1], strlen(reasons[1])) != 0)) {
        fprintf(stderr, "GPU 1000: %d, \"%s\"\n", (int)rc, err.message);
        return 1;
    }
    puts(err.message);
    must(fc_device_cpu(&cpu, &err), &err, "cpu");
    rc = fc_comm_nccl_file("/tmp/none", 0, 1, 1, cpu, &comm, &err);
    cpu->destroy(cpu);
    if (rc != FC_EUNSUPPORTED || comm || !strstr(err.message, "memory of cpu is not supported")) {
        fprintf(stderr, "NCCL on the processor: %d, \"%s\"\n", (int)rc, err.message);
        return 1;
    }
    puts(err.message);
    return 0;
}
