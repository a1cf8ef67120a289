/*
 * Reading HDF5: our own files come back unchanged, and damaged and foreign files give the right message.
 */
#include "fsdpckpt/read.h"
#include "h5_make.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct place {
    char path[64];
} place;

static int make_place(void **state) {
    place *p = calloc(1, sizeof *p);
    strcpy(p->path, "/tmp/test_h5_reader-XXXXXX");
    *state = p;
    return mkdtemp(p->path) ? 0 : -1;
}

static int remove_place(void **state) {
    place *p = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", p->path);
    int rc = system(command);
    free(p);
    return rc;
}

static const char *in_place(const place *p, const char *name) {
    static char buf[4][160];
    static int next;
    char *out = buf[next++ % 4];
    snprintf(out, sizeof buf[0], "%s/%s", p->path, name);
    return out;
}

static fc_checkpoint *must_open(const char *path, bool headers_only) {
    fc_open_options options = {.headers_only = headers_only};
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    if (fc_checkpoint_open(path, &options, &c, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    return c;
}

/* Checks that opening `path` fails with `code` and the message "<path><rest>". */
static void expect_failure(const char *path, fc_code code, const char *rest) {
    char expected[1200];
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    snprintf(expected, sizeof expected, "%s%s", path, rest);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), code);
    assert_null(c);
    assert_string_equal(err.message, expected);
}

static const fc_tensor *find(const fc_checkpoint *c, const char *name) {
    for (size_t i = 0; i < c->ntensors; i++) {
        if (strcmp(c->tensors[i].name, name) == 0) {
            return &c->tensors[i];
        }
    }
    fail_msg("there is no tensor %s", name);
    return NULL;
}

static unsigned char *read_all(const fc_checkpoint *c, const fc_tensor *t, size_t *size) {
    const int64_t origin[FC_MAX_DIMS] = {0};
    int64_t numel = 0;
    fc_error err = {0};
    fc_box box = {t->ndim, origin, t->shape};
    assert_true(fc_numel(t->ndim, t->shape, &numel));
    *size = (size_t)numel * fc_dtype_size(t->dtype);
    unsigned char *bytes = malloc(*size + 1);
    if (fc_read_box(c, t, &box, t->dtype, bytes, &err) != FC_OK) {
        fail_msg("%s: %s", t->name, err.message);
    }
    return bytes;
}

/* ---- our own files ---- */

static void expect_zoo(const fc_checkpoint *c, const h5_made *made) {
    assert_int_equal(c->ntensors, made->target.ntensors);
    assert_string_equal(c->producer, "fsdpckpt 0.1.0");
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_target_tensor *want = &made->tensors[i];
        const fc_tensor *t = find(c, want->name);
        size_t size;
        assert_int_equal(t->dtype, want->dtype);
        assert_int_equal(t->ndim, want->source->ndim);
        assert_memory_equal(t->shape, want->source->shape, (size_t)t->ndim * sizeof *t->shape);
        assert_int_equal(t->path.count, want->path.count);
        for (size_t k = 0; k < t->path.count; k++) {
            assert_string_equal(t->path.elements[k].key, want->path.elements[k].key);
            assert_int_equal(t->path.elements[k].is_index, want->path.elements[k].is_index);
        }
        unsigned char *bytes = read_all(c, t, &size);
        for (uint64_t b = 0; b < size; b++) {
            unsigned char expected = (unsigned char)(b * 131 + b / 256 * 7 + i * 29);
            if (bytes[b] != (t->dtype == FC_BOOL ? expected & 1 : expected)) {
                fail_msg("%s: byte %llu is wrong", t->name, (unsigned long long)b);
            }
        }
        free(bytes);
        if (t->object) {
            const char *json;
            fc_error err = {0};
            assert_string_equal(t->object->encoding, "torch.save");
            /* The bytes are no archive, so only what is recorded can be compared. */
            assert_int_equal(c->format->reader.object_json(c, t, c->arena, &json, &err), FC_OK);
            assert_string_equal(json, want->source->detail);
        }
    }
}

static void full_file_comes_back(void **state) {
    h5_made made;
    fc_error err = {0};
    const char *path = in_place(*state, "model.h5");
    h5_made_begin(&made, 0, NULL, NULL);
    h5_made_zoo(&made);
    assert_int_equal(h5_made_write(&made, path, &err), FC_OK);
    fc_checkpoint *c = must_open(path, false);
    expect_zoo(c, &made);
    assert_int_equal(c->mesh.ndim, 0);
    /* Members of a group are in the order of the source, not of their names. */
    assert_true(find(c, "optim.groups.9.lr") < find(c, "optim.groups.10.lr"));
    assert_true(find(c, "model.scalar") < find(c, "model.none"));
    fc_checkpoint_close(c);
    h5_made_end(&made);
}

typedef struct mesh_cut {
    int ndim;
    const char *names[3];
    int64_t sizes[3];
} mesh_cut;

static void write_sharded(h5_made *made, const mesh_cut *cut, const char *path) {
    fc_error err = {0};
    h5_made_begin(made, cut->ndim, cut->names, cut->sizes);
    h5_made_zoo(made);
    assert_int_equal(mkdir(path, 0755), 0);
    if (h5_made_write(made, path, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
}

static void shards_come_back(void **state) {
    static const mesh_cut cuts[] = {{1, {"dp"}, {3}},
                                    {1, {"tp"}, {4}},
                                    {2, {"dp", "tp"}, {4, 2}},
                                    {2, {"replicate", "dp"}, {2, 3}},
                                    {3, {"replicate", "dp", "tp"}, {2, 2, 2}}};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        h5_made made;
        char name[16];
        snprintf(name, sizeof name, "cut%zu", i);
        const char *path = in_place(*state, name);
        write_sharded(&made, &cuts[i], path);
        fc_checkpoint *c = must_open(path, false);
        expect_zoo(c, &made);
        assert_int_equal(c->mesh.ndim, cuts[i].ndim);
        assert_int_equal(c->nfiles, 1 + fc_mesh_ranks(&made.mesh));
        for (int m = 0; m < cuts[i].ndim; m++) {
            assert_int_equal(c->mesh.sizes[m], cuts[i].sizes[m]);
            assert_string_equal(c->mesh.names[m], cuts[i].names[m]);
        }
        /* index.h5 alone gives the same boxes, without the shards. */
        fc_checkpoint *h = must_open(in_place(*state, strcat(name, "/index.h5")), true);
        assert_int_equal(h->ntensors, c->ntensors);
        for (size_t t = 0; t < c->ntensors; t++) {
            fc_error err;
            fc_extent extent, same;
            const fc_tensor *a = &c->tensors[t], *b = &h->tensors[t];
            assert_string_equal(a->name, b->name);
            assert_int_equal(a->nchunks, b->nchunks);
            if (b->nchunks > 0) {
                assert_int_equal(fc_checkpoint_extent(h, b, 0, &extent, &err), FC_OK);
                assert_int_equal(fc_checkpoint_extent(c, a, 0, &same, &err), FC_OK);
                assert_int_equal(extent.file, same.file);
                assert_int_equal(extent.offset, same.offset);
                assert_int_equal(extent.length, same.length);
            }
        }
        fc_checkpoint_close(h);
        fc_checkpoint_close(c);
        h5_made_end(&made);
    }
}

static void damaged_directories_are_refused_with_the_reason(void **state) {
    static const mesh_cut dp4 = {1, {"dp"}, {4}}, dp2 = {1, {"dp"}, {2}}, other = {2, {"dp", "tp"}, {2, 2}};
    h5_made made;
    const char *path = in_place(*state, "ckpt"), *two = in_place(*state, "two");
    char a[200], b[200], text[600];
    write_sharded(&made, &dp4, path);
    h5_made_end(&made);
    write_sharded(&made, &dp2, two);
    h5_made_end(&made);

    snprintf(a, sizeof a, "%s/shard-00002-of-00004.h5", path);
    snprintf(b, sizeof b, "%s/aside.h5", path);
    expect_failure(a, FC_EUSAGE,
                   ": this is the shard of rank 2 of 4; give the path of its directory to open the whole checkpoint");

    assert_int_equal(rename(a, b), 0);
    snprintf(text, sizeof text, "%s: the file is missing", a);
    fc_checkpoint *c;
    fc_error err;
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);
    c = must_open(path, true); /* headers alone are enough for this */
    fc_checkpoint_close(c);

    snprintf(b, sizeof b, "%s/shard-00001-of-00004.h5", path); /* replace it by the file of another rank */
    snprintf(text, sizeof text, "cp '%s' '%s'", b, a);
    assert_int_equal(system(text), 0);
    snprintf(text, sizeof text, "%s: it contains the shard of rank 1: the file was renamed or replaced", a);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);

    assert_int_equal(truncate(a, 5000), 0);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    snprintf(text, sizeof text,
             "%s: not the file that index.h5 was written with: it has 5000 bytes, but index.h5 says ", a);
    assert_memory_equal(err.message, text, strlen(text));

    snprintf(b, sizeof b, "%s/aside.h5", path);
    assert_int_equal(rename(b, a), 0);
    c = must_open(path, false);
    fc_checkpoint_close(c);

    snprintf(text, sizeof text, "cp '%s/shard-00001-of-00002.h5' '%s'", two, path);
    assert_int_equal(system(text), 0);
    expect_failure(path, FC_ECORRUPT,
                   ": shard-00001-of-00002.h5 does not belong here, because index.h5 has 4 shards; move it away");
    snprintf(b, sizeof b, "%s/shard-00001-of-00002.h5", path);
    assert_int_equal(unlink(b), 0);

    const char *mesh = in_place(*state, "mesh"); /* the same number of ranks, cut differently */
    write_sharded(&made, &other, mesh);
    h5_made_end(&made);
    snprintf(text, sizeof text, "cp '%s/shard-00002-of-00004.h5' '%s'", mesh, path);
    assert_int_equal(system(text), 0);
    snprintf(text, sizeof text, "%s: its mesh differs from that of index.h5: files of two checkpoints are mixed here",
             a);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);

    snprintf(b, sizeof b, "%s/index.h5", path);
    assert_int_equal(unlink(b), 0);
    snprintf(text, sizeof text,
             "%s: the file is missing; it describes the tensors in the shard files next to it: copy it again", b);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);
}

/* Changes index.h5 as another program would. Its tables are then not used. */
static void touch_index(const char *directory) {
    char text[300];
    snprintf(text, sizeof text, "printf x >> '%s/index.h5'", directory);
    assert_int_equal(system(text), 0);
}

static void index_and_shards_must_agree(void **state) {
    static const mesh_cut dp2 = {1, {"dp"}, {2}};
    h5_made a, b;
    char text[500], shard[200];
    fc_error err = {0};
    fc_checkpoint *c;
    const char *x = in_place(*state, "x"), *y = in_place(*state, "y");
    assert_int_equal(mkdir(x, 0755) | mkdir(y, 0755), 0);
    h5_made_begin(&a, dp2.ndim, dp2.names, dp2.sizes);
    h5_made_begin(&b, dp2.ndim, dp2.names, dp2.sizes);
    h5_made_add(&a, "w", FC_F32, 1, (const int64_t[]){8}, -1);
    h5_made_add(&b, "w", FC_F32, 1, (const int64_t[]){10}, -1);
    h5_made_add(&a, "gone", FC_F32, 1, (const int64_t[]){6}, -1);
    assert_int_equal(h5_made_write(&a, x, &err), FC_OK);
    assert_int_equal(h5_made_write(&b, y, &err), FC_OK);
    h5_made_end(&a);
    h5_made_end(&b);

    snprintf(shard, sizeof shard, "%s/shard-00001-of-00002.h5", x);
    snprintf(text, sizeof text, "cp '%s/shard-00001-of-00002.h5' '%s'", y, x);
    assert_int_equal(system(text), 0);
    assert_int_equal(fc_checkpoint_open(x, NULL, &c, &err), FC_ECORRUPT);
    snprintf(text, sizeof text, "%s: not the file that index.h5 was written with: it has ", shard);
    assert_memory_equal(err.message, text, strlen(text));
    touch_index(x);
    assert_int_equal(fc_checkpoint_open(x, NULL, &c, &err), FC_ECORRUPT);
    snprintf(text, sizeof text,
             "%s: dataset /w: the attributes global_shape and offsets are missing or disagree with index.h5", shard);
    assert_string_equal(err.message, text);

    /* The index of one checkpoint with all shards of the other. */
    snprintf(text, sizeof text, "cp '%s/index.h5' '%s'", x, y);
    assert_int_equal(system(text), 0);
    h5_made_begin(&b, dp2.ndim, dp2.names, dp2.sizes);
    h5_made_add(&b, "w", FC_F32, 1, (const int64_t[]){8}, -1);
    const char *z = in_place(*state, "z");
    assert_int_equal(mkdir(z, 0755), 0);
    assert_int_equal(h5_made_write(&b, z, &err), FC_OK);
    h5_made_end(&b);
    snprintf(text, sizeof text, "cp '%s/index.h5' '%s'", x, z);
    assert_int_equal(system(text), 0);
    touch_index(z);
    snprintf(text, sizeof text, "%s/index.h5: dataset /gone is not stored in any shard file", z);
    assert_int_equal(fc_checkpoint_open(z, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);

    h5_made_begin(&b, dp2.ndim, dp2.names, dp2.sizes);
    h5_made_add(&b, "extra", FC_F32, 1, (const int64_t[]){8}, -1);
    const char *v = in_place(*state, "v");
    assert_int_equal(mkdir(v, 0755), 0);
    assert_int_equal(h5_made_write(&b, v, &err), FC_OK);
    h5_made_end(&b);
    snprintf(text, sizeof text, "cp '%s/index.h5' '%s'", x, v);
    assert_int_equal(system(text), 0);
    touch_index(v);
    snprintf(text, sizeof text, "%s/shard-00000-of-00002.h5: dataset /extra is not in index.h5", v);
    assert_int_equal(fc_checkpoint_open(v, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);
}

/* ---- foreign and damaged files ---- */

static void expect_bytes(const fc_checkpoint *c, const char *name, fc_dtype dtype, const void *expected, size_t size) {
    size_t got;
    const fc_tensor *t = find(c, name);
    assert_int_equal(t->dtype, dtype);
    unsigned char *bytes = read_all(c, t, &got);
    assert_int_equal(got, size);
    assert_memory_equal(bytes, expected, size);
    free(bytes);
}

static void h5py_files_open(void **state) {
    static const char *const paths[] = {FSDPCKPT_CORPUS "/good/h5-layouts.h5", FSDPCKPT_CORPUS "/good/h5-userblock.h5"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fc_checkpoint *c = must_open(paths[i], false);
        const float w[] = {0, 1, 2, 3, 4, 5};
        int32_t filtered[60], partly[54];
        int64_t scaled[40];
        double never[20];
        for (int k = 0; k < 60; k++) {
            filtered[k] = k;
        }
        for (int k = 0; k < 54; k++) {
            partly[k] = k / 9 >= 2 && k / 9 < 4 && k % 9 >= 3 && k % 9 < 6 ? 7 : -1;
        }
        for (int k = 0; k < 40; k++) {
            scaled[k] = 100 + k;
        }
        for (int k = 0; k < 20; k++) {
            never[k] = 2.5;
        }
        assert_int_equal(c->ntensors, 15);
        expect_bytes(c, "contiguous", FC_F32, w, sizeof w);
        expect_bytes(c, "deep.tied", FC_F32, w, sizeof w);
        expect_bytes(c, "compact", FC_I16, (const int16_t[]){1, -2, 3}, 6);
        expect_bytes(c, "chunked", FC_U8, "\0\1\2\3\4\5\6\7\10\11", 10);
        expect_bytes(c, "filtered", FC_I32, filtered, sizeof filtered);
        expect_bytes(c, "partly_written", FC_I32, partly, sizeof partly);
        expect_bytes(c, "never_written", FC_F64, never, sizeof never);
        expect_bytes(c, "scaleoffset", FC_I64, scaled, sizeof scaled);
        expect_bytes(c, "big_endian", FC_U16, (const uint16_t[]){0, 1, 2}, 6);
        expect_bytes(c, "scalar", FC_F32, (const float[]){1.5F}, 4);
        expect_bytes(c, "empty", FC_F32, NULL, 0);
        expect_bytes(c, "deep.er.tensor", FC_BOOL, "\1\0", 2);
        expect_bytes(c, "text", FC_OPAQUE, "\"two words\"", 11);
        expect_bytes(c, "@attributes", FC_OPAQUE, "{\"/\": {\"keras_version\": \"3.0\"}}", 31);
        assert_string_equal(find(c, "point")->object->encoding, "hdf5.bytes");
        fc_checkpoint_close(c);
    }
}

static void expect_unreadable(const fc_checkpoint *c, const char *name, fc_code code, const char *text) {
    char expected[600];
    const fc_tensor *t = find(c, name);
    fc_extent extent;
    fc_error err = {0};
    const char *json;
    assert_non_null(t->object);
    assert_int_equal(t->nchunks, 1);
    snprintf(expected, sizeof expected, "%s: dataset /%s: %s", c->path, name, text);
    assert_int_equal(fc_checkpoint_extent(c, t, 0, &extent, &err), code);
    assert_string_equal(err.message, expected);
    assert_int_equal(err.hint, strstr(text, "followed") ? FC_HINT_FOLLOW_EXTERNAL : FC_HINT_EXCLUDE);
    assert_string_equal(err.about, name);
    assert_int_equal(fc_checkpoint_object_json(c, t, c->arena, &json, &err), code);
    assert_string_equal(err.message, expected);
}

static void unsupported_datasets_are_listed_with_their_reason(void **state) {
    (void)state;
    fc_checkpoint *c = must_open(FSDPCKPT_CORPUS "/unsupported/h5-parts.h5", false);
    const float ok[] = {0, 1, 2};
    assert_int_equal(c->ntensors, 7);
    expect_bytes(c, "ok", FC_F32, ok, sizeof ok);
    const int64_t lzf[] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    expect_bytes(c, "lzf", FC_I64, lzf, sizeof lzf);
    expect_unreadable(c, "refs", FC_EUNSUPPORTED,
                      "reference of 8 bytes: references and variable-length data have no meaning outside this file");
    expect_unreadable(c, "outside", FC_EUNSUPPORTED, "a link into another file, which is not followed");
    expect_unreadable(c, "external", FC_EUNSUPPORTED, "its bytes are in external files, which are not followed");
    expect_unreadable(c, "virtual", FC_EUNSUPPORTED, "a virtual dataset over other data, which is not followed");
    expect_unreadable(c, "nowhere", FC_ECORRUPT, "a link whose target does not exist (component not found)");
    fc_checkpoint_close(c);
}

static void bad_files_give_one_line(void **state) {
    (void)state;
    expect_failure(FSDPCKPT_CORPUS "/unsupported/h5-schema-3.h5", FC_EUNSUPPORTED,
                   ": written with schema 3; this fsdpckpt reads schemas 1 to 2: use a newer one");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-dtype-lies.h5", FC_ECORRUPT,
                   ": dataset /w: the attribute dtype says int32, but the HDF5 type is float32");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-same-name.h5", FC_ECORRUPT, ": two datasets have the name a.b.c");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-name.h5", FC_ECORRUPT,
                   ": dataset /a%41: the link name \"a%41\" is not encoded by fsdpckpt: \"%\" must start %2F, "
                   "%25, or be a whole name %2E or %");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-truncated.h5", FC_ECORRUPT,
                   ": not a readable HDF5 file (truncated file: eof = 15285, sblock->base_addr = 0, stored_eof = "
                   "22928)");
    /* Some versions of libhdf5 crash on these two. This process must survive in any case. */
    static const char *const crashers[] = {FSDPCKPT_CORPUS "/bad/h5-segv-group.h5",
                                           FSDPCKPT_CORPUS "/bad/h5-segv-text.h5"};
    for (int i = 0; i < 2; i++) {
        fc_checkpoint *c = NULL;
        fc_error err;
        if (fc_checkpoint_open(crashers[i], NULL, &c, &err) != FC_OK) {
            assert_int_equal(err.code, FC_ECORRUPT);
            assert_memory_equal(err.message, crashers[i], strlen(crashers[i]));
        }
        fc_checkpoint_close(c);
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child process is left */
    assert_int_equal(errno, ECHILD);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(full_file_comes_back, make_place, remove_place),
        cmocka_unit_test_setup_teardown(shards_come_back, make_place, remove_place),
        cmocka_unit_test_setup_teardown(damaged_directories_are_refused_with_the_reason, make_place, remove_place),
        cmocka_unit_test_setup_teardown(index_and_shards_must_agree, make_place, remove_place),
        cmocka_unit_test(h5py_files_open),
        cmocka_unit_test(unsupported_datasets_are_listed_with_their_reason),
        cmocka_unit_test(bad_files_give_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
