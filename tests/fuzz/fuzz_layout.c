/*
 * Fuzzes the plan and the moving of data: the input chooses a tensor, how it is cut in the source, and the mesh of the
 * target. The oracle is naive: the boxes that the ranks store must hold each element exactly once, with its value. They
 * are read into memory or, as the input chooses, written to a file by the engine.
 */
#include "fsdpckpt/layout.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/select.h"
#include "move/file.h"
#include "plan/target_file.h"

#include "fuzz_tensor.h"

enum { MOST_BOXES = 64 };

static uint16_t values[MOST_ELEMENTS];

/* What the ranks store: boxes, and their elements one after the other. */
typedef struct stored {
    fc_box_request boxes[MOST_BOXES];
    size_t count;
    uint16_t elements[2 * MOST_ELEMENTS];
    size_t used;
} stored;

/* Compares and counts the elements of one stored box. */
static void check_box(const source_tensor *t, const fc_box *box, const uint16_t *found, uint8_t *seen) {
    const int64_t volume = fc_box_volume(box);
    int64_t at[DIMS] = {0};
    for (int64_t i = 0; i < volume; i++) {
        int64_t place[DIMS];
        for (int d = 0; d < t->ndim; d++) {
            place[d] = box->offsets[d] + at[d];
        }
        const int64_t index = index_of(t, place);
        if (found[i] != values[index] || seen[index]++) {
            abort();
        }
        next_index(t->ndim, box->sizes, at);
    }
}

static void check_stored(const source_tensor *t, const stored *all) {
    static uint8_t seen[MOST_ELEMENTS];
    int64_t elements = 0;
    memset(seen, 0, sizeof seen);
    for (size_t i = 0; i < all->count; i++) {
        check_box(t, &all->boxes[i].box, all->boxes[i].buf, seen);
    }
    if (!fc_numel(t->ndim, t->shape, &elements)) {
        abort();
    }
    for (int64_t i = 0; i < elements; i++) {
        if (seen[i] != 1) {
            abort();
        }
    }
}

/* Gives the owned items of a file their places in it, and lists their boxes. */
static void list_items(const fc_checkpoint *source, const fc_target_file *file, stored *all) {
    const fc_tensor *t = &source->tensors[0];
    for (size_t i = 0; i < file->nitems; i++) {
        fc_target_item *item = &file->items[i];
        const fc_box box = {t->ndim, item->dims, item->dims + t->ndim};
        if (!item->owned || fc_box_volume(&box) == 0) {
            continue;
        }
        if (!fc_box_within(&box, t->shape) || all->used + (size_t)fc_box_volume(&box) > MOST_ELEMENTS) {
            abort();
        }
        item->offset = all->used * sizeof *all->elements;
        all->boxes[all->count++] = (fc_box_request){t, box, all->elements + all->used};
        all->used += (size_t)fc_box_volume(&box);
    }
}

/* Writes the items of one file, and reads them back as plain bytes. */
static void move_file(const fc_target *target, fc_target_file *file, stored *all) {
    static int fd = -1;
    static char path[32];
    const fc_move_options options = {.work = {.threads = 1, .memory = 1 << 20}, .crc32 = true};
    const size_t first = file->nitems > 0 && file->items[0].owned ? file->items[0].offset : 0;
    fc_error err;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    file->path = path;
    if (ftruncate(fd, 0) != 0 || ftruncate(fd, (off_t)(all->used * 2)) != 0 ||
        fc_move_file(target, file, &options, &err) != FC_OK ||
        pread(fd, (char *)all->elements + first, all->used * 2 - first, (off_t)first) !=
            (ssize_t)(all->used * 2 - first)) {
        abort();
    }
}

static void store(const fc_checkpoint *source, const fc_target *target, bool moves, stored *all, fc_arena *arena) {
    const fc_work_options options = {.threads = 1};
    const uint32_t ranks = (uint32_t)fc_mesh_ranks(target->mesh);
    fc_error err;
    all->count = all->used = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        fc_target_file file;
        const size_t before = all->used;
        if (fc_target_file_of(target, rank, arena, &file, &err) != FC_OK) {
            abort();
        }
        list_items(source, &file, all);
        if (moves && all->used > before) {
            move_file(target, &file, all);
        }
    }
    if (!moves && fc_read_boxes(source, NULL, all->boxes, all->count, &options, &err) != FC_OK) {
        abort();
    }
}

static fc_checkpoint *make_source(const source_tensor *t, const char *name) {
    fc_memory_chunk chunks[MOST_CHUNKS];
    for (size_t i = 0; i < t->nchunks; i++) {
        const int64_t *dims = t->dims[i];
        chunks[i] = (fc_memory_chunk){dims, dims + t->ndim, t->strides, values + index_of(t, dims)};
    }
    const fc_memory_tensor tensor = {
        .name = name, .dtype = FC_I16, .ndim = t->ndim, .shape = t->shape, .chunks = chunks, .nchunks = t->nchunks};
    fc_checkpoint *source = NULL;
    fc_error err;
    if (fc_checkpoint_in_memory("fuzz", &tensor, 1, &source, &err) != FC_OK) {
        abort();
    }
    return source;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static source_tensor t;
    static stored all;
    static const fc_tp_plan *plan;        /* in an arena that stays */
    static fc_arena *volatile plan_arena; /* volatile, so that LeakSanitizer finds it */
    choices c = {data, size};
    fc_error err;
    for (int i = 0; values[1] == 0 && i < MOST_ELEMENTS; i++) {
        values[i] = (uint16_t)(i * 40503 + 7);
    }
    if (!plan && fc_tp_plan_load("auto", plan_arena = fc_arena_new(), &plan, &err) != FC_OK) {
        abort();
    }
    if (!make_tensor(&t, &c)) {
        return 0;
    }
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *source = make_source(&t, fuzz_names[choose(&c, FUZZ_NAMES - 1)]);
    fc_mesh mesh = {.ndim = (int)choose(&c, 2), .names = {"dp", "tp"}};
    fc_target target;
    fc_selected counts;
    for (int i = 0; i < mesh.ndim; i++) {
        mesh.sizes[i] = 1 + choose(&c, 6);
    }
    const bool moves = choose(&c, 3) == 3;
    const fc_selection how = {.mesh = &mesh, .tp_plan = plan};
    if (fc_target_new(source, &how, arena, &target, &counts, &err) == FC_OK) {
        store(source, &target, moves, &all, arena);
        check_stored(&t, &all);
    }
    fc_checkpoint_close(source);
    fc_arena_free(arena);
    return 0;
}
