/*
 * lib/engine/decode.c and decoded.c: HDF5 filter pipelines, bytes that h5py 3.16 wrote, damaged and hostile input, and
 * the cache that limits the memory for decoding.
 */
#include "engine/decode.h"
#include "engine/decode_lean.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include <cmocka.h>

enum { DEFLATE = 1, SHUFFLE = 2, FLETCHER32 = 3, SIZE = 4000 };

/* The checksums that h5py stored for arange(n) * 31 % 251 and for n bytes of 255. */
static void fletcher_equals_hdf5(void **state) {
    (void)state;
    static const struct {
        size_t size;
        uint32_t ramp, ones;
    } known[] = {{8, 0x6fa475f1, 0xffffffff},
                 {7, 0x6ecb7518, 0xff00ff00},
                 {1001, 0xa3f95599, 0xff00ff00},
                 {70000, 0x14ec8d56, 0xffffffff}};
    unsigned char *bytes = malloc(70000);
    assert_non_null(bytes);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        for (size_t i = 0; i < known[k].size; i++) {
            bytes[i] = (unsigned char)(i * 31 % 251);
        }
        assert_int_equal(fc_fletcher32(bytes, known[k].size), known[k].ramp);
        memset(bytes, 255, known[k].size);
        assert_int_equal(fc_fletcher32(bytes, known[k].size), known[k].ones);
    }
    memset(bytes, 0, 100);
    assert_int_equal(fc_fletcher32(bytes, 100), 0);
    free(bytes);
}

static fc_extent extent_of(size_t length, size_t decoded, int count, const uint8_t *ids, uint32_t mask) {
    fc_extent extent = {.codec = FC_CODEC_FILTERED, .length = length, .decoded = decoded};
    extent.filters.count = (uint8_t)count;
    extent.filters.mask = mask;
    memcpy(extent.filters.ids, ids, (size_t)count);
    return extent;
}

/* A chunk that h5py wrote: uint32 arange(8) * 31 % 251 through shuffle, gzip and fletcher32. */
static void chunk_of_h5py(void **state) {
    (void)state;
    unsigned char stored[64] = {0x78, 0x5e, 0x63, 0x90, 0xb7, 0x8b, 0xad, 0x99, 0xbd, 0xeb, 0x26, 0x03,
                                0x0e, 0x00, 0x00, 0x5b, 0xac, 0x03, 0x65, 0x62, 0x44, 0x04, 0xd7};
    fc_extent extent = extent_of(23, 32, 3, (uint8_t[]){SHUFFLE, DEFLATE, FLETCHER32}, 0);
    uint32_t out[8];
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, stored, 4, (unsigned char *)out, &err), FC_OK);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(out[i], i * 31 % 251);
    }
    stored[9] ^= 1;
    assert_int_equal(fc_decode_filters(&extent, stored, 4, (unsigned char *)out, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "fletcher32"));
}

static size_t encode(const uint8_t *ids, int count, uint32_t mask, size_t element, const unsigned char *in, size_t size,
                     unsigned char *out, size_t room) {
    unsigned char *from = malloc(room);
    assert_non_null(from);
    memcpy(out, in, size);
    for (int i = 0; i < count; i++) {
        if (mask >> i & 1) {
            continue;
        }
        memcpy(from, out, size);
        if (ids[i] == SHUFFLE) {
            size_t n = size / element;
            for (size_t e = 0; e < n; e++) {
                for (size_t b = 0; b < element; b++) {
                    out[b * n + e] = from[e * element + b];
                }
            }
        } else if (ids[i] == DEFLATE) {
            uLongf length = room;
            assert_int_equal(compress2(out, &length, from, size, 1), Z_OK);
            size = length;
        } else {
            uint32_t sum = fc_fletcher32(from, size);
            memcpy(out + size,
                   (unsigned char[]){(unsigned char)sum, (unsigned char)(sum >> 8), (unsigned char)(sum >> 16),
                                     (unsigned char)(sum >> 24)},
                   4);
            size += 4;
        }
    }
    free(from);
    return size;
}

static const uint8_t pipelines[][3] = {{SHUFFLE, DEFLATE, FLETCHER32}, {DEFLATE, SHUFFLE, FLETCHER32},
                                       {FLETCHER32, SHUFFLE, DEFLATE}, {FLETCHER32, DEFLATE, SHUFFLE},
                                       {SHUFFLE, FLETCHER32, DEFLATE}, {DEFLATE, FLETCHER32, SHUFFLE}};

/*
 * Every order and number of filters and every mask. Then with damage, which must fail or give other bytes but never
 * overrun the buffer (the sanitizers check that).
 */
static void every_pipeline(void **state) {
    (void)state;
    unsigned char in[SIZE], out[SIZE], stored[2 * SIZE + 100], copy[2 * SIZE + 100];
    uint64_t workspace = 0;
    srand(4);
    int checked = 0;
    for (size_t p = 0; p < sizeof pipelines / sizeof *pipelines; p++) {
        for (int count = 0; count <= 3; count++) {
            for (uint32_t mask = 0; mask < 8; mask++) {
                size_t size = SIZE - (size_t)(rand() % 20), element = (size_t)1 << rand() % 5;
                for (size_t i = 0; i < size; i++) {
                    in[i] = (unsigned char)(rand() % 9);
                }
                size_t length = encode(pipelines[p], count, mask, element, in, size, stored, sizeof stored);
                memcpy(copy, stored, length);
                fc_extent extent = extent_of(length, size, count, pipelines[p], mask);
                fc_error err = {FC_OK, ""};
                assert_true(fc_decode_workspace(&extent, &workspace));
                unsigned char *work = malloc(workspace); /* exact size, so that the sanitizer detects any overrun */
                assert_non_null(work);
                memcpy(work, copy, length);
                assert_int_equal(fc_decode_filters(&extent, work, (uint32_t)element, out, &err), FC_OK);
                assert_memory_equal(out, in, size);
                for (int i = 0; i < 30; i++) {
                    memcpy(work, copy, length);
                    work[(size_t)rand() % length] ^= (unsigned char)(1 + rand() % 255);
                    (void)fc_decode_filters(&extent, work, (uint32_t)element, out, &err);
                }
                extent.decoded = size - 1;
                memcpy(work, copy, length);
                assert_int_equal(fc_decode_filters(&extent, work, (uint32_t)element, out, &err), FC_ECORRUPT);
                free(work);
                checked++;
            }
        }
    }
    assert_int_equal(checked, 6 * 4 * 8);
}

typedef struct in_memory {
    const unsigned char *bytes;
    size_t size;
} in_memory;

static fc_code read_memory(void *context, uint64_t at, unsigned char *bytes, size_t size, fc_error *err) {
    const in_memory *m = context;
    (void)err;
    assert_true(at <= m->size && size <= m->size - at);
    memcpy(bytes, m->bytes + at, size);
    return FC_OK;
}

/* Every supported pipeline with windows of any size, then with damage, which must not overrun the buffer. */
static void lean_decoding_gives_the_same_bytes(void **state) {
    (void)state;
    unsigned char in[SIZE], stored[2 * SIZE + 100], window[500];
    int taken = 0;
    srand(5);
    for (size_t round = 0; round < 6 * 4 * 8 * 4; round++) {
        const uint8_t *ids = pipelines[round % 6];
        const int count = (int)(round / 6 % 4);
        const uint32_t mask = (uint32_t)(round / 24 % 8);
        size_t size = SIZE - (size_t)(rand() % 20), element = (size_t)1 << rand() % 5;
        for (size_t i = 0; i < size; i++) {
            in[i] = (unsigned char)(rand() % 9);
        }
        size_t length = encode(ids, count, mask, element, in, size, stored, sizeof stored);
        fc_extent extent = extent_of(length, size, count, ids, mask);
        if (!fc_decode_lean_can(&extent)) {
            continue;
        }
        taken++;
        fc_error err;
        in_memory memory = {stored, length};
        size_t some = 2 + (size_t)rand() % (sizeof window - 1);
        unsigned char *out = malloc(size); /* exact size, so that the sanitizer detects any overrun */
        assert_non_null(out);
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_OK);
        assert_memory_equal(out, in, size);
        extent.decoded = size - 1;
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_ECORRUPT);
        extent.decoded = size;
        extent.length = memory.size = length - 1;
        assert_int_equal(fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err),
                         FC_ECORRUPT);
        for (int i = 0; i < 20; i++) {
            stored[(size_t)rand() % length] ^= (unsigned char)(1 + rand() % 255);
            (void)fc_decode_lean(&extent, read_memory, &memory, window, some, (uint32_t)element, out, &err);
        }
        free(out);
    }
    assert_int_equal(taken, 4 * 27); /* counted by hand: 8, 10 and 9 with one, two and three filters */
}

/* 64 MiB of zeros in 64 KiB, declared as 1000 bytes: rejected without allocating memory for them. */
static void bomb_is_refused(void **state) {
    (void)state;
    size_t size = 64 << 20;
    unsigned char *zeros = calloc(1, size), out[1000];
    uLongf length = compressBound(size);
    unsigned char *stored = malloc(length);
    assert_true(zeros && stored);
    assert_int_equal(compress2(stored, &length, zeros, size, 9), Z_OK);
    fc_extent extent = extent_of(length, sizeof out, 1, (uint8_t[]){DEFLATE}, 0);
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, stored, 1, out, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "the compressed data expands to more than the 1000 bytes of the chunk");
    extent.length = length / 2;
    unsigned char *big = malloc(size);
    assert_non_null(big);
    extent.decoded = size;
    assert_int_equal(fc_decode_filters(&extent, stored, 1, big, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "the compressed data is damaged after"));
    free(big);
    free(zeros);
    free(stored);
}

static void unknown_filter_is_refused(void **state) {
    (void)state;
    unsigned char bytes[4] = {0}, out[4];
    fc_extent extent = extent_of(4, 4, 1, (uint8_t[]){32}, 0);
    fc_error err;
    assert_int_equal(fc_decode_filters(&extent, bytes, 1, out, &err), FC_EUNSUPPORTED);
}

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
        cmocka_unit_test(fletcher_equals_hdf5),
        cmocka_unit_test(chunk_of_h5py),
        cmocka_unit_test(every_pipeline),
        cmocka_unit_test(bomb_is_refused),
        cmocka_unit_test(unknown_filter_is_refused),
        cmocka_unit_test(workspace_is_kept),
        cmocka_unit_test(cache_keeps_what_fits),
        cmocka_unit_test(chunk_in_use_stays),
        cmocka_unit_test(claimed_chunk_stays),
        cmocka_unit_test(trying_does_not_wait),
        cmocka_unit_test(chunk_above_the_limit_is_refused),
        cmocka_unit_test(used_up_chunk_goes_first),
        cmocka_unit_test(lean_decoding_gives_the_same_bytes),
        cmocka_unit_test(cache_under_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
