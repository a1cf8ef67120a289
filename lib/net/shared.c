/*
 * Divides the memory that the fetcher shares: see shared.h. It belongs to the process that started the fetcher. A
 * process that was forked later shares the fetcher, and gets other memory here.
 */
#include "net/shared.h"

#include "base/pages.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SIZE = 256 << 20, PAGE = 4096, MOST_BLOCKS = 1024 };

typedef struct block {
    size_t at, size;
    bool lost; /* the fetcher may still write there */
} block;

/* A part of the fetcher's state (docs/ARCHITECTURE.md, decisions). */
static struct {
    pthread_mutex_t lock;
    unsigned char *memory; /* NULL: none */
    pid_t owner;
    block blocks[MOST_BLOCKS]; /* in use, in order */
    size_t count;
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

unsigned char *fc_shared_make(size_t *size) {
    void *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) { /* a limit of the address space */
        *size = 0;
        return NULL;
    }
    if (shared.memory) {
        munmap(shared.memory, SIZE); /* the fetcher could not be started */
    }
    shared.memory = memory;
    shared.owner = getpid();
    shared.count = 0;
    *size = SIZE;
    return memory;
}

/* Finds the first gap. @return its index among the blocks; MOST_BLOCKS: none */
static size_t find_gap(size_t size, size_t *at) {
    *at = 0;
    for (size_t i = 0; i < shared.count; i++) {
        if (shared.blocks[i].at - *at >= size) {
            return i;
        }
        *at = shared.blocks[i].at + shared.blocks[i].size;
    }
    return shared.count < MOST_BLOCKS && SIZE - *at >= size ? shared.count : MOST_BLOCKS;
}

void *fc_shared_new(size_t size) {
    const size_t whole = (size + PAGE - 1) / PAGE * PAGE;
    void *pages = NULL;
    if (shared.memory && shared.owner == getpid() && size > 0 && size <= SIZE) {
        size_t at;
        pthread_mutex_lock(&shared.lock);
        const size_t index = shared.count < MOST_BLOCKS ? find_gap(whole, &at) : MOST_BLOCKS;
        if (index < MOST_BLOCKS) {
            memmove(shared.blocks + index + 1, shared.blocks + index, (shared.count - index) * sizeof(block));
            shared.blocks[index] = (block){at, whole, false};
            shared.count++;
            pages = shared.memory + at;
        }
        pthread_mutex_unlock(&shared.lock);
    }
    return pages ? pages : fc_pages_new(size);
}

uint64_t fc_shared_offset(const void *buffer, size_t size) {
    const uintptr_t first = (uintptr_t)shared.memory, at = (uintptr_t)buffer;
    const bool is_shared =
        first && shared.owner == getpid() && at >= first && at - first <= SIZE - size && size <= SIZE;
    return is_shared ? at - first : FC_NOT_SHARED;
}

void fc_shared_free(void *pages, size_t size) {
    if (!pages || fc_shared_offset(pages, size) == FC_NOT_SHARED) {
        fc_pages_free(pages, size);
        return;
    }
    const size_t at = (size_t)((unsigned char *)pages - shared.memory);
    pthread_mutex_lock(&shared.lock);
    for (size_t i = 0; i < shared.count; i++) {
        if (shared.blocks[i].at == at && !shared.blocks[i].lost) {
            (void)madvise(pages, shared.blocks[i].size, MADV_REMOVE); /* gives the pages back */
            shared.count--;
            memmove(shared.blocks + i, shared.blocks + i + 1, (shared.count - i) * sizeof(block));
            break;
        }
    }
    pthread_mutex_unlock(&shared.lock);
}

void fc_shared_lose(const void *buffer) {
    const size_t at = (size_t)((const unsigned char *)buffer - shared.memory);
    pthread_mutex_lock(&shared.lock);
    for (size_t i = 0; i < shared.count; i++) {
        block *b = &shared.blocks[i];
        b->lost |= at >= b->at && at - b->at < b->size;
    }
    pthread_mutex_unlock(&shared.lock);
}
