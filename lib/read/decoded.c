/*
 * The cache of decoded chunks. Tiles are made for the target, so a compressed chunk overlaps many tiles and a tile many
 * chunks. Each chunk is decoded once while it fits. The cache is shared by the workers, and the only place that limits
 * the memory for decoding: a worker that finds no room waits until others release theirs.
 *
 * A worker claims the chunks of its tile before it uses the first. A claimed chunk stays once it is decoded, so workers
 * on neighbouring tiles can decode one chunk each and use each other's.
 */
#include "read/decode.h"

#include "base/checked.h"
#include "base/pages.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    BUCKETS = 1024,
    /* Larger chunks have pages of their own (base/pages.h). The system limits the number of mappings. */
    PAGE = 4096,
    MOST_MAPPINGS = 1 << 14,
    MOST_IDLE = 16
};

typedef enum entry_state {
    ENTRY_ABSENT, /* claimed, but not in memory */
    ENTRY_LOADING,
    ENTRY_READY
} entry_state;

typedef struct entry {
    const fc_tensor *tensor;
    size_t chunk;
    entry_state state;
    unsigned claims; /* while above 0, the entry and its bytes stay */
    unsigned char *bytes;
    size_t size;
    uint64_t cost;
    uint64_t left; /* bytes that no worker has used yet; at 0 the chunk is probably not needed again */
    struct entry *next_in_bucket;
    struct entry *newer, *older; /* ring of the ready entries by last use, through fc_decoded.ring */
} entry;

/* An unused workspace, kept for the next chunk because its pages are already mapped. */
typedef struct idle {
    unsigned char *bytes;
    size_t size;
} idle;

struct fc_decoded {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* signals that memory became free, or that a chunk finished loading */
    uint64_t changes;       /* how often that happened */
    uint64_t limit, used;
    uint64_t paged; /* buffers of at least this many bytes have pages of their own */
    idle idle[MOST_IDLE];
    int nidle;
    entry *buckets[BUCKETS];
    entry ring; /* ring.older is the newest, ring.newer the oldest */
};

/* Wakes all waiting workers. Called with the lock held. */
static void wake_all(fc_decoded *cache) {
    cache->changes++;
    pthread_cond_broadcast(&cache->changed);
}

fc_decoded *fc_decoded_new(uint64_t limit) {
    fc_decoded *cache = calloc(1, sizeof *cache);
    if (!cache) {
        return NULL;
    }
    pthread_mutex_init(&cache->lock, NULL);
    pthread_cond_init(&cache->changed, NULL);
    cache->limit = limit;
    cache->paged = limit / MOST_MAPPINGS > PAGE ? limit / MOST_MAPPINGS : PAGE;
    cache->ring.newer = cache->ring.older = &cache->ring;
    return cache;
}

uint64_t fc_decoded_limit(const fc_decoded *cache) {
    return cache->limit;
}

static unsigned char *buffer_new(const fc_decoded *cache, size_t size) {
    if (size < cache->paged) {
        return malloc(size ? size : 1);
    }
    return fc_pages_new(size);
}

static void buffer_free(const fc_decoded *cache, unsigned char *bytes, size_t size) {
    if (bytes && size >= cache->paged) {
        fc_pages_free(bytes, size);
    } else {
        free(bytes);
    }
}

/* Returns the memory that a buffer of `size` bytes really takes. */
static uint64_t buffer_cost(const fc_decoded *cache, uint64_t size) {
    return size < cache->paged ? size : (size + PAGE - 1) / PAGE * PAGE;
}

/* Frees the workspace that has been idle the longest. */
static void drop_idle(fc_decoded *cache) {
    idle first = cache->idle[0];
    memmove(cache->idle, cache->idle + 1, (size_t)--cache->nidle * sizeof *cache->idle);
    cache->used -= first.size;
    buffer_free(cache, first.bytes, first.size);
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

static void link_oldest(fc_decoded *cache, entry *e) {
    e->newer = cache->ring.newer;
    e->older = &cache->ring;
    e->newer->older = e;
    cache->ring.newer = e;
}

static entry **bucket_of(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    uint64_t h = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9e3779b97f4a7c15u + chunk * 0xc2b2ae3d27d4eb4fu;
    return &cache->buckets[(h ^ h >> 29) % BUCKETS];
}

static entry *find_chunk(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    entry *e = *bucket_of(cache, tensor, chunk);
    while (e && (e->tensor != tensor || e->chunk != chunk)) {
        e = e->next_in_bucket;
    }
    return e;
}

static entry *insert_decoded(fc_decoded *cache, const fc_tensor *tensor, size_t chunk) {
    entry *e = calloc(1, sizeof *e);
    if (e) {
        e->tensor = tensor;
        e->chunk = chunk;
        entry **bucket = bucket_of(cache, tensor, chunk);
        e->next_in_bucket = *bucket;
        *bucket = e;
    }
    return e;
}

/* Frees an entry without claims. */
static void remove_entry(fc_decoded *cache, entry *e) {
    entry **at = bucket_of(cache, e->tensor, e->chunk);
    while (*at != e) {
        at = &(*at)->next_in_bucket;
    }
    *at = e->next_in_bucket;
    if (e->state == ENTRY_READY) {
        unlink_ring(e);
    }
    cache->used -= e->cost;
    buffer_free(cache, e->bytes, e->size);
    free(e);
}

void fc_decoded_free(fc_decoded *cache) {
    if (!cache) {
        return;
    }
    while (cache->ring.newer != &cache->ring) {
        remove_entry(cache, cache->ring.newer);
    }
    while (cache->nidle > 0) {
        drop_idle(cache);
    }
    pthread_cond_destroy(&cache->changed);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

/* Returns an idle workspace of exactly `size` bytes, or NULL. */
static unsigned char *take_idle(fc_decoded *cache, size_t size) {
    for (int i = cache->nidle - 1; i >= 0; i--) {
        if (cache->idle[i].size == size) {
            unsigned char *bytes = cache->idle[i].bytes;
            cache->idle[i] = cache->idle[--cache->nidle];
            cache->used -= size;
            return bytes;
        }
    }
    return NULL;
}

/* Keeps a workspace. Its memory has just been released elsewhere, so it fits. */
static void keep_idle(fc_decoded *cache, unsigned char *bytes, size_t size) {
    if (!bytes) {
        return;
    }
    if (cache->nidle == MOST_IDLE) {
        drop_idle(cache);
    }
    cache->idle[cache->nidle++] = (idle){bytes, size};
    cache->used += size;
}

/*
 * Evicts entries without claims until `cost` fits. Fully used entries go first (they are the oldest), then idle
 * workspaces, because mapping their pages again is cheaper than decoding a chunk again. Returns false when the claimed
 * entries leave no room.
 *
 * An evicted buffer of exactly `size` bytes is kept in `*spare`, because the chunks of a dataset have the same size;
 * this avoids the allocator and page faults. A fully used one is reused even where there is room: it is still in the
 * processor's cache.
 */
static bool make_room(fc_decoded *cache, uint64_t cost, size_t size, unsigned char **spare) {
    entry *e = cache->ring.newer;
    while (e != &cache->ring && (cache->limit - cache->used < cost || (!*spare && e->left == 0))) {
        entry *next = e->newer;
        if (e->left > 0 && cache->nidle > 0) {
            drop_idle(cache);
            continue;
        }
        if (e->claims == 0) {
            if (e->size == size && !*spare) {
                *spare = e->bytes;
                e->bytes = NULL;
            }
            remove_entry(cache, e);
        }
        e = next;
    }
    while (cache->nidle > 0 && cache->limit - cache->used < cost) {
        drop_idle(cache);
    }
    return cache->limit - cache->used >= cost;
}

static fc_code cost_of(const fc_decoded *cache, const fc_extent *extent, uint64_t extra, uint64_t *cost,
                       fc_error *err) {
    *cost = extent->decoded;
    bool fits = *cost <= cache->limit;
    *cost = fits ? buffer_cost(cache, *cost) : *cost;
    if (!fits || !fc_add_u64(*cost, extra, cost) || !fc_add_u64(*cost, sizeof(entry), cost) || *cost > cache->limit) {
        fc_code rc = fc_fail(err, FC_EUNSUPPORTED,
                             "decoding the chunk of %" PRIu64 " bytes needs %" PRIu64
                             " bytes of memory, but only %" PRIu64 " are allowed",
                             extent->decoded, *cost, cache->limit);
        return fc_advise(err, rc, FC_HINT_MEMORY, NULL);
    }
    return FC_OK;
}

fc_code fc_decoded_claim(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, fc_error *err) {
    pthread_mutex_lock(&cache->lock);
    entry *e = find_chunk(cache, tensor, chunk);
    e = e ? e : insert_decoded(cache, tensor, chunk);
    if (e) {
        e->claims++;
    }
    pthread_mutex_unlock(&cache->lock);
    return e ? FC_OK : fc_no_memory(err, NULL);
}

/* Releases a claim. Called with the lock held. */
static void give_back(fc_decoded *cache, entry *e, uint64_t taken) {
    e->left -= taken < e->left ? taken : e->left;
    if (--e->claims > 0) {
        return;
    }
    if (e->state == ENTRY_ABSENT) {
        remove_entry(cache, e);
        return;
    }
    unlink_ring(e);
    if (e->left == 0) {
        link_oldest(cache, e);
    } else {
        link_newest(cache, e);
    }
    wake_all(cache);
}

/* The memory to decode a chunk. */
typedef struct need {
    size_t size, extra;               /* bytes of the result, and of the workspace */
    uint64_t cost;                    /* bytes of both, as accounted */
    unsigned char *bytes, *workspace; /* reused buffers, or NULL */
} need;

/* Reserves the memory to decode a chunk. Returns false when there is not enough. */
static bool take_room(fc_decoded *cache, need *n) {
    n->workspace = take_idle(cache, n->extra);
    n->bytes = NULL;
    if (!make_room(cache, n->cost, n->size, &n->bytes)) {
        buffer_free(cache, n->bytes, n->size);
        keep_idle(cache, n->workspace, n->extra);
        return false;
    }
    return true;
}

/* Decodes into an entry whose memory is reserved. Called with the lock held; releases it while decoding. */
static fc_code load_decoded(fc_decoded *cache, entry *e, const need *n, const fc_extent *extent, fc_decode_fn decode,
                            void *context, fc_error *err) {
    unsigned char *workspace = n->workspace;
    e->state = ENTRY_LOADING;
    e->cost = n->cost;
    e->size = n->size;
    cache->used += n->cost;
    pthread_mutex_unlock(&cache->lock);
    e->bytes = n->bytes ? n->bytes : buffer_new(cache, n->size);
    workspace = workspace || n->extra == 0 ? workspace : buffer_new(cache, n->extra);
    fc_code rc =
        e->bytes && (n->extra == 0 || workspace)
            ? decode(context, e->tensor, e->chunk, extent, workspace, e->bytes, err)
            : fc_fail(err, FC_ENOMEM, "out of memory for a chunk of %zu bytes and %zu to decode it", n->size, n->extra);
    pthread_mutex_lock(&cache->lock);
    cache->used -= n->extra;
    e->cost -= n->extra;
    keep_idle(cache, workspace, n->extra);
    if (rc == FC_OK) {
        e->state = ENTRY_READY;
        e->left = n->size;
        link_newest(cache, e);
    } else {
        cache->used -= e->cost;
        buffer_free(cache, e->bytes, n->size);
        e->bytes = NULL;
        e->cost = 0;
        e->state = ENTRY_ABSENT;
    }
    wake_all(cache);
    return rc;
}

fc_code fc_decoded_try(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                       uint64_t extra, fc_decode_fn decode, void *context, const unsigned char **bytes, fc_error *err) {
    need n = {(size_t)extent->decoded, (size_t)extra, 0, NULL, NULL};
    *bytes = NULL;
    FC_TRY(cost_of(cache, extent, extra, &n.cost, err));
    fc_code rc = FC_OK;
    pthread_mutex_lock(&cache->lock);
    entry *e = find_chunk(cache, tensor, chunk);
    if (e->state == ENTRY_ABSENT && take_room(cache, &n)) {
        rc = load_decoded(cache, e, &n, extent, decode, context, err);
    }
    *bytes = e->state == ENTRY_READY ? e->bytes : NULL;
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

uint64_t fc_decoded_changes(fc_decoded *cache) {
    pthread_mutex_lock(&cache->lock);
    uint64_t changes = cache->changes;
    pthread_mutex_unlock(&cache->lock);
    return changes;
}

void fc_decoded_wait(fc_decoded *cache, uint64_t seen) {
    pthread_mutex_lock(&cache->lock);
    while (cache->changes == seen) {
        pthread_cond_wait(&cache->changed, &cache->lock);
    }
    pthread_mutex_unlock(&cache->lock);
}

void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t taken) {
    pthread_mutex_lock(&cache->lock);
    give_back(cache, find_chunk(cache, tensor, chunk), taken);
    pthread_mutex_unlock(&cache->lock);
}
