/*
 * Text output for terminals, pipes and files: a buffered writer that keeps its first error, the display width of UTF-8,
 * safe names, and readable sizes.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A buffered descriptor. After the first error (`error` is its errno) everything else is discarded. */
typedef struct text_out {
    int fd;
    int error;
    size_t used;
    bool (*put)(void *context, const void *bytes, size_t size); /**< takes the bytes; NULL: they go to `fd` */
    void *context;                                              /**< of `put` */
    char buf[1 << 16];
} text_out;

void text_out_init(text_out *out, int fd);
void text_write(text_out *out, const void *data, size_t size);
void text_puts(text_out *out, const char *s);
void text_printf(text_out *out, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void text_int(text_out *out, int64_t n);
void text_uint(text_out *out, uint64_t n);
/** Writes `s` `count` times. */
void text_repeat(text_out *out, const char *s, size_t count);
/** @return 0, or the errno of the first write that failed. */
int text_flush(text_out *out);

/**
 * Writes a name from a checkpoint. Control characters, invalid UTF-8 and characters that reorder the line are escaped,
 * so that a hostile name cannot move the cursor or hide text; and so is what would make a line a command of GitHub,
 * Azure or TeamCity: a colon at the start, and the second "#" of "##".
 */
void text_name(text_out *out, const char *name);
/** Writes a name as text_name does, between two texts. */
void text_name_in(text_out *out, const char *before, const char *name, const char *after);
/** @return whether `*at` is the second "#" of "##" in the text at `start`: see text_name. */
bool text_is_second_hash(const char *start, const char *at);
/** Writes a name or a value as HTML text or attribute, with the same escapes as text_name. */
void text_html(text_out *out, const char *s);
void text_html_in(text_out *out, const char *before, const char *s, const char *after);
/** Writes a name like text_name, then spaces up to `width` columns. */
void text_name_padded(text_out *out, const char *name, size_t width);
/** @return the number of columns that text_name fills. */
size_t text_name_width(const char *name);

/** Prints one line on stderr: "fsdpckpt: ", then the text with the escapes of text_name. */
void text_report(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

typedef enum text_color_name { TEXT_PLAIN, TEXT_ERROR, TEXT_WARNING } text_color_name;

/**
 * @return the escape sequence that starts a color on `fd` (stdout or stderr); TEXT_PLAIN ends it. "" without colors.
 */
const char *text_color(int fd, text_color_name color);

/** Prints the error that ends the command on stderr. */
void text_report_error(const char *message);

/**
 * Decodes one UTF-8 sequence of `s` (NUL-terminated) into `*code`. @return its length, or 0 if it is invalid, a
 * surrogate or overlong.
 */
size_t text_utf8(const char *s, uint32_t *code);
/** @return whether a character must not reach a terminal: C0, DEL, C1, line separators, changes of text direction. */
bool text_is_unsafe(uint32_t code);

bool text_ends_with(const char *s, const char *end);

/** Whether the locale uses UTF-8, which has line-drawing characters. */
bool text_is_utf8(void);

enum { TEXT_SIZE_MAX = 32 };
/** "1.23 GB" (powers of 1000), into `buf` of TEXT_SIZE_MAX. @return buf. */
const char *text_bytes(char *buf, uint64_t bytes);
/** "1,234,567", into `buf` of TEXT_SIZE_MAX. @return buf. */
const char *text_count(char *buf, uint64_t n);
/** "8.03 billion", "124 million", "512": a number of parameters. @return buf. */
const char *text_params(char *buf, uint64_t n);
/** "64×32" ("scalar" for no dimensions), cut with "…" when longer than `size`. @return buf. */
const char *text_shape(char *buf, size_t size, int ndim, const int64_t *shape);
