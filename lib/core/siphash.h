/*
 * A keyed hash for tables whose keys come from a file.
 */
#ifndef FSDPCKPT_CORE_SIPHASH_H
#define FSDPCKPT_CORE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

/** SipHash-1-3 of `size` bytes. With a random key a file cannot be made whose strings all collide. */
uint64_t fc_siphash(const uint64_t key[2], const void *bytes, size_t size);

/** A random key; early in boot, an address: better than a constant. */
void fc_siphash_key(uint64_t key[2]);

#endif
