/*
 * lib/io: the commit through a staging directory, its refusals, what dead runs left, and reading whole files.
 */
#include "commit_home.h"
#include "io/commit.h"
#include "io/file.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static void new_file(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(begin("model.h5", false, false, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_int_equal(access("model.h5", F_OK), -1);
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("model.h5", "new");
    assert_int_equal(entries("."), 1);
}

static void existing_file_needs_force(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    put("model.h5", OURS "old");
    assert_int_equal(begin("model.h5", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "model.h5: exists"));
    assert_int_equal(err.hint, FC_HINT_FORCE);
    assert_null(commit);
    assert_int_equal(begin("model.h5", false, true, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_content("model.h5", OURS "old");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("model.h5", "new");
    assert_int_equal(entries("."), 1);
}

static void target_that_appears_meanwhile_is_kept(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(begin("model.h5", false, false, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    put("model.h5", "other");
    assert_int_equal(fc_commit_finish(commit, &err), FC_EUSAGE);
    assert_content("model.h5", "other");
    assert_int_equal(entries("."), 1);
}

static void abort_leaves_nothing(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(begin("out/", true, false, 10, &commit, &err), FC_OK);
    put_in(commit, "index.h5", "x");
    assert_int_equal(entries("."), 1);
    fc_commit_abort(commit);
    assert_int_equal(entries("."), 0);
    fc_commit_abort(NULL);
}

static void directory_is_replaced_whole(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    struct stat st;
    assert_int_equal(mkdir("out", 0777), 0);
    put("out/__0_0.distcp", OURS);
    put("out/__1_0.distcp", OURS);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_OK);
    put_in(commit, "index.h5", "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("out/index.h5", "new");
    assert_int_equal(entries("out"), 1);
    assert_int_equal(entries("."), 1);
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat("out", &st), 0);
    assert_int_equal(st.st_mode & 0777, 0777 & ~mask);
}

/* Many scripts run mkdir first. An empty directory is replaced without --force. */
static void empty_directory_gives_way(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir("out", 0700), 0);
    assert_int_equal(begin("out/", true, false, 10, &commit, &err), FC_OK);
    put_in(commit, "index.h5", "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("out/index.h5", "new");
    assert_int_equal(begin("out", true, false, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "out: exists"));
    assert_int_equal(err.hint, FC_HINT_FORCE);
    assert_int_equal(mkdir("filled", 0777), 0);
    assert_int_equal(begin("filled", true, false, 10, &commit, &err), FC_OK);
    put("filled/other", "theirs");
    assert_int_equal(fc_commit_finish(commit, &err), FC_EUSAGE);
    assert_content("filled/other", "theirs");
    assert_int_equal(entries("."), 2);
}

/* Makes the files of a killed run, whose lock nobody holds. */
static void put_leftover(const char *name, const char *file, const char *text) {
    char path[512];
    mkdir(name, 0700);
    snprintf(path, sizeof path, "%s/lock", name);
    put(path, "");
    snprintf(path, sizeof path, "%s/%s", name, file);
    char *slash = strrchr(path, '/');
    *slash = '\0';
    mkdir(path, 0700);
    *slash = '/';
    put(path, text);
}

static void leftovers_of_dead_runs_are_removed(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    put_leftover(".model.h5.fsdpckpt-dead00", "new/model.h5", "half");
    put_leftover(".model.h5.fsdpckpt-others", "new/thesis.tex", "years"); /* belongs to another target */
    put_leftover(".model.h5.fsdpckpt-dead00-notes", "new/model.h5", "years");
    assert_int_equal(begin("model.h5", false, false, 10, &commit, &err), FC_OK);
    assert_non_null(strstr(told, "model.h5: an earlier run died while writing this; its leftover "
                                 ".model.h5.fsdpckpt-dead00 is removed"));
    fc_commit_abort(commit);
    assert_int_equal(access(".model.h5.fsdpckpt-dead00", F_OK), -1);
    assert_int_equal(entries("."), 2);
}

static void live_runs_are_left_alone(void **state) {
    (void)state;
    fc_commit *first, *second;
    fc_error err;
    assert_int_equal(begin("model.h5", false, false, 10, &first, &err), FC_OK);
    assert_int_equal(begin("model.h5", false, false, 10, &second, &err), FC_OK);
    assert_string_equal(told, "");
    assert_int_equal(entries("."), 2);
    put(fc_commit_path(first), "first");
    assert_int_equal(fc_commit_finish(first, &err), FC_OK);
    put(fc_commit_path(second), "second");
    assert_int_equal(fc_commit_finish(second, &err), FC_EUSAGE);
    assert_content("model.h5", "first");
    assert_int_equal(entries("."), 1);
}

/* A run can die before it makes anything, or just before it removes its lock. Nobody needs to know. */
static void leftovers_without_content_are_removed_silently(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir(".model.h5.fsdpckpt-empty0", 0700), 0);
    put_leftover(".model.h5.fsdpckpt-start0", "new/model.h5", "");
    assert_int_equal(remove(".model.h5.fsdpckpt-start0/new/model.h5"), 0);
    assert_int_equal(begin("model.h5", false, false, 10, &commit, &err), FC_OK);
    assert_string_equal(told, "");
    fc_commit_abort(commit);
    assert_int_equal(entries("."), 0);
}

enum { ROUNDS = 300 };

static void count_report(void *context, const char *line) {
    (void)line;
    atomic_fetch_add((atomic_int *)context, 1);
}

/* Starts and aborts runs on one target. */
static void *start_and_abort(void *context) {
    fc_commit_options how = {.path = "model.h5", .bytes = 10, .reporter = {count_report, context}};
    for (int i = 0; i < ROUNDS; i++) {
        fc_commit *commit;
        if (fc_commit_begin(&how, &commit, NULL) != FC_OK) {
            atomic_fetch_add((atomic_int *)context, 1);
        }
        fc_commit_abort(commit);
    }
    return NULL;
}

/* A run must not take one that has just made its directory, or is removing it, for dead. */
static void runs_that_start_together_report_nothing(void **state) {
    enum { RUNS = 4 };
    (void)state;
    pthread_t threads[RUNS];
    atomic_int reports = 0;
    for (int i = 0; i < RUNS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, start_and_abort, &reports), 0);
    }
    for (int i = 0; i < RUNS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(reports, 0);
    assert_int_equal(entries("."), 0);
}

/* After a kill between the two renames, the next run on the same target finishes the replacement. */
static void interrupted_replacement_is_finished(void **state) {
    (void)state;
    fc_error err;
    const fc_reporter reporter = {tell, NULL};
    put_leftover(".out.fsdpckpt-dead00", "new/out", "");
    assert_int_equal(remove(".out.fsdpckpt-dead00/new/out"), 0);
    assert_int_equal(mkdir(".out.fsdpckpt-dead00/new/out", 0777), 0);
    put(".out.fsdpckpt-dead00/new/out/index.h5", "new");
    put_leftover(".out.fsdpckpt-dead00", "old/out", "old");
    assert_int_equal(symlink("out", "link"), 0);
    assert_int_equal(fc_commit_recover("link/index.h5", &reporter, &err), FC_OK);
    assert_non_null(strstr(told,
                           "out: an earlier run died while it replaced this; the replacement, which was complete, "
                           "is put in place"));
    assert_content("out/index.h5", "new");
    assert_int_equal(entries("."), 2);
}

/* If somebody has made a new target in the meantime, nothing is deleted. */
static void old_target_is_not_thrown_away(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    put_leftover(".model.h5.fsdpckpt-dead00", "new/model.h5", "new");
    put_leftover(".model.h5.fsdpckpt-dead00", "old/model.h5", "old");
    put("model.h5", OURS);
    assert_int_equal(begin("model.h5", false, true, 10, &commit, &err), FC_OK);
    assert_non_null(strstr(told, "what it replaced is still in .model.h5.fsdpckpt-dead00/old"));
    fc_commit_abort(commit);
    assert_content(".model.h5.fsdpckpt-dead00/old/model.h5", "old");
}

static void inputs_are_known_under_any_name(void **state) {
    (void)state;
    fc_error err;
    assert_int_equal(mkdir("run", 0777), 0);
    assert_int_equal(mkdir("run/ckpt", 0777), 0);
    put("run/ckpt/index.h5", OURS);
    assert_int_equal(symlink("run", "link"), 0);
    assert_int_equal(link("run/ckpt/index.h5", "hard.h5"), 0);
    assert_int_equal(mkdir("other", 0777), 0);
    const char *const inputs[] = {"other/../run/ckpt/index.h5", NULL};
    assert_int_equal(fc_check_inputs("run", inputs, "a file", &err), FC_EUSAGE);
    assert_string_equal(err.message,
                        "run: is or contains other/../run/ckpt/index.h5, which is read: name another target");
    assert_int_equal(fc_check_inputs("link", inputs, "a file", &err), FC_EUSAGE);
    assert_int_equal(fc_check_inputs("link/ckpt", inputs, "a file", &err), FC_EUSAGE);
    assert_int_equal(fc_check_inputs("hard.h5", inputs, "a file", &err), FC_EUSAGE);
    assert_int_equal(fc_check_inputs("run/ckpt/index.h5", inputs, "a file", &err), FC_EUSAGE);
    assert_int_equal(fc_check_inputs("other", inputs, "a file", &err), FC_OK);
    assert_int_equal(fc_check_inputs("none", inputs, "a file", &err), FC_OK);
    assert_int_equal(link("hard.h5", "other/shard-00000-of-00001.h5"), 0);
    assert_int_equal(fc_check_inputs("other", inputs, "a file", &err), FC_EUSAGE);
}

static void link_is_followed(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    struct stat st;
    put("real.h5", OURS);
    assert_int_equal(symlink("real.h5", "link.h5"), 0);
    assert_int_equal(begin("link.h5", false, true, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("real.h5", "new");
    assert_int_equal(lstat("link.h5", &st), 0);
    assert_true(S_ISLNK(st.st_mode));
}

static void refusals_change_nothing(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(begin("no/such/model.h5", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_string_equal(err.message, "no/such: the directory of the target does not exist: create it first");
    assert_int_equal(begin("model.h5", false, false, UINT64_MAX, &commit, &err), FC_EIO);
    assert_non_null(strstr(err.message, "no space: 18446744073709551615 bytes are needed"));
    assert_int_equal(mkfifo("fifo", 0600), 0);
    assert_int_equal(begin("fifo", false, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(unlink("fifo"), 0);
    assert_int_equal(begin("", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(begin("dir/", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_string_equal(err.message,
                        "dir/: the target is one file, and this is the name of a directory: name a file in it");
    assert_int_equal(begin(".", true, true, 10, &commit, &err), FC_OK);
    fc_commit_abort(commit);
    assert_int_equal(fc_commit_check(&(fc_commit_options){.path = "model.h5", .bytes = 10}, &err), FC_OK);
    assert_int_equal(entries("."), 0);
}

static void long_name_fits(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    char name[256];
    memset(name, 'n', 255);
    name[255] = '\0';
    assert_int_equal(begin(name, false, false, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content(name, "new");
}

static void safe_paths(void **state) {
    (void)state;
    assert_true(fc_path_is_safe("__0_0.distcp"));
    assert_true(fc_path_is_safe("a/b..c/.d"));
    assert_false(fc_path_is_safe(""));
    assert_false(fc_path_is_safe("/etc/passwd"));
    assert_false(fc_path_is_safe("../x"));
    assert_false(fc_path_is_safe("a/../x"));
    assert_false(fc_path_is_safe("a/.."));
    assert_false(fc_path_is_safe("a//b"));
    assert_false(fc_path_is_safe("a/"));
    assert_false(fc_path_is_safe("."));
}

static void input_must_be_a_complete_regular_file(void **state) {
    (void)state;
    fc_error err;
    int fd;
    uint64_t size;
    char buf[8];
    assert_int_equal(mkfifo("fifo", 0600), 0);
    assert_int_equal(fc_open_input("fifo", &fd, &size, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "fifo: not a regular file");
    assert_int_equal(fc_open_input("none", &fd, &size, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "none: the file is missing");
    put("short", "abc");
    assert_int_equal(fc_open_input("short", &fd, &size, &err), FC_OK);
    assert_int_equal(size, 3);
    assert_int_equal(fc_pread_full(fd, buf, 2, 1, "short", &err), FC_OK);
    assert_memory_equal(buf, "bc", 2);
    assert_int_equal(fc_pread_full(fd, buf, 8, 1, "short", &err), FC_ECORRUPT);
    assert_string_equal(err.message, "short: truncated: the file ends at offset 3, 6 more bytes are expected");
    close(fd);
}

static void whole_files(void **state) {
    (void)state;
    fc_error err;
    char *text = (char *)state;
    size_t bytes;
    put("three", "abc");
    assert_int_equal(fc_read_whole("three", "a note", 2, &text, &bytes, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message, "three: has 3 bytes; a note of more than 2 is not read");
    assert_null(text);
    assert_int_equal(fc_read_whole("none", "a note", 2, &text, &bytes, &err), FC_ECORRUPT);
    assert_null(text);
    assert_int_equal(fc_read_whole("three", "a note", 3, &text, &bytes, &err), FC_OK);
    assert_int_equal(bytes, 3);
    assert_memory_equal(text, "abc", 3);
    free(text);
    put("empty", "");
    assert_int_equal(fc_read_whole("empty", "a note", 0, &text, &bytes, &err), FC_OK);
    assert_int_equal(bytes, 0);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(new_file, enter, leave),
        cmocka_unit_test_setup_teardown(existing_file_needs_force, enter, leave),
        cmocka_unit_test_setup_teardown(target_that_appears_meanwhile_is_kept, enter, leave),
        cmocka_unit_test_setup_teardown(abort_leaves_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(directory_is_replaced_whole, enter, leave),
        cmocka_unit_test_setup_teardown(empty_directory_gives_way, enter, leave),
        cmocka_unit_test_setup_teardown(leftovers_of_dead_runs_are_removed, enter, leave),
        cmocka_unit_test_setup_teardown(live_runs_are_left_alone, enter, leave),
        cmocka_unit_test_setup_teardown(leftovers_without_content_are_removed_silently, enter, leave),
        cmocka_unit_test_setup_teardown(runs_that_start_together_report_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(interrupted_replacement_is_finished, enter, leave),
        cmocka_unit_test_setup_teardown(old_target_is_not_thrown_away, enter, leave),
        cmocka_unit_test_setup_teardown(inputs_are_known_under_any_name, enter, leave),
        cmocka_unit_test_setup_teardown(link_is_followed, enter, leave),
        cmocka_unit_test_setup_teardown(refusals_change_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(long_name_fits, enter, leave),
        cmocka_unit_test(safe_paths),
        cmocka_unit_test_setup_teardown(input_must_be_a_complete_regular_file, enter, leave),
        cmocka_unit_test_setup_teardown(whole_files, enter, leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
