/*
 * The cache of decoded chunks. Tiles are cut for the target, so one compressed chunk serves many tiles and many chunks
 * serve one; each is decoded once while it fits. Shared by the workers, and the one place that bounds the memory for
 * decoding: who finds no room waits until others give theirs back.
 */
#include "move/decode.h"

#include "core/checked.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    BUCKETS = 1024,
    /* Chunks have pages of their own: freed in one thread and allocated in another, they would grow each thread's heap
       to the size of the whole cache. Only so many at most, because the system limits the number of mappings. */
    PAGE = 4096,
    MOST_MAPPINGS = 1 << 14,
    MOST_IDLE = 16
};

typedef struct entry {
    const fc_tensor *tensor;
    size_t chunk;
    unsigned char *bytes;
    size_t size;
    uint64_t cost;
    uint64_t left; /* bytes that nobody has taken yet; 0: most likely nobody will ask again */
    unsigned users;
    bool loading;
    unsigned char *workspace; /* while loading: `extra` bytes, part of `cost`; NULL for none, or not yet allocated */
    size_t extra;
    struct entry *next_in_bucket;
    struct entry *newer, *older; /* ring of all entries by last use, through fc_decoded.ring */
} entry;

/* A workspace that nobody uses: kept for the next chunk, as its pages are there already. */
typedef struct idle {
    unsigned char *bytes;
    size_t size;
} idle;

struct fc_decoded {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* room was made, or a chunk finished loading */
    uint64_t limit, used;
    uint64_t paged; /* from this size on, chunks have pages of their own */
    idle idle[MOST_IDLE];
    int nidle;
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
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

static void buffer_free(const fc_decoded *cache, unsigned char *bytes, size_t size) {
    if (bytes && size >= cache->paged) {
        munmap(bytes, size);
    } else {
        free(bytes);
    }
}

/* What a buffer of `size` bytes takes from the system. */
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

/* An idle workspace of that size. @return NULL when there is none. */
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

/* Keeps a workspace; what it takes has just been given up elsewhere, so there is room. */
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

/* Drops unused entries until `cost` fits, those that have been taken whole first (they are the oldest), before
   others the idle workspaces: their pages are sooner back than a chunk is decoded. A buffer of `size` bytes among them
   is kept in `*spare`: chunks of a dataset are of one size, so allocator and page faults stay out of the way. One that
   has been taken whole is reused even where there is room: it is still in the processor's cache.
   @return false when the entries in use leave no room. */
static bool make_room(fc_decoded *cache, uint64_t cost, size_t size, unsigned char **spare) {
    entry *e = cache->ring.newer;
    while (e != &cache->ring && (cache->limit - cache->used < cost || (!*spare && e->left == 0))) {
        entry *next = e->newer;
        if (e->left > 0 && cache->nidle > 0) {
            drop_idle(cache);
            continue;
        }
        if (e->users == 0 && !e->loading) {
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

static entry *insert(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, size_t size, uint64_t cost) {
    entry *e = calloc(1, sizeof *e);
    if (!e) {
        return NULL;
    }
    e->tensor = tensor;
    e->chunk = chunk;
    e->size = size;
    e->cost = cost;
    e->left = size;
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
    if (!e->bytes) {
        e->bytes = buffer_new(cache, e->size);
    }
    if (e->extra > 0 && !e->workspace) {
        e->workspace = buffer_new(cache, e->extra);
    }
    fc_code rc =
        e->bytes && (e->extra == 0 || e->workspace)
            ? decode(context, e->tensor, e->chunk, extent, e->workspace, e->bytes, err)
            : fc_fail(err, FC_ENOMEM, "out of memory for a chunk of %zu bytes and %zu to decode it", e->size, e->extra);
    pthread_mutex_lock(&cache->lock);
    cache->used -= e->extra;
    e->cost -= e->extra;
    keep_idle(cache, e->workspace, e->extra);
    e->workspace = NULL;
    if (rc == FC_OK) {
        e->loading = false;
    } else {
        remove_entry(cache, e);
    }
    pthread_cond_broadcast(&cache->changed);
    return rc;
}

static fc_code cost_of(const fc_decoded *cache, const fc_extent *extent, uint64_t extra, uint64_t *cost,
                       fc_error *err) {
    *cost = extent->decoded;
    bool fits = *cost <= cache->limit;
    *cost = fits ? buffer_cost(cache, *cost) : *cost;
    if (!fits || !fc_add_u64(*cost, extra, cost) || !fc_add_u64(*cost, sizeof(entry), cost) || *cost > cache->limit) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "decoding the chunk of %" PRIu64 " bytes takes %" PRIu64 " bytes of memory, %" PRIu64
                       " are allowed: raise --memory",
                       extent->decoded, *cost, cache->limit);
    }
    return FC_OK;
}

/* The entry of a chunk, in use by the caller: as it is in the cache, or new and `loading`. Called with the lock held;
   gives it up while it waits. @return NULL when out of memory. */
static entry *find_or_insert(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, size_t size, size_t extra,
                             uint64_t cost) {
    for (;;) {
        entry *e = find(cache, tensor, chunk);
        if (e && !e->loading) {
            e->users++;
            unlink_ring(e);
            link_newest(cache, e);
            return e;
        }
        if (!e) {
            unsigned char *spare = NULL, *workspace = take_idle(cache, extra);
            bool room = make_room(cache, cost, size, &spare);
            e = room ? insert(cache, tensor, chunk, size, cost) : NULL;
            if (e) {
                e->bytes = spare;
                e->workspace = workspace;
                e->extra = extra;
                return e;
            }
            buffer_free(cache, spare, size);
            keep_idle(cache, workspace, extra);
            if (room) {
                return NULL;
            }
        }
        pthread_cond_wait(&cache->changed, &cache->lock);
    }
}

fc_code fc_decoded_acquire(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                           uint64_t extra, fc_decode_fn decode, void *context, const unsigned char **bytes,
                           fc_error *err) {
    uint64_t cost = 0;
    fc_code rc = cost_of(cache, extent, extra, &cost, err);
    if (rc != FC_OK) {
        return rc;
    }
    pthread_mutex_lock(&cache->lock);
    entry *e = find_or_insert(cache, tensor, chunk, (size_t)extent->decoded, (size_t)extra, cost);
    if (!e) {
        rc = fc_fail(err, FC_ENOMEM, "out of memory");
    } else if (e->loading) {
        rc = load(cache, e, extent, decode, context, err);
    }
    if (rc == FC_OK) {
        *bytes = e->bytes;
    }
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

void fc_decoded_release(fc_decoded *cache, const fc_tensor *tensor, size_t chunk, uint64_t taken) {
    pthread_mutex_lock(&cache->lock);
    entry *e = find(cache, tensor, chunk);
    if (e) {
        e->left -= taken < e->left ? taken : e->left;
    }
    if (e && --e->users == 0) {
        if (e->left == 0) {
            unlink_ring(e);
            link_oldest(cache, e);
        }
        pthread_cond_broadcast(&cache->changed);
    }
    pthread_mutex_unlock(&cache->lock);
}
