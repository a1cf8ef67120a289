/*
 * lib/move/convert.c with several ranks as threads: the target has the same bytes as with one process. If a rank
 * fails, there is no target and every rank returns its error.
 */
#include "fsdpckpt/move.h"

#include <dirent.h>
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

#define SOURCE FSDPCKPT_CORPUS "/good/dcp-torch2.15.0-train"

static char directory[] = "/tmp/fsdpckpt-ranks-XXXXXX";

static int setup(void **state) {
    (void)state;
    return !mkdtemp(directory);
}

/* Removes the remaining files of targets. */
static void empty(const char *path) {
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        char name[512];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlink(name) != 0) {
            empty(name);
            assert_int_equal(rmdir(name), 0);
        }
    }
    closedir(dir);
}

static int teardown(void **state) {
    (void)state;
    empty(directory);
    return rmdir(directory);
}

static int entries(void) {
    int n = 0;
    DIR *dir = opendir(directory);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(dir);
    return n;
}

/* The work of the ranks. */
typedef struct work {
    const char *target, *format; /* NULL: h5 */
    const fc_mesh *mesh;
    int compress;
    fc_dtype cast; /* FC_OPAQUE for no cast */
    int bad;       /* this rank has another source or too little memory; -1 for none */
    bool other_source, dry_run;
    fc_code codes[8];
} work;

static fc_code convert(fc_comm *comm, void *context, fc_error *err) {
    work *w = context;
    bool bad = comm && comm->rank == w->bad;
    fc_convert_options how = {
        .format = fc_format_find(w->format ? w->format : "h5"),
        .selection = {.mesh = w->mesh, .compress = w->compress, .cast = w->cast != FC_OPAQUE, .dtype = w->cast},
        .dry_run = w->dry_run,
        .work = {.threads = 2, .memory = bad && !w->other_source ? 1000 : 0},
        .comm = comm,
    };
    fc_checkpoint *source;
    fc_code rc = fc_checkpoint_open(bad && w->other_source ? FSDPCKPT_CORPUS "/good/dcp-torch2.15.0-2d-dp2tp2" : SOURCE,
                                    NULL, &source, err);
    assert_int_equal(rc, FC_OK);
    rc = fc_convert(source, w->target, &how, NULL, err);
    fc_checkpoint_close(source);
    if (comm) {
        w->codes[comm->rank] = rc;
    }
    return rc;
}

static void compare_files(const char *a, const char *b) {
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    int x, y;
    assert_true(f && g);
    do {
        x = getc(f);
        y = getc(g);
        assert_int_equal(x, y);
    } while (x != EOF);
    fclose(f);
    fclose(g);
}

/* Compares two targets: files, or directories of files. */
static void compare(const char *a, const char *b) {
    struct stat st;
    assert_int_equal(stat(a, &st), 0);
    if (!S_ISDIR(st.st_mode)) {
        compare_files(a, b);
        return;
    }
    DIR *dir = opendir(a);
    for (struct dirent *e; (e = readdir(dir));) {
        char x[512], y[512];
        snprintf(x, sizeof x, "%s/%s", a, e->d_name);
        snprintf(y, sizeof y, "%s/%s", b, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            compare_files(x, y);
        }
    }
    closedir(dir);
}

static void same_as_alone(work w) {
    char alone[128], together[128];
    fc_error err = {FC_OK, ""};
    snprintf(alone, sizeof alone, "%s/alone", directory);
    snprintf(together, sizeof together, "%s/together", directory);
    w.target = alone;
    assert_int_equal(convert(NULL, &w, &err), FC_OK);
    w.target = together;
    for (int size = 1; size <= 4; size++) {
        fc_code rc = fc_comm_run_local(size, convert, &w, &err);
        assert_string_equal(err.message, "");
        assert_int_equal(rc, FC_OK);
        compare(alone, together);
        if (unlink(together) != 0) {
            empty(together);
            assert_int_equal(rmdir(together), 0);
        }
    }
    empty(directory);
}

static const fc_mesh two_by_two = {.ndim = 2, .sizes = {2, 2}, .names = {"replicate", "dp"}};

static void full_target_is_the_same(void **state) {
    (void)state;
    same_as_alone((work){.cast = FC_OPAQUE, .bad = -1});
    same_as_alone((work){.cast = FC_BF16, .bad = -1});
    same_as_alone((work){.cast = FC_OPAQUE, .compress = 1, .bad = -1});
}

static void sharded_target_is_the_same(void **state) {
    (void)state;
    same_as_alone((work){.mesh = &two_by_two, .cast = FC_OPAQUE, .bad = -1});
    same_as_alone((work){.mesh = &two_by_two, .cast = FC_OPAQUE, .compress = 1, .bad = -1});
}

/* With many files, each rank writes whole files. */
static void many_files_are_the_same(void **state) {
    (void)state;
    static const fc_mesh many = {.ndim = 1, .sizes = {19}, .names = {"dp"}};
    static const char *const names[] = {"h5", "dcp", "pt", "safetensors"};
    for (int i = 0; i < 4; i++) {
        same_as_alone((work){.format = names[i], .mesh = &many, .cast = FC_OPAQUE, .bad = -1});
    }
    same_as_alone((work){.mesh = &many, .cast = FC_BF16, .bad = -1});
    same_as_alone((work){.mesh = &many, .cast = FC_OPAQUE, .compress = 1, .bad = -1});
}

/* Formats that store some values differently report these values only to rank 0. */
static void every_format_is_the_same(void **state) {
    (void)state;
    static const char *const names[] = {"pt", "dcp", "safetensors"};
    for (int i = 0; i < 3; i++) {
        same_as_alone((work){.format = names[i], .cast = FC_OPAQUE, .bad = -1});
        same_as_alone((work){.format = names[i], .mesh = &two_by_two, .cast = FC_OPAQUE, .bad = -1});
    }
}

static void a_failing_rank_fails_all(void **state) {
    (void)state;
    char target[128];
    snprintf(target, sizeof target, "%s/target", directory);
    for (int bad = 0; bad < 3; bad++) {
        work w = {.target = target, .cast = FC_OPAQUE, .bad = bad};
        fc_error err = {FC_OK, ""};
        char who[32];
        snprintf(who, sizeof who, "rank %d: ", bad);
        assert_int_equal(fc_comm_run_local(3, convert, &w, &err), FC_EUSAGE);
        assert_non_null(strstr(err.message, who));
        assert_non_null(strstr(err.message, "1000 bytes of memory"));
        for (int r = 0; r < 3; r++) {
            assert_int_equal(w.codes[r], FC_EUSAGE);
        }
        assert_int_equal(entries(), 0);
    }
}

static void different_sources_are_refused(void **state) {
    (void)state;
    char target[128];
    snprintf(target, sizeof target, "%s/target", directory);
    work w = {.target = target, .cast = FC_OPAQUE, .bad = 1, .other_source = true};
    fc_error err = {FC_OK, ""};
    assert_int_equal(fc_comm_run_local(3, convert, &w, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "rank 1: "));
    assert_non_null(strstr(err.message, "shared file system"));
    assert_int_equal(entries(), 0);
}

static void dry_run_writes_nothing(void **state) {
    (void)state;
    char target[128];
    snprintf(target, sizeof target, "%s/target", directory);
    work w = {.target = target, .cast = FC_OPAQUE, .bad = -1, .dry_run = true};
    fc_error err = {FC_OK, ""};
    assert_int_equal(fc_comm_run_local(3, convert, &w, &err), FC_OK);
    assert_int_equal(entries(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_files_are_the_same),    cmocka_unit_test(full_target_is_the_same),
        cmocka_unit_test(sharded_target_is_the_same), cmocka_unit_test(every_format_is_the_same),
        cmocka_unit_test(a_failing_rank_fails_all),   cmocka_unit_test(different_sources_are_refused),
        cmocka_unit_test(dry_run_writes_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
