/*
 * Reading HDF5: what the writer wrote comes back, damaged and foreign files give the message they should, and the
 * reader process may die, hang or lie without harm.
 */
#include "fsdpckpt/move.h"
#include "h5_make.h"
#include "hdf5/records.h"
#include "hdf5/text.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
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

/* Opening `path` must fail with `code` and the message "<path><rest>". */
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

/* ---- what the writer wrote ---- */

static void expect_zoo(const fc_checkpoint *c, const h5_made *made) {
    assert_int_equal(c->ntensors, made->wanted.ntensors);
    assert_string_equal(c->producer, "fsdpckpt 0.1.0");
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_wanted_tensor *want = &made->tensors[i];
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
            assert_int_equal(fc_checkpoint_object_json(c, t, c->arena, &json, &err), FC_OK);
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
    /* In the order of the source within each group, not of the names. */
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
        /* The same boxes are known from index.h5 alone, without the shards. */
        fc_checkpoint *h = must_open(in_place(*state, strcat(name, "/index.h5")), true);
        assert_int_equal(h->ntensors, c->ntensors);
        for (size_t t = 0; t < c->ntensors; t++) {
            fc_error err;
            fc_extent extent;
            const fc_tensor *a = &c->tensors[t], *b = &h->tensors[t];
            assert_string_equal(a->name, b->name);
            assert_int_equal(a->nchunks, b->nchunks);
            if (b->nchunks > 0) {
                assert_int_equal(fc_checkpoint_extent(h, b, 0, &extent, &err), FC_EUSAGE);
            }
        }
        fc_checkpoint_close(h);
        fc_checkpoint_close(c);
        h5_made_end(&made);
    }
}

static void damaged_directories_say_what_is_wrong(void **state) {
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
    expect_failure(a, FC_EUSAGE, ": this is the shard of rank 2 of 4; name its directory to open the whole checkpoint");

    assert_int_equal(rename(a, b), 0);
    snprintf(text, sizeof text, "%s: the file is missing", a);
    fc_checkpoint *c;
    fc_error err;
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);
    c = must_open(path, true); /* headers alone are enough for this */
    fc_checkpoint_close(c);

    snprintf(b, sizeof b, "%s/shard-00001-of-00004.h5", path); /* another rank's file in its place */
    snprintf(text, sizeof text, "cp '%s' '%s'", b, a);
    assert_int_equal(system(text), 0);
    snprintf(text, sizeof text, "%s: it is the shard of rank 1 of 4, or of another mesh than index.h5's", a);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);

    assert_int_equal(truncate(a, 5000), 0);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    snprintf(text, sizeof text, "%s: not a readable HDF5 file (truncated file: eof = 5000", a);
    assert_memory_equal(err.message, text, strlen(text));

    snprintf(b, sizeof b, "%s/aside.h5", path);
    assert_int_equal(rename(b, a), 0);
    c = must_open(path, false);
    fc_checkpoint_close(c);

    snprintf(text, sizeof text, "cp '%s/shard-00001-of-00002.h5' '%s'", two, path);
    assert_int_equal(system(text), 0);
    expect_failure(path, FC_ECORRUPT,
                   ": shard-00001-of-00002.h5 does not belong here: index.h5 is of 4 shards; move it away");
    snprintf(b, sizeof b, "%s/shard-00001-of-00002.h5", path);
    assert_int_equal(unlink(b), 0);

    const char *mesh = in_place(*state, "mesh"); /* the same number of ranks, cut otherwise */
    write_sharded(&made, &other, mesh);
    h5_made_end(&made);
    snprintf(text, sizeof text, "cp '%s/shard-00002-of-00004.h5' '%s'", mesh, path);
    assert_int_equal(system(text), 0);
    snprintf(text, sizeof text, "%s: it is the shard of rank 2 of 4, or of another mesh than index.h5's", a);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);

    snprintf(b, sizeof b, "%s/index.h5", path);
    assert_int_equal(unlink(b), 0);
    snprintf(text, sizeof text, "%s: the file is missing", b);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_ECORRUPT);
    assert_string_equal(err.message, text);
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
    snprintf(text, sizeof text,
             "%s: dataset /w: the attributes global_shape and offsets are missing or disagree with index.h5", shard);
    assert_string_equal(err.message, text);

    /* All shards of the one with the index of the other. */
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
    snprintf(text, sizeof text, "%s/index.h5: dataset /gone is stored in no shard file", z);
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
    snprintf(expected, sizeof expected, "%s: dataset /%s: %s; --exclude '%s' leaves it out", c->path, name, text, name);
    assert_int_equal(fc_checkpoint_extent(c, t, 0, &extent, &err), code);
    assert_string_equal(err.message, expected);
    assert_int_equal(fc_checkpoint_object_json(c, t, c->arena, &json, &err), code);
    assert_string_equal(err.message, expected);
}

static void unsupported_parts_are_listed_with_their_reason(void **state) {
    (void)state;
    fc_checkpoint *c = must_open(FSDPCKPT_CORPUS "/unsupported/h5-parts.h5", false);
    const float ok[] = {0, 1, 2};
    assert_int_equal(c->ntensors, 7);
    expect_bytes(c, "ok", FC_F32, ok, sizeof ok);
    expect_unreadable(c, "lzf", FC_EUNSUPPORTED,
                      "compressed with lzf (HDF5 filter 32000), which this libhdf5 cannot decode: rewrite it with gzip "
                      "or uncompressed");
    expect_unreadable(c, "refs", FC_EUNSUPPORTED,
                      "reference of 8 bytes: references and variable-length data have no meaning outside this file");
    expect_unreadable(c, "outside", FC_EUNSUPPORTED,
                      "a link into another file, which is not followed (--follow-external does)");
    expect_unreadable(c, "external", FC_EUNSUPPORTED,
                      "its bytes are in external files, which are not followed (--follow-external does)");
    expect_unreadable(c, "virtual", FC_EUNSUPPORTED,
                      "a virtual dataset onto other data, which is not followed (--follow-external does)");
    expect_unreadable(c, "nowhere", FC_ECORRUPT, "a link that leads nowhere (component not found)");
    fc_checkpoint_close(c);
}

static void bad_files_give_one_line(void **state) {
    (void)state;
    expect_failure(FSDPCKPT_CORPUS "/unsupported/h5-schema-2.h5", FC_EUNSUPPORTED,
                   ": written with schema 2; this fsdpckpt reads schema 1: use a newer one");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-dtype-lies.h5", FC_ECORRUPT,
                   ": dataset /w: the attribute dtype says int32, the HDF5 type is float32");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-same-name.h5", FC_ECORRUPT, ": two datasets have the name a.b.c");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-name.h5", FC_ECORRUPT,
                   ": dataset /a%41: the link name \"a%41\" is not encoded as fsdpckpt does it: \"%\" must start %2F, "
                   "%25, or be a whole name %2E or %");
    expect_failure(FSDPCKPT_CORPUS "/bad/h5-truncated.h5", FC_ECORRUPT,
                   ": not a readable HDF5 file (truncated file: eof = 15285, sblock->base_addr = 0, stored_eof = "
                   "22928)");
    /* Other versions of libhdf5 may survive these two; this process must, whatever they do. */
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
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* nobody was left behind */
    assert_int_equal(errno, ECHILD);
}

/* ---- the reader process ---- */

static int crash(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    strcpy(shared->where, "dataset /a\nb");
    raise(SIGSEGV);
    return 0;
}

static int hang(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    strcpy(shared->where, "group /g");
    for (int i = 0; i < 1000; i++) {
        pause();
    }
    return 0;
}

static int refuse(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    memset(shared->where, 'x', sizeof shared->where); /* without an end */
    return 7;
}

static int flood(void *context, int out, fc_h5_shared *shared) {
    static char junk[4096];
    (void)context, (void)shared;
    while (write(out, junk, sizeof junk) > 0) {
    }
    return 3;
}

/* Counts what it may do that it should not. */
static int try_everything(void *context, int out, fc_h5_shared *shared) {
    int done = 0;
    (void)out, (void)shared;
    done += open("/etc/passwd", O_RDONLY) >= 0;
    done += open("/tmp/test_h5_reader-never", O_WRONLY | O_CREAT, 0600) >= 0;
    done += socket(AF_INET, SOCK_STREAM, 0) >= 0;
    done += fork() > 0;
    done += kill(getppid(), 0) == 0;
    done += write(*(int *)context, "x", 1) == 1;
    done += unlink("/tmp/test_h5_reader-never") == 0;
    return done;
}

/* Runs `run` and returns what is said about its end. */
static fc_code run_child(int (*run)(void *, int, fc_h5_shared *), void *context, bool read_it, fc_error *err) {
    fc_h5_child child;
    char buf[64];
    fc_h5_job job = {.run = run, .context = context, .timeout_ms = 300, .not_confined = run == hang || run == crash};
    assert_int_equal(fc_h5_child_start(&child, &job, err), FC_OK);
    while (read_it && fc_h5_child_read(&child, buf, sizeof buf) > 0) {
    }
    fc_code rc = fc_h5_child_finish(&child, "x.h5", err);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    return rc;
}

static void reader_process_may_die(void **state) {
    fc_error err = {0};
    (void)state;
    assert_int_equal(run_child(crash, NULL, true, &err), FC_ECORRUPT);
    assert_string_equal(
        err.message,
        "x.h5: corrupt HDF5 file (the reader process was killed by SIGSEGV while reading dataset /a?b)");
    assert_int_equal(run_child(hang, NULL, true, &err), FC_ECORRUPT);
    assert_string_equal(
        err.message,
        "x.h5: corrupt HDF5 file (the reader process was stopped: no progress for 0 s while reading group /g)");
    assert_int_equal(run_child(refuse, NULL, true, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "failed with status 7 while reading xxx"));
    assert_int_equal(run_child(flood, NULL, false, &err), FC_ECORRUPT); /* ends when nobody reads */
    assert_non_null(strstr(err.message, "failed with status 3"));
}

static void reader_process_is_confined(void **state) {
#ifdef FSDPCKPT_HAVE_SECCOMP
    fc_error err = {0};
    int fd = open("/dev/null", O_WRONLY);
    (void)state;
    if (run_child(try_everything, &fd, true, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    close(fd);
#else
    (void)state, (void)try_everything;
    skip();
#endif
}

/* A child that sends what it is told to: the parent must find what is wrong with it. */
static int send_bytes(void *context, int out, fc_h5_shared *shared) {
    const fc_h5_bytes *bytes = context;
    (void)shared;
    return write(out, bytes->data, bytes->size) != (ssize_t)bytes->size;
}

static fc_code decode(const void *data, size_t size, uint64_t file_size) {
    fc_h5_child child;
    fc_h5_bytes bytes = {data, size};
    fc_h5_job job = {.run = send_bytes, .context = &bytes};
    fc_error err = {0};
    fc_h5_file file;
    fc_arena *arena = fc_arena_new();
    assert_int_equal(fc_h5_child_start(&child, &job, &err), FC_OK);
    fc_h5_in in = {.child = &child, .budget = 1 << 20};
    fc_code rc = fc_h5_read_file(&in, arena, "x.h5", file_size, &file, &err);
    fc_h5_in_free(&in);
    fc_h5_child_finish(&child, "x.h5", &err);
    assert_true(fc_arena_size(arena) < 8 << 20);
    fc_arena_free(arena);
    return rc;
}

/* Encodes ROOT, one dataset, one chunk and END into a buffer through a pipe-less sink. */
static fc_h5_sink encode(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = {.fd = -1};
    fc_h5_root root = {.rank = -1, .world_size = -1, .nmesh = -1};
    fc_h5_put_root(&out, &root);
    fc_h5_put_dataset(&out, d);
    if (d->where == FC_H5_IN_CHUNKS) {
        fc_h5_begin(&out, FC_H5_CHUNKS);
        fc_h5_put_u64(&out, 1);
        fc_h5_put_u64(&out, offset);
        fc_h5_put_u64(&out, size);
        fc_h5_put_u64(&out, 0);
        fc_h5_put_u64(&out, (uint64_t)at);
        fc_h5_end(&out);
    }
    fc_h5_begin(&out, FC_H5_END);
    fc_h5_end(&out);
    return out;
}

static fc_code decode_dataset(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = encode(d, offset, size, at);
    fc_code rc = decode(out.buf, out.used, 1000);
    free(out.buf);
    return rc;
}

static void parent_believes_nothing(void **state) {
    static const unsigned char zeros[64];
    const int64_t shape[] = {100}, chunk[] = {10}, huge[] = {INT64_MAX};
    (void)state;
    const fc_h5_dataset good = {.path = "w",
                                .lists = {zeros, 1},
                                .where = FC_H5_AT_OFFSET,
                                .dtype = FC_U8,
                                .element = 1,
                                .ndim = 1,
                                .shape = shape,
                                .offset = 900,
                                .length = 100,
                                .owner = -1,
                                .nglobal_shape = -1,
                                .noffsets = -1};
    fc_h5_dataset d = good;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_OK);
    d.offset = 901; /* one byte beyond the end */
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.offset = UINT64_MAX - 50;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.length = 99;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.element = 2;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.shape = huge;
    d.dtype = FC_F64;
    d.element = 8;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    static const char *const paths[] = {"", "/w", "w/", "a//b", "a/b", "\xff"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        d = good;
        d.path = paths[i];
        assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    }
    d = good;
    d.where = FC_H5_IN_CHUNKS;
    d.chunk = chunk;
    d.bytes = (fc_h5_bytes){zeros, 1};
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_OK);
    assert_int_equal(decode_dataset(&d, 991, 10, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 0, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 10, 91), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 10, 100), FC_ECORRUPT);
    d.nfilters = 2;
    d.filters[0] = d.filters[1] = 1; /* deflate twice: its swelling has no useful bound */
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_ECORRUPT);
    d.filters[1] = 4;
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_ECORRUPT);
}

/* Every truncation and many random changes of a good stream: an answer, never more. */
static void any_stream_is_survived(void **state) {
    static const unsigned char zeros[64];
    const int64_t shape[] = {100}, chunk[] = {10};
    const fc_h5_dataset d = {.path = "w",
                             .lists = {zeros, 1},
                             .where = FC_H5_IN_CHUNKS,
                             .dtype = FC_U8,
                             .element = 1,
                             .ndim = 1,
                             .shape = shape,
                             .chunk = chunk,
                             .bytes = {zeros, 1},
                             .owner = -1,
                             .nglobal_shape = -1,
                             .noffsets = -1,
                             .json = "{}"};
    fc_h5_sink out = encode(&d, 990, 10, 90);
    unsigned seed = 1;
    (void)state;
    assert_int_equal(decode(out.buf, out.used, 1000), FC_OK);
    for (size_t n = 0; n < out.used; n += 7) {
        assert_int_equal(decode(out.buf, n, 1000), FC_ECORRUPT);
    }
    unsigned char *copy = malloc(out.used);
    for (int i = 0; i < 300; i++) {
        memcpy(copy, out.buf, out.used);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] ^= (unsigned char)(1 << seed / 4096 % 8);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] = (unsigned char)(seed >> 8);
        decode(copy, out.used, 1000);
    }
    free(copy);
    free(out.buf);
}

/* ---- text ---- */

static void json_is_checked(void **state) {
    static const char *const good[] = {"null", " [1, -2.5e+3, 0, true] ", "{\"a\": {\"b\": []}}", "\"\\u00e9\\n\"",
                                       "123456789012345678901234567890"};
    static const char *const bad[] = {"",     "[1,]", "{\"a\" 1}", "01",  "1.",     "nul",     "\"a",
                                      "[1 2]", "{1:2}", "\"\\x\"",  "\"\t\"", "\"\xff\"", "[] []", "-"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(fc_h5_is_json(good[i], strlen(good[i])));
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(fc_h5_is_json(bad[i], strlen(bad[i])));
    }
    char *deep = malloc(100001);
    memset(deep, '[', 100000);
    assert_false(fc_h5_is_json(deep, 100000));
    free(deep);
    fc_h5_text t = {0};
    fc_h5_text_string(&t, "a\"\\\x01\xc3\xa9", 6);
    fc_h5_text_string(&t, "\xc0\x80", 2);
    fc_h5_text_nul(&t);
    assert_string_equal(t.data, "\"a\\\"\\\\\\u0001\xc3\xa9\"{\"$bytes\": \"wIA=\"}");
    fc_h5_text_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(full_file_comes_back, make_place, remove_place),
        cmocka_unit_test_setup_teardown(shards_come_back, make_place, remove_place),
        cmocka_unit_test_setup_teardown(damaged_directories_say_what_is_wrong, make_place, remove_place),
        cmocka_unit_test_setup_teardown(index_and_shards_must_agree, make_place, remove_place),
        cmocka_unit_test(h5py_files_open),
        cmocka_unit_test(unsupported_parts_are_listed_with_their_reason),
        cmocka_unit_test(bad_files_give_one_line),
        cmocka_unit_test(reader_process_may_die),
        cmocka_unit_test(reader_process_is_confined),
        cmocka_unit_test(parent_believes_nothing),
        cmocka_unit_test(any_stream_is_survived),
        cmocka_unit_test(json_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
