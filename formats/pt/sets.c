/*
 * The names of one-file-a-rank checkpoints: <set>_world_size_<N>_rank_<r>.pt, as verl and others write them.
 */
#include "pt/ranks.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 1 << 20 };

static bool parse_number(const char **at, int64_t most, int64_t *out) {
    int64_t value = 0;
    const char *p = *at;
    if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9')) {
        return false;
    }
    for (; *p >= '0' && *p <= '9'; p++) {
        value = value * 10 + (*p - '0');
        if (value > most) {
            return false;
        }
    }
    *at = p;
    *out = value;
    return true;
}

bool fc_pt_parse_rank_name(const char *file, char name[64], int64_t *ranks, int64_t *rank) {
    static const char between[] = "_world_size_", before_rank[] = "_rank_";
    const char *at = strstr(file, between);
    if (!at || at == file || at - file >= 64) {
        return false;
    }
    memcpy(name, file, (size_t)(at - file));
    name[at - file] = '\0';
    at += sizeof between - 1;
    if (!parse_number(&at, MAX_RANKS, ranks) || strncmp(at, before_rank, sizeof before_rank - 1) != 0) {
        return false;
    }
    at += sizeof before_rank - 1;
    return parse_number(&at, MAX_RANKS, rank) && strcmp(at, ".pt") == 0 && *rank < *ranks;
}

bool fc_pt_has_sets(const char *directory) {
    char name[64];
    int64_t ranks, rank;
    DIR *dir = opendir(directory);
    bool found = false;
    for (const struct dirent *e; dir && !found && (e = readdir(dir)) != NULL;) {
        found = fc_pt_parse_rank_name(e->d_name, name, &ranks, &rank);
    }
    if (dir) {
        closedir(dir);
    }
    return found;
}

static int order_of(const pt_set *set) {
    return strcmp(set->name, "model") == 0 ? 0 : strcmp(set->name, "optim") == 0 ? 1 : 2;
}

static int by_name(const void *a, const void *b) {
    const pt_set *x = a, *y = b;
    return order_of(x) != order_of(y) ? order_of(x) - order_of(y) : strcmp(x->name, y->name);
}

static fc_code add_set(const char *directory, const char *name, int64_t ranks, fc_arena *arena, pt_set *sets,
                       size_t *count, fc_error *err) {
    for (size_t i = 0; i < *count; i++) {
        if (strcmp(sets[i].name, name) == 0) {
            return sets[i].ranks == ranks ? FC_OK
                                          : fc_fail(err, FC_ECORRUPT,
                                                    "%s: files %s_world_size_* of two worlds, %" PRId64 " and %" PRId64
                                                    " ranks: move one of them away",
                                                    directory, name, sets[i].ranks, ranks);
        }
    }
    const char *copy = fc_arena_strndup(arena, name, strlen(name));
    if (!copy) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", directory);
    }
    sets[(*count)++] = (pt_set){copy, ranks};
    return FC_OK;
}

fc_code fc_pt_find_sets(const char *directory, fc_arena *arena, pt_set **out, size_t *count, fc_error *err) {
    enum { MOST = 64 };
    DIR *dir = opendir(directory);
    if (!dir) {
        return fc_fail_errno(err, errno, "%s: cannot be read", directory);
    }
    *count = 0;
    *out = fc_arena_calloc(arena, MOST, sizeof **out);
    fc_code rc = *out ? FC_OK : fc_fail(err, FC_ENOMEM, "%s: out of memory", directory);
    for (const struct dirent *e; rc == FC_OK && (e = readdir(dir)) != NULL;) {
        char name[64];
        int64_t ranks, rank;
        if (!fc_pt_parse_rank_name(e->d_name, name, &ranks, &rank)) {
            continue;
        }
        rc = *count < MOST ? add_set(directory, name, ranks, arena, *out, count, err)
                           : fc_fail(err, FC_EUNSUPPORTED, "%s: more than %d kinds of files", directory, MOST);
    }
    closedir(dir);
    if (rc == FC_OK) {
        qsort(*out, *count, sizeof **out, by_name);
    }
    return rc;
}
