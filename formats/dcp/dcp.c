/*
 * PyTorch distributed checkpoints (DCP): the format's table, and opening one. A checkpoint is a directory with a
 * `.metadata` pickle and the data files that it names. Its path is the directory or the `.metadata` file.
 */
#include "dcp/dcp.h"

#include "checkpoint/other_files.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "dcp/packed.h"
#include "dcp/writer.h"

#include "registry.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"

#include <limits.h>
#include <string.h>

static const char metadata_name[] = ".metadata";

/* Whether `name` is like "__3.metadata". A save without collectives writes one such file per rank. */
static bool is_rank_metadata(const char *name) {
    return strncmp(name, "__", 2) == 0 && fc_ends_with(name, metadata_name);
}

static bool is_data_file(const char *name) {
    return strncmp(name, "__", 2) == 0 && fc_ends_with(name, ".distcp");
}

static bool has_metadata(const char *directory, fc_error *err) {
    char path[PATH_MAX];
    return fc_find_in(directory, metadata_name, path, err);
}

static bool is_dcp_file(const char *name) {
    return is_rank_metadata(name) || is_data_file(name);
}

static fc_code dcp_list(const char *directory, fc_listing *out, fc_error *err) {
    const bool has = has_metadata(directory, err);
    const bool ranks = !has && err->code == FC_OK && fc_dir_find(directory, is_dcp_file, err);
    FC_TRY(err->code);
    const char *name = has ? metadata_name : "__*";
    return has || ranks ? fc_listing_add(out, name, name, FC_LISTED_TRAINING, err) : FC_OK;
}

static bool dcp_probe(const fc_probe *probe) {
    const char *name = fc_base_name(probe->path);
    return strcmp(name, metadata_name) == 0 || is_dcp_file(name);
}

/* Reports why a directory or file that looks like DCP cannot be opened. */
static fc_code refuse_metadata(const char *path, bool is_directory, fc_error *err) {
    if (!is_directory) {
        return fc_fail(err, FC_EUSAGE, "%s: this is one data file of a DCP checkpoint; give the path of its directory",
                       path);
    }
    return fc_fail(
        err, FC_ECORRUPT,
        "%s: the file .metadata is missing: the save did not finish, or the copy is incomplete; no other file "
        "has the names of the tensors",
        path);
}

/* Sets the directory of the checkpoint and the path of `.metadata`, or NULL if each rank has its own metadata. */
static fc_code locate_metadata(const fc_checkpoint *checkpoint, const char **directory, const char **metadata,
                               fc_error *err) {
    fc_arena *arena = checkpoint->arena;
    const char *path = checkpoint->path;
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    const char *base = fc_base_name(path);
    *directory = path;
    *metadata = is_directory || is_rank_metadata(base) ? NULL : path;
    if (!is_directory) {
        size_t n = (size_t)(base - path);
        *directory = n == 0 ? "." : fc_arena_strndup(arena, path, n == 1 ? 1 : n - 1);
    }
    fc_error failed = {FC_OK, ""};
    bool has = is_directory && has_metadata(path, &failed);
    if (failed.code != FC_OK) {
        return fc_fail(err, failed.code, "%s", failed.message);
    }
    if (has) {
        *metadata = fc_arena_printf(arena, "%s%s%s", path, fc_ends_with(path, "/") ? "" : "/", metadata_name);
        return *metadata ? FC_OK : fc_no_memory(err, path);
    }
    FC_NEED(*directory, err, path);
    size_t ranks = 0;
    if (is_directory) {
        FC_TRY(fc_dcp_count_ranks(path, &ranks, err));
    }
    bool known = is_directory ? ranks > 0 : strcmp(base, metadata_name) == 0 || !*metadata;
    return known ? FC_OK : refuse_metadata(path, is_directory, err);
}

fc_code fc_dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, const char **directory, fc_error *err) {
    const char *metadata = NULL;
    FC_TRY(locate_metadata(checkpoint, directory, &metadata, err));
    FC_TRY(metadata ? fc_dcp_load(checkpoint, options, *directory, metadata, false, err)
                    : fc_dcp_open_ranks(checkpoint, options, *directory, err));
    checkpoint->state = fc_dcp_state_new(checkpoint->nfiles);
    FC_NEED(checkpoint->state, err, checkpoint->path);
    return FC_OK;
}

fc_code fc_dcp_open_whole(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *directory = NULL;
    FC_TRY(fc_dcp_open(checkpoint, options, &directory, err));
    checkpoint->whole = true;
    return fc_note_other_files(checkpoint, directory, err);
}

void fc_dcp_close(fc_checkpoint *checkpoint) {
    fc_dcp_state_free(checkpoint->state);
    checkpoint->state = NULL;
}

const fc_own_file fc_dcp_own_files[] = {{".metadata", fc_dcp_is_metadata}, {"__*_*.distcp", fc_dcp_is_data}, {NULL}};

const fc_format_notes fc_dcp_notes = {fc_dcp_take_notes, fc_dcp_add_notes};

const fc_format fc_format_dcp = {
    .name = "dcp",
    .description = "PyTorch distributed checkpoint (DCP)",
    .directory_sign = ".metadata (PyTorch DCP)",
    .extensions = (const char *const[]){NULL},
    .header_name = ".metadata",
    .reader =
        {
            .probe = dcp_probe,
            .list = dcp_list,
            .open = fc_dcp_open_whole,
            .close = fc_dcp_close,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent,
            .read = fc_dcp_read,
            .read_part = fc_dcp_read_part,
            .object_json = fc_dcp_object_json,
            .digest = fc_dcp_digest,
            .check_object = fc_dcp_check_object,
        },
    .verifier =
        {
            .verify = fc_dcp_verify,
            .verify_chunk = fc_dcp_verify_chunk,
            .unverified = DCP_UNVERIFIED,
        },
    .target =
        {
            .own_files = fc_dcp_own_files,
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = fc_dcp_is_directory,
            .files = fc_dcp_files,
            .index = fc_dcp_index,
        },
    .writer =
        {
            .create = fc_dcp_create,
            .reserve = fc_dcp_reserve,
            .finish_item = fc_dcp_finish_item,
            .finish = fc_dcp_finish,
            .destroy = fc_dcp_destroy,
            .notes = &fc_dcp_notes,
        },
};
