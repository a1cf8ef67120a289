/*
 * Building JSON text, and checking text that comes from a file. Knows nothing about HDF5; used on both sides.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_TEXT_H
#define FSDPCKPT_FORMATS_HDF5_TEXT_H

#include <stdbool.h>
#include <stddef.h>

enum { FC_H5_MAX_TEXT = 64 << 20 };

/** Growing text; `failed` once out of memory or above FC_H5_MAX_TEXT. */
typedef struct fc_h5_text {
    char *data;
    size_t size, cap;
    bool failed;
} fc_h5_text;

void fc_h5_text_free(fc_h5_text *text);
void fc_h5_text_raw(fc_h5_text *text, const char *s);
void fc_h5_text_bytes(fc_h5_text *text, const void *s, size_t len);

/** A JSON string, or {"$bytes": base64} for what is not UTF-8. */
void fc_h5_text_string(fc_h5_text *text, const char *s, size_t len);

/** `len` bytes as a JSON string of base64. */
void fc_h5_text_base64(fc_h5_text *text, const unsigned char *p, size_t len);

/** Ends the text with a NUL that does not count. */
void fc_h5_text_nul(fc_h5_text *text);

/** Whether `s` is well-formed UTF-8. */
bool fc_h5_is_utf8(const char *s, size_t len);

/** Replaces what is not UTF-8 with question marks. */
void fc_h5_make_utf8(char *s);

/** Whether `s` is one JSON value (RFC 8259; numbers of any length, nesting up to 1000). */
bool fc_h5_is_json(const char *s, size_t len);

#endif
