/*
 * Builds JSON text, and checks text that comes from a file.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** The most bytes that a text can have. */
enum { FC_MAX_TEXT = 64 << 20 };

/** Text that grows as it is built. Start with {0}; end with fc_text_free. */
typedef struct fc_text {
    char *data;       /**< owned, from malloc */
    size_t size, cap; /**< bytes in use and bytes allocated */
    bool failed;      /**< out of memory, or longer than FC_MAX_TEXT; everything appended later is ignored */
    bool no_memory;   /**< it failed because it was out of memory */
} fc_text;

void fc_text_free(fc_text *text);

/** Appends a string without escaping it. */
void fc_text_raw(fc_text *text, const char *s);

/** Appends `len` bytes without escaping them. */
void fc_text_bytes(fc_text *text, const void *s, size_t len);

/** Appends `len` bytes as a JSON string, or as {"$bytes": base64} when they are not UTF-8. */
void fc_text_string(fc_text *text, const char *s, size_t len);

/** Appends `len` bytes as a JSON string of base64. */
void fc_text_base64(fc_text *text, const unsigned char *p, size_t len);

/** Ends the text with a NUL that `size` does not count. A text that failed becomes empty. */
void fc_text_nul(fc_text *text);

/** @return whether `s` is well-formed UTF-8. */
bool fc_is_utf8(const char *s, size_t len);

/** @return whether `s` can be a name: UTF-8 without NUL. Python strings may contain NULs and lone surrogates. */
bool fc_is_plain_text(const char *s, size_t len);

/** Replaces every byte that is not part of valid UTF-8 with a question mark. */
void fc_make_utf8(char *s);

/** @return whether `s` is exactly one JSON value (RFC 8259), nested at most 1000 deep. Numbers may have any length. */
bool fc_is_json(const char *s, size_t len);
