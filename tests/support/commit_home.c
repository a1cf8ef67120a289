/*
 * For tests of the commit: see commit_home.h.
 */
#include "commit_home.h"

#include <dirent.h>
#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char home[64];

int enter(void **state) {
    (void)state;
    strcpy(home, "/tmp/fc-commit-XXXXXX");
    return mkdtemp(home) && chdir(home) == 0 ? 0 : -1;
}

int leave(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", home);
    return chdir("/") == 0 && system(command) == 0 ? 0 : -1;
}

int entries(const char *path) {
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(dir);
    return n;
}

void put(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

void assert_content(const char *path, const char *text) {
    char buf[64] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_true(fread(buf, 1, sizeof buf - 1, f) < sizeof buf);
    fclose(f);
    assert_string_equal(buf, text);
}

void put_in(const fc_commit *commit, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", fc_commit_path(commit), name);
    put(path, text);
}

char told[1024];

void tell(void *unused, const char *line) {
    (void)unused;
    snprintf(told, sizeof told, "%s", line);
}

static fc_code is_ours(const char *path, const char *name, bool *own, fc_error *err) {
    static const char *const globs[] = {"__*_*.distcp", "index.h5", "shard-*.h5", "optimizer_*/.metadata"};
    char start[sizeof OURS] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    const size_t n = fread(start, 1, sizeof start - 1, f);
    fclose(f);
    *own = !name;
    for (size_t i = 0; i < sizeof globs / sizeof *globs && name; i++) {
        *own = *own || fnmatch(globs[i], name, FNM_PATHNAME) == 0;
    }
    *own = *own && (n == 0 || strcmp(start, OURS) == 0);
    (void)err;
    return FC_OK;
}

fc_code begin(const char *path, bool is_directory, bool force, uint64_t bytes, fc_commit **out, fc_error *err) {
    const fc_commit_options how = {.path = path,
                                   .is_directory = is_directory,
                                   .force = force,
                                   .bytes = bytes,
                                   .is_own_file = is_ours,
                                   .reporter = {tell, NULL}};
    told[0] = '\0';
    return fc_commit_begin(&how, out, err);
}
