/*
 * inspect: the bytes and tensors of each rank, as text for groups of equal ranks, and the ranks that hold each chunk of
 * a tensor.
 */
#include "inspect/inspect.h"

#include "fsdpckpt/order.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 1 << 20 }; /* the limit for conversions, too; higher ranks are not counted */

/* ---- bytes and tensors ---- */

static size_t count_ranks(const inspection *in) {
    size_t ranks = 0;
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_tensor *t = in->items[i];
        for (size_t k = 0; k < t->nchunks && !t->object; k++) {
            if (t->chunks[k].rank >= MAX_RANKS) {
                return 0; /* FC_NO_RANK, or an implausible rank */
            }
            ranks = t->chunks[k].rank >= ranks ? (size_t)t->chunks[k].rank + 1 : ranks;
        }
    }
    const int64_t mesh = in->mesh.ndim > 0 ? fc_mesh_ranks(&in->mesh) : 0;
    return mesh > (int64_t)ranks && mesh <= MAX_RANKS ? (size_t)mesh : ranks;
}

static uint64_t box_bytes(const fc_tensor *t, const int64_t *sizes) {
    uint64_t bytes = fc_dtype_size(t->dtype);
    for (int d = 0; d < t->ndim; d++) {
        if (__builtin_mul_overflow(bytes, (uint64_t)sizes[d], &bytes)) {
            return UINT64_MAX;
        }
    }
    return bytes;
}

/* Adds up what each rank wrote. @param seen by rank: the last tensor counted for it, plus one. */
static void add_stored(const inspection *in, rank_load *stored, size_t *seen) {
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_tensor *t = in->items[i];
        for (size_t k = 0; k < t->nchunks && !t->object; k++) {
            rank_load *load = &stored[t->chunks[k].rank];
            load->bytes = inspect_add(load->bytes, box_bytes(t, t->chunks[k].dims + t->ndim));
            load->tensors += seen[t->chunks[k].rank] != i + 1;
            seen[t->chunks[k].rank] = i + 1;
        }
    }
}

/* Adds what each rank holds of `count` equal tensors. @return false if that is unknown. */
static bool add_held(const inspection *in, const fc_tensor *t, uint64_t count, rank_load *held, size_t ranks) {
    int64_t coordinate[FC_MAX_MESH_DIMS], box[2 * FC_MAX_DIMS];
    const fc_placement *placed = inspect_placed(in, t);
    fc_error ignored;
    for (size_t rank = 0; rank < ranks && placed; rank++) {
        fc_mesh_coordinate(&in->mesh, (int64_t)rank, coordinate);
        if (fc_local_box(t->ndim, t->shape, &in->mesh, placed, coordinate, box, box + t->ndim, &ignored) != FC_OK) {
            return false;
        }
        uint64_t bytes = box_bytes(t, box + t->ndim), all;
        all = __builtin_mul_overflow(bytes, count, &all) ? UINT64_MAX : all;
        held[rank].bytes = inspect_add(held[rank].bytes, all);
        held[rank].tensors += bytes > 0 ? count : 0;
    }
    return placed != NULL;
}

fc_code inspect_ranks(inspection *in, inspect_loads *out, fc_error *err) {
    *out = (inspect_loads){.ranks = count_ranks(in)};
    if (out->ranks == 0) {
        return FC_OK;
    }
    size_t *seen = calloc(out->ranks, sizeof *seen);
    out->stored = fc_arena_calloc(in->arena, out->ranks, sizeof *out->stored);
    rank_load *held = fc_arena_calloc(in->arena, out->ranks, sizeof *held);
    if (!seen || !out->stored || !held) {
        free(seen);
        return fc_no_memory(err, in->checkpoint->path);
    }
    add_stored(in, out->stored, seen);
    free(seen);
    bool known = in->mesh.ndim > 0 && (size_t)fc_mesh_ranks(&in->mesh) == out->ranks;
    for (size_t i = 0; i < in->nkinds && known; i++) {
        const fc_tensor *t = in->kinds[i].example;
        known = t->object || add_held(in, t, in->kinds[i].count, held, out->ranks);
    }
    out->held = known ? held : NULL;
    return FC_OK;
}

/* ---- as text ---- */

/* Adds a run of ranks to a list. @return false when there is no room for more than "…". */
static bool add_run(char *buf, size_t size, size_t *used, uint32_t first, uint32_t last) {
    char run[32];
    int n = first == last       ? snprintf(run, sizeof run, "%u", (unsigned)first)
            : last == first + 1 ? snprintf(run, sizeof run, "%u, %u", (unsigned)first, (unsigned)last)
                                : snprintf(run, sizeof run, "%u-%u", (unsigned)first, (unsigned)last);
    if (*used + (size_t)n + 8 > size) {
        snprintf(buf + *used, size - *used, ", …");
        return false;
    }
    *used += (size_t)snprintf(buf + *used, size - *used, "%s%s", buf[*used - 1] == ' ' ? "" : ", ", run);
    return true;
}

const char *inspect_rank_list(const uint32_t *ranks, size_t count, char *buf, size_t size) {
    size_t used = (size_t)snprintf(buf, size, "%s", count == 1 ? "rank " : "ranks ");
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && ranks[end] == ranks[end - 1] + 1; end++) {
        }
        if (!add_run(buf, size, &used, ranks[i], ranks[end - 1])) {
            break;
        }
    }
    return buf;
}

/* Whether both loads print the same text. */
static bool equal_loads(const rank_load *a, const rank_load *b) {
    char x[TEXT_SIZE_MAX], y[TEXT_SIZE_MAX];
    return a->tensors == b->tensors &&
           (a->bytes == b->bytes || strcmp(text_bytes(x, a->bytes), text_bytes(y, b->bytes)) == 0);
}

/* Writes "ranks 0-7: 1.21 GB, 291 tensors each": the ranks whose load equals `load`. */
static void write_group(const rank_load *loads, size_t ranks, const rank_load *load, char *buf, size_t size) {
    char bytes[TEXT_SIZE_MAX], count[TEXT_SIZE_MAX];
    size_t used = (size_t)snprintf(buf, size, "ranks "), members = 0;
    bool room = true;
    for (size_t i = 0, end; i < ranks; i = end) {
        for (end = i; end < ranks && equal_loads(&loads[end], load); end++) {
        }
        members += end - i;
        room = room && (end == i || add_run(buf, size - 64, &used, (uint32_t)i, (uint32_t)(end - 1)));
        used = strlen(buf);
        end += end == i;
    }
    if (members == 1) {
        memmove(buf + 4, buf + 5, strlen(buf + 5) + 1); /* "rank 3" */
        used--;
    }
    snprintf(buf + used, size - used, ": %s, %s %s%s", text_bytes(bytes, load->bytes), text_count(count, load->tensors),
             load->tensors == 1 ? "tensor" : "tensors", members > 1 ? " each" : "");
}

static void write_span(const rank_load *loads, size_t ranks, char *buf, size_t size) {
    char least[TEXT_SIZE_MAX], most[TEXT_SIZE_MAX], few[TEXT_SIZE_MAX], many[TEXT_SIZE_MAX];
    rank_load low = loads[0], high = loads[0];
    for (size_t i = 0; i < ranks; i++) {
        low.bytes = loads[i].bytes < low.bytes ? loads[i].bytes : low.bytes;
        high.bytes = loads[i].bytes > high.bytes ? loads[i].bytes : high.bytes;
        low.tensors = loads[i].tensors < low.tensors ? loads[i].tensors : low.tensors;
        high.tensors = loads[i].tensors > high.tensors ? loads[i].tensors : high.tensors;
    }
    text_bytes(least, low.bytes);
    text_bytes(most, high.bytes);
    text_count(few, low.tensors);
    text_count(many, high.tensors);
    const bool one_size = strcmp(least, most) == 0, one_count = strcmp(few, many) == 0;
    snprintf(buf, size, "ranks 0-%zu: %s%s%s, %s%s%s tensors each", ranks - 1, least, one_size ? "" : " to ",
             one_size ? "" : most, few, one_count ? "" : " to ", one_count ? "" : many);
}

void inspect_group_ranks(const rank_load *loads, size_t ranks, rank_groups *out) {
    const rank_load *kinds[RANK_GROUPS] = {NULL};
    out->count = 0;
    for (size_t i = 0; i < ranks; i++) {
        size_t k = 0;
        while (k < out->count && !equal_loads(kinds[k], &loads[i])) {
            k++;
        }
        if (k == RANK_GROUPS) {
            out->count = 1;
            write_span(loads, ranks, out->text[0], sizeof out->text[0]);
            return;
        }
        if (k == out->count) {
            kinds[out->count++] = &loads[i];
        }
    }
    for (size_t k = 0; k < out->count && kinds[k]; k++) {
        write_group(loads, ranks, kinds[k], out->text[k], sizeof out->text[k]);
    }
}

/* ---- replicas ---- */

/* Boxes and their ranks: rows of offsets, sizes and the rank, sorted. */
typedef struct box_table {
    int64_t *rows;
    size_t width, count; /* numbers in a row; rows */
} box_table;

/* Fills in the local boxes of all ranks. @return false if they are unknown. */
static bool fill_local(const inspection *in, const fc_tensor *t, box_table *table) {
    const fc_placement *placed = inspect_placed(in, t);
    fc_error ignored;
    for (size_t rank = 0; rank < table->count; rank++) {
        int64_t coordinate[FC_MAX_MESH_DIMS], *row = table->rows + rank * table->width;
        fc_mesh_coordinate(&in->mesh, (int64_t)rank, coordinate);
        if (fc_local_box(t->ndim, t->shape, &in->mesh, placed, coordinate, row, row + t->ndim, &ignored) != FC_OK) {
            return false;
        }
        row[2 * t->ndim] = (int64_t)rank;
    }
    return true;
}

/* Fills in the boxes of the chunks. */
static void fill_chunks(const fc_tensor *t, box_table *table) {
    table->count = 0;
    for (size_t i = 0; i < t->nchunks; i++) {
        if (t->chunks[i].rank != FC_NO_RANK) {
            int64_t *row = table->rows + table->count++ * table->width;
            memcpy(row, t->chunks[i].dims, (table->width - 1) * sizeof *row);
            row[table->width - 1] = t->chunks[i].rank;
        }
    }
}

static void sort_table(box_table *table) {
    fc_sort_items_by(table->rows, table->count, table->width * sizeof *table->rows, fc_order_rows, &table->width);
}

/* Finds the rows with the box of the chunk: [*from, *end). */
static void find_rows(const box_table *table, const fc_chunk *chunk, size_t *from, size_t *end) {
    const size_t numbers = table->width - 1;
    *from = 0;
    FC_BISECT(*from, table->count, i, fc_order_row(table->rows + i * table->width, chunk->dims, numbers) < 0);
    *end = *from;
    while (*end < table->count && fc_order_row(table->rows + *end * table->width, chunk->dims, numbers) == 0) {
        ++*end;
    }
}

/* Whether each chunk is held by the rank that wrote it. If not, the placements do not match the ranks. */
static bool agrees_with_chunks(const box_table *table, const fc_tensor *t) {
    for (size_t i = 0; i < t->nchunks; i++) {
        size_t from, end;
        find_rows(table, &t->chunks[i], &from, &end);
        while (from < end && table->rows[(from + 1) * table->width - 1] != (int64_t)t->chunks[i].rank) {
            from++;
        }
        if (from == end) {
            return false;
        }
    }
    return true;
}

static void fill_table(const inspection *in, const fc_tensor *t, size_t ranks, box_table *table) {
    table->count = ranks;
    if (ranks > 0 && fill_local(in, t, table)) {
        sort_table(table);
        if (agrees_with_chunks(table, t)) {
            return;
        }
    }
    fill_chunks(t, table);
    sort_table(table);
}

fc_code inspect_find_holders(const inspection *in, const fc_tensor *t, fc_arena *arena, inspect_holders *out,
                             fc_error *err) {
    const int64_t mesh = inspect_placed(in, t) ? fc_mesh_ranks(&in->mesh) : 0;
    const size_t ranks = mesh > 0 && mesh <= MAX_RANKS ? (size_t)mesh : 0;
    const size_t rows = ranks > t->nchunks ? ranks : t->nchunks;
    box_table table = {.width = 2 * (size_t)t->ndim + 1};
    table.rows = calloc(rows + 1, table.width * sizeof *table.rows);
    out->spans = fc_arena_calloc(arena, t->nchunks, sizeof *out->spans);
    uint32_t *list = fc_arena_calloc(arena, rows, sizeof *list);
    if (!table.rows || !out->spans || !list) {
        free(table.rows);
        return fc_no_memory(err, in->checkpoint->path);
    }
    fill_table(in, t, ranks, &table);
    for (size_t i = 0; i < table.count; i++) {
        list[i] = (uint32_t)table.rows[(i + 1) * table.width - 1];
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        size_t from, end;
        find_rows(&table, &t->chunks[i], &from, &end);
        out->spans[i].ranks = list + from;
        out->spans[i].count = end - from;
    }
    free(table.rows);
    return FC_OK;
}
