/*
 * Fuzzes the tables of index.h5 and of a full file: the input changes numbers in the tables of a good checkpoint, whose
 * CRC-64 is then corrected, as an attacker would do. If it opens, it must be consistent.
 */
#include "base/crc.h"
#include "fsdpckpt/format.h"
#include "hdf5/tables.h"

#include "fuzz_checkpoint.h"
#include "fuzz_tensor.h"

#include <fcntl.h>

enum { ROWS = 67, COLUMNS = 64, KINDS = 3, MOST_EDITS = 16 };

/* A checkpoint on disk, and the file with its tables in memory. */
typedef struct made {
    char path[96];
    int fd; /* of the file with the tables */
    unsigned char *good, *bytes;
    size_t size, tables; /* `tables`: offset of the tables */
} made;

static char home[64];

static void load(made *m, bool sharded) {
    char index[128];
    snprintf(index, sizeof index, "%s%s", m->path, sharded ? "/index.h5" : "");
    m->fd = open(index, O_RDWR | O_CLOEXEC);
    m->size = (size_t)lseek(m->fd, 0, SEEK_END);
    m->good = malloc(m->size);
    m->bytes = malloc(m->size);
    if (m->fd < 0 || !m->good || !m->bytes || pread(m->fd, m->good, m->size, 0) != (ssize_t)m->size) {
        abort();
    }
    const unsigned char *found = memmem(m->good, m->size, FC_H5_TABLES_MAGIC, 8);
    if (!found) {
        abort();
    }
    m->tables = (size_t)(found - m->good);
}

/* A plain checkpoint for 2 × 2 ranks, a compressed one for 3, and a compressed full file. */
static void make(made *m, int kind) {
    static const int64_t shape[] = {ROWS, COLUMNS, 3}, origin[3];
    static float data[ROWS * COLUMNS * 3];
    const fc_memory_chunk chunk = {origin, shape, NULL, data};
    fc_memory_tensor tensors[4];
    for (int i = 0; i < 4; i++) {
        tensors[i] = (fc_memory_tensor){
            .name = fuzz_names[i], .dtype = FC_F32, .ndim = i, .shape = shape, .chunks = &chunk, .nchunks = 1};
    }
    static const fc_mesh meshes[KINDS] = {
        {.ndim = 2, .sizes = {2, 2}, .names = {"dp", "tp"}}, {.ndim = 1, .sizes = {3}, .names = {"dp"}}, {.ndim = 0}};
    const fc_tp_plan *plan = NULL;
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *source = NULL;
    fc_error err;
    snprintf(m->path, sizeof m->path, "%s/%d", home, kind);
    if (fc_tp_plan_load("auto", arena, &plan, &err) != FC_OK ||
        fc_checkpoint_in_memory("fuzz", tensors, 4, &source, &err) != FC_OK) {
        abort();
    }
    const fc_convert_options how = {
        .format = fc_format_find("h5"),
        .selection = {.mesh = &meshes[kind], .tp_plan = kind < 2 ? plan : NULL, .compress = kind > 0}};
    if (fc_convert(source, m->path, &how, NULL, &err) != FC_OK) {
        abort();
    }
    fc_checkpoint_close(source);
    fc_arena_free(arena);
    load(m, kind < 2);
}

/* Changes one number of 1, 2, 4 or 8 bytes. */
static void edit(const made *m, choices *c, size_t length) {
    static const uint64_t special[] = {0, UINT64_MAX, INT64_MAX, 1ull << 32, 1ull << 20, 4096};
    const size_t width = (size_t)1 << choose(c, 3);
    const size_t at = ((size_t)choose(c, 255) << 8 | (size_t)choose(c, 255)) * width % (length - width);
    unsigned char *place = m->bytes + m->tables + at;
    const int64_t how = choose(c, 3), value = choose(c, 255);
    uint64_t number = 0;
    memcpy(&number, place, width);
    number = how == 0   ? (uint64_t)value
             : how == 1 ? number + (uint64_t)(value - 128)
             : how == 2 ? special[value % 6]
                        : number ^ 1ull << value % (8 * (int)width);
    memcpy(place, &number, width);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static made kinds[KINDS];
    choices c = {data, size};
    if (!kinds[0].good) {
        fuzz_place(home, "fuzz-tables-XXXXXX");
        if (!mkdtemp(home)) {
            abort();
        }
        fuzz_remove_at_end(home);
        for (int i = 0; i < KINDS; i++) {
            make(&kinds[i], i);
        }
    }
    const made *m = &kinds[choose(&c, KINDS - 1)];
    fc_h5_manifest_row *manifest = (fc_h5_manifest_row *)(m->bytes + m->tables);
    memcpy(m->bytes, m->good, m->size);
    const size_t length = (size_t)manifest->bytes;
    for (int i = 0; i < MOST_EDITS && c.size > 0; i++) {
        edit(m, &c, length);
    }
    manifest->crc64 = 0;
    manifest->crc64 = fc_crc64(0, m->bytes + m->tables, length);
    if (pwrite(m->fd, m->bytes + m->tables, length, (off_t)m->tables) != (ssize_t)length) {
        abort();
    }
    /* Other versions and sizes are read with libhdf5, in a process of its own. */
    const fc_h5_manifest_row *good = (const fc_h5_manifest_row *)(m->good + m->tables);
    if (manifest->version == good->version && manifest->file_size == good->file_size &&
        memcmp(manifest->objects, good->objects, sizeof good->objects) == 0 &&
        manifest->objects_crc64 == good->objects_crc64 &&
        memcmp(manifest->magic, good->magic, sizeof good->magic) == 0 && manifest->bytes == good->bytes) {
        fuzz_open(m->path);
    }
    return 0;
}
