/*
 * lib/io: the commit by temporary name, what it refuses, and that nothing is left behind.
 */
#include "fsdpckpt/io.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char home[64];

static int enter(void **state) {
    (void)state;
    strcpy(home, "/tmp/fc-commit-XXXXXX");
    return mkdtemp(home) && chdir(home) == 0 ? 0 : -1;
}

static int leave(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", home);
    return chdir("/") == 0 && system(command) == 0 ? 0 : -1;
}

static int entries(const char *path) {
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(dir);
    return n;
}

static void put(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void assert_content(const char *path, const char *text) {
    char buf[64] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_true(fread(buf, 1, sizeof buf - 1, f) < sizeof buf);
    fclose(f);
    assert_string_equal(buf, text);
}

static void put_in(const fc_commit *commit, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", fc_commit_path(commit), name);
    put(path, text);
}

static void new_file(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(fc_commit_begin("model.h5", false, false, 10, &commit, &err), FC_OK);
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
    put("model.h5", "old");
    assert_int_equal(fc_commit_begin("model.h5", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "model.h5: exists: --force replaces it"));
    assert_null(commit);
    assert_int_equal(fc_commit_begin("model.h5", false, true, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_content("model.h5", "old");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("model.h5", "new");
    assert_int_equal(entries("."), 1);
}

static void target_that_appears_meanwhile_is_kept(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(fc_commit_begin("model.h5", false, false, 10, &commit, &err), FC_OK);
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
    assert_int_equal(fc_commit_begin("out/", true, false, 10, &commit, &err), FC_OK);
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
    put("out/index.h5", "old");
    put("out/shard-00000-of-00001.h5", "old");
    assert_int_equal(fc_commit_begin("out", true, true, 10, &commit, &err), FC_OK);
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

/* mkdir before the run, as many scripts do, is no reason to ask for --force. */
static void empty_directory_gives_way(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir("out", 0700), 0);
    assert_int_equal(fc_commit_begin("out/", true, false, 10, &commit, &err), FC_OK);
    put_in(commit, "index.h5", "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("out/index.h5", "new");
    assert_int_equal(fc_commit_begin("out", true, false, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "out: exists: --force replaces it"));
    assert_int_equal(mkdir("filled", 0777), 0);
    assert_int_equal(fc_commit_begin("filled", true, false, 10, &commit, &err), FC_OK);
    put("filled/other", "theirs");
    assert_int_equal(fc_commit_finish(commit, &err), FC_EUSAGE);
    assert_content("filled/other", "theirs");
    assert_int_equal(entries("."), 2);
}

static void force_deletes_only_its_own_files(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir("out", 0777), 0);
    put("out/thesis.tex", "years");
    assert_int_equal(fc_commit_begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "--force would delete 'thesis.tex'"));
    assert_content("out/thesis.tex", "years");
    assert_int_equal(fc_commit_begin("out", false, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(fc_commit_begin("out/thesis.tex", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(entries("."), 1);
}

static void link_is_followed(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    struct stat st;
    put("real.h5", "old");
    assert_int_equal(symlink("real.h5", "link.h5"), 0);
    assert_int_equal(fc_commit_begin("link.h5", false, true, 10, &commit, &err), FC_OK);
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
    assert_int_equal(fc_commit_begin("no/such/model.h5", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_string_equal(err.message, "no/such: the directory of the target does not exist: make it first");
    assert_int_equal(fc_commit_begin("model.h5", false, false, UINT64_MAX, &commit, &err), FC_EIO);
    assert_non_null(strstr(err.message, "no space: 18446744073709551615 bytes are needed"));
    assert_int_equal(fc_commit_begin("/dev/null", false, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(fc_commit_begin("", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(fc_commit_begin("dir/", false, false, 10, &commit, &err), FC_EUSAGE);
    assert_string_equal(err.message,
                        "dir/: the target is one file, and this is the name of a directory: name a file in it");
    assert_int_equal(fc_commit_begin(".", true, true, 10, &commit, &err), FC_OK);
    fc_commit_abort(commit);
    assert_int_equal(fc_commit_check("model.h5", false, false, 10, &err), FC_OK);
    assert_int_equal(entries("."), 0);
}

static void long_name_fits(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    char name[256];
    memset(name, 'n', 255);
    name[255] = '\0';
    assert_int_equal(fc_commit_begin(name, false, false, 10, &commit, &err), FC_OK);
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
    assert_string_equal(err.message, "short: truncated: the file ends at offset 3, 6 more bytes belong here");
    close(fd);
}

static void whole_files(void **state) {
    (void)state;
    fc_error err;
    char *text = (char *)state;
    size_t bytes;
    put("three", "abc");
    assert_int_equal(fc_read_whole("three", "a note", 2, &text, &bytes, &err), FC_EUNSUPPORTED);
    assert_string_equal(err.message, "three: 3 bytes: a note of more than 2 is not read");
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
        cmocka_unit_test_setup_teardown(force_deletes_only_its_own_files, enter, leave),
        cmocka_unit_test_setup_teardown(link_is_followed, enter, leave),
        cmocka_unit_test_setup_teardown(refusals_change_nothing, enter, leave),
        cmocka_unit_test_setup_teardown(long_name_fits, enter, leave),
        cmocka_unit_test(safe_paths),
        cmocka_unit_test_setup_teardown(input_must_be_a_complete_regular_file, enter, leave),
        cmocka_unit_test_setup_teardown(whole_files, enter, leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
