/*
 * The cache of decoded chunks. Tiles are cut for the target, so one compressed chunk serves many tiles and many chunks
 * serve one; each is decoded once while it fits. Shared by the workers, and the one place that bounds the memory for
 * decoding: who finds no room waits until others give theirs back.
 */
#include "move/decode.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

enum { BUCKETS = 1024 };

typedef struct entry {
    const fc_tensor *tensor;
    size_t chunk;
    unsigned char *bytes;
    uint64_t cost;
    unsigned users;
    bool loading;
    struct entry *next_in_bucket;
    struct entry *newer, *older; /* ring of all entries by last use, through fc_decoded.ring */
} entry;

struct fc_decoded {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* room was made, or a chunk finished loading */
    uint64_t limit, used;
    entry *buckets[BUCKETS];
    entry ring; /* ring.older: the newest; ring.newer: the oldest */
};

fc_decoded *fc_decoded_new(uint64_t limit) {
    fc_decoded *cache = calloc(1, sizeof *cache);
    if (!cache) {
        return NULL;
    }
    pthread_mutex_init(&cache->lock, NULL);
    pthread_cond_init(&cache->changed, NULL);
    cache->limit = limit;
    cache->ring.newer = cache->ring.older = &cache->ring;
    return cache;
}

static void unlink_ring(entry *e) {
    e->older->newer = e->newer;
    e->newer->older = e->older;
}

static void link_newest(fc_decoded *cache, entry *e) {
    e->older = cache->ring.older;
    e->newer = &cache->ring;
    e->older->newer = e;
    cache->ring.older = e;
}

static entry **bucket_of(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    uint64_t h = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9e3779b97f4a7c15u + chunk * 0xc2b2ae3d27d4eb4fu;
    return &cache->buckets[(h ^ h >> 29) % BUCKETS];
}

static entry *find(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    entry *e = *bucket_of(cache, tensor, chunk);
    while (e && (e->tensor != tensor || e->chunk != chunk)) {
        e = e->next_in_bucket;
    }
    return e;
}

static void remove_entry(fc_decoded *cache, entry *e) {
    entry **at = bucket_of(cache, e->tensor, e->chunk);
    while (*at != e) {
        at = &(*at)->next_in_bucket;
    }
    *at = e->next_in_bucket;
    unlink_ring(e);
    cache->used -= e->cost;
    free(e->bytes);
    free(e);
}

void fc_decoded_free(fc_decoded *cache) {
    if (!cache) {
        return;
    }
    while (cache->ring.newer != &cache->ring) {
        remove_entry(cache, cache->ring.newer);
    }
    pthread_cond_destroy(&cache->changed);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

/* Drops unused entries, the oldest first, until `cost` fits. @return false when those in use leave no room. */
static bool make_room(fc_decoded *cache, uint64_t cost) {
    entry *e = cache->ring.newer;
    while (cache->limit - cache->used < cost && e != &cache->ring) {
        entry *next = e->newer;
        if (e->users == 0 && !e->loading) {
            remove_entry(cache, e);
        }
        e = next;
    }
    return cache->limit - cache->used >= cost;
}

static entry *insert(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t cost) {
    entry *e = calloc(1, sizeof *e);
    if (!e) {
        return NULL;
    }
    e->tensor = tensor;
    e->chunk = chunk;
    e->cost = cost;
    e->users = 1;
    e->loading = true;
    entry **bucket = bucket_of(cache, tensor, chunk);
    e->next_in_bucket = *bucket;
    *bucket = e;
    link_newest(cache, e);
    cache->used += cost;
    return e;
}

/* Decodes into a new entry; called and returns with the lock held. */
static fc_code load(fc_decoded *cache, entry *e, const fc_extent *extent, fc_decode_fn decode, void *context,
                    fc_error *err) {
    pthread_mutex_unlock(&cache->lock);
    unsigned char *bytes = malloc(extent->decoded ? (size_t)extent->decoded : 1);
    fc_code rc = bytes ? decode(context, e->tensor, e->chunk, extent, bytes, err)
                       : fc_fail(err, FC_ENOMEM, "out of memory for a chunk of %" PRIu64 " bytes", extent->decoded);
    pthread_mutex_lock(&cache->lock);
    e->bytes = bytes;
    if (rc == FC_OK) {
        /* What decoding needed beside the result is free again. */
        uint64_t keep = extent->decoded + sizeof *e;
        cache->used -= e->cost - keep;
        e->cost = keep;
        e->loading = false;
    } else {
        remove_entry(cache, e);
    }
    pthread_cond_broadcast(&cache->changed);
    return rc;
}

static fc_code check_cost(const fc_decoded *cache, const fc_extent *extent, uint64_t *cost, fc_error *err) {
    if (!fc_decode_cost(extent, cost) || *cost > UINT64_MAX / 2 || *cost + sizeof(entry) > cache->limit) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "the chunk has %" PRIu64 " bytes when decoded and needs %" PRIu64 " to do so, %" PRIu64
                       " are allowed: raise --memory",
                       extent->decoded, *cost, cache->limit);
    }
    *cost += sizeof(entry);
    return FC_OK;
}

fc_code fc_decoded_acquire(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                           fc_decode_fn decode, void *context, const unsigned char **bytes, fc_error *err) {
    uint64_t cost = 0;
    fc_code rc = check_cost(cache, extent, &cost, err);
    if (rc != FC_OK) {
        return rc;
    }
    pthread_mutex_lock(&cache->lock);
    for (;;) {
        entry *e = find(cache, tensor, chunk);
        if (e && !e->loading) {
            e->users++;
            unlink_ring(e);
            link_newest(cache, e);
            *bytes = e->bytes;
            break;
        }
        if (!e && make_room(cache, cost)) {
            e = insert(cache, tensor, chunk, cost);
            rc = e ? load(cache, e, extent, decode, context, err) : fc_fail(err, FC_ENOMEM, "out of memory");
            if (rc == FC_OK) {
                *bytes = e->bytes;
            }
            break;
        }
        pthread_cond_wait(&cache->changed, &cache->lock);
    }
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    pthread_mutex_lock(&cache->lock);
    entry *e = find(cache, tensor, chunk);
    if (e && --e->users == 0) {
        pthread_cond_broadcast(&cache->changed);
    }
    pthread_mutex_unlock(&cache->lock);
}
