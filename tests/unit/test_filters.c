/*
 * lib/codec/filter.c and what it calls, on chunks that h5py and hdf5plugin wrote (tests/corpus/make_h5_filters.py
 * and make_h5_blosc2.py), then on damaged copies of them.
 */
#include "codec/bzip2.h"
#include "codec/filter.h"
#include "codec/lz.h"
#include "codec/zstd.h"
#include "read/decode.h"

#include "fsdpckpt/read.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const corpora[] = {FSDPCKPT_CORPUS "/good/h5-filters.h5", FSDPCKPT_CORPUS "/good/h5-blosc2.h5"};

enum { CORPORA = sizeof corpora / sizeof *corpora };

static fc_checkpoint *open_corpus(const char *path) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    if (fc_checkpoint_open(path, NULL, &c, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    return c;
}

/* Calls `visit` with every chunk that is stored with filters, and a workspace of exactly the size that decoding needs,
   so that the sanitizer detects any overrun. Its first bytes are the stored ones. @return the number of chunks. */
typedef void (*visit_fn)(const fc_tensor *tensor, const fc_extent *extent, unsigned char *work, unsigned char *out);

static int each_chunk_of(const char *path, visit_fn visit) {
    fc_checkpoint *c = open_corpus(path);
    FILE *f = fopen(c->path, "rb");
    int count = 0;
    assert_non_null(f);
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        for (size_t k = 0; k < t->nchunks; k++) {
            fc_extent extent;
            fc_error err = {0};
            uint64_t size = 0;
            if (fc_checkpoint_extent(c, t, k, &extent, &err) != FC_OK) {
                const bool zstd = strstr(err.message, "build it with the package libzstd-dev");
                const bool bzip2 = strstr(err.message, "build it with the package libbz2-dev");
                assert_true((zstd && !fc_zstd_is_built_in()) || (bzip2 && !fc_bzip2_is_built_in()));
                continue;
            }
            if (extent.codec != FC_CODEC_FILTERED) {
                continue;
            }
            assert_true(fc_decode_workspace(&extent, &size));
            unsigned char *work = malloc(size), *out = malloc(extent.decoded);
            assert_true(work && out);
            assert_int_equal(fseek(f, (long)extent.offset, SEEK_SET), 0);
            assert_int_equal(fread(work, 1, extent.length, f), extent.length);
            visit(t, &extent, work, out);
            free(work);
            free(out);
            count++;
        }
    }
    fclose(f);
    fc_checkpoint_close(c);
    return count;
}

static int each_chunk(visit_fn visit) {
    int count = 0;
    for (size_t i = 0; i < CORPORA; i++) {
        count += each_chunk_of(corpora[i], visit);
    }
    return count;
}

static uint32_t size_of(const fc_tensor *t) {
    return (uint32_t)fc_dtype_size(t->dtype);
}

/* A chunk whose method is not in this build. */
static bool is_lacking(fc_code code) {
    return code == FC_EUNSUPPORTED && !(fc_zstd_is_built_in() && fc_bzip2_is_built_in());
}

static void damage_one(const fc_tensor *t, const fc_extent *extent, unsigned char *work, unsigned char *out) {
    fc_error err = {0};
    unsigned char *stored = malloc(extent->length);
    assert_non_null(stored);
    memcpy(stored, work, extent->length);
    const fc_code rc = fc_decode_filters(extent, work, size_of(t), out, &err);
    if (rc != FC_OK && !is_lacking(rc)) {
        fail_msg("%s: %s", t->name, err.message);
    }
    for (int i = 0; rc == FC_OK && i < 60; i++) {
        memcpy(work, stored, extent->length);
        for (int n = 1 + rand() % 3; n > 0; n--) {
            /* Every other time near the start, where the headers are. */
            const size_t at = (size_t)rand() % (i % 2 && extent->length > 40 ? 40 : extent->length);
            work[at] ^= (unsigned char)(1 + rand() % 255);
        }
        const fc_code damaged = fc_decode_filters(extent, work, size_of(t), out, &err);
        assert_true(damaged == FC_OK || damaged == FC_ECORRUPT || damaged == FC_EUNSUPPORTED);
    }
    free(stored);
}

static void damage_never_writes_outside(void **state) {
    (void)state;
    srand(29);
    assert_true(each_chunk(damage_one) > 100);
}

static void shorten_one(const fc_tensor *t, const fc_extent *extent, unsigned char *work, unsigned char *out) {
    fc_error err = {0};
    uint64_t size;
    fc_extent shorter = *extent, smaller = *extent, larger = *extent;
    const bool tail = extent->filters.items[extent->filters.count - 1].id == FC_FILTER_FLETCHER32;
    shorter.length -= tail ? 5 : 1;
    smaller.decoded -= size_of(t);
    larger.decoded += size_of(t);
    const fc_extent *wrong[] = {&shorter, &smaller, &larger};
    unsigned char *stored = malloc(extent->length);
    assert_non_null(stored);
    memcpy(stored, work, extent->length);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_true(fc_decode_workspace(wrong[i], &size));
        unsigned char *exact = malloc(size), *to = malloc(wrong[i]->decoded);
        assert_true(exact && to);
        memcpy(exact, stored, wrong[i]->length);
        const fc_code rc = fc_decode_filters(wrong[i], exact, size_of(t), to, &err);
        if (rc != FC_ECORRUPT && !is_lacking(rc)) {
            fail_msg("%s: error %d for a wrong size", t->name, rc);
        }
        free(exact);
        free(to);
    }
    free(stored);
    (void)out;
}

/* A chunk that gives more or fewer bytes than its place has. */
static void wrong_sizes_are_damage(void **state) {
    (void)state;
    assert_true(each_chunk(shorten_one) > 100);
}

static fc_code read_whole(const fc_checkpoint *c, const fc_tensor *t, unsigned char *bytes) {
    const int64_t origin[FC_MAX_DIMS] = {0};
    const fc_box box = {t->ndim, origin, t->shape};
    fc_error err = {0};
    return t->object ? FC_EUNSUPPORTED : fc_read_box(c, t, &box, t->dtype, bytes, &err);
}

/* @return what was stored without filters in the group of `t`. */
static const fc_tensor *find_plain(const fc_checkpoint *c, const fc_tensor *t) {
    const size_t group = strcspn(t->name, ".");
    for (size_t i = 0; i < c->ntensors; i++) {
        const char *name = c->tensors[i].name;
        if (strncmp(name, t->name, group) == 0 && strcmp(name + group, ".plain") == 0) {
            return &c->tensors[i];
        }
    }
    fail_msg("%s: there is no plain dataset in its group", t->name);
    return NULL;
}

/* Every dataset equals the one that was stored without filters. */
static size_t compare_chunks(const char *path) {
    fc_checkpoint *c = open_corpus(path);
    size_t compared = 0;
    unsigned char truth[1 << 13], bytes[1 << 13];
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i], *plain = find_plain(c, t);
        int64_t elements = 0;
        assert_true(fc_numel(plain->ndim, plain->shape, &elements));
        const size_t size = (size_t)elements * size_of(plain);
        assert_true(size <= sizeof bytes);
        const fc_code rc = read_whole(c, t, bytes);
        if (is_lacking(rc)) {
            continue;
        }
        assert_int_equal(rc, FC_OK);
        assert_int_equal(read_whole(c, plain, truth), FC_OK);
        assert_memory_equal(bytes, truth, size);
        compared++;
    }
    fc_checkpoint_close(c);
    return compared;
}

static void chunks_equal_what_was_written(void **state) {
    (void)state;
    for (size_t i = 0; i < CORPORA; i++) {
        assert_true(compare_chunks(corpora[i]) > 30);
    }
}

static void parameters_are_checked(void **state) {
    (void)state;
    const unsigned good[] = {0, 4, 4, 0, 2}, block[] = {0, 4, 4, 12, 2}, element[] = {0, 4, 8, 0, 2},
                   inner[] = {0, 4, 4, 0, 7};
    fc_filter filter;
    assert_true(fc_filter_parse(FC_FILTER_BITSHUFFLE, good, 5, 4, &filter));
    assert_true(fc_filter_compresses(&filter));
    assert_true(fc_filter_parse(FC_FILTER_BITSHUFFLE, good, 3, 4, &filter));
    assert_false(fc_filter_compresses(&filter));
    assert_false(fc_filter_parse(FC_FILTER_BITSHUFFLE, good, 2, 4, &filter));
    assert_false(fc_filter_parse(FC_FILTER_BITSHUFFLE, block, 5, 4, &filter));
    assert_false(fc_filter_parse(FC_FILTER_BITSHUFFLE, element, 5, 4, &filter));
    assert_false(fc_filter_parse(FC_FILTER_BITSHUFFLE, inner, 5, 4, &filter));
    assert_false(fc_filter_parse(FC_FILTER_SHUFFLE, good, 0, 4, &filter));
    assert_false(fc_filter_parse(32013, good, 5, 4, &filter));
}

/* Blocks written by hand. A match may not begin before the first byte, and a length may not reach beyond the end. */
static void lies_of_blocks_are_refused(void **state) {
    (void)state;
    static const struct {
        fc_lz_fn decode;
        unsigned char in[8];
        size_t size, out;
        bool good;
    } blocks[] = {
        {fc_lzf_decode, {0, 'a', 0x20 | 0x40, 0}, 4, 6, true},           /* a, then 5 times the byte before */
        {fc_lzf_decode, {0, 'a', 0x20 | 0x40, 1}, 4, 6, false},          /* two before, where there is one */
        {fc_lzf_decode, {0, 'a', 0x20 | 0x40, 0}, 4, 5, false},          /* one byte too many */
        {fc_lzf_decode, {0, 'a', 0xe0, 255}, 4, 6, false},               /* a length without a distance */
        {fc_lzf_decode, {5, 'a'}, 2, 6, false},                          /* fewer literals than promised */
        {fc_lz4_decode, {0x11, 'a', 1, 0, 0x00}, 5, 6, true},            /* the same in LZ4 */
        {fc_lz4_decode, {0x11, 'a', 0, 0, 0x00}, 5, 6, false},           /* a distance of 0 */
        {fc_lz4_decode, {0x11, 'a', 2, 0, 0x00}, 5, 6, false},           /* before the start */
        {fc_lz4_decode, {0xf1, 255, 255, 255}, 4, 6, false},             /* a length without an end */
        {fc_lz4_decode, {0x1f, 'a', 1, 0, 255, 0}, 6, 6, false},         /* a match beyond the end */
        {fc_blosclz_decode, {0, 'a', 0x20 | 0x40, 0}, 4, 6, true},       /* a, then 5 times the byte before */
        {fc_blosclz_decode, {0, 'a', 0x5f, 255, 0}, 5, 6, false},        /* a far distance without its bytes */
        {fc_blosclz_decode, {0, 'a', 0x5f, 255, 0, 0}, 6, 6, false},     /* a far distance */
        {fc_blosclz_decode, {0, 'a', 0xe0, 255, 255, 255}, 6, 6, false}, /* a length without an end */
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        unsigned char *out = malloc(blocks[i].out);
        assert_non_null(out);
        if (blocks[i].decode(blocks[i].in, blocks[i].size, out, blocks[i].out) != blocks[i].good) {
            fail_msg("block %zu", i);
        }
        for (size_t k = 0; blocks[i].good && k < blocks[i].out; k++) {
            assert_int_equal(out[k], 'a');
        }
        free(out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_equal_what_was_written), cmocka_unit_test(damage_never_writes_outside),
        cmocka_unit_test(wrong_sizes_are_damage),        cmocka_unit_test(parameters_are_checked),
        cmocka_unit_test(lies_of_blocks_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
