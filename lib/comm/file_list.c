/*
 * Lists the files of every rank and sends the lists to all ranks. A list is text, one line "SIZE NAME" per file.
 */
#include "comm/file_list.h"

#include "base/name_table.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <errno.h>
#include <fts.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Writes the line of a file. A name with a newline would read as two lines. */
static fc_code put_line(FILE *lines, const char *path, const char *name, fc_error *err) {
    struct stat st;
    if (strchr(name, '\n')) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: a file name with a line break is not supported", path);
    }
    if (stat(path, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be read", path);
    }
    if (S_ISREG(st.st_mode)) {
        fprintf(lines, "%" PRIu64 " %s\n", (uint64_t)st.st_size, name);
    }
    return FC_OK;
}

static int compare_file_names(const FTSENT **a, const FTSENT **b) {
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static fc_code walk(const char *source, FILE *lines, fc_error *err) {
    char *roots[] = {(char *)source, NULL};
    FTS *tree = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, compare_file_names);
    fc_code rc;
    FC_TRY_GOTO(tree ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be listed", source), rc, out);
    for (FTSENT *e; (e = (errno = 0, fts_read(tree)));) {
        if (e->fts_level == 0 && e->fts_info != FTS_D && e->fts_info != FTS_DP) {
            FC_TRY_GOTO(e->fts_errno
                            ? fc_fail_errno(err, e->fts_errno, "%s: cannot be listed", source)
                            : fc_fail(err, FC_EUSAGE, "%s: is not a directory; each rank needs a local one", source),
                        rc, out);
        } else if (e->fts_info == FTS_F || e->fts_info == FTS_SL) {
            FC_TRY_GOTO(put_line(lines, e->fts_path, e->fts_path + strlen(source) + 1, err), rc, out);
        } else if (e->fts_info == FTS_DNR || e->fts_info == FTS_ERR || e->fts_info == FTS_NS) {
            rc = fc_fail_errno(err, e->fts_errno, "%s: cannot be listed", e->fts_path);
            goto out;
        }
    }
    rc = errno ? fc_fail_errno(err, errno, "%s: cannot be listed to its end", source) : FC_OK;
out:
    if (tree) {
        fts_close(tree);
    }
    return rc;
}

/* Makes this rank's list. The caller frees `*text`. */
static fc_code list_own_files(const char *source, char **text, size_t *size, fc_error *err) {
    FILE *lines = open_memstream(text, size);
    size_t length = strlen(source);
    char *plain = strndup(source, length);
    while (plain && length > 1 && plain[length - 1] == '/') {
        plain[--length] = '\0';
    }
    fc_code rc = lines && plain ? walk(plain, lines, err) : fc_no_memory(err, NULL);
    free(plain);
    if (lines && fclose(lines) != 0 && rc == FC_OK) {
        rc = fc_no_memory(err, NULL);
    }
    return rc;
}

/* The merged list. */
typedef struct file_list {
    fc_sent_file *files;
    size_t count, capacity;
    fc_name_table *table;
} file_list;

static fc_code add_file(file_list *l, int rank, char *line, fc_error *err) {
    char *name;
    uint64_t size = strtoull(line, &name, 10);
    if (*name != ' ' || !fc_path_is_safe(name + 1) || l->count == l->capacity) {
        return fc_fail(err, FC_ECORRUPT, "rank %d: sent an unsafe file name '%s'", rank, name);
    }
    name++;
    size_t at = fc_name_table_put(l->table, name, strlen(name), l->count);
    if (at < l->count) {
        const fc_sent_file *first = &l->files[at];
        if (first->size != size) {
            return fc_fail(err, FC_EUSAGE,
                           "rank %d: %s has %" PRIu64 " bytes, but %" PRIu64
                           " bytes on rank %d: the ranks must have files of the same checkpoint",
                           rank, name, size, first->size, first->rank);
        }
        return FC_OK;
    }
    l->files[l->count++] = (fc_sent_file){name, size, rank};
    return FC_OK;
}

static fc_code add_files(file_list *l, int rank, char *text, fc_error *err) {
    for (char *end; (end = strchr(text, '\n')); text = end + 1) {
        *end = '\0';
        FC_TRY(add_file(l, rank, text, err));
    }
    return FC_OK;
}

/* Gathers the lists of all ranks. The list of rank r starts at displs[r] and ends with a NUL. */
static fc_code gather_lists(fc_comm *comm, const char *own, size_t size, fc_arena *arena, size_t **displs, char **all,
                            fc_error *err) {
    size_t n = (size_t)comm->size, mine = size + 1, total = 0;
    size_t *counts = fc_arena_calloc(arena, 2 * n, sizeof *counts);
    FC_TRY(fc_comm_agree(comm, counts ? FC_OK : fc_no_memory(err, NULL), err));
    FC_TRY(comm->all_gather(comm, &mine, counts, sizeof mine, err));
    *displs = counts + n;
    for (size_t r = 0; r < n; r++) {
        (*displs)[r] = total;
        total += counts[r];
    }
    *all = fc_arena_alloc(arena, total);
    FC_TRY(fc_comm_agree(comm, *all ? FC_OK : fc_no_memory(err, NULL), err));
    return comm->all_gather_v(comm, own, *all, counts, *displs, err);
}

static size_t count_lines(const char *text) {
    size_t n = 0;
    for (; (text = strchr(text, '\n')); text++) {
        n++;
    }
    return n;
}

static fc_code add_all_files(file_list *l, int ranks, char *all, const size_t *displs, fc_arena *arena, fc_error *err) {
    for (int r = 0; r < ranks; r++) {
        l->capacity += count_lines(all + displs[r]);
    }
    l->files = fc_arena_calloc(arena, l->capacity + 1, sizeof *l->files);
    l->table = fc_name_table_new(arena, l->capacity + 1);
    FC_NEED(l->files && l->table, err, NULL);
    for (int r = 0; r < ranks; r++) {
        FC_TRY(add_files(l, r, all + displs[r], err));
    }
    return FC_OK;
}

fc_code fc_list_files(fc_comm *comm, const char *source, fc_arena *arena, fc_sent_file **out, size_t *count,
                      fc_error *err) {
    char *own = NULL, *all = NULL;
    size_t size = 0, *displs = NULL;
    file_list l = {0};
    fc_code rc;
    FC_TRY_GOTO(fc_comm_agree(comm, list_own_files(source, &own, &size, err), err), rc, out);
    FC_TRY_GOTO(gather_lists(comm, own, size, arena, &displs, &all, err), rc, out);
    FC_TRY_GOTO(fc_comm_agree(comm, add_all_files(&l, comm->size, all, displs, arena, err), err), rc, out);
    *out = l.files;
    *count = l.count;
out:
    free(own);
    return rc;
}
