#pragma once
/*
 * How much memory the processes of this machine can still use.
 */

#include <stdint.h>

/**
 * Returns the bytes that programs can still use without taking memory from each other: those of the machine, or of the
 * control group of this process or one above it if that has less. Cached files count as available.
 * @param root a folder with proc/ and sys/; "" for those of the system.
 * @return 0 if the system does not tell.
 */
uint64_t fc_available_memory(const char *root);
