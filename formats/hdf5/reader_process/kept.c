/*
 * Keeps parts of files on servers: see kept.h.
 */
#include "hdf5/reader_process/kept.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_KEPT = 16 << 20, MOST_PARTS = 256, MOST_PART = 1 << 20 };

typedef struct kept_part {
    const char *path;
    fc_h5_part part;
    unsigned char *bytes;
} kept_part;

struct fc_h5_kept {
    pthread_mutex_t lock;
    kept_part parts[MOST_PARTS]; /* a ring */
    size_t oldest, count;
    uint64_t bytes;
};

fc_h5_kept *fc_h5_kept_new(void) {
    fc_h5_kept *kept = calloc(1, sizeof *kept);
    if (kept) {
        pthread_mutex_init(&kept->lock, NULL);
    }
    return kept;
}

static void drop_oldest(fc_h5_kept *kept) {
    kept_part *p = &kept->parts[kept->oldest];
    kept->bytes -= p->part.size;
    free(p->bytes);
    kept->oldest = (kept->oldest + 1) % MOST_PARTS;
    kept->count--;
}

void fc_h5_kept_free(fc_h5_kept *kept) {
    while (kept && kept->count > 0) {
        drop_oldest(kept);
    }
    if (kept) {
        pthread_mutex_destroy(&kept->lock);
        free(kept);
    }
}

bool fc_h5_kept_find(fc_h5_kept *kept, const char *path, const fc_h5_part *part, unsigned char *bytes) {
    bool found = false;
    if (!kept) {
        return false;
    }
    pthread_mutex_lock(&kept->lock);
    for (size_t i = 0; i < kept->count && !found; i++) {
        const kept_part *p = &kept->parts[(kept->oldest + i) % MOST_PARTS];
        found = p->path == path && p->part.at == part->at && p->part.size == part->size;
        if (found) {
            memcpy(bytes, p->bytes, (size_t)part->size);
        }
    }
    pthread_mutex_unlock(&kept->lock);
    return found;
}

void fc_h5_kept_add(fc_h5_kept *kept, const char *path, const fc_h5_part *part, const unsigned char *bytes) {
    unsigned char *copy = kept && part->size <= MOST_PART ? malloc((size_t)part->size) : NULL;
    if (!copy) {
        return;
    }
    memcpy(copy, bytes, (size_t)part->size);
    pthread_mutex_lock(&kept->lock);
    while (kept->count == MOST_PARTS || (kept->count > 0 && kept->bytes + part->size > MOST_KEPT)) {
        drop_oldest(kept);
    }
    kept->parts[(kept->oldest + kept->count++) % MOST_PARTS] = (kept_part){path, *part, copy};
    kept->bytes += part->size;
    pthread_mutex_unlock(&kept->lock);
}
