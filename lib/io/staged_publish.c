/*
 * Makes a target in a bucket visible.
 *
 * A bucket cannot show several objects at once. So the first object that becomes visible is the mark, a list of all
 * others, and it is deleted when they are visible. A run that finds a mark knows that another one died in between. If
 * all names were new, it deletes what the list names, as far as its metadata has the number of the run that died:
 * another program may have made an object of that name. If they replaced another target, nothing is deleted, and it
 * goes on only with `force`. A target that is not complete has the mark, and lacks its index, which comes last.
 */
#include "io/staged_publish.h"

#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"
#include "io/report.h"
#include "io/staged_private.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MARK FC_STAGED_MARK

/* The first line of a mark. Each other one has the number of a run, and a name. */
static const char all_new[] = "new\n", replaces[] = "replaces\n";

enum { MOST_MARK = 64 << 20, RUN_DIGITS = 16 };

static fc_code name_in(const char *folder, const char *name, char out[PATH_MAX], fc_error *err) {
    return snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "%s/%s: the name is too long", folder, name);
}

/* ---- the mark ---- */

static fc_code add_text(int fd, const char *text, uint64_t *at, const char *mark, fc_error *err) {
    const size_t size = strlen(text);
    *at += size;
    return fc_pwrite_full(fd, text, size, *at - size, mark, err);
}

static fc_code fill_mark(int fd, fc_staged_file *const *list, size_t count, bool only_new, const char *mark,
                         uint64_t *size, fc_error *err) {
    char run[RUN_DIGITS + 2];
    FC_TRY(add_text(fd, only_new ? all_new : replaces, size, mark, err));
    for (size_t i = 0; i < count; i++) {
        const char *name = list[i]->path + strlen(list[i]->target->path) + 1;
        if (strchr(name, '\n')) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s: a name with a line break cannot be made in a bucket",
                           fc_staged_final_name(list[i]->path));
        }
        snprintf(run, sizeof run, "%016" PRIx64 " ", list[i]->run);
        FC_TRY(add_text(fd, run, size, mark, err));
        FC_TRY(add_text(fd, name, size, mark, err));
        FC_TRY(add_text(fd, "\n", size, mark, err));
    }
    return FC_OK;
}

/* @param list NULL: the mark becomes empty */
static fc_code write_mark(const char *mark, fc_staged_file *const *list, size_t count, bool only_new, fc_error *err) {
    const int fd = memfd_create("fsdpckpt-mark", MFD_CLOEXEC);
    uint64_t size = 0;
    fc_code rc = fd < 0 ? fc_fail_errno(err, errno, "%s: a list of names cannot be made", mark) : FC_OK;
    rc = rc == FC_OK && list ? fill_mark(fd, list, count, only_new, mark, &size, err) : rc;
    rc = rc == FC_OK ? fc_upload_whole(mark, list ? list[0]->run : 0, fd, size, false, err) : rc;
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}

/* Not every user who may write objects may delete them. A mark that names nothing does no harm. */
static fc_code remove_mark(const char *mark, fc_error *err) {
    if (fc_upload_delete(mark, NULL) == FC_OK) {
        return FC_OK;
    }
    return write_mark(mark, NULL, 0, true, err);
}

static fc_code fail_mark(const char *mark, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: is not a list of names: look at it, and remove it", mark);
}

/* Deletes an object that a mark names. */
static fc_code delete_own(const char *name, uint64_t run, const fc_reporter *reporter, fc_error *err) {
    bool left = false;
    FC_TRY(fc_upload_delete_own(name, run, &left, err));
    if (left) {
        fc_report(reporter, "%s: stays: its metadata does not say that the run that died wrote it", name);
    }
    return FC_OK;
}

/* Deletes what a mark names, and then the mark. */
static fc_code delete_marked(const char *folder, const char *mark, char *text, const fc_reporter *reporter,
                             fc_error *err) {
    char name[PATH_MAX], *end = NULL, *save = NULL;
    for (const char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        const uint64_t run = strtoull(line, &end, 16);
        const bool good = run != 0 && end == line + RUN_DIGITS && *end == ' ' && fc_path_is_safe(end + 1);
        FC_TRY(good ? FC_OK : fail_mark(mark, err));
        FC_TRY(name_in(folder, end + 1, name, err));
        FC_TRY(delete_own(name, run, reporter, err));
    }
    return remove_mark(mark, err);
}

static fc_code settle_mark(const char *folder, const char *mark, char *text, const fc_commit_options *how,
                           fc_error *err) {
    if (strncmp(text, replaces, strlen(replaces)) == 0) {
        return how->force
                   ? FC_OK
                   : fc_advise(err,
                               fc_fail(err, FC_EUSAGE,
                                       "%s: an earlier run died while it replaced this, which is not complete", folder),
                               FC_HINT_FORCE, NULL);
    }
    FC_TRY(strncmp(text, all_new, strlen(all_new)) == 0 ? FC_OK : fail_mark(mark, err));
    FC_TRY(delete_marked(folder, mark, text + strlen(all_new), &how->reporter, err));
    fc_report(&how->reporter, "%s: an earlier run died while it made this visible; what it left is deleted", folder);
    return FC_OK;
}

/* ---- before ---- */

fc_code fc_staged_clear_mark(const char *folder, const fc_commit_options *how, fc_error *err) {
    char mark[PATH_MAX], *text = NULL;
    size_t size = 0;
    struct stat st;
    bool found = false;
    FC_TRY(name_in(folder, MARK, mark, err));
    FC_TRY(fc_stat_path(mark, &st, &found, err));
    if (!found || st.st_size == 0) {
        return FC_OK;
    }
    FC_TRY(fc_read_whole(mark, "a list of names", MOST_MARK, &text, &size, err));
    text[size] = '\0';
    fc_code rc = settle_mark(folder, mark, text, how, err);
    free(text);
    return rc;
}

fc_code fc_staged_clear_uploads(const char *name, const fc_commit_options *how, fc_error *err) {
    size_t count = 0;
    fc_error line;
    const fc_code rc = fc_upload_clear(name, how->is_directory, &count, &line);
    if (rc == FC_EIO) { /* not every user who may write may list uploads */
        fc_report(&how->reporter, "%s", line.message);
    } else if (rc != FC_OK) {
        return fc_fail(err, rc, "%s", line.message);
    }
    if (count > 0) {
        fc_report(&how->reporter, "%s: an earlier run died while writing this; its %zu unfinished upload%s aborted",
                  name, count, count == 1 ? " is" : "s are");
    }
    return FC_OK;
}

/* ---- after ---- */

/* @param gone as in fc_upload_complete */
static fc_code publish_file(fc_staged_file *file, bool only_new, bool *gone, fc_error *err) {
    struct stat st;
    *gone = false;
    if (file->upload) {
        FC_TRY(fc_staged_end(file->path, err));
        FC_TRY(fc_upload_complete(file->upload, file->nparts, only_new, gone, err));
        file->upload = NULL; /* it is freed */
        return FC_OK;
    }
    if (fstat(file->fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", fc_staged_final_name(file->path));
    }
    return fc_upload_whole(fc_staged_final_name(file->path), file->run, file->fd, (uint64_t)st.st_size, only_new, err);
}

/* Lists the files in the order in which they become visible. */
static size_t list_files(const fc_staged_target *target, fc_staged_file **list) {
    size_t count = 0, first = 0;
    for (fc_staged_file *f = target->files; f; f = f->next) {
        if (f->engine) {
            list[count++] = f;
        }
    }
    first = count;
    for (fc_staged_file *f = target->files; f; f = f->next) {
        if (!f->engine) {
            memmove(list + first + 1, list + first, (count++ - first) * sizeof(fc_staged_file *));
            list[first] = f;
        }
    }
    return count;
}

/* After a failure, a new target is deleted as far as possible, and the mark names what is left of it.
 * @param made the number of files that are visible @param unknown whether the next one may be, too */
static void take_back(fc_staged_file **list, size_t made, bool unknown, const char *mark) {
    size_t left = 0;
    for (size_t i = 0; i < made; i++) {
        bool stays = false; /* another program has replaced it */
        if (fc_upload_delete_own(fc_staged_final_name(list[i]->path), list[i]->run, &stays, NULL) != FC_OK) {
            list[left++] = list[i];
        }
    }
    if (unknown) {
        list[left++] = list[made];
    }
    if (*mark) {
        (void)(left > 0 ? write_mark(mark, list, left, true, NULL) : remove_mark(mark, NULL));
    }
}

static fc_code publish_files(fc_staged_file **list, size_t count, const char *mark, bool only_new,
                             fc_progress *progress, fc_error *err) {
    size_t made = 0;
    bool gone = false;
    fc_code rc = FC_OK;
    while (made < count && rc == FC_OK) {
        rc = publish_file(list[made], only_new, &gone, err);
        made += rc == FC_OK;
        rc = rc == FC_OK && made < count ? fc_progress_count(progress, 1, err) : rc;
    }
    const bool unknown = rc == FC_EIO && made < count && !gone; /* the answer may have been lost */
    if (rc != FC_OK && only_new) {
        take_back(list, made, unknown, mark);
    } else if (rc != FC_OK && made == 0 && !unknown && *mark) {
        (void)remove_mark(mark, NULL); /* nothing is replaced */
    }
    return rc;
}

fc_code fc_staged_publish(fc_staged_target *target, bool only_new, fc_progress *progress, fc_error *err) {
    const size_t files = fc_staged_count(target);
    char mark[PATH_MAX] = "";
    fc_staged_file **list = calloc(files + 1, sizeof *list);
    fc_code rc;
    FC_NEED(list, err, fc_staged_final_name(target->path));
    const size_t count = list_files(target, list);
    fc_progress_begin(progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, count);
    if (count > 1) {
        FC_TRY_GOTO(name_in(fc_staged_final_name(target->path), MARK, mark, err), rc, out);
        FC_TRY_GOTO(write_mark(mark, list, count, only_new, err), rc, out);
    }
    FC_TRY_GOTO(publish_files(list, count, mark, only_new, progress, err), rc, out);
    rc = *mark ? remove_mark(mark, err) : FC_OK;
    if (rc != FC_OK) {
        rc = fc_context(err, rc, "the target is complete, but the next run would delete it: delete the mark");
    }
out:
    free(list);
    return rc;
}

/* ---- what it replaces ---- */

/* @param below the folder, relative to the target and with a slash at its end, or "" */
static fc_code delete_old(const fc_staged_target *target, const fc_commit_options *how, const char *below,
                          fc_error *err) {
    char folder[PATH_MAX], full[PATH_MAX], name[PATH_MAX];
    fc_dir dir = {0};
    fc_code rc;
    FC_TRY(name_in(fc_staged_final_name(target->path), below, folder, err));
    folder[strlen(folder) - 1] = '\0'; /* there is a slash in any case */
    FC_TRY_GOTO(fc_dir_open(&dir, folder, err), rc, out);
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL;) {
        struct stat st;
        bool own = false;
        FC_TRY_GOTO(name_in(folder, entry, full, err), rc, out);
        snprintf(name, sizeof name, "%s%s", below, entry);
        FC_TRY_GOTO(fc_dir_stat(&dir, entry, &st, err), rc, out);
        if (S_ISDIR(st.st_mode) && !*below) {
            snprintf(name, sizeof name, "%s/", entry);
            FC_TRY_GOTO(delete_old(target, how, name, err), rc, out);
        } else if (S_ISREG(st.st_mode) && !fc_staged_has(target, name)) {
            own = fc_has_text(how->also, name);
            FC_TRY_GOTO(own || !how->is_own_file ? FC_OK : how->is_own_file(full, name, &own, err), rc, out);
            FC_TRY_GOTO(own ? fc_upload_delete(full, err) : FC_OK, rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_staged_replace(const fc_staged_target *target, const fc_commit_options *how, fc_error *err) {
    return delete_old(target, how, "", err);
}
