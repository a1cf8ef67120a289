/*
 * The checksums of tensors in a delta, as hexadecimal digits.
 */
#pragma once

#include "fsdpckpt/delta.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { FC_DELTA_DIGITS = 65 }; /**< those of blake3, with the final NUL */

/** Sums up bytes in order. It is aligned as XXH3 wants it. */
typedef struct fc_delta_sum {
    XXH3_state_t xxh3;
    unsigned long adler;
    fc_delta_checksum kind;
} fc_delta_sum;

void fc_delta_sum_begin(fc_delta_sum *sum, fc_delta_checksum kind);
void fc_delta_sum_add(fc_delta_sum *sum, const unsigned char *bytes, size_t size);
/** How many numbers another process needs to go on with a sum. */
enum { FC_DELTA_SUM_NUMBERS = 45 };

/** Saves a sum as numbers. @param bytes how many were added */
void fc_delta_sum_save(const fc_delta_sum *sum, uint64_t bytes, uint64_t numbers[FC_DELTA_SUM_NUMBERS]);

/** Begins a sum as it was saved. @return the bytes that were added; 0: the numbers are not those of one sum, or another
 *  version of the library made them, so it begins with nothing. */
uint64_t fc_delta_sum_load(fc_delta_sum *sum, fc_delta_checksum kind, const uint64_t numbers[FC_DELTA_SUM_NUMBERS]);

void fc_delta_sum_end(const fc_delta_sum *sum, char digits[FC_DELTA_DIGITS]);

/** Refuses a checksum that this build lacks. @param path for the message. */
fc_code fc_delta_checksum_check(fc_delta_checksum kind, const char *path, fc_error *err);

/** Finds a checksum by the name that the files use. @return false if there is none of this name. */
bool fc_delta_checksum_find(const char *name, fc_delta_checksum *out);
