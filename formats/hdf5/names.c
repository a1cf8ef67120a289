/*
 * Converts an element of a value's path to an HDF5 link name and back. HDF5 gives "/" and a lone "." a meaning and has
 * no empty names. Everything else stays unchanged, so that names look the same in h5py as in torch.
 */
#include "hdf5/names.h"
#include "fsdpckpt/try.h"

#include <stdint.h>
#include <string.h>

static const char *escape_of(char c) {
    switch (c) {
    case '/':
        return "%2F";
    case '%':
        return "%25";
    case '\0':
        return "%00";
    default:
        return NULL;
    }
}

char *fc_h5_name_encode(fc_arena *arena, const char *key, size_t len) {
    if (len == 0) {
        return fc_arena_strndup(arena, "%", 1);
    }
    if (len == 1 && key[0] == '.') {
        return fc_arena_strndup(arena, "%2E", 3);
    }
    size_t escapes = 0;
    for (size_t i = 0; i < len; i++) {
        escapes += escape_of(key[i]) != NULL;
    }
    if (escapes > (SIZE_MAX - len - 1) / 2) {
        return NULL;
    }
    char *link = fc_arena_alloc(arena, len + 2 * escapes + 1);
    char *at = link;
    for (size_t i = 0; link && i < len; i++) {
        const char *escape = escape_of(key[i]);
        if (escape) {
            memcpy(at, escape, 3);
            at += 3;
        } else {
            *at++ = key[i];
        }
    }
    if (link) {
        *at = '\0';
    }
    return link;
}

static fc_code refuse_link(const char *link, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT,
                   "the link name \"%s\" is not encoded by fsdpckpt: \"%%\" must start %%2F, %%25, or be a "
                   "whole name %%2E or %%",
                   link);
}

fc_code fc_h5_name_decode(fc_arena *arena, const char *link, const char **key, fc_error *err) {
    size_t len = strlen(link);
    if (len == 0 || strcmp(link, ".") == 0 || strchr(link, '/')) {
        return refuse_link(link, err);
    }
    char *out = fc_arena_alloc(arena, len + 1);
    FC_NEED(out, err, NULL);
    char *at = out;
    if (strcmp(link, "%2E") == 0) {
        *at++ = '.';
    } else if (strcmp(link, "%") != 0) {
        for (const char *p = link; *p; p++) {
            if (*p != '%') {
                *at++ = *p;
                continue;
            }
            if (strncmp(p, "%2F", 3) == 0) {
                *at++ = '/';
            } else if (strncmp(p, "%25", 3) == 0) {
                *at++ = '%';
            } else if (strncmp(p, "%00", 3) == 0) {
                return fc_fail(err, FC_EUNSUPPORTED, "the link name \"%s\" stands for a key with a NUL character",
                               link);
            } else {
                return refuse_link(link, err);
            }
            p += 2;
        }
    }
    *at = '\0';
    *key = out;
    return FC_OK;
}
