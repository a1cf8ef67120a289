/*
 * Base64 (RFC 4648, section 4): how bytes stand in JSON text.
 */
#ifndef FSDPCKPT_BASE_BASE64_H
#define FSDPCKPT_BASE_BASE64_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stdbool.h>
#include <stddef.h>

/** Characters that `size` bytes take; SIZE_MAX when that does not fit. */
size_t fc_base64_length(size_t size);

/** Writes the fc_base64_length(size) characters of `bytes` to `out`, without a NUL. */
void fc_base64_encode(const void *bytes, size_t size, char *out);

/**
 * Decodes `length` characters, with their padding and nothing between them.
 * @param out receives at most length / 4 · 3 bytes.
 * @return false when the text is no canonical base64.
 */
bool fc_base64_decode(const char *text, size_t length, unsigned char *out, size_t *size);

#endif
