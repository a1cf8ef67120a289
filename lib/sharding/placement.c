/*
 * Placements as text, in the form that DTensor users write. HDF5 attributes contain this form, so the parser accepts
 * only it and torch's own repr.
 */
#include "base/file_name.h"
#include "fsdpckpt/mesh.h"
#include "sharding/recorded.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Appends like snprintf: *used also counts the bytes that do not fit. */
static void append(char *buf, int size, int *used, const char *text) {
    int len = (int)strlen(text);
    if (*used < size) {
        snprintf(buf + *used, (size_t)(size - *used), "%s", text);
    }
    *used += len;
}

int fc_placements_format(int count, const fc_placement *placements, char *buf, int size) {
    int used = 0;
    append(buf, size, &used, "[");
    for (int i = 0; i < count; i++) {
        const fc_placement *p = &placements[i];
        char text[64];
        switch (p->kind) {
        case FC_REPLICATE:
            snprintf(text, sizeof text, "Replicate()");
            break;
        case FC_SHARD:
            snprintf(text, sizeof text, "Shard(%d)", p->dim);
            break;
        case FC_STRIDED_SHARD:
            snprintf(text, sizeof text, "_StridedShard(%d, %" PRId64 ")", p->dim, p->split_factor);
            break;
        default:
            snprintf(text, sizeof text, "Partial()");
            break;
        }
        append(buf, size, &used, i > 0 ? ", " : "");
        append(buf, size, &used, text);
    }
    append(buf, size, &used, "]");
    return used;
}

/* A decimal number of at most 18 digits, which an int64_t always holds. */
static bool eat_number(const char **at, int64_t *out) {
    const char *start = *at;
    int64_t n = 0;
    while (**at >= '0' && **at <= '9' && *at - start < 18) {
        n = n * 10 + (**at - '0');
        (*at)++;
    }
    *out = n;
    return *at > start && !(**at >= '0' && **at <= '9');
}

static bool eat_dim(const char **at, fc_placement *p) {
    int64_t dim;
    fc_take_text(at, "dim=");
    if (!eat_number(at, &dim) || dim > INT32_MAX) {
        return false;
    }
    p->dim = (int)dim;
    return true;
}

static bool eat_strided(const char **at, fc_placement *p) {
    p->kind = FC_STRIDED_SHARD;
    if (!eat_dim(at, p) || !fc_take_text(at, ", ")) {
        return false;
    }
    if (!fc_take_text(at, "sf=")) {
        fc_take_text(at, "split_factor=");
    }
    return eat_number(at, &p->split_factor) && p->split_factor >= 1 && fc_take_text(at, ")");
}

static bool eat_partial(const char **at, fc_placement *p) {
    p->kind = FC_PARTIAL;
    while (**at >= 'a' && **at <= 'z') {
        (*at)++;
    }
    return fc_take_text(at, ")");
}

static bool eat_placement(const char **at, fc_placement *p) {
    *p = (fc_placement){FC_REPLICATE, 0, 0};
    if (fc_take_text(at, "Replicate()")) {
        return true;
    }
    if (fc_take_text(at, "Shard(")) {
        p->kind = FC_SHARD;
        return eat_dim(at, p) && fc_take_text(at, ")");
    }
    if (fc_take_text(at, "_StridedShard(")) {
        return eat_strided(at, p);
    }
    return fc_take_text(at, "Partial(") && eat_partial(at, p);
}

bool fc_placements_parse(const char *text, int count, fc_placement *placements) {
    const char *at = text;
    if (!fc_take_text(&at, "[")) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        if ((i > 0 && !fc_take_text(&at, ", ")) || !eat_placement(&at, &placements[i])) {
            return false;
        }
    }
    return fc_take_text(&at, "]") && *at == '\0';
}
