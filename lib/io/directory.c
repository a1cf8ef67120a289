/*
 * Walks a directory and reports every error. See directory.h.
 */
#include "io/directory.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "io/staged_objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static fc_code opened(fc_dir *dir, const char *path, DIR *handle, fc_error *err) {
    *dir = (fc_dir){.path = path, .dir = handle};
    return handle ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be listed", path);
}

fc_code fc_dir_open(fc_dir *dir, const char *path, fc_error *err) {
    if (fc_is_remote(path)) {
        *dir = (fc_dir){.path = path};
        return fc_remote_list(path, &dir->remote, err);
    }
    if (fc_is_staged(path)) {
        *dir = (fc_dir){.path = path};
        return fc_staged_list(path, &dir->remote, err);
    }
    return opened(dir, path, opendir(path), err);
}

fc_code fc_dir_open_at(fc_dir *dir, int fd, const char *path, fc_error *err) {
    DIR *handle = fdopendir(fd);
    fc_code rc = opened(dir, path, handle, err);
    if (!handle) {
        close(fd);
    }
    return rc;
}

const char *fc_dir_next(fc_dir *dir) {
    if (dir->next < dir->remote.count) {
        return dir->remote.names[dir->next++];
    }
    while (dir->dir && dir->errnum == 0) {
        errno = 0;
        const struct dirent *entry = readdir(dir->dir);
        if (!entry) {
            dir->errnum = errno;
            return NULL;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            return entry->d_name;
        }
    }
    return NULL;
}

fc_code fc_dir_stat(const fc_dir *dir, const char *name, struct stat *st, fc_error *err) {
    char path[PATH_MAX];
    bool found = false;
    if (!dir->dir) { /* it is not on this machine */
        if (snprintf(path, sizeof path, "%s/%s", dir->path, name) >= PATH_MAX) {
            return fc_fail(err, FC_EUNSUPPORTED, "%s/%s: the name is too long", dir->path, name);
        }
        FC_TRY(fc_stat_path(path, st, &found, err));
        return found ? FC_OK : fc_fail(err, FC_ECORRUPT, "%s: the file is missing", path);
    }
    return fstatat(dirfd(dir->dir), name, st, AT_SYMLINK_NOFOLLOW) == 0
               ? FC_OK
               : fc_fail_errno(err, errno, "%s/%s: cannot be examined", dir->path, name);
}

fc_code fc_dir_is_folder(const fc_dir *dir, const char *name, bool *is_folder, fc_error *err) {
    struct stat st;
    *is_folder = false;
    FC_TRY(fc_dir_stat(dir, name, &st, err));
    *is_folder = S_ISDIR(st.st_mode);
    return FC_OK;
}

bool fc_path_exists(const char *path, struct stat *st, fc_error *err) {
    struct stat own;
    bool found;
    (void)fc_stat_path(path, st ? st : &own, &found, err);
    return found;
}

fc_code fc_is_directory(const char *path, bool *is, fc_error *err) {
    struct stat st;
    bool found;
    *is = false;
    FC_TRY(fc_stat_path(path, &st, &found, err));
    *is = found && S_ISDIR(st.st_mode);
    return FC_OK;
}

bool fc_find_in(const char *directory, const char *name, char path[PATH_MAX], fc_error *err) {
    return snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX && fc_path_exists(path, NULL, err);
}

fc_code fc_dir_close(fc_dir *dir, fc_code rc, fc_error *err) {
    if (dir->dir) {
        closedir(dir->dir);
        dir->dir = NULL;
    }
    fc_entry_names_free(&dir->remote);
    return rc != FC_OK || dir->errnum == 0
               ? rc
               : fc_fail_errno(err, dir->errnum, "%s: the directory cannot be read to its end", dir->path);
}

static fc_code add_name(fc_entry_names *l, const char *name, fc_error *err) {
    FC_NEED(fc_grow(&l->names, &l->capacity, l->count + 1, sizeof *l->names), err, name);
    l->names[l->count] = strdup(name);
    FC_NEED(l->names[l->count], err, name);
    l->count++;
    return FC_OK;
}

fc_code fc_dir_names(const char *path, fc_entry_names *out, fc_error *err) {
    fc_dir dir;
    *out = (fc_entry_names){.names = NULL};
    fc_code rc = fc_dir_open(&dir, path, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        rc = add_name(out, name, err);
    }
    if (out->count > 0) {
        fc_sort_texts((const char **)(void *)out->names, out->count);
    }
    return fc_dir_close(&dir, rc, err);
}

bool fc_dir_find(const char *path, bool (*matches)(const char *name), fc_error *err) {
    fc_dir dir;
    bool found = false;
    struct stat st;
    if (!fc_path_exists(path, &st, err) || !S_ISDIR(st.st_mode)) {
        return false;
    }
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *name; !found && (name = fc_dir_next(&dir)) != NULL;) {
        found = matches(name);
    }
out:
    return fc_dir_close(&dir, rc, err) == FC_OK && found;
}

fc_code fc_dir_list(const char *path, bool (*accepts)(const char *name, const void *context), const void *context,
                    fc_arena *arena, const char ***names, size_t *count, fc_error *err) {
    fc_dir dir;
    size_t capacity = 0;
    fc_code rc;
    *names = NULL;
    *count = 0;
    FC_TRY_GOTO(fc_dir_open(&dir, path, err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        if (!accepts(name, context)) {
            continue;
        }
        const char *copy = fc_arena_strndup(arena, name, strlen(name));
        const bool room = copy && fc_arena_grow(arena, names, &capacity, *count, *count + 1, sizeof **names);
        FC_TRY_GOTO(room ? FC_OK : fc_no_memory(err, path), rc, out);
        (*names)[(*count)++] = copy;
    }
    fc_sort_texts(*names, *count);
out:
    return fc_dir_close(&dir, rc, err);
}

/* Removes the entries of the directory. @return false if it could not be read to the end. */
static bool remove_entries(int parent, const char *name) {
    fc_dir dir;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fc_dir_open_at(&dir, fd, name, NULL) != FC_OK) {
        return false;
    }
    for (const char *entry; (entry = fc_dir_next(&dir)) != NULL;) {
        fc_remove_tree(fd, entry);
    }
    return fc_dir_close(&dir, FC_OK, NULL) == FC_OK;
}

void fc_remove_tree(int parent, const char *name) {
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) {
        return;
    }
    if (!remove_entries(parent, name)) {
        remove_entries(parent, name); /* errors are ignored; the next run removes the rest */
    }
    unlinkat(parent, name, AT_REMOVEDIR);
}
