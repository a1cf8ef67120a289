/*
 * Finds which bytes of two versions differ. A few bytes of many do, at random places, so a branch for each of them
 * costs more than all comparisons.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    FC_CHANGE_BLOCK = 128 << 10, /**< the most bytes that are compared at once */
    FC_CHANGE_GAP = 4,           /**< two changes are at least so many bytes apart */
    FC_MOST_CHANGES = FC_CHANGE_BLOCK / (FC_CHANGE_GAP + 1) + 1
};

/** The first and the last byte differ; of those between them, at most FC_CHANGE_GAP - 1 in a row do not. */
typedef struct fc_change {
    uint32_t begin, end;
} fc_change;

/** Stores the difference of two versions, `a ^ b`. @param out may be `a`. */
void fc_difference(unsigned char *out, const unsigned char *a, const unsigned char *b, size_t size);

/**
 * Finds the changes of a block, in order.
 * @param old     NULL: all its bytes are 0.
 * @param size    at most FC_CHANGE_BLOCK.
 * @param changes receives them: room for FC_MOST_CHANGES.
 * @param bytes   receives how many bytes differ.
 * @return how many changes there are.
 */
size_t fc_find_changes(const unsigned char *old, const unsigned char *made, size_t size, fc_change *changes,
                       size_t *bytes);
