/*
 * PyTorch distributed checkpoints (DCP): the format's table, and opening one. A checkpoint is a directory with a
 * `.metadata` pickle and the data files that it names. Its path is the directory or the `.metadata` file.
 */
#include "dcp/dcp.h"

#include "checkpoint/identity.h"
#include "checkpoint/other_files.h"
#include "dcp/writer.h"

#include "registry.h"

#include "base/file_name.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

fc_code fc_dcp_fail(const dcp_builder *b, fc_code code, const char *tensor, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (tensor) {
        return fc_fail(b->err, code, "%s: tensor %.256s: %s", b->metadata_path, tensor, text);
    }
    return fc_fail(b->err, code, "%s: %s", b->metadata_path, text);
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
static fc_code locate(const fc_checkpoint *checkpoint, const char **directory, const char **metadata, fc_error *err) {
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
    if (!*directory) {
        return fc_no_memory(err, path);
    }
    size_t ranks = 0;
    if (is_directory) {
        FC_TRY(fc_dcp_count_ranks(path, &ranks, err));
    }
    bool known = is_directory ? ranks > 0 : strcmp(base, metadata_name) == 0 || !*metadata;
    return known ? FC_OK : refuse_metadata(path, is_directory, err);
}

fc_code fc_dcp_load_metadata(const char *path, fc_pickle **out, fc_error *err) {
    int fd;
    uint64_t size;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_pickle_source source = {path, 0, size, fd, NULL};
    fc_code rc = fc_pickle_load(&source, FC_PICKLE_STRICT, out, err);
    close(fd);
    return rc;
}

static fc_code set_producer(dcp_builder *b, fc_pv version) {
    b->checkpoint->keeps_order = true;
    size_t n = 0;
    const char *text = fc_pv_typeof(version) == FC_PV_STR ? fc_pickle_bytes(b->p, version, &n) : "";
    if (n == 0 || strspn(text, "0123456789.abcdevrpost+-") != n) { /* only these characters are printed */
        b->checkpoint->producer = "torch.distributed.checkpoint";
        return FC_OK;
    }
    b->checkpoint->producer = fc_arena_printf(b->checkpoint->arena, "torch.distributed.checkpoint %.64s", text);
    return b->checkpoint->producer ? FC_OK : fc_no_memory(b->err, b->metadata_path);
}

fc_code fc_dcp_check_class(const dcp_builder *b, const char *tensor, fc_pv v) {
    uint32_t aux;
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_OBJECT ||
        fc_pickle_global(b->p, fc_pickle_callee(b->p, v), &aux) != FC_GLOBAL_UNKNOWN) {
        return FC_OK;
    }
    const uint64_t *cell = b->p->cells + fc_pv_payload(fc_pickle_callee(b->p, v));
    return fc_dcp_fail(b, FC_EUNSUPPORTED, tensor, "unsupported: class %.128s of %.128s",
                       fc_pickle_bytes(b->p, cell[2], &n), fc_pickle_bytes(b->p, cell[1], &n));
}

static fc_code build_manifest(dcp_builder *b) {
    fc_pv root = b->p->root;
    FC_TRY(fc_dcp_check_class(b, NULL, root));
    if (!fc_pickle_is_object(b->p, root, FC_CLASS_METADATA)) {
        return fc_dcp_fail(b, FC_ECORRUPT, NULL,
                           "not the metadata of a checkpoint: the pickle contains something else");
    }
    FC_TRY(set_producer(b, fc_pickle_slot(b->p, root, FC_METADATA_VERSION)));
    FC_TRY(fc_dcp_build_tensors(b, root));
    FC_TRY(fc_dcp_place_chunks(b, fc_pickle_slot(b->p, root, FC_METADATA_STORAGE)));
    b->checkpoint->tensors = b->tensors;
    b->checkpoint->ntensors = b->ntensors;
    FC_TRY(fc_dcp_finish_files(b));
    FC_TRY(fc_dcp_move_misplaced(b));
    FC_TRY(fc_dcp_place_in_safetensors(b));
    if (is_rank_metadata(fc_base_name(b->metadata_path))) {
        return FC_OK; /* the ranks' metadata is compared first: all ranks must list a value in the same way */
    }
    FC_TRY(fc_dcp_refuse_classes(b));
    return fc_dcp_restore_flattened(b, root);
}

fc_code fc_dcp_load(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                    const char *metadata_path, fc_error *err) {
    fc_pickle *pickle = NULL;
    dcp_builder b = {.checkpoint = checkpoint, .options = options, .err = err};
    b.directory = directory;
    b.metadata_path = metadata_path;
    fc_code rc;
    FC_TRY_GOTO(fc_identities_add_header(checkpoint, metadata_path, options, err), rc, out);
    FC_TRY_GOTO(fc_dcp_load_metadata(metadata_path, &pickle, err), rc, out);
    b.p = pickle;
    rc = build_manifest(&b);
out:
    fc_pickle_free(pickle);
    free(b.files);
    return rc;
}

fc_code fc_dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, const char **directory, fc_error *err) {
    const char *metadata = NULL;
    FC_TRY(locate(checkpoint, directory, &metadata, err));
    FC_TRY(metadata ? fc_dcp_load(checkpoint, options, *directory, metadata, err)
                    : fc_dcp_open_ranks(checkpoint, options, *directory, err));
    checkpoint->state = fc_dcp_state_new(checkpoint->nfiles);
    if (!checkpoint->state) {
        return fc_no_memory(err, checkpoint->path);
    }
    return FC_OK;
}

static fc_code dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *directory = NULL;
    FC_TRY(fc_dcp_open(checkpoint, options, &directory, err));
    checkpoint->whole = true;
    return fc_note_other_files(checkpoint, directory, err);
}

static void dcp_close(fc_checkpoint *checkpoint) {
    fc_dcp_state_free(checkpoint->state);
    checkpoint->state = NULL;
}

static const char *const extensions[] = {NULL};
static const fc_own_file own_files[] = {{".metadata", fc_dcp_is_metadata}, {"__*_*.distcp", fc_dcp_is_data}, {NULL}};

static const fc_format_notes notes = {fc_dcp_take_notes, fc_dcp_add_notes};

const fc_format fc_format_dcp = {
    .name = "dcp",
    .description = "PyTorch distributed checkpoint (DCP)",
    .directory_sign = ".metadata (PyTorch DCP)",
    .extensions = extensions,
    .header_name = ".metadata",
    .reader =
        {
            .probe = dcp_probe,
            .list = dcp_list,
            .open = dcp_open,
            .close = dcp_close,
            .extent = fc_dcp_extent,
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
            .own_files = own_files,
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
            .finish_file = fc_dcp_finish_file,
            .finish = fc_dcp_finish,
            .destroy = fc_dcp_destroy,
            .notes = &notes,
        },
};
