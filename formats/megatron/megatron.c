/*
 * Reads Megatron checkpoints. `torch_dist` is a DCP checkpoint with a torch.save file, `common.pt`, for everything that
 * is not sharded. The older `torch` format has one torch.save file per model-parallel rank,
 * `mp_rank_00/model_optim_rng.pt`; ranks.c reads and joins them. The path is the directory of an iteration, or its
 * parent, where `latest_checkpointed_iteration.txt` names the iteration. NeMo 2 has torch_dist in a folder `weights`.
 */
#include "fsdpckpt/format.h"

#include "dcp/files.h"
#include "dcp/with_torch_file.h"
#include "megatron/stages.h"
#include "registry.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char tracker[] = "latest_checkpointed_iteration.txt";
static const char common[] = "common.pt";
static const char nemo[] = "weights";
static const char rank_folders[] = "mp_rank_*";

enum { TRACKED = 32 };

static bool is_iteration(const char *directory, fc_error *err) {
    return fc_dcp_has_file(directory, common, err) || (err->code == FC_OK && fc_mg_has_ranks(directory, err));
}

/* Reads the directory name from the tracker file: "iter_0000010" for 10, or "release". */
static bool read_tracker(const char *directory, char name[TRACKED], fc_error *err) {
    char path[PATH_MAX], text[TRACKED] = "", *end;
    int fd;
    uint64_t size;
    if (!fc_find_in(directory, tracker, path, err) || fc_open_input(path, &fd, &size, err) != FC_OK) {
        return false;
    }
    bool good = size > 0 && size < TRACKED - 8 && fc_pread_full(fd, text, (size_t)size, 0, path, err) == FC_OK;
    close(fd);
    text[strcspn(text, " \r\n")] = '\0';
    unsigned long long number = strtoull(text, &end, 10);
    if (good && strcmp(text, "release") == 0) {
        strcpy(name, text);
        return true;
    }
    return good && end != text && *end == '\0' && snprintf(name, TRACKED, "iter_%07llu", number) < TRACKED;
}

/* Finds the directory of an iteration that the tracker file names, or NeMo's. */
static bool find_inner(const char *directory, char path[PATH_MAX], fc_error *err) {
    char name[TRACKED];
    if (read_tracker(directory, name, err)) {
        return fc_find_in(directory, name, path, err) && is_iteration(path, err);
    }
    return err->code == FC_OK && fc_find_in(directory, nemo, path, err) && fc_dcp_has_file(path, common, err);
}

/* Lists an iteration, torch_dist or one file per rank, or the folder of the one that the tracker names. */
static fc_code megatron_list(const char *directory, fc_listing *out, fc_error *err) {
    char path[PATH_MAX];
    const bool distributed = fc_dcp_has_file(directory, common, err);
    const bool ranks = err->code == FC_OK && fc_mg_has_ranks(directory, err);
    const bool inner = err->code == FC_OK && !distributed && !ranks && find_inner(directory, path, err);
    FC_TRY(err->code);
    FC_TRY(distributed ? fc_listing_add(out, ".metadata", ".metadata", FC_LISTED_TRAINING, err) : FC_OK);
    FC_TRY(ranks ? fc_listing_add(out, rank_folders, "mp_rank_00", FC_LISTED_TRAINING, err) : FC_OK);
    return inner ? fc_listing_add(out, fc_base_name(path), fc_base_name(path), FC_LISTED_TRAINING, err) : FC_OK;
}

static bool is_distributed(const fc_checkpoint *checkpoint, fc_error *err) {
    return !(checkpoint->group && strcmp(checkpoint->group, rank_folders) == 0) &&
           fc_dcp_has_file(checkpoint->path, common, err);
}

static fc_code megatron_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    char path[PATH_MAX];
    fc_error failed = {FC_OK, ""};
    if (!is_iteration(checkpoint->path, &failed) && failed.code == FC_OK &&
        find_inner(checkpoint->path, path, &failed)) {
        checkpoint->path = fc_arena_strndup(checkpoint->arena, path, strlen(path));
        FC_NEED(checkpoint->path, err, NULL);
    }
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    bool distributed = is_distributed(checkpoint, &failed);
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    fc_code rc = distributed ? fc_dcp_open_with_file(checkpoint, common, false, options, err)
                             : fc_mg_open_ranks(checkpoint, options, err);
    checkpoint->producer = "Megatron";
    checkpoint->keeps_order = false; /* the files of a pipeline's ranks each hold some of the layers */
    return rc;
}

/* DCP's data files have no headers to check. */
static fc_code megatron_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    return is_distributed(checkpoint, NULL) ? FC_OK : fc_torch_check_header(checkpoint, index, err);
}

const fc_format fc_format_megatron = {
    .name = "megatron",
    .description = "Megatron checkpoint",
    .directory_sign = "mp_rank_*/model_optim_rng.pt (Megatron)",
    .header_name = ".metadata",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .list = megatron_list,
            .open = megatron_open,
            .check_header = megatron_check_header,
            .close = fc_dcp_close_with_file,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent_with_file,
            .read = fc_dcp_read_with_file,
            .read_part = fc_dcp_read_part_with_file,
            .object_json = fc_dcp_object_json_with_file,
            .digest = fc_dcp_digest_with_file,
            .check_object = fc_dcp_check_object_with_file,
        },
    .verifier =
        {
            .verify = fc_dcp_verify_with_file,
            .verify_chunk = fc_dcp_verify_chunk_with_file,
            .unverified = ".metadata, objects in torch.save files, and the gaps between the records of archives",
        },
};
