/*
 * Megatron checkpoints, read. `torch_dist` is a DCP checkpoint and beside it `common.pt`, a torch.save file of what is
 * not sharded: so this is the readers of both, one behind the other. The older `torch` format is a torch.save file for
 * each model-parallel rank, `mp_rank_00/model_optim_rng.pt`; with one rank it is read as such a file. The path is the
 * directory of an iteration, or the one above, whose `latest_checkpointed_iteration.txt` says which.
 */
#include "fsdpckpt/format.h"

#include "pt/beside_dcp.h"
#include "pt/pt.h"
#include "registry.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char tracker[] = "latest_checkpointed_iteration.txt";
static const char common[] = "common.pt";

enum { TRACKED = 32 };

static bool exists(const char *directory, const char *name, char path[PATH_MAX]) {
    struct stat st;
    return snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX && stat(path, &st) == 0;
}

static bool is_rank_name(const char *name) {
    return strncmp(name, "mp_rank_", 8) == 0 && name[8] >= '0' && name[8] <= '9';
}

/* The file of a model-parallel rank's directory. */
static bool rank_file(const char *directory, const char *rank, char path[PATH_MAX]) {
    static const char *const names[] = {"model_optim_rng.pt", "model_rng.pt"};
    char name[NAME_MAX + 32];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (snprintf(name, sizeof name, "%s/%s", rank, names[i]) < (int)sizeof name && exists(directory, name, path)) {
            return true;
        }
    }
    return false;
}

/* How many model-parallel ranks have files; the name of one of them. */
static size_t count_ranks(const char *directory, char rank[NAME_MAX + 1]) {
    char path[PATH_MAX];
    size_t count = 0;
    DIR *dir = opendir(directory);
    for (const struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        if (is_rank_name(e->d_name) && rank_file(directory, e->d_name, path)) {
            snprintf(rank, NAME_MAX + 1, "%s", e->d_name);
            count++;
        }
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

static bool is_iteration(const char *directory) {
    char rank[NAME_MAX + 1];
    return fc_pt_is_beside_dcp(directory, common) || count_ranks(directory, rank) > 0;
}

/* What the tracker names: "iter_0000010" for 10, or "release". */
static bool read_tracker(const char *directory, char name[TRACKED]) {
    char path[PATH_MAX], text[TRACKED] = "", *end;
    int fd;
    uint64_t size;
    if (!exists(directory, tracker, path) || fc_open_input(path, &fd, &size, NULL) != FC_OK) {
        return false;
    }
    bool good = size > 0 && size < TRACKED - 8 && fc_pread_full(fd, text, (size_t)size, 0, path, NULL) == FC_OK;
    close(fd);
    text[strcspn(text, " \r\n")] = '\0';
    unsigned long long number = strtoull(text, &end, 10);
    if (good && strcmp(text, "release") == 0) {
        strcpy(name, text);
        return true;
    }
    return good && end != text && *end == '\0' && snprintf(name, TRACKED, "iter_%07llu", number) < TRACKED;
}

static bool megatron_probe(const fc_probe *probe) {
    char name[TRACKED], path[PATH_MAX];
    if (!probe->is_directory) {
        return false;
    }
    return is_iteration(probe->path) ||
           (read_tracker(probe->path, name) && exists(probe->path, name, path) && is_iteration(path));
}

/* ---- torch_dist ---- */

static fc_code no_memory(const fc_checkpoint *checkpoint, fc_error *err) {
    return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
}

/* ---- one file a rank ---- */

static fc_code open_rank(fc_checkpoint *checkpoint, fc_error *err) {
    char rank[NAME_MAX + 1], path[PATH_MAX], optimizer[PATH_MAX], name[NAME_MAX + 32];
    size_t count = count_ranks(checkpoint->path, rank);
    if (count != 1) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: the model is cut over %zu model-parallel ranks, and the files do not say along which "
                       "dimensions; save it with --ckpt-format torch_dist, or name the file of one rank",
                       checkpoint->path, count);
    }
    rank_file(checkpoint->path, rank, path);
    snprintf(name, sizeof name, "%s/distrib_optim.pt", rank);
    if (exists(checkpoint->path, name, optimizer)) {
        checkpoint->note = "the distributed optimizer's state, in distrib_optim.pt, is not read: its buckets do not "
                           "say which parameter is where";
    }
    const char *copy = fc_arena_strndup(checkpoint->arena, path, strlen(path));
    if (!copy) {
        return no_memory(checkpoint, err);
    }
    checkpoint->path = copy;
    return fc_pt_open_file(checkpoint, err);
}

static fc_code megatron_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    char name[TRACKED], path[PATH_MAX];
    if (!is_iteration(checkpoint->path) && read_tracker(checkpoint->path, name) &&
        exists(checkpoint->path, name, path)) {
        checkpoint->path = fc_arena_strndup(checkpoint->arena, path, strlen(path));
        if (!checkpoint->path) {
            return fc_fail(err, FC_ENOMEM, "out of memory");
        }
    }
    bool distributed = fc_pt_is_beside_dcp(checkpoint->path, common);
    fc_code rc = distributed ? fc_pt_open_beside_dcp(checkpoint, common, options, err) : open_rank(checkpoint, err);
    checkpoint->producer = "Megatron";
    checkpoint->keeps_order = false; /* ranks of a pipeline have parts of it */
    return rc;
}

static const char *const extensions[] = {NULL};

const fc_format fc_format_megatron = {
    .name = "megatron",
    .description = "Megatron checkpoint",
    .directory_sign = "mp_rank_*/model_optim_rng.pt (Megatron)",
    .header_name = ".metadata",
    .extensions = extensions,
    .probe = megatron_probe,
    .open = megatron_open,
    .close = fc_pt_close_beside_dcp,
    .extent = fc_pt_extent_beside_dcp,
    .read = fc_pt_read,
    .object_json = fc_pt_object_json_beside_dcp,
    .digest = fc_pt_digest_beside_dcp,
    .check_object = fc_pt_check_object_beside_dcp,
    .unverified = ".metadata, objects, and the gaps between the records of archives",
};
