/*
 * Reads the model of nanotron's checkpoints: checkpoint_metadata.json, and below model/ one safetensors file for each
 * parameter, or for each of its tensor-parallel shards, under the path of its name. The header of a shard says which
 * slices of the whole tensor it has.
 */
#include "base/checked.h"
#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/extent.h"
#include "checkpoint/folder.h"
#include "checkpoint/path.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "nanotron/slices.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

#include <stdlib.h>
#include <string.h>

static const char header_name[] = "checkpoint_metadata.json";

enum { MOST_DEPTH = 32 };

/* ---- the files ---- */

typedef struct walker {
    fc_arena *arena;
    const char **names; /* malloc'ed: of files, relative to the checkpoint */
    size_t count, capacity;
    fc_error *err;
} walker;

static fc_code add_file(walker *w, const char *name) {
    FC_NEED(fc_grow(&w->names, &w->capacity, w->count + 1, sizeof *w->names), w->err, name);
    w->names[w->count++] = name;
    return FC_OK;
}

/* Lists the files of parameters in a folder and below it. Links to folders are not followed. */
static fc_code walk(walker *w, const char *root, const char *folder, int depth) { // NOLINT(misc-no-recursion): bounded
    const char *path = fc_arena_printf(w->arena, "%s/%s", root, folder);
    fc_dir dir = {0};
    fc_code rc;
    FC_TRY_GOTO(path ? fc_dir_open(&dir, path, w->err) : fc_no_memory(w->err, root), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        bool is_folder = false;
        const char *inner = fc_arena_printf(w->arena, "%s/%s", folder, name);
        FC_TRY_GOTO(inner ? fc_dir_is_folder(&dir, name, &is_folder, w->err) : fc_no_memory(w->err, root), rc, out);
        if (is_folder) {
            rc = depth > 0 ? walk(w, root, inner, depth - 1)
                           : fc_fail(w->err, FC_ECORRUPT, "%s/%s: folders are nested too deeply", root, inner);
            FC_TRY_GOTO(rc, rc, out);
        } else if (strncmp(name, "model_", 6) == 0 && fc_ends_with(name, ST_EXTENSION)) {
            FC_TRY_GOTO(add_file(w, inner), rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, w->err);
}

/* Whether `name` has "-of-<count>" after `word`; then multiplies `*shards` by it. */
static bool count_ranks(const char *name, const char *word, int64_t *shards) {
    const char *at = strstr(name, word);
    at = at ? strstr(at, "-of-") : NULL;
    at = at ? at + 4 : NULL;
    const int64_t count = at ? fc_take_number(&at, FC_NO_RANK) : 1;
    return count > 0 && count < INT32_MAX && fc_mul_i64(*shards, count, shards);
}

/*
 * Makes the name of the parameter of a file:
 * "model/decoder/0/attn/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors" is of decoder.0.attn.weight. @param
 * shards receives the number of its files; 0: the name is malformed.
 */
static const char *name_of(fc_arena *arena, const char *file, int64_t *shards) {
    const char *base = fc_base_name(file), *last = base + 6, *rank = strstr(last, "_pp-rank-");
    const size_t len = rank ? (size_t)(rank - last) : strlen(last) - strlen(ST_EXTENSION);
    const char *inner = file + strlen("model/");
    char *name = fc_arena_printf(arena, "%.*s%.*s", base > inner ? (int)(base - inner) : 0, inner, (int)len, last);
    *shards = 1;
    if (rank && !(count_ranks(rank, "tp-rank-", shards) && count_ranks(rank, "_exp-rank-", shards))) {
        *shards = 0;
    }
    for (char *c = name; c && *c; c++) {
        *c = *c == '/' ? '.' : *c;
    }
    return name;
}

/* ---- the tensors ---- */

/* A parameter, while its files are read. */
typedef struct builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    fc_tensor *tensor;
    fc_chunk *chunks; /* malloc'ed */
    size_t count, capacity;
    int64_t *shape;
    int64_t shards; /* the number of files that it should have */
    size_t nfiles;
    fc_error *err;
} builder;

static fc_code refuse(const builder *b, const char *path, const char *what) {
    return fc_fail(b->err, FC_ECORRUPT, "%s: tensor %.256s: %s", path, b->tensor->name, what);
}

/* Adds a box of a shard. Its place is from its first element to its last one; the elements are at the strides of the
   shard. */
static fc_code add_pair(builder *b, const fc_st_header *header, const fc_nano_pair *pair, uint32_t file) {
    fc_arena *arena = b->checkpoint->arena;
    const fc_st_entry *e = fc_st_header_find(header, "data");
    const int n = e->ndim;
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)n + 1, sizeof *dims);
    int64_t *strides = fc_arena_calloc(arena, (size_t)n + 1, sizeof *strides), first = 0, last = 0;
    FC_NEED(dims && strides && fc_grow(&b->chunks, &b->capacity, b->count + 1, sizeof *b->chunks), b->err,
            b->checkpoint->path);
    if (!fc_row_major_strides(n, e->shape, strides)) {
        return refuse(b, b->checkpoint->files[file].path, "its size overflows");
    }
    for (int d = 0; d < n; d++) { /* within the shard, whose size is that of its data */
        dims[d] = pair->global[d];
        dims[n + d] = pair->sizes[d];
        if (pair->sizes[d] == 0) {
            return FC_OK;
        }
        first += pair->local[d] * strides[d];
        last += (pair->local[d] + pair->sizes[d] - 1) * strides[d];
    }
    const uint64_t size = fc_dtype_size(e->dtype);
    b->chunks[b->count++] = (fc_chunk){.dims = dims,
                                       .place = fc_place_bytes(file, header->data + e->begin + (uint64_t)first * size,
                                                               (uint64_t)(last - first + 1) * size),
                                       .rank = FC_NO_RANK,
                                       .data = strides};
    return FC_OK;
}

/* Takes the whole tensor of a file without ranks. */
static fc_code add_whole(builder *b, const fc_st_header *header, uint32_t file) {
    const fc_st_entry *e = fc_st_header_find(header, "data");
    fc_nano_pair all = {.local = {0}};
    memcpy(all.sizes, e->shape, (size_t)e->ndim * sizeof *all.sizes);
    return add_pair(b, header, &all, file);
}

/* Takes the shards that a file's `__metadata__` describes. */
static fc_code add_pairs(builder *b, const fc_st_header *header, const char *at, uint32_t file) {
    const fc_st_entry *e = fc_st_header_find(header, "data");
    while (*at) {
        fc_nano_pair pair = {.local = {0}};
        if (!fc_nano_take_pair(&at, e->ndim, e->shape, b->shape, &pair)) {
            return refuse(b, b->checkpoint->files[file].path,
                          "local_global_slices_pairs in __metadata__ does not fit its shapes");
        }
        FC_TRY(add_pair(b, header, &pair, file));
    }
    return FC_OK;
}

static fc_code take_header(builder *b, const fc_st_header *header, uint32_t file) {
    const char *path = b->checkpoint->files[file].path;
    const char *pairs = fc_st_header_value(header, "local_global_slices_pairs");
    const char *whole = fc_st_header_value(header, "unsharded_shape");
    const fc_st_entry *e = fc_st_header_find(header, "data");
    int64_t shape[FC_MAX_DIMS] = {0};
    fc_tensor *t = b->tensor;
    /* Mamba's parameters also have a flag for the optimizer. */
    if (!e || header->nentries != 1 + (size_t)(fc_st_header_find(header, "_no_weight_decay") != NULL)) {
        return refuse(b, path, "the file should have one tensor, called data");
    }
    if (b->shards > 1 && !(pairs && whole)) {
        return fc_fail(
            b->err, FC_EUNSUPPORTED,
            "%s: tensor %.256s: a shard without local_global_slices_pairs in __metadata__, as nanotron wrote "
            "them before version 1.2 of its checkpoints; save it again with a newer one",
            path, t->name);
    }
    const int ndim = pairs && whole ? fc_nano_shape(whole, shape) : e->ndim;
    memcpy(shape, pairs && whole ? shape : e->shape, (size_t)e->ndim * sizeof *shape);
    if (ndim != e->ndim || (b->nfiles > 0 && (t->dtype != e->dtype || t->ndim != ndim ||
                                              memcmp(b->shape, shape, (size_t)ndim * sizeof *shape) != 0))) {
        return refuse(b, path, "its dtype or unsharded_shape differs from that of another shard, or is malformed");
    }
    t->dtype = e->dtype;
    t->ndim = ndim;
    memcpy(b->shape, shape, (size_t)ndim * sizeof *shape);
    b->nfiles++;
    return pairs && whole ? add_pairs(b, header, pairs, file) : add_whole(b, header, file);
}

static fc_code read_file(builder *b, uint32_t file) {
    fc_arena *scratch = fc_arena_new();
    fc_st_header header = {0};
    fc_code rc;
    FC_TRY_GOTO(scratch ? FC_OK : fc_no_memory(b->err, b->checkpoint->path), rc, out);
    FC_TRY_GOTO(fc_st_header_read(scratch, b->checkpoint->files[file].path, b->options->headers_only, &header, b->err),
                rc, out);
    rc = take_header(b, &header, file);
out:
    fc_st_header_free(&header);
    fc_arena_free(scratch);
    return rc;
}

typedef struct placed_box {
    const int64_t *dims;
    size_t bytes; /* of dims */
} placed_box;

static int compare_boxes(const void *a, const void *b) {
    const placed_box *x = a, *y = b;
    return memcmp(x->dims, y->dims, x->bytes);
}

/* Refuses a box that two shards have, because the planner takes such chunks for copies. */
static fc_code check_boxes(const builder *b, const char *path) {
    placed_box *boxes = calloc(b->count + 1, sizeof *boxes);
    bool again = false;
    FC_NEED(boxes, b->err, path);
    for (size_t i = 0; i < b->count; i++) {
        boxes[i] = (placed_box){b->chunks[i].dims, 2 * (size_t)b->tensor->ndim * sizeof *b->chunks[i].dims};
    }
    fc_sort_items(boxes, b->count, sizeof *boxes, compare_boxes);
    for (size_t i = 1; i < b->count && !again; i++) {
        again = compare_boxes(&boxes[i - 1], &boxes[i]) == 0;
    }
    free(boxes);
    return again ? refuse(b, path, "two shards say that they are the same slices of it") : FC_OK;
}

/* Ends a parameter. */
static fc_code finish_tensor(builder *b, uint32_t file) {
    fc_arena *arena = b->checkpoint->arena;
    fc_path_element *element = fc_arena_calloc(arena, 1, sizeof *element);
    int64_t elements;
    if ((int64_t)b->nfiles != b->shards) {
        return fc_fail(b->err, FC_ECORRUPT,
                       "%s: tensor %.256s has %zu files, and by their names there are %lld: files are missing",
                       b->checkpoint->files[file].path, b->tensor->name, b->nfiles, (long long)b->shards);
    }
    if (!fc_numel(b->tensor->ndim, b->shape, &elements) || elements > INT64_MAX / 16) {
        return refuse(b, b->checkpoint->files[file].path, "the product of its sizes overflows");
    }
    FC_TRY(check_boxes(b, b->checkpoint->files[file].path));
    b->tensor->chunks = fc_arena_copy(arena, b->chunks, b->count, sizeof *b->chunks);
    b->tensor->nchunks = b->count;
    b->tensor->shape = b->shape;
    FC_NEED(element && (b->tensor->chunks || b->count == 0), b->err, b->checkpoint->path);
    *element = (fc_path_element){.key = b->tensor->name};
    b->tensor->path = (fc_path){element, 1};
    return FC_OK;
}

/* Reads all files, whose names are sorted, so that the shards of a parameter are neighbours. */
static fc_code read_files(fc_checkpoint *checkpoint, const walker *w, fc_tensor *tensors,
                          const fc_open_options *options) {
    builder b = {.checkpoint = checkpoint, .options = options, .err = w->err};
    fc_code rc = FC_OK;
    for (size_t i = 0; i < w->count; i++) {
        int64_t shards = 0;
        const char *name = name_of(checkpoint->arena, w->names[i], &shards);
        FC_TRY_GOTO(name ? FC_OK : fc_no_memory(w->err, checkpoint->path), rc, out);
        if (!b.tensor || strcmp(b.tensor->name, name) != 0) {
            FC_TRY_GOTO(b.tensor ? finish_tensor(&b, (uint32_t)i - 1) : FC_OK, rc, out);
            b.tensor = &tensors[checkpoint->ntensors++];
            b.tensor->name = name;
            b.shape = fc_arena_calloc(checkpoint->arena, FC_MAX_DIMS, sizeof *b.shape);
            b.shards = shards;
            b.count = b.nfiles = 0;
            FC_TRY_GOTO(b.shape ? FC_OK : fc_no_memory(w->err, checkpoint->path), rc, out);
        }
        FC_TRY_GOTO(shards == b.shards ? read_file(&b, (uint32_t)i)
                                       : refuse(&b, checkpoint->files[i].path, "files of different numbers of ranks"),
                    rc, out);
    }
    rc = b.tensor ? finish_tensor(&b, (uint32_t)w->count - 1) : FC_OK;
out:
    free(b.chunks);
    return rc;
}

/* ---- the format ---- */

static bool nanotron_probe(const fc_probe *probe) {
    return strcmp(fc_base_name(probe->path), header_name) == 0;
}

static fc_code nanotron_list(const char *directory, fc_listing *out, fc_error *err) {
    char path[PATH_MAX];
    const bool found = fc_find_in(directory, header_name, path, err) && fc_find_in(directory, "model", path, err);
    FC_TRY(err->code);
    return found ? fc_listing_add(out, header_name, header_name, FC_LISTED_TRAINING, err) : FC_OK;
}

static fc_code open_model(fc_checkpoint *checkpoint, const char *root, walker *w, const fc_open_options *options) {
    fc_error *err = w->err;
    FC_TRY(walk(w, root, "model", MOST_DEPTH));
    if (w->count == 0 || w->count > FC_MOST_FILES) {
        return fc_fail(err, FC_ECORRUPT, "%s: model/ has no model_*.safetensors", root);
    }
    fc_sort_texts(w->names, w->count);
    fc_file *files = fc_arena_calloc(checkpoint->arena, w->count, sizeof *files);
    fc_tensor *tensors = fc_arena_calloc(checkpoint->arena, w->count, sizeof *tensors);
    FC_NEED(files && tensors, err, root);
    for (size_t i = 0; i < w->count; i++) {
        FC_NEED(fc_file_in(checkpoint->arena, root, w->names[i], &files[i]), err, root);
    }
    checkpoint->files = files;
    checkpoint->nfiles = w->count;
    checkpoint->tensors = tensors;
    FC_TRY(options->follow_external ? FC_OK : fc_check_links(root, files, w->count, err));
    return read_files(checkpoint, w, tensors, options);
}

static fc_code nanotron_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *base = fc_base_name(checkpoint->path), *root = checkpoint->path;
    walker w = {.arena = checkpoint->arena, .err = err};
    char optimizer[PATH_MAX];
    fc_error ignored = {0};
    if (strcmp(base, header_name) == 0) {
        root = base == root ? "." : fc_arena_strndup(w.arena, root, (size_t)(base - root));
        FC_NEED(root, err, checkpoint->path);
    }
    const fc_code rc = open_model(checkpoint, root, &w, options);
    free(w.names);
    checkpoint->producer = "nanotron";
    checkpoint->note = fc_find_in(root, "optimizer", optimizer, &ignored)
                           ? "the optimizer of nanotron, and its random numbers, are not read"
                           : NULL;
    return rc;
}

static fc_code nanotron_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                               fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    (void)checkpoint;
    (void)err;
    *out = fc_raw_extent(&chunk->place);
    memcpy(out->strides, chunk->data, (size_t)tensor->ndim * sizeof *out->strides);
    return FC_OK;
}

static fc_code nanotron_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_st_header header = {0};
    const fc_code rc = arena ? fc_st_header_read(arena, checkpoint->files[index].path, false, &header, err)
                             : fc_no_memory(err, checkpoint->path);
    fc_st_header_free(&header);
    fc_arena_free(arena);
    return rc;
}

const fc_format fc_format_nanotron = {
    .name = "nanotron",
    .description = "nanotron checkpoint",
    .directory_sign = "checkpoint_metadata.json (nanotron)",
    .header_name = header_name,
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .probe = nanotron_probe,
            .list = nanotron_list,
            .open = nanotron_open,
            .check_header = nanotron_check_header,
            .extent = nanotron_extent,
        },
    .verifier = {.unverified = "all files: nanotron records no digests"},
};
