/*
 * Text output: see text.h.
 */
#include "output/text.h"

#include "output/terminal.h"

#include <errno.h>
#include <langinfo.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void text_out_init(text_out *out, int fd) {
    out->fd = fd;
    out->error = 0;
    out->used = 0;
    out->put = NULL;
}

static void write_descriptor(text_out *out, const char *data, size_t size) {
    if (out->put) {
        out->error = size > 0 && out->error == 0 && !out->put(out->context, data, size) ? EIO : out->error;
        return;
    }
    if (out->fd == STDOUT_FILENO && size > 0) {
        terminal_end_line();
    }
    while (size > 0 && out->error == 0) {
        ssize_t n = write(out->fd, data, size);
        if (n < 0) {
            if (errno != EINTR) {
                out->error = errno;
            }
            continue;
        }
        data += n;
        size -= (size_t)n;
    }
}

int text_flush(text_out *out) {
    write_descriptor(out, out->buf, out->used);
    out->used = 0;
    return out->error;
}

void text_write(text_out *out, const void *data, size_t size) {
    if (size > sizeof out->buf - out->used) {
        text_flush(out);
        if (size > sizeof out->buf) {
            write_descriptor(out, data, size);
            return;
        }
    }
    memcpy(out->buf + out->used, data, size);
    out->used += size;
}

void text_puts(text_out *out, const char *s) {
    text_write(out, s, strlen(s));
}

void text_printf(text_out *out, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    size_t room = sizeof out->buf - out->used;
    int n = vsnprintf(out->buf + out->used, room, fmt, args);
    va_end(args);
    if (n < 0) {
        out->error = EINVAL;
        return;
    }
    if ((size_t)n < room) {
        out->used += (size_t)n;
        return;
    }
    char *big = malloc((size_t)n + 1);
    if (!big) {
        out->error = ENOMEM;
        return;
    }
    va_start(args, fmt);
    vsnprintf(big, (size_t)n + 1, fmt, args);
    va_end(args);
    text_write(out, big, (size_t)n);
    free(big);
}

/* Without printf, which is slow for the ten million numbers of a million chunks. */
static void write_digits(text_out *out, bool negative, uint64_t n) {
    char digits[24];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + n % 10);
        n /= 10;
    } while (n);
    if (negative) {
        digits[--at] = '-';
    }
    text_write(out, digits + at, sizeof digits - at);
}

void text_int(text_out *out, int64_t n) {
    write_digits(out, n < 0, n < 0 ? 0 - (uint64_t)n : (uint64_t)n);
}

void text_uint(text_out *out, uint64_t n) {
    write_digits(out, false, n);
}

void text_repeat(text_out *out, const char *s, size_t count) {
    size_t len = strlen(s);
    for (size_t i = 0; i < count; i++) {
        text_write(out, s, len);
    }
}

size_t text_utf8(const char *s, uint32_t *code) {
    const unsigned char *u = (const unsigned char *)s;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t len = u[0] < 0x80 ? 1 : u[0] < 0xc2 ? 0 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : u[0] < 0xf5 ? 4 : 0;
    if (len <= 1) {
        *code = u[0];
        return len;
    }
    uint32_t value = u[0] & (0x7fU >> len);
    for (size_t i = 1; i < len; i++) {
        if ((u[i] & 0xc0) != 0x80) { /* stops at the terminating NUL as well */
            return 0;
        }
        value = value << 6 | (u[i] & 0x3fU);
    }
    *code = value;
    return value < least[len] || (value >= 0xd800 && value < 0xe000) || value > 0x10ffff ? 0 : len;
}

typedef struct span {
    uint32_t first, last;
} span;

static bool in_spans(uint32_t code, const span *spans, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (code >= spans[i].first && code <= spans[i].last) {
            return true;
        }
    }
    return false;
}

bool text_is_unsafe(uint32_t code) {
    static const span unsafe[] = {{0x00, 0x1f},     {0x7f, 0x9f},     {0x61c, 0x61c},
                                  {0x200b, 0x200f}, {0x2028, 0x202e}, {0x2060, 0x206f},
                                  {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe007f}};
    return in_spans(code, unsafe, sizeof unsafe / sizeof *unsafe);
}

/* @return the columns of a printable character. The ranges are whole blocks of wide and combining characters, which
 * aligns names in all common scripts without a full Unicode table.
 */
static size_t columns_of(uint32_t code) {
    static const span combining[] = {{0x300, 0x36f},   {0x483, 0x489},   {0x591, 0x5bd},    {0x610, 0x61a},
                                     {0x64b, 0x65f},   {0x93c, 0x93c},   {0x941, 0x948},    {0xe31, 0xe31},
                                     {0xe34, 0xe3a},   {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff},  {0x20d0, 0x20ff},
                                     {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0xe0100, 0xe01ef}};
    static const span wide[] = {{0x1100, 0x115f},   {0x231a, 0x231b},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},
                                {0xa960, 0xa97f},   {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},
                                {0xff00, 0xff60},   {0xffe0, 0xffe6},   {0x16fe0, 0x18aff}, {0x1b000, 0x1b2ff},
                                {0x1f300, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f900, 0x1f9ff}, {0x1fa70, 0x1faff},
                                {0x20000, 0x3fffd}};
    if (code < 0x300) {
        return 1;
    }
    if (in_spans(code, combining, sizeof combining / sizeof *combining)) {
        return 0;
    }
    return in_spans(code, wide, sizeof wide / sizeof *wide) ? 2 : 1;
}

static size_t escape_byte(char byte, char escape[16], size_t *width) {
    *width = (size_t)snprintf(escape, 16, "\\x%02x", (unsigned)(unsigned char)byte);
    return 1;
}

/* Reads one character of a name. @return its bytes; `escape` receives its replacement, or "" if it is printable. */
static size_t name_step(const char *s, char escape[16], size_t *width) {
    uint32_t code;
    size_t len = text_utf8(s, &code);
    escape[0] = '\0';
    if (len == 0) {
        return escape_byte(*s, escape, width);
    }
    if (text_is_unsafe(code)) {
        *width = (size_t)snprintf(escape, 16,
                                  code < 0x80      ? "\\x%02x"
                                  : code < 0x10000 ? "\\u%04x"
                                                   : "\\U%08x",
                                  (unsigned)code);
        return len;
    }
    *width = columns_of(code);
    return len;
}

/* @return whether a line of CI logs ignores the character at its start. */
static bool is_blank(uint32_t code) {
    static const span blanks[] = {{' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
                                  {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
    return in_spans(code, blanks, sizeof blanks / sizeof *blanks);
}

/* @return the bytes of the blanks at the start. */
static size_t skip_blanks(const char *name) {
    size_t at = 0;
    uint32_t code;
    for (size_t len; (len = text_utf8(name + at, &code)) > 0 && is_blank(code);) {
        at += len;
    }
    return at;
}

bool text_is_second_hash(const char *start, const char *at) {
    return *at == '#' && at > start && at[-1] == '#';
}

/*
 * Whether a character makes a line of a log a command. GitHub obeys lines that begin with "::" after blanks, and a name
 * may begin a line. GitHub and Azure obey "##[" and "##vso[" anywhere, TeamCity "##teamcity[".
 * @param first the place after the blanks at the start.
 */
static bool is_command(const char *name, size_t first, size_t at) {
    return (name[at] == ':' && at == first) || text_is_second_hash(name, name + at);
}

static size_t walk_name(text_out *out, const char *whole) {
    char escape[16];
    size_t total = 0;
    const size_t first = skip_blanks(whole);
    for (const char *name = whole; *name;) {
        /* Nearly every name is plain ASCII, and is written at once. */
        size_t plain = 0;
        while (name[plain] >= 0x20 && name[plain] < 0x7f && !is_command(whole, first, (size_t)(name - whole) + plain)) {
            plain++;
        }
        if (plain > 0) {
            if (out) {
                text_write(out, name, plain);
            }
            total += plain;
            name += plain;
            continue;
        }
        size_t width;
        const bool command = is_command(whole, first, (size_t)(name - whole));
        size_t len = command ? escape_byte(*name, escape, &width) : name_step(name, escape, &width);
        if (out && escape[0]) {
            text_puts(out, escape);
        } else if (out) {
            text_write(out, name, len);
        }
        total += width;
        name += len;
    }
    return total;
}

void text_name(text_out *out, const char *name) {
    walk_name(out, name);
}

void text_name_in(text_out *out, const char *before, const char *name, const char *after) {
    text_puts(out, before);
    text_name(out, name);
    text_puts(out, after);
}

void text_html_in(text_out *out, const char *before, const char *s, const char *after) {
    text_puts(out, before);
    text_html(out, s);
    text_puts(out, after);
}

void text_html(text_out *out, const char *s) {
    char escape[16];
    while (*s) {
        size_t plain = 0, width;
        while (s[plain] >= 0x20 && s[plain] < 0x7f && !strchr("<>&\"'", s[plain])) {
            plain++;
        }
        text_write(out, s, plain);
        s += plain;
        if (!*s) {
            return;
        }
        size_t len = name_step(s, escape, &width);
        if (strchr("<>&\"'", *s)) {
            text_printf(out, "&#%d;", *s);
        } else if (escape[0]) {
            text_puts(out, escape);
        } else {
            text_write(out, s, len);
        }
        s += len;
    }
}

void text_name_padded(text_out *out, const char *name, size_t width) {
    size_t used = walk_name(out, name);
    text_repeat(out, " ", used < width ? width - used : 0);
}

size_t text_name_width(const char *name) {
    return walk_name(NULL, name);
}

const char *text_color(int fd, text_color_name color) {
    static const char *const codes[] = {
        [TEXT_PLAIN] = "\x1b[0m", [TEXT_ERROR] = "\x1b[1;31m", [TEXT_WARNING] = "\x1b[1;33m"};
    return terminal_has_color(fd) ? codes[color] : "";
}

/* Prints a line on stderr; `color` applies to "fsdpckpt:" or "warning:". */
static void report_line(const char *line, text_color_name color) {
    static const char warning[] = "warning:";
    text_out *out = malloc(sizeof *out);
    if (!out) {
        fputs("fsdpckpt: out of memory\n", stderr);
        return;
    }
    text_out_init(out, STDERR_FILENO);
    text_puts(out, color == TEXT_ERROR ? text_color(STDERR_FILENO, color) : "");
    text_puts(out, "fsdpckpt:");
    text_puts(out, color == TEXT_ERROR ? text_color(STDERR_FILENO, TEXT_PLAIN) : "");
    text_puts(out, " ");
    if (strncmp(line, warning, sizeof warning - 1) == 0) {
        text_puts(out, text_color(STDERR_FILENO, TEXT_WARNING));
        text_puts(out, warning);
        text_puts(out, text_color(STDERR_FILENO, TEXT_PLAIN));
        line += sizeof warning - 1;
    }
    text_name(out, line);
    text_puts(out, "\n");
    terminal_write_lines(out->buf, out->used);
    free(out);
}

void text_report(const char *fmt, ...) {
    char *line = NULL;
    va_list args;
    va_start(args, fmt);
    if (vasprintf(&line, fmt, args) >= 0) {
        report_line(line, TEXT_PLAIN);
        free(line);
    } else {
        fputs("fsdpckpt: out of memory\n", stderr);
    }
    va_end(args);
}

void text_report_error(const char *message) {
    report_line(message, TEXT_ERROR);
}

bool text_ends_with(const char *s, const char *end) {
    size_t a = strlen(s), b = strlen(end);
    return a >= b && strcmp(s + a - b, end) == 0;
}

bool text_is_utf8(void) {
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

const char *text_bytes(char *buf, uint64_t bytes) {
    static const char *const units[] = {"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    /* Three digits and a decimal point, without printf, which is slow for long lists of chunks. */
    int decimals = unit == 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    unsigned digits = (unsigned)nearbyint(decimals == 2 ? value * 100 : decimals == 1 ? value * 10 : value);
    char *to = buf;
    for (unsigned place = digits < 10    ? 1
                          : digits < 100 ? 10
                                         : 100,
                  left = digits < 10    ? 1
                         : digits < 100 ? 2
                                        : 3;
         place > 0; place /= 10, left--) {
        if ((int)left == decimals && decimals > 0) {
            *to++ = '.';
        }
        *to++ = (char)('0' + digits / place % 10);
    }
    *to++ = ' ';
    strcpy(to, bytes == 1 ? "byte" : units[unit]);
    return buf;
}

const char *text_count(char *buf, uint64_t n) {
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    char *to = buf;
    for (int i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0) {
            *to++ = ',';
        }
        *to++ = digits[i];
    }
    *to = '\0';
    return buf;
}

const char *text_params(char *buf, uint64_t n) {
    if (n < 1000000) {
        return text_count(buf, n);
    }
    double value = (double)n / 1e6;
    const char *unit = "million";
    if (value >= 999.5) {
        value /= 1000;
        unit = "billion";
    }
    snprintf(buf, TEXT_SIZE_MAX, "%.*f %s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, unit);
    return buf;
}

const char *text_shape(char *buf, size_t size, int ndim, const int64_t *shape) {
    size_t used = 0;
    if (ndim == 0) {
        snprintf(buf, size, "scalar");
        return buf;
    }
    for (int i = 0; i < ndim; i++) {
        int n = snprintf(buf + used, size - used, "%s%lld", i ? "×" : "", (long long)shape[i]);
        if (n < 0 || (size_t)n >= size - used) {
            memcpy(buf + (used + 4 > size ? size - 4 : used), "…", 4);
            return buf;
        }
        used += (size_t)n;
    }
    return buf;
}
