/*
 * The file where ranks of several processes meet: what they share, who has failed, left or been killed, files that dead
 * runs have left, and that no file stays.
 */
#include "gather/file_meet.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { SECONDS = 600 }; /* only a hang takes this long */

static fc_meeting *come(int rank, int size) {
    fc_meeting *m = NULL;
    fc_error err = {FC_OK, ""};
    if (fc_meeting_come("meet", rank, size, SECONDS, &m, &err) != FC_OK) {
        fail_msg("rank %d: %s", rank, err.message);
    }
    return m;
}

static fc_code come_later(const char *path, int rank, int size, int seconds, fc_error *err) {
    fc_meeting *m = NULL;
    fc_code rc = fc_meeting_come(path, rank, size, seconds, &m, err);
    assert_true((rc == FC_OK) == (m != NULL));
    if (m) {
        fc_meeting_leave(m, 0);
    }
    return rc;
}

/* Asks until there is an error: a look is a few milliseconds after the last one, and at few ranks. */
static void assert_learns(fc_meeting *m, uint64_t calls, const char *message) {
    fc_error err = {FC_OK, ""};
    alarm(SECONDS);
    while (fc_meeting_check(m, calls, &err) == FC_OK) {
        usleep(1000);
    }
    alarm(0);
    assert_string_equal(err.message, message);
    assert_int_equal(fc_meeting_check(m, calls, NULL), FC_EIO);
}

static void assert_learns_nothing(fc_meeting *m, uint64_t calls) {
    for (int i = 0; i < 30; i++) {
        fc_error err = {FC_OK, ""};
        if (fc_meeting_check(m, calls, &err) != FC_OK) {
            fail_msg("%s", err.message);
        }
        usleep(2000);
    }
}

static void assert_no_file(void) {
    assert_int_equal(access("meet", F_OK), -1);
}

static void put(const char *text) {
    FILE *file = fopen("meet", "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* A process that comes as `rank`, and waits to be killed. */
static pid_t start(int rank, int size) {
    int ends[2];
    char byte;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        fc_meeting *m;
        if (fc_meeting_come("meet", rank, size, SECONDS, &m, NULL) != FC_OK || write(ends[1], "", 1) != 1) {
            _exit(1);
        }
        for (;;) {
            pause();
        }
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 1);
    close(ends[0]);
    return pid;
}

static void end(pid_t pid, int signal) {
    assert_int_equal(kill(pid, signal), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void rank_0_shares(void **state) {
    (void)state;
    char given[] = "0123456789", got[sizeof given] = "";
    fc_error err = {FC_OK, ""};
    fc_meeting *first = come(0, 2), *second = come(1, 2);
    assert_int_equal(fc_meeting_share(first, given, sizeof given, &err), FC_OK);
    assert_int_equal(fc_meeting_share(second, got, sizeof got, &err), FC_OK);
    assert_string_equal(got, given);
    fc_meeting_close(first);
    assert_no_file();
    assert_learns_nothing(second, 0);
    fc_meeting_leave(second, 5);
    assert_learns_nothing(first, 5);
    fc_meeting_leave(first, 5);
}

static void ranks_learn_of_a_failure(void **state) {
    (void)state;
    fc_meeting *m[3] = {come(0, 3), come(1, 3), come(2, 3)};
    fc_meeting_close(m[0]);
    fc_meeting_fail(m[2], "rank 2: out of memory");
    fc_meeting_fail(m[2], "rank 2 has given up");
    fc_meeting_leave(m[2], 0);
    assert_learns(m[0], 0, "rank 2: out of memory");
    assert_learns(m[1], 0, "rank 2: out of memory");
    assert_learns(m[0], 0, "rank 2: out of memory");
    fc_meeting_leave(m[0], 0);
    fc_meeting_leave(m[1], 0);
}

static void leaving_too_early_is_a_failure(void **state) {
    (void)state;
    fc_meeting *m[2] = {come(0, 2), come(1, 2)};
    fc_meeting_close(m[0]);
    fc_meeting_leave(m[1], 7);
    assert_learns_nothing(m[0], 7);
    assert_learns(m[0], 8, "rank 1 has freed its communicator, and other ranks wait for it");
    fc_meeting_leave(m[0], 8);
}

static void killed_ranks_are_noticed(void **state) {
    (void)state;
    const int signals[] = {SIGKILL, SIGTERM, SIGABRT};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        fc_meeting *m = come(0, 2);
        pid_t other = start(1, 2);
        fc_meeting_close(m);
        assert_learns_nothing(m, 9);
        end(other, signals[i]);
        assert_learns(m, 9, "rank 1: its process has ended");
        fc_meeting_leave(m, 9);
    }
}

/* While rank 0 has not shared its data. The file that it has made goes, too. */
static void a_killed_rank_0_is_noticed(void **state) {
    (void)state;
    char data[8];
    fc_error err = {FC_OK, ""};
    pid_t first = start(0, 2);
    fc_meeting *m = come(1, 2);
    end(first, SIGKILL);
    assert_int_equal(fc_meeting_share(m, data, sizeof data, &err), FC_EIO);
    assert_string_equal(err.message, "rank 0: its process has ended");
    assert_no_file();
    fc_meeting_leave(m, 0);
}

static void a_file_that_a_killed_rank_0_left_is_not_used(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    end(start(0, 2), SIGKILL);
    assert_int_equal(access("meet", F_OK), 0);
    assert_int_equal(come_later("meet", 1, 2, 0, &err), FC_EIO);
    assert_string_equal(err.message, "meet: rank 0 did not write this file within 0 seconds");
    fc_meeting *m = come(0, 1);
    fc_meeting_leave(m, 0);
    assert_no_file();
}

/* A rank that comes after the failure learns of it, since rank 0 waits for it before it removes the file. */
static void late_ranks_learn_of_a_failure(void **state) {
    (void)state;
    char data[8];
    fc_error err = {FC_OK, ""};
    fflush(NULL);
    pid_t first = fork();
    assert_true(first >= 0);
    if (first == 0) {
        fc_meeting *m = come(0, 2);
        fc_meeting_fail(m, "rank 0: no GPU");
        fc_meeting_leave(m, 0);
        _exit(0);
    }
    alarm(SECONDS);
    while (access("meet", F_OK) != 0) {
        usleep(1000);
    }
    alarm(0);
    usleep(20000);
    fc_meeting *m = come(1, 2);
    assert_int_equal(fc_meeting_share(m, data, sizeof data, &err), FC_EIO);
    assert_string_equal(err.message, "rank 0: no GPU");
    assert_int_equal(waitpid(first, NULL, 0), first);
    assert_no_file();
    fc_meeting_leave(m, 0);
}

static void wrong_files_and_ranks_are_refused(void **state) {
    (void)state;
    fc_error err = {FC_OK, ""};
    put("a file of somebody else\n");
    assert_int_equal(come_later("meet", 0, 2, 1, &err), FC_EUSAGE);
    assert_string_equal(err.message, "meet: exists, and is not a file where ranks meet");
    assert_int_equal(come_later("meet", 1, 2, 1, &err), FC_ECORRUPT);
    assert_string_equal(err.message, "meet: not a file where ranks meet");
    assert_int_equal(access("meet", F_OK), 0);
    assert_int_equal(unlink("meet"), 0);
    assert_int_equal(come_later("none/meet", 0, 2, 1, &err), FC_EIO);
    assert_string_equal(err.message, "none/meet: cannot be created: No such file or directory");
    assert_int_equal(come_later("meet", 1, 2, 0, &err), FC_EIO);

    fc_meeting *first = come(0, 2), *second = come(1, 2);
    assert_int_equal(come_later("meet", 0, 2, 1, &err), FC_EUSAGE);
    assert_string_equal(err.message, "meet: another process is rank 0");
    assert_int_equal(come_later("meet", 1, 2, 1, &err), FC_EUSAGE);
    assert_string_equal(err.message, "meet: another process is rank 1");
    assert_int_equal(come_later("meet", 2, 3, 1, &err), FC_EUSAGE);
    assert_string_equal(err.message, "meet: rank 0 expects 2 ranks, and rank 2 expects 3");
    assert_learns_nothing(first, 0);
    fc_meeting_leave(second, 0);
    fc_meeting_leave(first, 0);
    assert_no_file();
}

static void one_of_many_ranks_is_killed(void **state) {
    (void)state;
    enum { MANY = 300, KILLED = 222 };
    static fc_meeting *m[MANY];
    pid_t killed = 0;
    for (int r = 0; r < MANY; r++) {
        if (r == KILLED) {
            killed = start(r, MANY);
        } else {
            m[r] = come(r, MANY);
        }
    }
    for (int i = 0; i < 30; i++) {
        assert_learns_nothing(m[MANY - 1], 0);
    }
    end(killed, SIGKILL);
    assert_learns(m[MANY - 1], 0, "rank 222: its process has ended");
    for (int r = MANY - 1; r >= 0; r--) {
        if (r != KILLED) {
            fc_meeting_leave(m[r], 0);
        }
    }
    assert_no_file();
}

static int enter_directory(void **state) {
    static char path[] = "/tmp/fsdpckpt-meet-XXXXXX";
    *state = path;
    return mkdtemp(path) && chdir(path) == 0 ? 0 : -1;
}

static int leave_directory(void **state) {
    return chdir("/") == 0 && rmdir(*state) == 0 ? 0 : -1; /* it is empty */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rank_0_shares),
        cmocka_unit_test(ranks_learn_of_a_failure),
        cmocka_unit_test(leaving_too_early_is_a_failure),
        cmocka_unit_test(killed_ranks_are_noticed),
        cmocka_unit_test(a_killed_rank_0_is_noticed),
        cmocka_unit_test(a_file_that_a_killed_rank_0_left_is_not_used),
        cmocka_unit_test(late_ranks_learn_of_a_failure),
        cmocka_unit_test(wrong_files_and_ranks_are_refused),
        cmocka_unit_test(one_of_many_ranks_is_killed),
    };
    return cmocka_run_group_tests(tests, enter_directory, leave_directory);
}
