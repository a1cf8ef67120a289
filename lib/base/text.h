/*
 * Building JSON text, and checking text that comes from a file.
 */
#ifndef FSDPCKPT_BASE_TEXT_H
#define FSDPCKPT_BASE_TEXT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stdbool.h>
#include <stddef.h>

enum { FC_MAX_TEXT = 64 << 20 };

/** Growing text; `failed` once out of memory or above FC_MAX_TEXT. */
typedef struct fc_text {
    char *data;
    size_t size, cap;
    bool failed;
} fc_text;

void fc_text_free(fc_text *text);
void fc_text_raw(fc_text *text, const char *s);
void fc_text_bytes(fc_text *text, const void *s, size_t len);

/** A JSON string, or {"$bytes": base64} for what is not UTF-8. */
void fc_text_string(fc_text *text, const char *s, size_t len);

/** `len` bytes as a JSON string of base64. */
void fc_text_base64(fc_text *text, const unsigned char *p, size_t len);

/** Ends the text with a NUL that does not count. */
void fc_text_nul(fc_text *text);

/** Whether `s` is well-formed UTF-8. */
bool fc_is_utf8(const char *s, size_t len);

/** Whether `s` can be a name: UTF-8 without NUL. Python's text may have either, and surrogates. */
bool fc_is_plain_text(const char *s, size_t len);

/** Replaces what is not UTF-8 with question marks. */
void fc_make_utf8(char *s);

/** Whether `s` is one JSON value (RFC 8259; numbers of any length, nesting up to 1000). */
bool fc_is_json(const char *s, size_t len);

#endif
