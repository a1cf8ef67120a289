/*
 * Base64 encoder and decoder. See base64.h.
 */
#include "base/base64.h"

#include <stdint.h>
#include <string.h>

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

size_t fc_base64_length(size_t size) {
    size_t groups = size / 3 + (size % 3 != 0);
    return groups > SIZE_MAX / 4 ? SIZE_MAX : groups * 4;
}

void fc_base64_encode(const void *bytes, size_t size, char *out) {
    const unsigned char *s = bytes;
    for (size_t i = 0; i < size; i += 3) {
        uint32_t bits = (uint32_t)s[i] << 16;
        bits |= i + 1 < size ? (uint32_t)s[i + 1] << 8 : 0;
        bits |= i + 2 < size ? s[i + 2] : 0u;
        *out++ = digits[bits >> 18];
        *out++ = digits[bits >> 12 & 63];
        *out++ = i + 1 < size ? digits[bits >> 6 & 63] : '=';
        *out++ = i + 2 < size ? digits[bits & 63] : '=';
    }
}

static int value_of(char c) {
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

bool fc_base64_decode(const char *text, size_t length, unsigned char *out, size_t *size) {
    size_t n = 0;
    if (length % 4 != 0) {
        return false;
    }
    for (size_t i = 0; i < length; i += 4) {
        bool last = i + 4 == length;
        int pads = last && text[i + 3] == '=' ? 1 + (text[i + 2] == '=') : 0;
        uint32_t bits = 0;
        for (int k = 0; k < 4; k++) {
            int value = k < 4 - pads ? value_of(text[i + (size_t)k]) : 0;
            if (value < 0) {
                return false;
            }
            bits = bits << 6 | (uint32_t)value;
        }
        if (pads && (bits & (pads == 2 ? 0xffffu : 0xffu)) != 0) {
            return false; /* unused bits must be 0, or two texts would decode to the same bytes */
        }
        for (int k = 0; k < 3 - pads; k++) {
            out[n++] = (unsigned char)(bits >> (16 - 8 * k));
        }
    }
    *size = n;
    return true;
}
