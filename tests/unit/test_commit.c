/*
 * lib/io: the commit through a staging directory, its refusals, and that nothing is left behind.
 */
#include "fsdpckpt/format.h"
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

/* The last message that the commit reported. */
static char told[1024];

static void tell(void *unused, const char *line) {
    (void)unused;
    snprintf(told, sizeof told, "%s", line);
}

static fc_code begin(const char *path, bool is_directory, bool force, uint64_t bytes, fc_commit **out, fc_error *err) {
    const fc_commit_options how = {.path = path,
                                   .is_directory = is_directory,
                                   .force = force,
                                   .bytes = bytes,
                                   .is_own_file = fc_is_own_file,
                                   .reporter = {tell, NULL}};
    told[0] = '\0';
    return fc_commit_begin(&how, out, err);
}

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

/* The signature of HDF5, which makes a file one that --force replaces. */
#define OURS "\x89HDF\r\n\x1a\n"

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
    put("out/index.h5", OURS);
    put("out/shard-00000-of-00001.h5", OURS);
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

static void force_deletes_only_its_own_files(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir("out", 0777), 0);
    put("out/thesis.tex", "years");
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "replacing it would delete 'thesis.tex'"));
    assert_content("out/thesis.tex", "years");
    assert_int_equal(begin("out", false, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(begin("out/thesis.tex", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_int_equal(entries("."), 1);
}

/* A name like ours is not enough; the file's type and content are checked. */
static void force_looks_into_files(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    assert_int_equal(mkdir("out", 0777), 0);
    assert_int_equal(mkdir("out/shard-00000-of-00001.h5", 0777), 0);
    put("out/shard-00000-of-00001.h5/thesis.tex", "years");
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "replacing it would delete 'shard-00000-of-00001.h5/thesis.tex'"));
    assert_content("out/shard-00000-of-00001.h5/thesis.tex", "years");
    assert_int_equal(mkdir("other", 0777), 0);
    put("other/index.h5", "not HDF5");
    assert_int_equal(begin("other", true, true, 10, &commit, &err), FC_EUSAGE);
    put("other/index.h5", OURS);
    assert_int_equal(symlink("../thesis.h5", "other/shard-00000-of-00001.h5"), 0);
    assert_int_equal(begin("other", true, true, 10, &commit, &err), FC_EUSAGE);
    put("letter.h5", "Dear reader");
    assert_int_equal(begin("letter.h5", false, true, 10, &commit, &err), FC_EUSAGE);
    assert_string_equal(err.message + strlen(err.message) - strlen("remove it yourself or name another target"),
                        "remove it yourself or name another target");
    put("letter.h5", "");
    assert_int_equal(begin("letter.h5", false, true, 10, &commit, &err), FC_OK);
    fc_commit_abort(commit);
    assert_int_equal(entries("."), 3);
}

/* The start of a file that --force replaces in a folder of accelerate. */
#define PICKLE "\x80\2"

/* Makes the target "out" with a folder and a file in it. */
static void put_folder(const char *folder, const char *file) {
    char path[512];
    snprintf(path, sizeof path, "out/%s", folder);
    assert_int_equal(mkdir("out", 0777) == 0 || access("out", F_OK) == 0, true);
    assert_int_equal(mkdir(path, 0777), 0);
    if (file) {
        snprintf(path, sizeof path, "out/%s/%s", folder, file);
        put(path, PICKLE);
    }
}

/* Targets of folders: what is in them must be ours, under the name that it has there. */
static void force_looks_into_folders(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    put_folder("optimizer_0", ".metadata");
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_OK);
    fc_commit_abort(commit);
    const char *const foreign[][2] = {{"optimizer_0/notes", "optimizer_0/notes"},
                                      {"optimizer_0/index.h5", "optimizer_0/index.h5"},
                                      {"__0_0.metadata", "__0_0.metadata"}};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        char path[512];
        snprintf(path, sizeof path, "out/%s", foreign[i][0]);
        put(path, OURS);
        assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
        assert_non_null(strstr(err.message, foreign[i][1]));
        assert_int_equal(unlink(path), 0);
    }
    put_folder("mine", NULL);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "'mine'"));
    assert_int_equal(rmdir("out/mine"), 0);
    assert_int_equal(mkdir("out/optimizer_0/deeper", 0777), 0);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "'optimizer_0/deeper'"));
    assert_int_equal(rmdir("out/optimizer_0/deeper"), 0);
    assert_int_equal(symlink("optimizer_0", "out/optimizer_1"), 0);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "'optimizer_1'"));
}

static mode_t mode_of(const char *path) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st.st_mode & 07777;
}

/* Folders take over what the old target and its folders allowed, and files what the old files did, wherever they are.
 */
static void permissions_of_folders_are_kept(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    char path[512];
    put_folder("optimizer_0", ".metadata");
    put_folder("optimizer_1", ".metadata");
    assert_int_equal(chmod("out", 0755), 0);
    assert_int_equal(chmod("out/optimizer_0", 0750), 0);
    assert_int_equal(chmod("out/optimizer_1", 0705), 0);
    assert_int_equal(chmod("out/optimizer_0/.metadata", 0640), 0);
    assert_int_equal(chmod("out/optimizer_1/.metadata", 0644), 0);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_OK);
    snprintf(path, sizeof path, "%s/pytorch_model_fsdp_0", fc_commit_path(commit));
    assert_int_equal(mkdir(path, 0777), 0);
    put_in(commit, "pytorch_model_fsdp_0/.metadata", "new");
    put_in(commit, "top", "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_content("out/pytorch_model_fsdp_0/.metadata", "new");
    assert_int_equal(mode_of("out"), 0755);
    assert_int_equal(mode_of("out/pytorch_model_fsdp_0"), 0700);
    assert_int_equal(mode_of("out/pytorch_model_fsdp_0/.metadata"), 0640);
    assert_int_equal(mode_of("out/top"), 0640);
    assert_int_equal(entries("out"), 2);
    assert_int_equal(entries("."), 1);
}

static void permissions_are_kept(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    struct stat st;
    put("model.h5", OURS);
    assert_int_equal(chmod("model.h5", 0600), 0);
    assert_int_equal(begin("model.h5", false, true, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_int_equal(stat("model.h5", &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_int_equal(mkdir("out", 0777), 0);
    put("out/index.h5", OURS);
    put("out/shard-00000-of-00001.h5", OURS);
    assert_int_equal(chmod("out/index.h5", 0640), 0);
    assert_int_equal(chmod("out/shard-00000-of-00001.h5", 0604), 0);
    assert_int_equal(chmod("out", 0710), 0);
    assert_int_equal(begin("out", true, true, 10, &commit, &err), FC_OK);
    put_in(commit, "index.h5", "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_int_equal(stat("out", &st), 0);
    assert_int_equal(st.st_mode & 07777, 0710);
    assert_int_equal(stat("out/index.h5", &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600); /* the permissions that both files had */
}

static void owner_is_kept(void **state) {
    (void)state;
    fc_commit *commit;
    fc_error err;
    struct stat st;
    put("model.h5", OURS);
    if (geteuid() != 0 || chown("model.h5", 12345, 23456) != 0) {
        skip();
    }
    assert_int_equal(begin("model.h5", false, true, 10, &commit, &err), FC_OK);
    put(fc_commit_path(commit), "new");
    assert_int_equal(fc_commit_finish(commit, &err), FC_OK);
    assert_int_equal(stat("model.h5", &st), 0);
    assert_int_equal(st.st_uid, 12345);
    assert_int_equal(st.st_gid, 23456);
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
    assert_string_equal(err.message, "no/such: the directory of the target does not exist: make it first");
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
        cmocka_unit_test_setup_teardown(force_deletes_only_its_own_files, enter, leave),
        cmocka_unit_test_setup_teardown(force_looks_into_files, enter, leave),
        cmocka_unit_test_setup_teardown(force_looks_into_folders, enter, leave),
        cmocka_unit_test_setup_teardown(permissions_of_folders_are_kept, enter, leave),
        cmocka_unit_test_setup_teardown(permissions_are_kept, enter, leave),
        cmocka_unit_test_setup_teardown(owner_is_kept, enter, leave),
        cmocka_unit_test_setup_teardown(leftovers_of_dead_runs_are_removed, enter, leave),
        cmocka_unit_test_setup_teardown(live_runs_are_left_alone, enter, leave),
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
