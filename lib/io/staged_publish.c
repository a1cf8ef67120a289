/*
 * Makes a target in a bucket visible.
 *
 * A bucket cannot show several objects at once. So the first object that becomes visible is the mark, a list of all
 * others, and it is deleted when they are visible. A run that finds a mark knows that another one died in between, and
 * deletes what the list names. A target that is not complete has the mark, and lacks its index, which comes last.
 */
#include "io/staged_publish.h"

#include "fsdpckpt/progress.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/staged_private.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MARK ".fsdpckpt-unfinished"

enum { MOST_MARK = 64 << 20 };

static const char *name_of(const char *path) {
    return path + strlen(FC_STAGED);
}

static fc_code name_in(const char *folder, const char *name, char out[PATH_MAX], fc_error *err) {
    return snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX
               ? FC_OK
               : fc_fail(err, FC_EUNSUPPORTED, "%s/%s: the name is too long", folder, name);
}

/* ---- the mark ---- */

/* @param mark receives its name */
static fc_code write_mark(const fc_staged_target *target, char mark[PATH_MAX], fc_error *err) {
    const int fd = memfd_create("fsdpckpt-mark", MFD_CLOEXEC);
    uint64_t at = 0;
    fc_code rc = fd < 0 ? fc_fail_errno(err, errno, "%s: a list of names cannot be made", target->path)
                        : name_in(name_of(target->path), MARK, mark, err);
    for (const fc_staged_file *f = target->files; f && rc == FC_OK; f = f->next) {
        const char *name = f->path + strlen(target->path) + 1;
        rc = fc_pwrite_full(fd, name, strlen(name), at, mark, err);
        rc = rc == FC_OK ? fc_pwrite_full(fd, "\n", 1, at + strlen(name), mark, err) : rc;
        at += strlen(name) + 1;
    }
    rc = rc == FC_OK ? fc_upload_whole(mark, fd, at, false, err) : rc;
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
    const int fd = memfd_create("fsdpckpt-mark", MFD_CLOEXEC);
    fc_code rc = fd < 0 ? fc_fail_errno(err, errno, "%s: a list of names cannot be made", mark)
                        : fc_upload_whole(mark, fd, 0, false, err);
    if (fd >= 0) {
        close(fd);
    }
    return rc == FC_OK
               ? rc
               : fc_context(err, rc, "the target is complete, but the next run would delete it: delete the mark");
}

/* Deletes what a mark names, and then the mark. */
static fc_code delete_marked(const char *folder, char *text, fc_error *err) {
    char name[PATH_MAX], *save = NULL;
    for (const char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (!fc_path_is_safe(line)) {
            return fc_fail(err, FC_ECORRUPT, "%s/" MARK ": is not a list of names: look at it, and remove it", folder);
        }
        FC_TRY(name_in(folder, line, name, err));
        FC_TRY(fc_upload_delete(name, err));
    }
    FC_TRY(name_in(folder, MARK, name, err));
    return fc_upload_delete(name, err);
}

static fc_code clear_marked(const char *folder, const fc_reporter *reporter, fc_error *err) {
    char mark[PATH_MAX], *text = NULL;
    size_t size = 0;
    fc_error failed = {FC_OK, ""};
    FC_TRY(name_in(folder, MARK, mark, err));
    if (!fc_path_exists(mark, NULL, &failed)) {
        return failed.code == FC_OK ? FC_OK : fc_fail(err, failed.code, "%s", failed.message);
    }
    FC_TRY(fc_read_whole(mark, "a list of names", MOST_MARK, &text, &size, err));
    text[size] = '\0';
    fc_code rc = delete_marked(folder, text, err);
    free(text);
    if (rc == FC_OK && reporter->report) {
        fc_fail(&failed, FC_OK, "%s: an earlier run died while it made this visible; what it left is deleted", folder);
        reporter->report(reporter->context, failed.message);
    }
    return rc;
}

/* ---- before ---- */

fc_code fc_staged_check(const char *name, fc_error *err) {
    return fc_upload_check(name, err);
}

fc_code fc_staged_clear(const char *name, bool is_folder, const fc_reporter *reporter, fc_error *err) {
    size_t count = 0;
    fc_error line;
    const fc_code cleared = fc_upload_clear(name, is_folder, &count, &line);
    if (cleared == FC_EIO && reporter->report) { /* not every user who may write may list uploads */
        reporter->report(reporter->context, line.message);
    }
    FC_TRY(cleared == FC_EIO ? FC_OK : cleared != FC_OK ? fc_fail(err, cleared, "%s", line.message) : FC_OK);
    if (count > 0 && reporter->report) {
        fc_fail(&line, FC_OK, "%s: an earlier run died while writing this; its %zu unfinished upload%s aborted", name,
                count, count == 1 ? " is" : "s are");
        reporter->report(reporter->context, line.message);
    }
    return is_folder ? clear_marked(name, reporter, err) : FC_OK;
}

/* ---- after ---- */

static fc_code publish_file(fc_staged_file *file, bool only_new, fc_error *err) {
    struct stat st;
    if (file->upload) {
        FC_TRY(fc_staged_end(file->path, err));
        fc_upload *upload = file->upload;
        file->upload = NULL; /* it is freed by the call, which may fail */
        return fc_upload_complete(upload, file->nparts, only_new, err);
    }
    if (fstat(file->fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", file->path);
    }
    return fc_upload_whole(name_of(file->path), file->fd, (uint64_t)st.st_size, only_new, err);
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

/* After a failure, a new target is deleted as far as possible. One that replaces an old one stays, with the mark. */
static void take_back(fc_staged_file **list, size_t count, const char *mark) {
    bool all = true;
    for (size_t i = 0; i < count; i++) {
        all &= fc_upload_delete(name_of(list[i]->path), NULL) == FC_OK;
    }
    if (all && *mark) {
        (void)fc_upload_delete(mark, NULL);
    }
}

static fc_code publish_files(fc_staged_file **list, size_t count, const char *mark, bool only_new,
                             fc_progress *progress, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        fc_code rc = publish_file(list[i], only_new, err);
        rc = rc == FC_OK && i + 1 < count ? fc_progress_count(progress, 1, err) : rc;
        if (rc != FC_OK) {
            const size_t made = rc == FC_EINTERRUPTED ? i + 1 : i;
            if (only_new) {
                take_back(list, made, mark);
            }
            return rc;
        }
    }
    return FC_OK;
}

fc_code fc_staged_publish(fc_staged_target *target, bool only_new, fc_progress *progress, fc_error *err) {
    const size_t files = fc_staged_count(target);
    char mark[PATH_MAX] = "";
    fc_staged_file **list = calloc(files + 1, sizeof *list);
    fc_code rc;
    FC_NEED(list, err, target->path);
    const size_t count = list_files(target, list);
    fc_progress_begin(progress, FC_PHASE_SYNCING, FC_COUNTED_FILES, count);
    FC_TRY_GOTO(count > 1 ? write_mark(target, mark, err) : FC_OK, rc, out);
    FC_TRY_GOTO(publish_files(list, count, mark, only_new, progress, err), rc, out);
    rc = *mark ? remove_mark(mark, err) : FC_OK;
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
    FC_TRY(name_in(name_of(target->path), below, folder, err));
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
