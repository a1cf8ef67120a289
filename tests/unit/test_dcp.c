/*
 * formats/dcp on every checkpoint of tests/corpus: good ones open and all their extents resolve; bad and unsupported
 * ones give exactly the message in expected-error. tests/oracle/dcp_extents.py compares the bytes.
 */
#include "dcp/dcp.h"
#include "dcp/files.h"
#include "fsdpckpt/checkpoint.h"

#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATH_SIZE = 1024 };

/* Calls `check` for every dcp-* folder of the corpus. Returns their number. */
static int each_case(const char *kind, void (*check)(const char *path)) {
    char path[PATH_SIZE];
    int count = 0;
    snprintf(path, sizeof path, "%s/%s", FSDPCKPT_CORPUS, kind);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (strncmp(e->d_name, "dcp-", 4) == 0) {
            snprintf(path, sizeof path, "%s/%s/%s", FSDPCKPT_CORPUS, kind, e->d_name);
            check(path);
            count++;
        }
    }
    closedir(dir);
    return count;
}

/* Opens the checkpoint and resolves all extents. Returns the first error. */
static fc_code read_all(const char *path, fc_error *err) {
    fc_checkpoint *c;
    fc_code rc = fc_checkpoint_open(path, NULL, &c, err);
    if (rc != FC_OK) {
        assert_null(c);
        return rc;
    }
    fc_arena *arena = fc_arena_new();
    for (size_t i = 0; i < c->ntensors && rc == FC_OK; i++) {
        const fc_tensor *t = &c->tensors[i];
        const char *json = NULL;
        fc_extent extent;
        for (size_t n = 0; n < t->nchunks && rc == FC_OK; n++) {
            rc = fc_checkpoint_extent(c, t, n, &extent, err);
        }
        if (t->object && rc == FC_OK) {
            rc = fc_checkpoint_object_json(c, t, arena, &json, err);
            assert_true(rc != FC_OK || json[0] != '\0');
        }
    }
    fc_arena_free(arena);
    fc_checkpoint_close(c);
    return rc;
}

static void check_refused(const char *path) {
    char file[PATH_SIZE], line[1024] = "", want[2048];
    fc_error err = {FC_OK, ""};
    snprintf(file, sizeof file, "%s/expected-error", path);
    FILE *f = fopen(file, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    line[strcspn(line, "\n")] = '\0';
    char *at = strstr(line, "{}");
    assert_non_null(at);
    *at = '\0';
    snprintf(want, sizeof want, "%s%s%s", line + 2, path, at + 2);
    fc_code rc = read_all(path, &err);
    /* The library only gives a hint. expected-error has the option, which the command adds. */
    static const struct {
        const char *text;
        fc_hint hint;
    } options[] = {{"; --exclude 'w' leaves it out", FC_HINT_EXCLUDE},
                   {"; --follow-external allows it", FC_HINT_FOLLOW_EXTERNAL}};
    fc_hint hint = FC_HINT_NONE;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char *option = strstr(want, options[i].text);
        if (option) {
            *option = '\0';
            hint = options[i].hint;
        }
    }
    assert_int_equal(err.hint, hint);
    assert_string_equal(err.message, want);
    assert_int_equal(fc_exit_status(rc), line[0] - '0');
}

static void bad_ones_are_refused(void **state) {
    (void)state;
    assert_true(each_case("bad", check_refused) >= 40);
    assert_true(each_case("unsupported", check_refused) >= 9);
}

static void check_good(const char *path) {
    fc_error err = {FC_OK, ""};
    fc_code rc = read_all(path, &err);
    if (rc != FC_OK) {
        print_error("%s\n", err.message);
    }
    assert_int_equal(rc, FC_OK);
}

static void good_ones_open(void **state) {
    (void)state;
    assert_true(each_case("good", check_good) >= 50);
}

static fc_checkpoint *open_good(const char *name) {
    char path[PATH_SIZE];
    fc_checkpoint *c;
    fc_error err;
    snprintf(path, sizeof path, "%s/good/%s", FSDPCKPT_CORPUS, name);
    fc_code rc = fc_checkpoint_open(path, NULL, &c, &err);
    if (rc != FC_OK) {
        print_error("%s\n", err.message);
    }
    assert_int_equal(rc, FC_OK);
    return c;
}

static const fc_tensor *find(const fc_checkpoint *c, const char *name) {
    for (size_t i = 0; i < c->ntensors; i++) {
        if (strcmp(c->tensors[i].name, name) == 0) {
            return &c->tensors[i];
        }
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

/* dp 4 × tp 2, colwise: torch's offsets in rank order. */
static void strided_shards_of_2d(void **state) {
    (void)state;
    fc_checkpoint *c = open_good("dcp-torch2.15.0-2d-dp4tp2");
    assert_int_equal(c->nfiles, 8);
    assert_string_equal(c->format->name, "dcp");
    assert_string_equal(c->producer, "torch.distributed.checkpoint 1.0.0");
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        int64_t volume = 0, whole = 1;
        for (size_t n = 0; n < t->nchunks; n++) {
            int64_t box = 1;
            for (int d = 0; d < t->ndim; d++) {
                box *= t->chunks[n].dims[t->ndim + d];
            }
            volume += box;
            assert_true(t->chunks[n].rank < 8);
        }
        for (int d = 0; d < t->ndim; d++) {
            whole *= t->shape[d];
        }
        assert_int_equal(volume, whole);
        assert_string_equal(t->path.elements[0].key, "model");
        assert_false(t->path.elements[0].is_index);
    }
    fc_checkpoint_close(c);
}

static void empty_shards_leave_no_chunks(void **state) {
    (void)state;
    fc_checkpoint *c = open_good("dcp-torch2.15.0-empty");
    assert_int_equal(find(c, "none")->nchunks, 0);
    assert_int_equal(find(c, "none")->shape[0], 0);
    assert_int_equal(find(c, "none")->shape[1], 4);
    assert_int_equal(find(c, "rows")->nchunks, 2);
    fc_checkpoint_close(c);
}

static void paths_keep_keys_and_indices(void **state) {
    (void)state;
    fc_checkpoint *c = open_good("dcp-torch2.15.0-objects");
    const fc_path *path = &find(c, "nested.mixed.2.k")->path;
    assert_int_equal(path->count, 4);
    assert_string_equal(path->elements[1].key, "mixed");
    assert_string_equal(path->elements[2].key, "2");
    assert_true(path->elements[2].is_index);
    assert_false(path->elements[3].is_index);
    fc_checkpoint_close(c);
}

static void objects_decode(void **state) {
    (void)state;
    static const struct {
        const char *name, *json;
    } wanted[] = {
        {"step", "1234"},
        {"big", "{\"$int\":\"9223372036854775808\"}"},
        {"min64", "-9223372036854775808"},
        {"betas", "{\"$tuple\":[0.9,0.999]}"},
        {"nan", "{\"$float\":\"nan\"}"},
        {"nothing", "null"},
        {"amp", "true"},
        {"empty_tuple", "{\"$tuple\":[]}"},
    };
    static const char *const versions[] = {"dcp-torch1.13.1-objects", "dcp-torch2.0.1-objects",
                                           "dcp-torch2.1.2-objects", "dcp-torch2.15.0-objects"};
    for (size_t v = 0; v < 4; v++) {
        fc_checkpoint *c = open_good(versions[v]);
        fc_arena *arena = fc_arena_new();
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
            const fc_tensor *t = find(c, wanted[i].name);
            const char *json;
            fc_error err;
            assert_int_equal(t->dtype, FC_OPAQUE);
            assert_int_equal(t->ndim, 1);
            assert_int_equal(t->nchunks, 1);
            assert_int_equal((uint64_t)t->shape[0], t->chunks[0].place.length);
            assert_string_equal(t->object->encoding, "torch.save");
            assert_int_equal(fc_checkpoint_object_json(c, t, arena, &json, &err), FC_OK);
            assert_string_equal(json, wanted[i].json);
        }
        fc_arena_free(arena);
        fc_checkpoint_close(c);
    }
}

static void opens_by_its_metadata_file(void **state) {
    (void)state;
    char path[PATH_SIZE];
    fc_checkpoint *c;
    fc_error err;
    snprintf(path, sizeof path, "%s/good/dcp-torch2.15.0-fsdp2/.metadata", FSDPCKPT_CORPUS);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_OK);
    assert_int_equal(c->nfiles, 4);
    fc_checkpoint_close(c);
    snprintf(path, sizeof path, "%s/good/dcp-torch2.15.0-fsdp2/__0_0.distcp", FSDPCKPT_CORPUS);
    assert_int_equal(fc_checkpoint_open(path, NULL, &c, &err), FC_EUSAGE);
    assert_non_null(
        strstr(err.message, "__0_0.distcp: this is one data file of a DCP checkpoint; give the path of its directory"));
}

static void headers_only_needs_no_data(void **state) {
    (void)state;
    char path[PATH_SIZE];
    fc_checkpoint *c;
    fc_error err;
    const fc_open_options options = {true, false};
    snprintf(path, sizeof path, "%s/bad/dcp-missing-file", FSDPCKPT_CORPUS);
    assert_int_equal(fc_checkpoint_open(path, &options, &c, &err), FC_OK);
    assert_int_equal(c->ntensors, 1);
    fc_extent extent;
    assert_int_equal(fc_checkpoint_extent(c, &c->tensors[0], 0, &extent, &err), FC_ECORRUPT);
    char want[2 * PATH_SIZE];
    snprintf(want, sizeof want, "tensor w: %s/__0_0.distcp: the file is missing", path);
    /* The library only says that the tensor can be excluded. expected-error has the option, which the command adds. */
    char *option = strstr(want, "; --exclude 'w' leaves it out");
    assert_int_equal(err.hint, option ? FC_HINT_EXCLUDE : FC_HINT_NONE);
    if (option) {
        *option = '\0';
    }
    assert_string_equal(err.message, want);
    fc_checkpoint_close(c);
}

static void copy_file(const char *from, const char *folder, const char *name) {
    char path[PATH_SIZE], buf[65536];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *in = fopen(from, "r"), *out = fopen(path, "w");
    assert_non_null(in);
    assert_non_null(out);
    size_t n = fread(buf, 1, sizeof buf, in);
    assert_true(n > 0 && n < sizeof buf);
    assert_int_equal(fwrite(buf, 1, n, out), n);
    fclose(in);
    fclose(out);
}

/* Links within the checkpoint are followed. Links out of it are refused, even when only headers are read. */
static void links_stay_within(void **state) {
    (void)state;
    char folder[] = "/tmp/fsdpckpt-test-XXXXXX", from[PATH_SIZE], link[PATH_SIZE];
    const fc_open_options headers = {.headers_only = true}, follow = {.follow_external = true};
    fc_checkpoint *c;
    fc_error err;
    assert_non_null(mkdtemp(folder));
    snprintf(from, sizeof from, "%s/good/dcp-torch2.15.0-strided/.metadata", FSDPCKPT_CORPUS);
    copy_file(from, folder, ".metadata");
    snprintf(from, sizeof from, "%s/good/dcp-torch2.15.0-strided/__0_0.distcp", FSDPCKPT_CORPUS);
    copy_file(from, folder, "real");
    snprintf(link, sizeof link, "%s/__0_0.distcp", folder);
    assert_int_equal(symlink("real", link), 0);
    assert_int_equal(read_all(folder, &err), FC_OK);
    unlink(link);
    assert_int_equal(symlink(from, link), 0);
    assert_int_equal(fc_checkpoint_open(folder, NULL, &c, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "/__0_0.distcp: a symbolic link that leads out of the checkpoint, to "));
    assert_int_equal(fc_checkpoint_open(folder, &headers, &c, &err), FC_ECORRUPT);
    assert_int_equal(fc_checkpoint_open(folder, &follow, &c, &err), FC_OK);
    fc_checkpoint_close(c);
    unlink(link);
    snprintf(link, sizeof link, "%s/real", folder);
    unlink(link);
    snprintf(link, sizeof link, "%s/.metadata", folder);
    unlink(link);
    rmdir(folder);
}

enum { MANY = 200, ROUNDS = 20, THREADS = 4 };

static void *use_files(void *arg) {
    const fc_checkpoint *c = arg;
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t file = 0; file < MANY; file++) {
            int fd;
            char text[8] = "";
            fc_error err;
            if (fc_dcp_acquire(c, file, &fd, &err) != FC_OK || pread(fd, text, 7, 0) <= 0 ||
                (uint32_t)atoi(text) != file) {
                return "a descriptor of another file";
            }
            fc_dcp_release(c, file);
        }
    }
    return NULL;
}

static int open_descriptors(void) {
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir)) {
        count++;
    }
    closedir(dir);
    return count;
}

/* torch 1.13 writes thousands of files. Threads read them correctly with a limited number of descriptors. */
static void descriptors_are_bounded(void **state) {
    (void)state;
    char folder[] = "/tmp/fsdpckpt-test-XXXXXX", path[MANY][64];
    fc_file files[MANY];
    fc_checkpoint c = {0};
    pthread_t threads[THREADS];
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < MANY; i++) {
        snprintf(path[i], sizeof path[i], "%s/%d", folder, i);
        FILE *f = fopen(path[i], "w");
        fprintf(f, "%d", i);
        fclose(f);
        files[i] = (fc_file){path[i], path[i]};
    }
    c.files = files;
    c.nfiles = MANY;
    c.state = fc_dcp_state_new(MANY);
    int before = open_descriptors();
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, use_files, &c), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *problem;
        pthread_join(threads[i], &problem);
        assert_null(problem);
    }
    assert_true(open_descriptors() <= before + 64 + THREADS);
    fc_dcp_state_free(c.state);
    assert_int_equal(open_descriptors(), before);
    for (int i = 0; i < MANY; i++) {
        unlink(path[i]);
    }
    rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_ones_are_refused),        cmocka_unit_test(good_ones_open),
        cmocka_unit_test(strided_shards_of_2d),        cmocka_unit_test(empty_shards_leave_no_chunks),
        cmocka_unit_test(paths_keep_keys_and_indices), cmocka_unit_test(objects_decode),
        cmocka_unit_test(opens_by_its_metadata_file),  cmocka_unit_test(headers_only_needs_no_data),
        cmocka_unit_test(links_stay_within),           cmocka_unit_test(descriptors_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
