/*
 * Describes how tensors are sharded: see sharding.h.
 */
#include "inspect/sharding.h"

#include <stdio.h>
#include <string.h>

const char *sharding_describe(const fc_tensor *tensor, const fc_sharding *c, char *buf, size_t size) {
    char grid[64];
    if (tensor->nchunks == 0) {
        snprintf(buf, size, fc_is_empty(tensor->ndim, tensor->shape) ? "empty" : "no data");
        return buf;
    }
    if (!c->grid) {
        snprintf(buf, size, "irregular, %zu %s", tensor->nchunks, tensor->nchunks == 1 ? "chunk" : "chunks");
        return buf;
    }
    size_t used = 0;
    for (int d = 0; d < tensor->ndim && c->nsharded > 0 && used < sizeof grid - 24; d++) {
        used += (size_t)snprintf(grid + used, sizeof grid - used, "%s%lld", d ? "×" : "", (long long)c->counts[d]);
    }
    if (c->copies > 1) {
        snprintf(buf, size, "%s, %zu copies", c->nsharded ? grid : "whole", c->copies);
    } else {
        snprintf(buf, size, "%s", c->nsharded ? grid : "whole");
    }
    return buf;
}

/* "Shard(0) over 8", "[_StridedShard(0, 2), Shard(0)] over 4 × 2", "Shard(0) in 4 chunks", "3×2×2 chunks". */
static void describe_style(const fc_mesh *recorded, const fc_tensor *tensor, const fc_sharding *c, char *buf,
                           size_t size) {
    char text[64];
    if (tensor->placements && recorded->ndim > 0) {
        fc_placements_format(recorded->ndim, tensor->placements, buf, (int)size);
    } else if (!c->placed && c->nsharded == 1 && c->copies == 1 && tensor->chunks[0].rank != FC_NO_RANK) {
        snprintf(buf, size, "Shard(%d) in %lld chunks", c->dims[0], (long long)c->counts[c->dims[0]]);
    } else if (!c->placed) {
        sharding_describe(tensor, c, text, sizeof text);
        snprintf(buf, size, "%s%s", text, c->nsharded > 0 ? " chunks" : "");
    } else if (c->mesh_ndim == 1) {
        snprintf(buf, size, "Shard(%d) over %lld", c->placements[0].dim, (long long)c->mesh[0]);
    } else {
        fc_placements_format(2, c->placements, text, sizeof text);
        snprintf(buf, size, "%s over %lld × %lld", text, (long long)c->mesh[0], (long long)c->mesh[1]);
    }
}

static void count_style(sharding_summary *summary, const fc_mesh *recorded, const fc_tensor *tensor,
                        const fc_sharding *c) {
    char text[sizeof summary->styles[0].text];
    describe_style(recorded, tensor, c, text, sizeof text);
    size_t i = 0;
    while (i < summary->nstyles && strcmp(summary->styles[i].text, text) != 0) {
        i++;
    }
    if (i == SHARDING_MAX_STYLES) {
        summary->other++;
        return;
    }
    if (i == summary->nstyles) {
        summary->nstyles++;
        memcpy(summary->styles[i].text, text, sizeof text);
    }
    summary->styles[i].tensors++;
}

void sharding_summary_add(sharding_summary *summary, const fc_mesh *recorded, const fc_tensor *tensor,
                          const fc_sharding *c) {
    for (size_t i = 0; i < tensor->nchunks; i++) {
        int64_t rank = tensor->chunks[i].rank;
        if (rank != FC_NO_RANK && rank >= summary->ranks) {
            summary->ranks = rank + 1;
        }
    }
    count_style(summary, recorded, tensor, c);
    summary->irregular = summary->irregular || (!c->grid && tensor->nchunks > 0);
    if (c->nsharded == 1) {
        int64_t chunks = c->counts[c->dims[0]];
        summary->dims |= UINT32_C(1) << c->dims[0];
        summary->chunks = chunks > summary->chunks ? chunks : summary->chunks;
    }
    if (c->nsharded == 2 || (c->placed && c->mesh_ndim == 2)) {
        int64_t a = c->placed ? c->mesh[0] : c->counts[c->dims[0]];
        int64_t b = c->placed ? c->mesh[1] : c->counts[c->dims[1]];
        if (a * b > summary->mesh[0] * summary->mesh[1]) {
            summary->mesh[0] = a;
            summary->mesh[1] = b;
        }
    }
}

static const char *recorded_layout(const fc_mesh *mesh, char *buf, size_t size) {
    size_t used = 0;
    int n = snprintf(buf, size, "%lld ranks, mesh ", (long long)fc_mesh_ranks(mesh));
    for (int i = 0; i < mesh->ndim && n >= 0 && used + (size_t)n < size; i++) {
        used += (size_t)n;
        n = snprintf(buf + used, size - used, "%s%s %lld", i ? " × " : "", mesh->names[i], (long long)mesh->sizes[i]);
    }
    return buf;
}

const char *sharding_summary_layout(const sharding_summary *s, const fc_mesh *recorded, char *buf, size_t size) {
    char ranks[48] = "";
    if (recorded->ndim > 0) {
        return recorded_layout(recorded, buf, size);
    }
    if (s->ranks == 0 && (s->mesh[0] > 0 || s->dims != 0)) {
        /* E.g. the chunks of an HDF5 file of another program. */
        snprintf(buf, size, "stored in chunks, no ranks recorded");
        return buf;
    }
    if (s->ranks > 1) {
        snprintf(ranks, sizeof ranks, "%lld ranks, ", (long long)s->ranks);
    }
    if (s->mesh[0] > 0) {
        snprintf(buf, size, "%s%lld × %lld mesh (FSDP × TP)", ranks, (long long)s->mesh[0], (long long)s->mesh[1]);
    } else if (s->dims != 0) {
        size_t used = (size_t)snprintf(buf, size, "%s", ranks);
        const char *between = "";
        for (int d = 0; d < FC_MAX_DIMS && used + 32 < size; d++) {
            if (s->dims & UINT32_C(1) << d) {
                used += (size_t)snprintf(buf + used, size - used, "%sShard(%d)", between, d);
                between = " or ";
            }
        }
        if (s->chunks != s->ranks) {
            snprintf(buf + used, size - used, " over %lld", (long long)s->chunks);
        }
    } else {
        snprintf(buf, size, "%s%s", ranks, s->irregular ? "irregular chunks" : "full: no tensor is sharded");
    }
    return buf;
}
