/*
 * The tables of index.h5 and of full files. A checkpoint opens with exactly their content, inconsistent tables are
 * refused, and no bytes in them, however hostile, make this process read out of bounds. After each change the CRC-64 of
 * the tables is updated, as an attacker would do.
 */
#include "base/crc.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/verify.h"
#include "h5_make.h"
#include "hdf5/tables.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* A checkpoint on disk, and the file with its tables in memory: index.h5, or the full file. */
typedef struct made {
    char path[64], index[96], shard[96];
    unsigned char *bytes, *good;
    size_t size, tables; /* offset of the tables */
} made;

static void load(made *m) {
    FILE *f = fopen(m->index, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    m->size = (size_t)ftell(f);
    rewind(f);
    m->bytes = malloc(m->size);
    m->good = malloc(m->size);
    assert_true(m->bytes && m->good);
    assert_int_equal(fread(m->good, 1, m->size, f), m->size);
    fclose(f);
    memcpy(m->bytes, m->good, m->size);
    const unsigned char *found = memmem(m->good, m->size, FC_H5_TABLES_MAGIC, 8);
    assert_non_null(found);
    m->tables = (size_t)(found - m->good);
}

static int make(void **state) {
    static const char *const names[] = {"dp", "tp"};
    static const int64_t sizes[] = {2, 2};
    made *m = calloc(1, sizeof *m);
    h5_made h5;
    fc_error err = {0};
    strcpy(m->path, "/tmp/test_h5_tables-XXXXXX");
    if (!mkdtemp(m->path)) {
        return -1;
    }
    snprintf(m->index, sizeof m->index, "%s/index.h5", m->path);
    snprintf(m->shard, sizeof m->shard, "%s/shard-00001-of-00004.h5", m->path);
    h5_made_begin(&h5, 2, names, sizes);
    h5_made_zoo(&h5);
    if (h5_made_write(&h5, m->path, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    h5_made_end(&h5);
    load(m);
    *state = m;
    return 0;
}

/*
 * For `mesh`, with two HDF5 chunks or more on each rank of a tensor, one of which does not shrink; and a small tensor.
 */
static int make_compressed_for(void **state, const fc_mesh *mesh) {
    enum { ROWS = 1003, COLUMNS = 2000 };
    static const int64_t shape[] = {ROWS, COLUMNS}, origin[2], small_shape[] = {5};
    made *m = calloc(1, sizeof *m);
    float *data = calloc((size_t)ROWS * COLUMNS, sizeof *data);
    fc_checkpoint *source = NULL;
    fc_error err = {0};
    strcpy(m->path, "/tmp/test_h5_tables-XXXXXX");
    if (!data || !mkdtemp(m->path) || rmdir(m->path) != 0) {
        return -1;
    }
    uint64_t random = 88172645463325252u;
    for (size_t i = 0; i < (size_t)300 * COLUMNS * sizeof *data; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        ((unsigned char *)data)[i] = (unsigned char)random;
    }
    strcat(m->path, mesh->ndim ? "" : ".h5");
    snprintf(m->index, sizeof m->index, "%s%s", m->path, mesh->ndim ? "/index.h5" : "");
    snprintf(m->shard, sizeof m->shard, "%s/shard-00001-of-00004.h5", m->path);
    const fc_memory_chunk whole = {origin, shape, NULL, data}, small = {origin, small_shape, NULL, data};
    const fc_memory_tensor tensors[] = {{"large", {NULL, 0}, FC_F32, 2, shape, &whole, 1},
                                        {"small", {NULL, 0}, FC_F32, 1, small_shape, &small, 1}};
    const fc_convert_options how = {.format = fc_format_find("h5"), .selection = {.mesh = mesh, .compress = 1}};
    if (fc_checkpoint_in_memory("this test", tensors, 2, &source, &err) != FC_OK ||
        fc_convert(source, m->path, &how, NULL, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    fc_checkpoint_close(source);
    free(data);
    load(m);
    *state = m;
    return 0;
}

static int make_compressed(void **state) {
    const fc_mesh mesh = {.ndim = 1, .sizes = {4}, .names = {"dp"}};
    return make_compressed_for(state, &mesh);
}

static int make_full(void **state) {
    const fc_mesh mesh = {.ndim = 0};
    return make_compressed_for(state, &mesh);
}

static int clean(void **state) {
    made *m = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", m->path);
    int rc = system(command);
    free(m->bytes);
    free(m->good);
    free(m);
    return rc;
}

static void *row_of(made *m, fc_h5_table table, size_t number, size_t size) {
    const fc_h5_manifest_row *manifest = (const fc_h5_manifest_row *)(m->good + m->tables);
    assert_true(number < manifest->tables[table][1]);
    return m->bytes + m->tables + manifest->tables[table][0] + number * size;
}

/* Writes index.h5 from memory, with the right CRC-64 of its tables. */
static void put(made *m) {
    fc_h5_manifest_row *manifest = (fc_h5_manifest_row *)(m->bytes + m->tables);
    const uint64_t bytes = ((const fc_h5_manifest_row *)(m->good + m->tables))->bytes;
    manifest->crc64 = 0;
    manifest->crc64 = fc_crc64(0, m->bytes + m->tables, bytes);
    FILE *f = fopen(m->index, "r+b");
    assert_non_null(f);
    assert_int_equal(fwrite(m->bytes, 1, m->size, f), m->size);
    assert_int_equal(fclose(f), 0);
}

static void restore(made *m) {
    memcpy(m->bytes, m->good, m->size);
}

static void expect(const made *m, const char *part) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    assert_int_equal(fc_checkpoint_open(m->path, NULL, &c, &err), FC_ECORRUPT);
    assert_null(c);
    if (!strstr(err.message, part)) {
        fail_msg("%s: it should say %s", err.message, part);
    }
}

/* Opens it and resolves every chunk, which must lie within its file. @return whether it opens. */
static bool try(const made *m) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    if (fc_checkpoint_open(m->path, NULL, &c, &err) != FC_OK) {
        assert_true(err.message[0] != '\0');
        return false;
    }
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        for (size_t k = 0; k < t->nchunks; k++) {
            fc_extent e;
            struct stat st;
            const fc_box box = fc_chunk_box(t, &t->chunks[k]);
            for (int d = 0; d < t->ndim; d++) {
                assert_true(box.offsets[d] >= 0 && box.sizes[d] > 0 && box.offsets[d] + box.sizes[d] <= t->shape[d]);
            }
            if (fc_checkpoint_extent(c, t, k, &e, &err) == FC_OK) {
                assert_int_equal(stat(c->files[e.file].path, &st), 0);
                assert_true(e.offset <= (uint64_t)st.st_size && e.length <= (uint64_t)st.st_size - e.offset);
            }
        }
    }
    fc_checkpoint_close(c);
    return true;
}

#define LIE(table, type, number, change, part)                                                                         \
    do {                                                                                                               \
        type *row = row_of(m, table, number, sizeof(type));                                                            \
        change;                                                                                                        \
        put(m);                                                                                                        \
        expect(m, part);                                                                                               \
        restore(m);                                                                                                    \
    } while (0)

static const uint64_t most = UINT64_MAX;

static void wrong_tables_are_refused(void **state) {
    made *m = *state;
    assert_true(try(m));
    LIE(FC_H5_T_FILES, fc_h5_file_row, 1, row->size++, "not the file that index.h5 was written with: it has");
    LIE(FC_H5_T_MESH, fc_h5_mesh_row, 0, row->size = 3, "its tables are damaged: mesh");
    LIE(FC_H5_T_MESH, fc_h5_mesh_row, 0, row->size = INT64_MAX, "its tables are damaged: mesh");
    LIE(FC_H5_T_MESH, fc_h5_mesh_row, 1, memset(row->name, 'x', 16), "its tables are damaged: mesh");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 0, row->text = most, "its tables are damaged: tensors, row 0");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 1, row->path = UINT32_MAX, "its tables are damaged: tensors, row 1");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 1, row->json = most, "its tables are damaged: tensors, row 1");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 1, row->kinds++, "its tables are damaged: tensors, row 1");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 2, row->dtype[0] = '?', "its tables are damaged: tensors, row 2");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 2, row->dims = most - 1, "its tables are damaged: tensors, row 2");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 2, row->ndim = 1000, "its tables are damaged: tensors, row 2");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 0, row->placements = 9999, "its tables are damaged: tensors, row 0");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 0, row->boxes = most, "its tables are damaged: tensors, row 0");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 1, row->box--, "its tables are damaged: tensors, row 1");
    LIE(FC_H5_T_DIMS, int64_t, 0, *row = -1, "its tables are damaged: ");
    LIE(FC_H5_T_DIMS, int64_t, 0, *row = INT64_MAX, "its tables are damaged: ");
    LIE(FC_H5_T_PLACEMENTS, fc_h5_placements_row, 0, row->text = most, "its tables are damaged: placements");
    LIE(FC_H5_T_PLACEMENTS, fc_h5_placements_row, 0, row->size--, "its tables are damaged: placements");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->rank = 4, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->rank = UINT32_MAX, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->offset = most - 4, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->length++, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->grid = 0, "its tables are damaged: boxes, row 0");
    m->bytes[m->tables + offsetof(fc_h5_manifest_row, tables)] ^= 0x40;
    put(m);
    expect(m, "its tables are damaged: ");
    restore(m);
    put(m);
    assert_true(try(m));
}

static void wrong_compressed_boxes_are_refused(void **state) {
    made *m = *state;
    assert_true(try(m));
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 1, row->grid = 9, "its tables are damaged: boxes, row 1");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 1, row->grid = FC_H5_NO_GRID, "its tables are damaged: boxes, row 1");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 1, row->offset = most, "its tables are damaged: boxes, row 1");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 1, row->length++, "its tables are damaged: boxes, row 1");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 4, row->grid = 0, "its tables are damaged: boxes, row 4");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->dims = most, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->ndim = 0, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->ndim = 33, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->ndim = 1, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->filters[0] = 0, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->filters[3] = 1, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_GRIDS, fc_h5_grid_row, 0, row->filters[1] = 4, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_DIMS, int64_t, 3, *row = 0, "its tables are damaged: grids, row 0");
    LIE(FC_H5_T_DIMS, int64_t, 3, *row = 1, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_CHUNKS, fc_h5_chunk_row, 0, row->offset = most, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_CHUNKS, fc_h5_chunk_row, 0, row->length = 0, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_CHUNKS, fc_h5_chunk_row, 0, row->length = UINT32_MAX, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_CHUNKS, fc_h5_chunk_row, 0, row->mask = 4, "its tables are damaged: boxes, row 0");
    put(m);
    assert_true(try(m));
}

static void wrong_tables_of_a_full_file_are_refused(void **state) {
    made *m = *state;
    assert_true(try(m));
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 0, row->placements = 0, "its tables are damaged: tensors, row 0");
    LIE(FC_H5_T_TENSORS, fc_h5_tensor_row, 0, row->boxes = 2, "its tables are damaged: ");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->rank = 1, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 0, row->grid = FC_H5_NO_GRID, "its tables are damaged: boxes, row 0");
    LIE(FC_H5_T_BOXES, fc_h5_box_row, 1, row->offset = m->size, "its tables are damaged: boxes, row 1");
    LIE(FC_H5_T_CHUNKS, fc_h5_chunk_row, 0, row->offset = m->size, "its tables are damaged: boxes, row 0");
    put(m);
    assert_true(try(m));
}

/* Any bytes may be there. */
static void mutations_are_survived(void **state) {
    made *m = *state;
    const size_t bytes = (size_t)((const fc_h5_manifest_row *)(m->good + m->tables))->bytes;
    uint64_t random = 88172645463325252u;
    for (int round = 0; round < 600; round++) {
        for (int i = 0; i < 1 + round % 3; i++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            static const unsigned char odd[] = {0, 1, 0x7f, 0x80, 0xff};
            const size_t at = sizeof(uint64_t) * 4 + (size_t)(random >> 8) % (bytes - sizeof(uint64_t) * 4);
            m->bytes[m->tables + at] = random & 64 ? odd[random % sizeof odd] : (unsigned char)random;
        }
        put(m);
        try(m);
        restore(m);
    }
}

static void a_flipped_bit_is_found(void **state) {
    made *m = *state;
    m->bytes[m->tables + 400] ^= 4;
    FILE *f = fopen(m->index, "r+b");
    assert_non_null(f);
    assert_int_equal(fwrite(m->bytes, 1, m->size, f), m->size);
    assert_int_equal(fclose(f), 0);
    expect(m, "its tables are damaged: their CRC-64 is ");
}

static void a_shard_of_another_run_is_refused(void **state) {
    made *m = *state;
    const fc_h5_file_row *row = row_of(m, FC_H5_T_FILES, 1, sizeof *row);
    FILE *f = fopen(m->shard, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)row->header_crc64_at, SEEK_SET), 0);
    assert_int_equal(fputc((int)(row->header_crc64 & 0xff) ^ 1, f), (int)(row->header_crc64 & 0xff) ^ 1);
    assert_int_equal(fclose(f), 0);
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    fc_extent e;
    size_t refused = 0;
    assert_int_equal(fc_checkpoint_open(m->path, NULL, &c, &err), FC_OK);
    for (size_t i = 0; i < c->ntensors; i++) {
        for (size_t k = 0; k < c->tensors[i].nchunks; k++) {
            fc_code rc = fc_checkpoint_extent(c, &c->tensors[i], k, &e, &err);
            if (c->tensors[i].chunks[k].rank == 1) {
                assert_int_equal(rc, FC_ECORRUPT);
                assert_memory_equal(err.message, m->shard, strlen(m->shard));
                assert_non_null(strstr(err.message, ": not the file that index.h5 was written with: its header_crc64"));
                refused++;
            } else {
                assert_int_equal(rc, FC_OK);
            }
        }
    }
    assert_true(refused > 0);
    fc_checkpoint_close(c);
}

static void count_disagreements(void *context, const fc_defect *defect) {
    *(size_t *)context += strstr(defect->message, "its tables and the files disagree about tensor ") != NULL;
}

static size_t disagreements(const made *m) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    fc_verify_options options = {.seal = NULL};
    fc_verify_report report;
    size_t count = 0;
    if (fc_checkpoint_open(m->path, NULL, &c, &err) != FC_OK ||
        fc_verify(c, &options, count_disagreements, &count, &report, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    fc_checkpoint_close(c);
    return count;
}

static void verify_compares_tables_with_files(void **state) {
    made *m = *state;
    assert_int_equal(disagreements(m), 0);
    ((fc_h5_box_row *)row_of(m, FC_H5_T_BOXES, 0, sizeof(fc_h5_box_row)))->crc64 ^= 1;
    put(m);
    assert_int_equal(disagreements(m), 1);
    restore(m);
    ((fc_h5_tensor_row *)row_of(m, FC_H5_T_TENSORS, 3, sizeof(fc_h5_tensor_row)))->crc64 ^= 1;
    put(m);
    assert_int_equal(disagreements(m), 1);
    restore(m);
    put(m);
}

static void verify_compares_compressed_boxes(void **state) {
    made *m = *state;
    assert_int_equal(disagreements(m), 0);
    fc_h5_chunk_row *chunk = row_of(m, FC_H5_T_CHUNKS, 0, sizeof *chunk);
    chunk->mask ^= 3;
    put(m);
    assert_int_equal(disagreements(m), 1);
    restore(m);
    chunk->offset++;
    put(m);
    assert_int_equal(disagreements(m), 1);
    restore(m);
    ((fc_h5_grid_row *)row_of(m, FC_H5_T_GRIDS, 0, sizeof(fc_h5_grid_row)))->filters[0] = 1;
    put(m);
    assert_int_equal(disagreements(m), 1);
    restore(m);
    put(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(wrong_tables_are_refused, make, clean),
        cmocka_unit_test_setup_teardown(mutations_are_survived, make, clean),
        cmocka_unit_test_setup_teardown(a_flipped_bit_is_found, make, clean),
        cmocka_unit_test_setup_teardown(a_shard_of_another_run_is_refused, make, clean),
        cmocka_unit_test_setup_teardown(verify_compares_tables_with_files, make, clean),
        cmocka_unit_test_setup_teardown(wrong_compressed_boxes_are_refused, make_compressed, clean),
        cmocka_unit_test_setup_teardown(mutations_are_survived, make_compressed, clean),
        cmocka_unit_test_setup_teardown(a_flipped_bit_is_found, make_compressed, clean),
        cmocka_unit_test_setup_teardown(a_shard_of_another_run_is_refused, make_compressed, clean),
        cmocka_unit_test_setup_teardown(verify_compares_compressed_boxes, make_compressed, clean),
        cmocka_unit_test_setup_teardown(wrong_tables_of_a_full_file_are_refused, make_full, clean),
        cmocka_unit_test_setup_teardown(mutations_are_survived, make_full, clean),
        cmocka_unit_test_setup_teardown(a_flipped_bit_is_found, make_full, clean),
        cmocka_unit_test_setup_teardown(verify_compares_compressed_boxes, make_full, clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
