/*
 * Reads and locks a model on a local disk. See model.h.
 */
#include "delta/model.h"

#include "base/grow.h"
#include "delta/journal.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/sync.h"
#include "safetensors/files.h"
#include "safetensors/header.h"
#include "safetensors/kept.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST_STATE = 64 << 10, WAIT_NANOSECONDS = 50000000 };

/* ---- the headers ---- */

static fc_code add_sync_file(fc_arena *arena, const char *name, fc_sync_model *m, size_t *capacity, fc_error *err) {
    FC_NEED(fc_arena_grow(arena, &m->files, capacity, m->nfiles, m->nfiles + 1, sizeof *m->files), err, m->path);
    fc_sync_file *f = &m->files[m->nfiles++];
    *f = (fc_sync_file){.name = fc_arena_strndup(arena, name, strlen(name)),
                        .path = fc_arena_printf(arena, "%s/%s", m->path, name),
                        .fd = -1};
    FC_NEED(f->name && f->path, err, m->path);
    return strchr(name, '/')
               ? fc_fail(err, FC_EUNSUPPORTED, "%s: a file in a folder of the model cannot be changed", f->path)
               : FC_OK;
}

static fc_code list_indexed(fc_arena *arena, const char *index, fc_sync_model *m, size_t *capacity, fc_error *err) {
    fc_st_files files = {.directory = m->path};
    fc_code rc = fc_st_index_read(arena, index, &files, err);
    for (size_t i = 0; rc == FC_OK && i < files.nfiles; i++) {
        rc = add_sync_file(arena, files.files[i].name, m, capacity, err);
    }
    fc_st_files_free(&files);
    return rc;
}

static fc_code list_all(fc_arena *arena, fc_sync_model *m, size_t *capacity, fc_error *err) {
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, m->path, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        if (fnmatch("*" ST_EXTENSION, name, FNM_PERIOD) == 0) {
            rc = add_sync_file(arena, name, m, capacity, err);
        }
    }
    FC_TRY(fc_dir_close(&dir, rc, err));
    return m->nfiles > 0 ? FC_OK : fc_fail(err, FC_ECORRUPT, "%s: the model has no safetensors files", m->path);
}

static fc_code add_sync_tensors(fc_arena *arena, fc_sync_model *m, fc_sync_file *file, size_t *capacity,
                                fc_error *err) {
    fc_st_header header;
    fc_code rc;
    FC_TRY_GOTO(fc_st_header_read(arena, file->path, false, &header, err), rc, out);
    file->data = header.data;
    file->ntensors = header.nentries;
    file->has_digests = header.has_digests;
    for (size_t i = 0; i < header.nentries; i++) {
        const fc_st_entry *e = &header.entries[header.by_offset[i]];
        if (!fc_arena_grow(arena, &m->tensors, capacity, m->ntensors, m->ntensors + 1, sizeof *m->tensors)) {
            rc = fc_no_memory(err, m->path);
            goto out;
        }
        m->tensors[m->ntensors++] = (fc_sync_tensor){.name = e->name,
                                                     .file = file,
                                                     .offset = header.data + e->begin,
                                                     .size = e->end - e->begin,
                                                     .element = e->stored->bits % 8 == 0 ? e->stored->bits / 8 : 0,
                                                     .place = i};
    }
out:
    fc_st_header_free(&header);
    return rc;
}

fc_code fc_sync_model_read(fc_arena *arena, const char *path, fc_sync_model *out, fc_error *err) {
    char index[PATH_MAX];
    fc_error missing = {FC_OK};
    size_t files = 0, tensors = 0;
    *out = (fc_sync_model){.path = path};
    const bool indexed = fc_find_in(path, ST_INDEX_NAME, index, &missing);
    if (missing.code != FC_OK) {
        return fc_fail(err, missing.code, "%s", missing.message);
    }
    FC_TRY(indexed ? list_indexed(arena, index, out, &files, err) : list_all(arena, out, &files, err));
    for (size_t i = 0; i < out->nfiles; i++) {
        FC_TRY(add_sync_tensors(arena, out, &out->files[i], &tensors, err));
    }
    fc_sort_items(out->tensors, out->ntensors, sizeof *out->tensors, fc_order_texts);
    for (size_t i = 1; i < out->ntensors; i++) {
        const fc_sync_tensor *a = &out->tensors[i - 1], *b = &out->tensors[i];
        if (strcmp(a->name, b->name) == 0) {
            return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s is in both %.128s and %.128s", path, a->name,
                           a->file->name, b->file->name);
        }
    }
    return FC_OK;
}

fc_sync_tensor *fc_sync_model_find(const fc_sync_model *m, const char *name) {
    return fc_find_struct(m->tensors, m->ntensors, sizeof *m->tensors, name);
}

fc_code fc_sync_file_check(const fc_sync_file *file, fc_error *err) {
    struct stat st;
    if (lstat(file->path, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: the file cannot be examined", file->path);
    }
    if (S_ISLNK(st.st_mode)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: this is a link, as in the cache of the Hugging Face hub, and a change of its file would "
                       "change every model that uses it: copy the model first, with cp -rL",
                       file->path);
    }
    if (st.st_nlink > 1) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: the file has %lu names, and a change would be seen under all of them: copy the model "
                       "first, with cp -r",
                       file->path, (unsigned long)st.st_nlink);
    }
    const int fd = open(file->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be changed in place", file->path)
                  : fc_close_written(fd, FC_OK, file->path, err);
}

/* ---- the state and the lock ---- */

fc_code fc_sync_version(const char *model, int64_t base, int64_t *version, fc_error *err) {
    char path[PATH_MAX];
    char *text = NULL;
    size_t size;
    fc_error missing = {FC_OK};
    *version = base == FC_DELTA_NO_NUMBER ? 0 : base;
    if (!fc_find_in(model, SYNC_STATE, path, &missing)) {
        return missing.code == FC_OK ? FC_OK : fc_fail(err, missing.code, "%s", missing.message);
    }
    FC_TRY(fc_read_whole(path, "the state of a model", MOST_STATE, &text, &size, err));
    json_t *state = json_loadb(text, size, 0, NULL);
    const char *digits = json_string_value(json_object_get(state, "version"));
    const size_t count = digits ? strspn(digits, "0123456789") : 0;
    const bool good = count > 0 && count <= 9 && digits[count] == '\0';
    *version = good ? strtoll(digits, NULL, 10) : -1;
    json_decref(state);
    free(text);
    if (!good) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: it does not say which version the model has, as {\"version\": \"000007\"} does", path);
    }
    if (base != FC_DELTA_NO_NUMBER && base != *version) {
        return fc_fail(err, FC_EUSAGE, "%s: the model has version %lld, not version %lld", path, (long long)*version,
                       (long long)base);
    }
    return FC_OK;
}

fc_code fc_sync_known_version(const char *path, int64_t *version, fc_error *err) {
    char model[PATH_MAX], state[PATH_MAX];
    fc_error missing = {FC_OK};
    bool is_folder = false;
    int64_t journal = -1;
    *version = FC_DELTA_NO_NUMBER;
    if (!fc_path_exists(path, NULL, &missing)) {
        return FC_OK; /* a checkpoint in memory */
    }
    FC_TRY(fc_is_directory(path, &is_folder, err));
    const char *slash = is_folder ? NULL : strrchr(path, '/');
    const int length = is_folder ? (int)strlen(path) : slash ? (int)(slash + 1 - path) : 0;
    if (snprintf(model, sizeof model, "%.*s", length, path) >= PATH_MAX) {
        return FC_OK; /* there is no such folder */
    }
    if (model[0] == '\0') {
        memcpy(model, ".", sizeof ".");
    }
    if (!fc_find_in(model, SYNC_FOLDER, state, &missing)) {
        return missing.code == FC_OK ? FC_OK : fc_fail(err, missing.code, "%s", missing.message);
    }
    FC_TRY(fc_journal_look(model, &journal, err));
    if (journal >= 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: an earlier run of apply has not put all of version %" PRId64
                       " in place, so the files may have bytes of two versions: run apply again first",
                       model, journal);
    }
    return fc_find_in(model, SYNC_STATE, state, &missing) ? fc_sync_version(model, FC_DELTA_NO_NUMBER, version, err)
                                                          : FC_OK;
}

static fc_code make_sync_folder(const char *model, fc_error *err) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" SYNC_FOLDER, model) >= PATH_MAX) {
        return fc_fail(err, FC_EUSAGE, "%s: the path is too long", model);
    }
    if (mkdir(path, 0777) != 0) {
        return errno == EEXIST ? FC_OK : fc_fail_errno(err, errno, "%s: the folder cannot be created", path);
    }
    return fc_sync_path(AT_FDCWD, model, model, err);
}

/* Waits for the lock, and says so once. */
static fc_code wait_for_lock(int fd, const char *path, const fc_delta_apply_options *o, fc_error *err) {
    const struct timespec pause = {0, WAIT_NANOSECONDS};
    bool told = false;
    while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            return fc_fail_errno(err, errno, "%s: the lock cannot be taken", path);
        }
        if (!told && o->reporter.report) {
            o->reporter.report(o->reporter.context,
                               "another process changes this model: waiting until it has finished");
        }
        told = true;
        nanosleep(&pause, NULL);
        FC_TRY(fc_progress_count(o->work.progress, 0, err));
    }
    return FC_OK;
}

fc_code fc_sync_lock(const char *model, const fc_delta_apply_options *o, int *fd, fc_error *err) {
    char path[PATH_MAX];
    *fd = -1;
    FC_TRY(make_sync_folder(model, err));
    snprintf(path, sizeof path, "%s/" SYNC_LOCK, model);
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (*fd < 0) {
        return fc_fail_errno(err, errno, "%s: the lock cannot be opened", path);
    }
    return wait_for_lock(*fd, path, o, err);
}

/* ---- digests ---- */

fc_code fc_sync_digests(const fc_sync_file *file, const uint64_t *crcs, const bool *known, unsigned char **text,
                        unsigned char **made, fc_error *err) {
    static const char mark[] = "\"" ST_DIGESTS "\":\""; /* inside a string the quotation marks would be escaped */
    const size_t size = (size_t)file->data;
    uint64_t bytes;
    int fd;
    *text = malloc(size);
    *made = malloc(size);
    FC_NEED(*text && *made, err, file->path);
    FC_TRY(fc_open_input(file->path, &fd, &bytes, err));
    const fc_code rc = fc_pread_full(fd, *text, size, 0, file->path, err);
    close(fd);
    FC_TRY(rc);
    memcpy(*made, *text, size);
    char *found = memmem(*made, size, mark, sizeof mark - 1);
    const size_t at = found ? (size_t)(found - (char *)*made) + sizeof mark - 1 : size;
    if (at + file->ntensors * ST_DIGITS > size) {
        return fc_fail(err, FC_ECORRUPT, "%s: the digests in its header are damaged", file->path);
    }
    for (size_t i = 0; i < file->ntensors; i++) {
        if (known[i]) {
            fc_st_digits(crcs[i], (char *)*made + at + i * ST_DIGITS);
        }
    }
    const size_t own = fc_st_digest_offset((const char *)*made, size);
    if (own > 0) {
        fc_st_digits(fc_st_digest_of((const char *)*made, size, own), (char *)*made + own);
    }
    return FC_OK;
}
