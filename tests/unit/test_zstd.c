/*
 * Zstandard against libzstd itself: frames and streams in steps of any size, frames that lie about their length, a
 * bomb, and frames that are made without a search.
 */
#include "codec/zstd.h"
#include "codec/zstd_runs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include <cmocka.h>

enum { SIZE = 300000, ROOM = 400000, SMALL = 7, LEVEL = 3 };

typedef struct buffers {
    unsigned char *plain, *packed, *decoded;
    size_t packed_size;
} buffers;

/* Bytes that compress, but not to nothing. */
static int set_up(void **state) {
    buffers *b = calloc(1, sizeof *b);
    assert_non_null(b);
    b->plain = malloc(SIZE);
    b->packed = malloc(ROOM);
    b->decoded = malloc(SIZE);
    assert_true(b->plain && b->packed && b->decoded);
    for (size_t i = 0; i < SIZE; i++) {
        b->plain[i] = (unsigned char)((i * 2654435761U >> 13) & (i % 3 ? 0xff : 0x07));
    }
    b->packed_size = ZSTD_compress(b->packed, ROOM, b->plain, SIZE, LEVEL);
    assert_false(ZSTD_isError(b->packed_size));
    *state = b;
    return 0;
}

static int tear_down(void **state) {
    buffers *b = *state;
    free(b->plain);
    free(b->packed);
    free(b->decoded);
    free(b);
    return 0;
}

static void frame_decodes_to_its_size_only(void **state) {
    buffers *b = *state;
    fc_error err;
    assert_int_equal(fc_zstd_decode(b->packed, b->packed_size, b->decoded, SIZE, &err), FC_OK);
    assert_memory_equal(b->decoded, b->plain, SIZE);
    assert_int_equal(fc_zstd_decode(b->packed, b->packed_size, b->decoded, SIZE - 1, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "more than the 299999 bytes"));
    assert_int_equal(fc_zstd_decode(b->packed, b->packed_size - 1, b->decoded, SIZE, &err), FC_ECORRUPT);
    size_t little = ZSTD_compress(b->packed, ROOM, b->plain, 1000, LEVEL);
    assert_int_equal(fc_zstd_decode(b->packed, little, b->decoded, SIZE, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "1000 bytes instead of 300000"));
}

/* Decodes with `in_step` and `out_step` bytes at a time. @return the decoded bytes; 0 if the stream does not end. */
static size_t decode_in_steps(const buffers *b, size_t in_step, size_t out_step) {
    fc_zstd_decoder *decoder;
    fc_error err;
    assert_int_equal(fc_zstd_decoder_new(&decoder, &err), FC_OK);
    size_t in = 0, out = 0;
    fc_zstd_step step = {0};
    do {
        const size_t give = b->packed_size - in < in_step ? b->packed_size - in : in_step;
        const size_t room = SIZE - out < out_step ? SIZE - out : out_step;
        assert_int_equal(fc_zstd_decode_step(decoder, b->packed + in, give, b->decoded + out, room, &step, &err),
                         FC_OK);
        in += step.taken;
        out += step.made;
    } while (!step.finished && (step.taken > 0 || step.made > 0));
    fc_zstd_decoder_free(decoder);
    return step.finished ? out : 0;
}

static void stream_decodes_in_steps_of_any_size(void **state) {
    buffers *b = *state;
    const size_t steps[] = {SMALL, 4096, SIZE};
    for (size_t i = 0; i < 3; i++) {
        for (size_t k = 0; k < 3; k++) {
            memset(b->decoded, 0, SIZE);
            assert_int_equal(decode_in_steps(b, steps[i], steps[k]), SIZE);
            assert_memory_equal(b->decoded, b->plain, SIZE);
        }
    }
    b->packed_size /= 2;
    assert_int_equal(decode_in_steps(b, 4096, 4096), 0);
}

static void damage_and_large_windows_are_refused(void **state) {
    buffers *b = *state;
    fc_zstd_decoder *decoder;
    fc_zstd_step step;
    fc_error err;
    assert_int_equal(fc_zstd_decoder_new(&decoder, &err), FC_OK);
    const unsigned char window[] = {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0}; /* its header asks for 1 GiB */
    assert_int_equal(fc_zstd_decode_step(decoder, window, sizeof window, b->decoded, SIZE, &step, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "window of more than 128 MiB"));
    fc_zstd_decoder_reset(decoder);
    assert_int_equal(fc_zstd_decode_step(decoder, b->plain, SIZE, b->decoded, SIZE, &step, &err), FC_ECORRUPT);
    fc_zstd_decoder_free(decoder);
}

/* Whether the frame of `size` bytes says its size, and a window that is as large as libzstd's or the content. */
static void check_frame_header(const buffers *b, size_t size) {
    uint64_t window, content;
    const size_t made = ZSTD_compress(b->packed, ROOM, b->plain, size, LEVEL);
    assert_true(fc_zstd_frame(b->packed, made < 18 ? made : 18, &window, &content));
    assert_int_equal(content, ZSTD_getFrameContentSize(b->packed, made));
    assert_int_equal(content, size);
    assert_true(window >= size || window >= 1 << 17);
    assert_false(fc_zstd_frame(b->packed, 5, &window, &content));
}

static void headers_of_frames_are_read(void **state) {
    const buffers *b = *state;
    const unsigned char large[] = {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa1};
    uint64_t window, content;
    for (size_t size = 0; size <= 256; size++) {
        check_frame_header(b, size);
    }
    check_frame_header(b, 65535 + 256);
    check_frame_header(b, SIZE);
    assert_true(fc_zstd_frame(large, sizeof large, &window, &content));
    assert_int_equal(window, (1 << 30) + (1 << 27));
    assert_int_equal(content, UINT64_MAX);
    assert_false(fc_zstd_frame(b->plain, 18, &window, &content));
}

/* Encodes in steps. @return the size of the frame. */
static size_t encode_in_steps(const buffers *b, fc_zstd_encoder *encoder, size_t in_step, size_t out_step) {
    fc_error err;
    assert_int_equal(fc_zstd_encoder_begin(encoder, SIZE, &err), FC_OK);
    size_t in = 0, out = 0;
    for (fc_zstd_step step = {0}; !step.finished;) {
        const size_t give = SIZE - in < in_step ? SIZE - in : in_step;
        const size_t room = ROOM - out < out_step ? ROOM - out : out_step;
        assert_int_equal(
            fc_zstd_encode_step(encoder, b->plain + in, give, in + give == SIZE, b->packed + out, room, &step, &err),
            FC_OK);
        in += step.taken;
        out += step.made;
    }
    return out;
}

static void encoder_makes_frames_that_libzstd_decodes(void **state) {
    buffers *b = *state;
    fc_zstd_encoder *encoder;
    fc_error err;
    assert_int_equal(fc_zstd_encoder_new(LEVEL, &encoder, &err), FC_OK);
    const size_t steps[] = {SIZE, 4096, SMALL};
    size_t sizes[3];
    for (size_t i = 0; i < 3; i++) {
        sizes[i] = encode_in_steps(b, encoder, steps[i], steps[i]);
        assert_int_equal(ZSTD_getFrameContentSize(b->packed, sizes[i]), SIZE);
        assert_int_equal(ZSTD_decompress(b->decoded, SIZE, b->packed, sizes[i]), SIZE);
        assert_memory_equal(b->decoded, b->plain, SIZE);
    }
    assert_int_equal(sizes[1], sizes[2]); /* the frame does not depend on the steps of the caller's output */
    fc_zstd_encoder_free(encoder);
}

/* Fills bytes of which one of `each` is not 0; 0: none is. They come in groups with gaps of any length. */
static void make_sparse(unsigned char *bytes, size_t size, unsigned each) {
    uint32_t random = each + 1;
    memset(bytes, 0, size);
    for (size_t i = 0; i < size && each > 0; i++) {
        random = random * 1664525U + 1013904223U;
        bytes[i] = (random >> 8) % each == 0 ? (unsigned char)(random >> 24 | 1) : 0;
    }
}

/* Compares the changes of a block with what a loop over its bytes says. */
static void check_changes(const unsigned char *old, const unsigned char *made, size_t size) {
    static fc_change changes[FC_MOST_CHANGES];
    size_t bytes, differ = 0, n = 0, end = 0;
    const size_t count = fc_find_changes(old, made, size, changes, &bytes);
    for (size_t i = 0; i < size; i++) {
        if ((old ? old[i] : 0) == made[i]) {
            continue;
        }
        differ++;
        if (n == 0 || i >= end + FC_CHANGE_GAP) {
            assert_true(n < count);
            assert_int_equal(changes[n++].begin, i);
        }
        end = i + 1;
        assert_true(changes[n - 1].end >= end);
        assert_int_equal(made[changes[n - 1].end - 1] != (old ? old[changes[n - 1].end - 1] : 0), 1);
    }
    assert_int_equal(n, count);
    assert_int_equal(bytes, differ);
}

static void changes_are_those_that_a_plain_comparison_finds(void **state) {
    const buffers *b = *state;
    const unsigned shares[] = {0, 1, 2, 3, 5, 7, 100, 5000};
    for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) {
        make_sparse(b->decoded, FC_CHANGE_BLOCK, shares[k]);
        for (size_t i = 0; i < FC_CHANGE_BLOCK; i++) {
            b->packed[i] = b->plain[i] ^ b->decoded[i];
        }
        for (size_t size = 0; size <= 200; size++) {
            check_changes(NULL, b->decoded + size, size);
            check_changes(b->plain + size, b->packed + size, size);
        }
        check_changes(NULL, b->decoded, FC_CHANGE_BLOCK);
        check_changes(b->plain, b->packed, FC_CHANGE_BLOCK);
    }
    memset(b->decoded, 0, FC_CHANGE_BLOCK);
    for (size_t i = 0; i < FC_CHANGE_BLOCK; i += FC_CHANGE_GAP + 1) {
        b->decoded[i] = 1; /* as many changes as there can be */
    }
    check_changes(NULL, b->decoded, FC_CHANGE_BLOCK);
}

/* @return the size of the frame of b->plain. */
static size_t encode_runs(const buffers *b, fc_zstd_runs *encoder, size_t size) {
    static fc_change changes[FC_MOST_CHANGES];
    size_t out = FC_ZSTD_RUNS_HEADER;
    fc_error err;
    fc_zstd_runs_begin(size, b->packed);
    for (size_t at = 0; at < size; at += FC_CHANGE_BLOCK) {
        const size_t some = size - at < FC_CHANGE_BLOCK ? size - at : FC_CHANGE_BLOCK;
        size_t bytes, made;
        const size_t count = fc_find_changes(NULL, b->plain + at, some, changes, &bytes);
        assert_true(out + FC_ZSTD_RUNS_MOST <= ROOM);
        assert_int_equal(fc_zstd_runs_block(encoder, b->plain + at, some, changes, count, at + some == size,
                                            b->packed + out, &made, &err),
                         FC_OK);
        out += made;
    }
    return out;
}

static void frames_without_a_search_are_those_of_their_bytes(void **state) {
    const buffers *b = *state;
    const unsigned shares[] = {0, 1, 2, 5, 7, 100, 5000};
    const size_t sizes[] = {1,
                            2,
                            3,
                            4,
                            5,
                            63,
                            64,
                            1000,
                            FC_CHANGE_BLOCK - 1,
                            FC_CHANGE_BLOCK,
                            FC_CHANGE_BLOCK + 1,
                            2 * FC_CHANGE_BLOCK - 7};
    fc_zstd_runs *encoder;
    fc_error err;
    if (!fc_zstd_runs_is_built_in()) {
        assert_int_equal(fc_zstd_runs_new(&encoder, &err), FC_EUNSUPPORTED);
        return;
    }
    assert_int_equal(fc_zstd_runs_new(&encoder, &err), FC_OK);
    for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) {
        make_sparse(b->plain, SIZE, shares[k]);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const size_t made = encode_runs(b, encoder, sizes[i]);
            assert_int_equal(ZSTD_getFrameContentSize(b->packed, made), sizes[i]);
            assert_int_equal(ZSTD_decompress(b->decoded, SIZE, b->packed, made), sizes[i]);
            assert_memory_equal(b->decoded, b->plain, sizes[i]);
            assert_true(made <= ZSTD_compress(b->decoded, SIZE, b->plain, sizes[i], 1) + 64);
        }
    }
    fc_zstd_runs_free(encoder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(frame_decodes_to_its_size_only, set_up, tear_down),
        cmocka_unit_test_setup_teardown(stream_decodes_in_steps_of_any_size, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damage_and_large_windows_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(headers_of_frames_are_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(encoder_makes_frames_that_libzstd_decodes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(changes_are_those_that_a_plain_comparison_finds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(frames_without_a_search_are_those_of_their_bytes, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
