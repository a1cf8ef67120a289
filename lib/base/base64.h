/*
 * Base64 (RFC 4648, section 4), which carries bytes in JSON text.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** @return the number of characters that encode `size` bytes, or SIZE_MAX when that overflows. */
size_t fc_base64_length(size_t size);

/** Writes the fc_base64_length(size) characters that encode `bytes` to `out`. Does not append a NUL. */
void fc_base64_encode(const void *bytes, size_t size, char *out);

/**
 * Decodes `length` characters of padded base64 without line breaks.
 * @param out receives at most length / 4 · 3 bytes.
 * @param size receives the number of decoded bytes.
 * @return false when the text is not canonical base64.
 */
bool fc_base64_decode(const char *text, size_t length, unsigned char *out, size_t *size);
