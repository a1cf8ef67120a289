/*
 * lib/read/decoded.c: the cache that limits the memory for decoding.
 */
#include "read/decode.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A decoder for the cache that counts its calls and writes the chunk's number. */
typedef struct counting {
    pthread_mutex_t lock;
    int calls, inside, most_inside;
    bool fails;
    int fresh;         /* workspaces with fresh pages */
    fc_decoded *again; /* when set, the decoder requests the same chunk from this cache */
    int refused;       /* how often the chunk was unavailable */
} counting;

static fc_code count_decode(void *context, const fc_tensor *tensor, size_t chunk, const fc_extent *extent,
                            unsigned char *workspace, unsigned char *out, fc_error *err) {
    counting *c = context;
    if (c->again) {
        const unsigned char *bytes = NULL;
        assert_int_equal(fc_decoded_claim(c->again, tensor, chunk, err), FC_OK);
        assert_int_equal(fc_decoded_try(c->again, tensor, chunk, extent, 0, count_decode, c, &bytes, err), FC_OK);
        fc_decoded_release(c->again, tensor, chunk, 0);
        c->refused += !bytes;
    }
    pthread_mutex_lock(&c->lock);
    c->calls++;
    c->fresh += extent->length >= 4096 && workspace[0] == 0;
    c->inside++;
    c->most_inside = c->inside > c->most_inside ? c->inside : c->most_inside;
    pthread_mutex_unlock(&c->lock);
    if (extent->length > 0) {
        memset(workspace, 0xab, extent->length);
    }
    memset(out, (int)chunk, extent->decoded);
    pthread_mutex_lock(&c->lock);
    c->inside--;
    pthread_mutex_unlock(&c->lock);
    return c->fails ? fc_fail(err, FC_ECORRUPT, "bad") : FC_OK;
}

static const fc_tensor some_tensor = {.name = "w"};

/* Claims a chunk and takes it as soon as it is available. @param extra bytes of workspace */
static fc_code take(fc_decoded *cache, size_t chunk, const fc_extent *extent, uint64_t extra, counting *c,
                    const unsigned char **bytes, fc_error *err) {
    assert_int_equal(fc_decoded_claim(cache, &some_tensor, chunk, err), FC_OK);
    for (;;) {
        uint64_t seen = fc_decoded_changes(cache);
        fc_code rc = fc_decoded_try(cache, &some_tensor, chunk, extent, extra, count_decode, c, bytes, err);
        if (rc != FC_OK) {
            fc_decoded_release(cache, &some_tensor, chunk, 0);
        }
        if (rc != FC_OK || *bytes) {
            return rc;
        }
        fc_decoded_wait(cache, seen);
    }
}

/* Uses and releases a chunk with extent->length bytes of workspace. */
static void use(fc_decoded *cache, size_t chunk, const fc_extent *extent, counting *c) {
    const unsigned char *bytes = NULL;
    fc_error err;
    assert_int_equal(take(cache, chunk, extent, extent->length, c, &bytes, &err), FC_OK);
    assert_int_equal(bytes[0], (unsigned char)chunk);
    assert_int_equal(bytes[extent->decoded - 1], (unsigned char)chunk);
    fc_decoded_release(cache, &some_tensor, chunk, 0);
}

static void cache_keeps_what_fits(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(10 * 2000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800};
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 10; i++) {
            use(cache, i, &extent, &c);
        }
    }
    assert_int_equal(c.calls, 10);
    use(cache, 10, &extent, &c); /* evicts chunk 0, the oldest */
    use(cache, 9, &extent, &c);
    assert_int_equal(c.calls, 11);
    use(cache, 0, &extent, &c);
    assert_int_equal(c.calls, 12);
    fc_decoded_free(cache);
}

/*
 * There is room for two chunks. The one in use stays although it is the oldest; buffers of another size are not reused.
 */
static void chunk_in_use_stays(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(2 * 2000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800}, small = extent;
    small.decoded = 700;
    const unsigned char *held = NULL;
    fc_error err;
    assert_int_equal(take(cache, 1, &extent, 0, &c, &held, &err), FC_OK);
    for (size_t i = 2; i < 9; i++) {
        use(cache, i, i % 2 ? &small : &extent, &c);
    }
    assert_int_equal(held[0], 1);
    assert_int_equal(held[1799], 1);
    int calls = c.calls;
    use(cache, 1, &extent, &c);
    assert_int_equal(c.calls, calls);
    fc_decoded_release(cache, &some_tensor, 1, 0);
    fc_decoded_free(cache);
}

/* There is room for two chunks. A claimed chunk stays in memory, regardless of what other workers decode. */
static void claimed_chunk_stays(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(2 * 2000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800};
    fc_error err;
    assert_int_equal(fc_decoded_claim(cache, &some_tensor, 1, &err), FC_OK);
    for (size_t i = 1; i < 9; i++) {
        use(cache, i, &extent, &c);
    }
    assert_int_equal(c.calls, 8);
    use(cache, 1, &extent, &c);
    assert_int_equal(c.calls, 8);
    fc_decoded_release(cache, &some_tensor, 1, 0);
    for (size_t i = 2; i < 9; i++) {
        use(cache, i, &extent, &c);
    }
    int calls = c.calls;
    use(cache, 1, &extent, &c);
    assert_int_equal(c.calls, calls + 1);
    fc_decoded_free(cache);
}

/*
 * A chunk is unavailable when there is no room for it or another worker is decoding it. The caller learns when to try
 * again.
 */
static void trying_does_not_wait(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(2000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800};
    const unsigned char *first = NULL, *second = NULL;
    fc_error err;
    assert_int_equal(take(cache, 1, &extent, 0, &c, &first, &err), FC_OK);
    assert_int_equal(fc_decoded_claim(cache, &some_tensor, 2, &err), FC_OK);
    uint64_t seen = fc_decoded_changes(cache);
    assert_int_equal(fc_decoded_try(cache, &some_tensor, 2, &extent, 0, count_decode, &c, &second, &err), FC_OK);
    assert_null(second);
    assert_int_equal(c.calls, 1);
    assert_int_equal(fc_decoded_changes(cache), seen);
    fc_decoded_release(cache, &some_tensor, 1, 0);
    fc_decoded_wait(cache, seen); /* must return */
    c.again = cache;
    assert_int_equal(fc_decoded_try(cache, &some_tensor, 2, &extent, 0, count_decode, &c, &second, &err), FC_OK);
    assert_non_null(second);
    assert_int_equal(c.refused, 1);
    assert_int_equal(c.calls, 2);
    fc_decoded_release(cache, &some_tensor, 2, 0);
    fc_decoded_free(cache);
}

/* A fully used chunk is evicted first, and its buffer is reused even when there is room. */
static void used_up_chunk_goes_first(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(10 * 2000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800};
    const unsigned char *first = NULL, *second = NULL;
    fc_error err;
    use(cache, 1, &extent, &c);
    assert_int_equal(take(cache, 2, &extent, 0, &c, &first, &err), FC_OK);
    fc_decoded_release(cache, &some_tensor, 2, 1000);
    assert_int_equal(take(cache, 2, &extent, 0, &c, &second, &err), FC_OK);
    assert_ptr_equal(first, second);
    assert_int_equal(c.calls, 2);
    fc_decoded_release(cache, &some_tensor, 2, 800);
    assert_int_equal(take(cache, 3, &extent, 0, &c, &second, &err), FC_OK);
    assert_ptr_equal(first, second);
    fc_decoded_release(cache, &some_tensor, 3, 0);
    use(cache, 1, &extent, &c);
    assert_int_equal(c.calls, 3);
    use(cache, 2, &extent, &c);
    assert_int_equal(c.calls, 4);
    fc_decoded_free(cache);
}

/*
 * There is room for one workspace and two chunks. All chunks are decoded in the same workspace, which is freed only as
 * a last resort.
 */
static void workspace_is_kept(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(2 * 2000 + 5000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800, .length = 5000}, plain = extent;
    plain.length = 0;
    for (size_t i = 0; i < 8; i++) {
        const unsigned char *bytes = NULL;
        fc_error err;
        assert_int_equal(take(cache, i, &extent, 5000, &c, &bytes, &err), FC_OK);
        fc_decoded_release(cache, &some_tensor, i, 1800);
    }
    assert_int_equal(c.fresh, 1);
    for (size_t i = 10; i < 14; i++) {
        use(cache, i, &plain, &c);
    }
    assert_int_equal(c.calls, 12);
    for (size_t i = 10; i < 14; i++) { /* all four fit once the workspace is freed */
        use(cache, i, &plain, &c);
    }
    assert_int_equal(c.calls, 12);
    use(cache, 20, &extent, &c);
    fc_decoded_free(cache);
}

static void chunk_above_the_limit_is_refused(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(13000);
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = (uint64_t)1 << 62};
    const unsigned char *bytes;
    fc_error err;
    assert_int_equal(take(cache, 0, &extent, 0, &c, &bytes, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "decoding the chunk of 4611686018427387904 bytes needs"));
    assert_int_equal(err.hint, FC_HINT_MEMORY);
    assert_int_equal(c.calls, 0);
    extent.decoded = 5000;
    c.fails = true;
    assert_int_equal(take(cache, 0, &extent, 0, &c, &bytes, &err), FC_ECORRUPT);
    c.fails = false; /* a failure leaves nothing in the cache */
    extent.decoded = 9000;
    use(cache, 0, &extent, &c);
    fc_decoded_free(cache);
}

typedef struct shared {
    fc_decoded *cache;
    counting *c;
    unsigned seed;
} shared;

static void *use_many(void *context) {
    shared s = *(shared *)context;
    fc_extent extent = {.codec = FC_CODEC_FORMAT, .decoded = 1800};
    for (int i = 0; i < 3000; i++) {
        extent.length = i % 2 ? 700 : 0;
        use(s.cache, (size_t)rand_r(&s.seed) % 7, &extent, s.c);
    }
    return NULL;
}

/*
 * Six threads share room for three chunks with their workspaces. Every thread makes progress, and at most four chunks
 * (what fits without workspaces) are decoded at a time.
 */
static void cache_under_threads(void **state) {
    (void)state;
    counting c = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fc_decoded *cache = fc_decoded_new(3 * (2000 + 700));
    pthread_t threads[6];
    shared contexts[6];
    for (int i = 0; i < 6; i++) {
        contexts[i] = (shared){cache, &c, (unsigned)i};
        assert_int_equal(pthread_create(&threads[i], NULL, use_many, &contexts[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_in_range(c.most_inside, 1, 4);
    assert_in_range(c.calls, 7, 6 * 3000);
    fc_decoded_free(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workspace_is_kept),        cmocka_unit_test(cache_keeps_what_fits),
        cmocka_unit_test(chunk_in_use_stays),       cmocka_unit_test(claimed_chunk_stays),
        cmocka_unit_test(trying_does_not_wait),     cmocka_unit_test(chunk_above_the_limit_is_refused),
        cmocka_unit_test(used_up_chunk_goes_first), cmocka_unit_test(cache_under_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
