/*
 * The memory of emulated GPUs: allocations, and copies on streams. See emulate.h.
 */
#include "machine.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_BLOCKS = 4096, PAGE = 4096 };

static const size_t gpu_bytes = (size_t)1 << 30; /* addresses per GPU; freed ones are not used again */

/* One allocation. */
typedef struct block {
    char *start;
    size_t bytes; /* 0: free entry */
    bool pinned;  /* page-locked host memory */
} block;

static struct {
    char *device, *local; /* the two views of device memory */
    size_t used[MOST_GPUS];
    block blocks[MOST_BLOCKS];
} memory;

void emulated_start_memory(void) {
    size_t all = gpu_bytes * MOST_GPUS;
    int file = memfd_create("gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)all) != 0) {
        emulated_die("memory cannot be reserved");
    }
    memory.device = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory.local = mmap(NULL, all, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory.device == MAP_FAILED || memory.local == MAP_FAILED) {
        emulated_die("memory cannot be reserved");
    }
}

static bool is_device(const void *address) {
    return (const char *)address >= memory.device && (const char *)address < memory.device + gpu_bytes * MOST_GPUS;
}

static block *find_block(const void *address) {
    for (int i = 0; i < MOST_BLOCKS; i++) {
        block *b = &memory.blocks[i];
        if (b->bytes > 0 && (const char *)address >= b->start && (const char *)address < b->start + b->bytes) {
            return b;
        }
    }
    return NULL;
}

static void add_block(char *start, size_t bytes, bool pinned) {
    for (int i = 0; i < MOST_BLOCKS; i++) {
        if (memory.blocks[i].bytes == 0) {
            memory.blocks[i] = (block){start, bytes, pinned};
            return;
        }
    }
    emulated_die("too many allocations");
}

void *emulated_remote(const void *address) {
    if (address && !is_device(address)) {
        emulated_die("a kernel accesses host memory");
    }
    return address ? memory.local + ((const char *)address - memory.device) : NULL;
}

void *emulated_local(const void *address) {
    size_t offset = address ? (size_t)((const char *)address - memory.device) : 0;
    if (address && is_device(address) && offset / gpu_bytes != (size_t)emulated_running_gpu()) {
        emulated_die("work on GPU %d accesses memory of GPU %zu", emulated_running_gpu(), offset / gpu_bytes);
    }
    return emulated_remote(address);
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    EMULATED_CALL("cudaMalloc", cudaErrorMemoryAllocation);
    emulated_lock();
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE,
           at = memory.used[emulated_gpu()] + gpu_bytes * (size_t)emulated_gpu();
    if (pages + PAGE > gpu_bytes - memory.used[emulated_gpu()]) {
        emulated_unlock();
        return emulated_error(cudaErrorMemoryAllocation);
    }
    memory.used[emulated_gpu()] += pages + PAGE; /* the last page stays inaccessible */
    if (mprotect(memory.local + at, pages, PROT_READ | PROT_WRITE) != 0) {
        emulated_die("memory cannot be made accessible");
    }
    memset(memory.local + at, 0xa5, pages);
    add_block(memory.device + at, pages, false);
    *out = memory.device + at;
    emulated_unlock();
    return cudaSuccess;
}

/* Like CUDA's, it waits for all work on the GPU. */
cudaError_t cudaFree(void *address) {
    if (!address) {
        return cudaSuccess;
    }
    emulated_lock();
    emulated_wait_for_gpu();
    block *b = find_block(address);
    if (!b || b->start != address) {
        emulated_die("memory is freed that was not allocated");
    }
    char *local = memory.local + (b->start - memory.device);
    madvise(local, b->bytes, MADV_REMOVE);
    mprotect(local, b->bytes, PROT_NONE);
    b->bytes = 0;
    emulated_unlock();
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) {
    EMULATED_CALL("cudaMallocHost", cudaErrorMemoryAllocation);
    if (posix_memalign(out, 256, bytes) != 0) {
        return emulated_error(cudaErrorMemoryAllocation);
    }
    emulated_lock();
    add_block(*out, bytes, true);
    emulated_unlock();
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    emulated_lock();
    emulated_wait_for_gpu();
    block *b = find_block(address);
    if (!b || !b->pinned || b->start != address) {
        emulated_die("page-locked memory is freed that was not allocated");
    }
    b->bytes = 0;
    emulated_unlock();
    free(address);
    return cudaSuccess;
}

/* ---- copies ---- */

typedef struct transfer {
    void *dst;
    const void *src; /* NULL: sets bytes to `value` */
    void *owned;     /* a copy of pageable host memory; is `src` then */
    size_t bytes;
    int value;
} transfer;

static void *seen(const void *address) {
    return is_device(address) ? emulated_local(address) : (void *)(uintptr_t)address;
}

static void do_transfer(void *argument) {
    transfer *t = argument;
    if (t->src) {
        memmove(seen(t->dst), seen(t->src), t->bytes);
    } else {
        memset(seen(t->dst), t->value, t->bytes);
    }
}

static void drop_transfer(void *argument) {
    free(((transfer *)argument)->owned);
    free(argument);
}

static void enqueue_transfer(transfer from, cudaStream_t stream) {
    transfer *t = malloc(sizeof *t);
    if (!t) {
        emulated_die("out of memory");
    }
    *t = from;
    emulated_enqueue(stream, (emulated_work){.run = do_transfer, .drop = drop_transfer, .argument = t});
}

static bool is_pageable(const void *address) {
    emulated_lock();
    bool is = !is_device(address) && !find_block(address);
    emulated_unlock();
    return is;
}

/* Pageable memory is read before the call returns, and written before it returns. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
    EMULATED_CALL("cudaMemcpyAsync", cudaErrorUnknown);
    (void)kind;
    transfer t = {.dst = dst, .src = src, .bytes = bytes};
    if (is_pageable(src)) {
        t.owned = malloc(bytes ? bytes : 1);
        if (!t.owned) {
            emulated_die("out of memory");
        }
        memcpy(t.owned, src, bytes);
        t.src = t.owned;
    }
    enqueue_transfer(t, stream);
    if (is_pageable(dst)) {
        emulated_synchronize(stream);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, int kind) {
    cudaError_t result = cudaMemcpyAsync(dst, src, bytes, kind, NULL);
    if (result == cudaSuccess) {
        emulated_synchronize(NULL);
    }
    return result;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    EMULATED_CALL("cudaMemsetAsync", cudaErrorUnknown);
    enqueue_transfer((transfer){.dst = dst, .bytes = bytes, .value = value}, stream);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes) {
    return cudaMemsetAsync(dst, value, bytes, NULL);
}
