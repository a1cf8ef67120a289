/*
 * Memory that the emulated NCCL allocates and registers. See emulate.h.
 */
#include "collectives.h"

#include <stdlib.h>

typedef struct registration {
    struct registration *next;
    const struct ncclComm *comm; /* NULL: the communicator was aborted */
    const char *memory;
    size_t bytes;
} registration;

static struct {
    registration *first;
    long gathers;
} registered;

ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    return cudaMalloc(out, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *memory) {
    emulated_lock();
    for (const registration *r = registered.first; r; r = r->next) {
        if (r->memory == memory && r->comm) {
            emulated_die("memory is freed that is registered");
        }
    }
    emulated_unlock();
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void *memory, size_t bytes, void **handle) {
    registration *r = calloc(1, sizeof *r);
    if (!r || emulated_fails("ncclCommRegister")) {
        free(r);
        return ncclSystemError;
    }
    emulated_lock();
    emulated_check_idle(comm, "ncclCommRegister");
    *r = (registration){registered.first, comm, memory, bytes};
    registered.first = r;
    *handle = r;
    emulated_unlock();
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle) {
    registration **p = &registered.first, *r;
    emulated_lock();
    while (*p && *p != handle) {
        p = &(*p)->next;
    }
    r = *p;
    if (!r || r->comm != comm) {
        emulated_die("a registration is ended that does not exist");
    }
    *p = r->next;
    free(r);
    emulated_unlock();
    return ncclSuccess;
}

void emulated_end_registrations(const struct ncclComm *comm) {
    for (registration **p = &registered.first, *r; (r = *p);) {
        if (r->comm != comm) {
            p = &r->next;
            continue;
        }
        if (!comm->aborted) {
            emulated_die("a communicator is destroyed while memory is registered with it");
        }
        *p = r->next;
        free(r);
    }
}

void emulated_count_gather(const struct ncclComm *comm, const void *recv) {
    for (const registration *r = registered.first; r; r = r->next) {
        if (r->comm == comm && (const char *)recv >= r->memory && (const char *)recv < r->memory + r->bytes) {
            registered.gathers++;
            return;
        }
    }
}

long emulated_registered_gathers(void) {
    emulated_lock();
    long gathers = registered.gathers;
    emulated_unlock();
    return gathers;
}
