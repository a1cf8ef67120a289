/*
 * inspect --tensor: draws the chunks of one tensor as a grid of ranks, then lists where each chunk is stored.
 */
#include "inspect/stats.h"

#include <stdio.h>
#include <string.h>

#include "fsdpckpt/try.h"

enum { MAX_ROWS = 16, MAX_COLUMNS = 8, LABEL_MAX = 48, CELL_MAX = 32, BOX_MAX = FC_MAX_DIMS * 2 * LABEL_MAX };

/* The characters of a drawing: lines, corners, tees. */
typedef struct lines {
    const char *h, *v, *top[3], *middle[3], *bottom[3], *dots;
} lines;

static const lines unicode_lines = {"─", "│", {"┌", "┬", "┐"}, {"├", "┼", "┤"}, {"└", "┴", "┘"}, "⋮"};
static const lines ascii_lines = {"-", "|", {"+", "+", "+"}, {"+", "+", "+"}, {"+", "+", "+"}, ":"};

/* A picture of a grid that is sharded along one or two dimensions, with at most MAX_ROWS × MAX_COLUMNS cells. */
typedef struct picture {
    inspection *in;
    const fc_tensor *tensor;
    const lines *lines;
    int row_dim, column_dim;      /* -1: not sharded that way */
    size_t rows, columns;         /* of the grid */
    size_t row_step, column_step; /* cells between neighbours, in scratch.cells */
    size_t width;                 /* of a cell, in columns of the terminal */
    size_t label;                 /* width of the row labels */
    inspect_holders holders;
} picture;

static const fc_chunk *cell_chunk(const picture *p, size_t row, size_t column) {
    return &p->tensor->chunks[p->in->scratch.cells[row * p->row_step + column * p->column_step] - 1];
}

static void cell_text(const picture *p, const fc_chunk *chunk, char *buf) {
    const size_t index = (size_t)(chunk - p->tensor->chunks);
    const rank_span *span = &p->holders.spans[index];
    if (span->count > 0) {
        inspect_rank_list(span->ranks, span->count, buf, CELL_MAX);
    } else {
        snprintf(buf, CELL_MAX, "chunk %zu", index);
    }
}

static void range_text(const fc_tensor *t, const fc_chunk *chunk, int dim, char *buf) {
    buf[0] = '\0';
    if (dim >= 0) {
        int64_t start = chunk->dims[dim];
        snprintf(buf, LABEL_MAX, "%lld:%lld", (long long)start, (long long)(start + chunk->dims[t->ndim + dim]));
    }
}

static size_t longest_text(size_t a, const char *text) {
    size_t len = text_name_width(text);
    return len > a ? len : a;
}

static size_t shown_cells(size_t n, size_t limit) {
    return n < limit ? n : limit;
}

static void measure_picture(picture *p) {
    char text[LABEL_MAX];
    p->width = p->label = 0;
    for (size_t r = 0; r < shown_cells(p->rows, MAX_ROWS); r++) {
        for (size_t c = 0; c < shown_cells(p->columns, MAX_COLUMNS); c++) {
            cell_text(p, cell_chunk(p, r, c), text);
            p->width = longest_text(p->width, text);
            range_text(p->tensor, cell_chunk(p, r, c), p->column_dim, text);
            p->width = longest_text(p->width, text);
            range_text(p->tensor, cell_chunk(p, r, c), p->row_dim, text);
            p->label = longest_text(p->label, text);
        }
    }
    p->width += 2;
}

static void write_centred(text_out *out, const char *text, size_t width) {
    size_t len = text_name_width(text), left = (width - len) / 2;
    text_repeat(out, " ", left);
    text_puts(out, text);
    text_repeat(out, " ", width - len - left);
}

static void draw_border(const picture *p, const char *const corners[3]) {
    text_out *out = p->in->out;
    size_t columns = shown_cells(p->columns, MAX_COLUMNS);
    text_repeat(out, " ", p->label + 3);
    for (size_t c = 0; c <= columns; c++) {
        text_puts(out, corners[c == 0 ? 0 : c == columns ? 2 : 1]);
        text_repeat(out, p->lines->h, c < columns ? p->width : 0);
    }
    text_puts(out, "\n");
}

static void draw_picture(const picture *p) {
    text_out *out = p->in->out;
    size_t rows = shown_cells(p->rows, MAX_ROWS), columns = shown_cells(p->columns, MAX_COLUMNS);
    char text[LABEL_MAX];
    text_puts(out, "\n");
    if (p->column_dim >= 0) {
        text_repeat(out, " ", p->label + 4);
        for (size_t c = 0; c < columns; c++) {
            range_text(p->tensor, cell_chunk(p, 0, c), p->column_dim, text);
            write_centred(out, text, p->width);
            text_puts(out, " ");
        }
        text_printf(out, " dim %d\n", p->column_dim);
    }
    draw_border(p, p->lines->top);
    for (size_t r = 0; r < rows; r++) {
        range_text(p->tensor, cell_chunk(p, r, 0), p->row_dim, text);
        text_puts(out, "  ");
        text_repeat(out, " ", p->label - strlen(text));
        text_printf(out, "%s %s", text, p->lines->v);
        for (size_t c = 0; c < columns; c++) {
            cell_text(p, cell_chunk(p, r, c), text);
            write_centred(out, text, p->width);
            text_puts(out, p->lines->v);
        }
        text_puts(out, "\n");
        draw_border(p, r + 1 < rows ? p->lines->middle : p->lines->bottom);
    }
    if (p->rows > rows) {
        text_printf(out, "  %s %zu more rows\n", p->lines->dots, p->rows - rows);
    }
    if (p->columns > columns) {
        text_printf(out, "  %s %zu more columns\n", p->lines->dots, p->columns - columns);
    }
    if (p->row_dim >= 0) {
        text_printf(out, "  rows are dim %d\n", p->row_dim);
    }
}

/* @return the distance of neighbours along `dim` in the row-major array of cells. */
static size_t cell_step(const fc_tensor *t, const fc_sharding *c, int dim) {
    size_t step = 1;
    for (int d = dim + 1; d < t->ndim; d++) {
        step *= (size_t)c->counts[d];
    }
    return step;
}

static void draw_grid(inspection *in, const fc_tensor *t, const fc_sharding *c, const inspect_holders *holders) {
    if (!c->grid || c->nsharded < 1 || c->nsharded > 2) {
        return;
    }
    picture p = {.in = in, .tensor = t, .row_dim = -1, .column_dim = -1, .rows = 1, .columns = 1, .holders = *holders};
    p.lines = text_is_utf8() ? &unicode_lines : &ascii_lines;
    if (c->nsharded == 2 || c->dims[0] == 0) {
        p.row_dim = c->dims[0];
        p.rows = (size_t)c->counts[p.row_dim];
        p.row_step = cell_step(t, c, p.row_dim);
    }
    if (c->nsharded == 2 || c->dims[0] != 0) {
        p.column_dim = c->dims[c->nsharded - 1];
        p.columns = (size_t)c->counts[p.column_dim];
        p.column_step = cell_step(t, c, p.column_dim);
    }
    measure_picture(&p);
    draw_picture(&p);
}

/* Writes "[0:16, 32:64]" into `buf`. @return buf. */
static const char *box_text(const fc_tensor *t, const fc_chunk *chunk, char *buf, size_t size) {
    size_t used = (size_t)snprintf(buf, size, "[");
    for (int d = 0; d < t->ndim && used + LABEL_MAX * 2 < size; d++) {
        char range[LABEL_MAX * 2];
        range_text(t, chunk, d, range);
        used += (size_t)snprintf(buf + used, size - used, "%s%s", d ? ", " : "", range);
    }
    snprintf(buf + used, size - used, "]");
    return buf;
}

/* @return the width of the widest box of the first chunks, which is enough to align a list of readable length. */
static size_t box_width(const fc_tensor *t) {
    char box[BOX_MAX];
    size_t width = 0;
    for (size_t i = 0; i < shown_cells(t->nchunks, 256); i++) {
        width = longest_text(width, box_text(t, &t->chunks[i], box, sizeof box));
    }
    return width;
}

/* Prints where the bytes of a chunk are, if that is known, and how they are stored.
 * @param extent NULL: only the headers were read. */
static void print_place(text_out *out, const fc_place *place, const fc_extent *extent) {
    static const char *const codecs[] = {"", "in the header", "filtered", "encoded", "computed"};
    const char *how = extent ? codecs[extent->codec] : "";
    if (place->kind == FC_PLACE_BYTES) {
        uint64_t offset = !extent                         ? place->offset
                          : extent->codec == FC_CODEC_RAW ? extent->offset + extent->first
                                                          : extent->offset;
        text_printf(out, "  at %llu, %llu bytes stored", (unsigned long long)offset, (unsigned long long)place->length);
        text_puts(out, *how ? ", " : "");
    } else {
        text_puts(out, *how ? "  " : "");
    }
    text_puts(out, how);
}

/* Prints the ranks that hold a chunk, if there are several. */
static void print_holders(text_out *out, const rank_span *span, char *buf, size_t size) {
    if (span->count > 1) {
        text_printf(out, ", held by %s", inspect_rank_list(span->ranks, span->count, buf, size));
    }
}

/* @param holders NULL: not shown. */
static fc_code print_chunks(inspection *in, const fc_tensor *t, const inspect_holders *holders, fc_error *err) {
    text_out *out = in->out;
    char box[BOX_MAX];
    size_t width = box_width(t);
    text_puts(out, "\n");
    for (size_t i = 0; i < t->nchunks && out->error == 0; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        char label[LABEL_MAX] = "";
        if (chunk->rank != FC_NO_RANK) {
            snprintf(label, sizeof label, "rank %u", (unsigned)chunk->rank);
        } else {
            snprintf(label, sizeof label, "chunk %zu", i);
        }
        text_printf(out, "  %-10s ", label);
        text_name_padded(out, box_text(t, chunk, box, sizeof box), width + 2);
        const fc_file *file = fc_chunk_file(in->checkpoint, chunk);
        if (file) {
            text_name(out, file->name);
        }
        fc_extent extent;
        FC_TRY(in->headers_only ? FC_OK : fc_checkpoint_extent(in->checkpoint, t, i, &extent, err));
        print_place(out, &chunk->place, in->headers_only ? NULL : &extent);
        if (holders) {
            print_holders(out, &holders->spans[i], box, sizeof box);
        }
        text_puts(out, "\n");
    }
    return FC_OK;
}

static fc_code print_object(inspection *in, const fc_tensor *t, fc_error *err) {
    text_out *out = in->out;
    char size[TEXT_SIZE_MAX];
    fc_error why = {FC_OK, ""};
    text_printf(out, "\n  object      %s, %s\n", t->object->encoding, text_bytes(size, inspect_bytes(t)));
    const char *json = inspect_object(in, t, in->arena, &why);
    if (json) {
        text_name_in(out, "  value       ", json, "\n");
    }
    fc_object_verdict verdict;
    if (inspect_risk(in, t, &verdict) != FC_OBJECT_HARMLESS) {
        text_name_in(out, verdict.risk == FC_OBJECT_RUNS ? "  unsafe      " : "  unknown     ", verdict.reason, "\n");
    }
    return print_chunks(in, t, NULL, err);
}

static fc_code print_shards(inspection *in, const fc_tensor *t, const fc_sharding *c, fc_error *err) {
    inspect_holders holders = {0};
    FC_TRY(inspect_find_holders(in, t, in->arena, &holders, err));
    draw_grid(in, t, c, &holders);
    return print_chunks(in, t, &holders, err);
}

fc_code inspect_tensor(inspection *in, const fc_tensor *t, fc_error *err) {
    text_out *out = in->out;
    char text[160], count[TEXT_SIZE_MAX];
    fc_sharding c;
    text_name(out, t->name);
    if (t->object) {
        return print_object(in, t, err);
    }
    FC_NEED(fc_recognise_sharding(t, &in->scratch, &c), err, in->checkpoint->path);
    text_printf(out, "\n  dtype       %s\n", fc_dtype_get(t->dtype)->torch_name);
    text_printf(out, "  shape       %s\n", text_shape(text, sizeof text, t->ndim, t->shape));
    text_printf(out, "  size        %s elements, %s\n", text_count(count, inspect_elements(t)),
                text_bytes(text, inspect_bytes(t)));
    text_printf(out, "  chunks      %s\n", sharding_describe(t, &c, text, sizeof text));
    if (inspect_placements(in, t, &c, text, sizeof text)[0]) {
        text_printf(out, "  placements  %s\n", text);
    }
    if (inspect_stats_of(in, t)) {
        stats_print_tensor(out, inspect_stats_of(in, t), t->dtype);
    }
    return print_shards(in, t, &c, err);
}
