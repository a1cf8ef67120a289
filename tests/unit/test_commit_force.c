/*
 * lib/io: which files --force deletes, and that the replacement takes over their permissions and owner.
 */
#include "commit_home.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

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
    assert_int_equal(unlink("other/index.h5"), 0);
    put("other/__0_0.distcp", OURS);
    assert_int_equal(symlink("../thesis.h5", "other/__1_0.distcp"), 0);
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

/* Makes the target "out" with a folder and a file in it. */
static void put_folder(const char *folder, const char *file) {
    char path[512];
    snprintf(path, sizeof path, "out/%s", folder);
    assert_int_equal(mkdir("out", 0777) == 0 || access("out", F_OK) == 0, true);
    assert_int_equal(mkdir(path, 0777), 0);
    if (file) {
        snprintf(path, sizeof path, "out/%s/%s", folder, file);
        put(path, OURS);
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
    put("out/__0_0.distcp", OURS);
    put("out/__1_0.distcp", OURS);
    assert_int_equal(chmod("out/__0_0.distcp", 0640), 0);
    assert_int_equal(chmod("out/__1_0.distcp", 0604), 0);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(force_deletes_only_its_own_files, enter, leave),
        cmocka_unit_test_setup_teardown(force_looks_into_files, enter, leave),
        cmocka_unit_test_setup_teardown(force_looks_into_folders, enter, leave),
        cmocka_unit_test_setup_teardown(permissions_of_folders_are_kept, enter, leave),
        cmocka_unit_test_setup_teardown(permissions_are_kept, enter, leave),
        cmocka_unit_test_setup_teardown(owner_is_kept, enter, leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
