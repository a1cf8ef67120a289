/*
 * XXH3 and Adler-32 of the bytes of tensors. See checksum.h.
 */
#include "delta/checksum.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

static const char *const names[] = {
    [FC_DELTA_XXH3_128] = "xxh3-128", [FC_DELTA_ADLER32] = "adler32", [FC_DELTA_BLAKE3] = "blake3"};

const char *fc_delta_checksum_name(fc_delta_checksum checksum) {
    return names[checksum];
}

bool fc_delta_checksum_find(const char *name, fc_delta_checksum *out) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (fc_delta_checksum)i;
            return true;
        }
    }
    return false;
}

fc_code fc_delta_checksum_check(fc_delta_checksum kind, const char *path, fc_error *err) {
    return kind == FC_DELTA_BLAKE3 ? fc_fail(err, FC_EUNSUPPORTED,
                                             "%s: this build cannot compute blake3, which has no C library in Debian "
                                             "12; publish with xxh3-128 or adler32",
                                             path)
                                   : FC_OK;
}

void fc_delta_sum_begin(fc_delta_sum *sum, fc_delta_checksum kind) {
    memset(sum, 0, sizeof *sum);
    sum->kind = kind;
    sum->adler = adler32(0, NULL, 0);
    XXH3_128bits_reset(&sum->xxh3);
}

void fc_delta_sum_add(fc_delta_sum *sum, const unsigned char *bytes, size_t size) {
    if (sum->kind == FC_DELTA_ADLER32) {
        sum->adler = adler32_z(sum->adler, bytes, size);
    } else {
        XXH3_128bits_update(&sum->xxh3, bytes, size);
    }
}

/*
 * The parts of XXH3's state that its bytes change, in the order of the numbers. The rest is as after a reset without a
 * secret. The first number is a hash of the others, with the version of the library. It is not linear as CRCs are, so
 * it also tells numbers from those of several states that were combined.
 */
enum { HASH, LENGTH, ADLER, STRIPES, BUFFERED, SUMS, BUFFER = SUMS + 8 };
_Static_assert(BUFFER + XXH3_INTERNALBUFFER_SIZE / sizeof(uint64_t) == FC_DELTA_SUM_NUMBERS, "all of the state");

static uint64_t hash_numbers(const uint64_t *numbers) {
    return XXH3_64bits_withSeed(numbers + 1, (FC_DELTA_SUM_NUMBERS - 1) * sizeof *numbers, XXH_VERSION_NUMBER);
}

void fc_delta_sum_save(const fc_delta_sum *sum, uint64_t bytes, uint64_t numbers[FC_DELTA_SUM_NUMBERS]) {
    const XXH3_state_t *from = &sum->xxh3;
    numbers[LENGTH] = bytes;
    numbers[ADLER] = sum->adler;
    numbers[STRIPES] = from->nbStripesSoFar;
    numbers[BUFFERED] = from->bufferedSize;
    memcpy(numbers + SUMS, from->acc, sizeof from->acc);
    memcpy(numbers + BUFFER, from->buffer, sizeof from->buffer);
    numbers[HASH] = hash_numbers(numbers);
}

uint64_t fc_delta_sum_load(fc_delta_sum *sum, fc_delta_checksum kind, const uint64_t numbers[FC_DELTA_SUM_NUMBERS]) {
    fc_delta_sum_begin(sum, kind);
    if (numbers[HASH] != hash_numbers(numbers) || numbers[BUFFERED] > XXH3_INTERNALBUFFER_SIZE ||
        numbers[STRIPES] > sum->xxh3.nbStripesPerBlock) {
        return 0;
    }
    sum->adler = (unsigned long)numbers[ADLER];
    if (kind != FC_DELTA_ADLER32) {
        sum->xxh3.totalLen = numbers[LENGTH];
        sum->xxh3.nbStripesSoFar = (size_t)numbers[STRIPES];
        sum->xxh3.bufferedSize = (XXH32_hash_t)numbers[BUFFERED];
        memcpy(sum->xxh3.acc, numbers + SUMS, sizeof sum->xxh3.acc);
        memcpy(sum->xxh3.buffer, numbers + BUFFER, sizeof sum->xxh3.buffer);
    }
    return numbers[LENGTH];
}

void fc_delta_sum_end(const fc_delta_sum *sum, char digits[FC_DELTA_DIGITS]) {
    if (sum->kind == FC_DELTA_ADLER32) {
        snprintf(digits, FC_DELTA_DIGITS, "%08lx", sum->adler);
    } else {
        const XXH128_hash_t hash = XXH3_128bits_digest(&sum->xxh3);
        snprintf(digits, FC_DELTA_DIGITS, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash.high64, (uint64_t)hash.low64);
    }
}
