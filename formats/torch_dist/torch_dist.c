/*
 * Writes torch_dist, megatron-core's distributed checkpoint: DCP for tensors and sharded objects, by DCP's own writer;
 * `common.pt`, one torch.save file, for all other objects; `metadata.json`, which names the two. megatron-core cuts the
 * tensors for its own ranks when it loads them, so the target may have any number of files.
 */
#include "torch_dist/torch_dist.h"

#include "checkpoint/folder.h"
#include "dcp/dcp.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "dcp/with_torch_file.h"
#include "dcp/writer.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "pt/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

static const char common_name[] = "common.pt", description_name[] = "metadata.json";
static const char description[] = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
                                  "\"common_backend\": \"torch\", \"common_backend_version\": 1}";

typedef struct dist_writer {
    fc_arena *arena;
    const char *staging;
    fc_target sharded, common; /* the values of DCP, and those of common.pt */
    uint32_t *of;              /* per value of the whole target: its index in one of them */
    bool *is_common;
    fc_writer dcp;
    fc_target_file file; /* DCP's part of the current file */
    size_t *items;       /* per item of it: its index in the whole file */
    size_t capacity;
} dist_writer;

static bool is_directory(const fc_target *target) {
    (void)target;
    return true;
}

/* ---- the targets ---- */

static fc_code divide_values(dist_writer *w, const fc_target *target, fc_error *err) {
    fc_target_tensor *sharded = fc_arena_calloc(w->arena, target->ntensors + 1, sizeof *sharded);
    fc_target_tensor *common = fc_arena_calloc(w->arena, target->ntensors + 1, sizeof *common);
    w->of = fc_arena_calloc(w->arena, target->ntensors + 1, sizeof *w->of);
    w->is_common = fc_arena_calloc(w->arena, target->ntensors + 1, sizeof *w->is_common);
    FC_NEED(sharded && common && w->of && w->is_common, err, w->staging);
    static const fc_mesh one = {0};
    w->sharded = w->common = *target;
    w->sharded.tensors = sharded;
    w->common.tensors = common;
    w->common.mesh = &one;
    w->sharded.ntensors = w->common.ntensors = 0;
    for (size_t i = 0; i < target->ntensors; i++) {
        w->is_common[i] = fc_dist_is_common(&target->tensors[i]);
        size_t *count = w->is_common[i] ? &w->common.ntensors : &w->sharded.ntensors;
        (w->is_common[i] ? common : sharded)[*count] = target->tensors[i];
        w->of[i] = (uint32_t)(*count)++;
    }
    return FC_OK;
}

static fc_code dist_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    if (!fc_dist_is_adapted(target->source)) { /* fc_shards_write does not call fc_format_target.adapt */
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: cannot be written as torch_dist directly: save it as dcp, and convert that",
                       target->source->path);
    }
    dist_writer *w = calloc(1, sizeof *w);
    writer->state = w;
    FC_NEED(w && (w->arena = fc_arena_new()), err, staging);
    w->staging = fc_arena_strndup(w->arena, staging, strlen(staging));
    FC_NEED(w->staging, err, staging);
    FC_TRY(divide_values(w, target, err));
    return fc_dcp_create(&w->sharded, staging, &w->dcp, err);
}

/* ---- the files of DCP ---- */

/* Collects the items of a file that are DCP's. */
static fc_code take_items(dist_writer *w, const fc_target_file *file, fc_error *err) {
    free(w->file.items);
    free(w->items);
    w->file = *file;
    w->file.nitems = 0;
    w->file.items = calloc(file->nitems + 1, sizeof *w->file.items);
    w->items = calloc(file->nitems + 1, sizeof *w->items);
    FC_NEED(w->file.items && w->items, err, w->staging);
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (!w->is_common[item->tensor]) {
            fc_target_item *own = &w->file.items[w->file.nitems];
            *own = *item;
            own->tensor = w->of[item->tensor];
            w->items[w->file.nitems++] = i;
        }
    }
    return FC_OK;
}

static fc_code dist_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    dist_writer *w = writer->state;
    FC_TRY(take_items(w, file, err));
    FC_TRY(fc_dcp_reserve(&w->dcp, &w->file, err));
    file->path = w->file.path;
    for (size_t i = 0; i < file->nitems; i++) {
        file->items[i].owned = file->items[i].owned && !w->is_common[file->items[i].tensor];
        file->items[i].offset = 0;
    }
    for (size_t i = 0; i < w->file.nitems; i++) {
        fc_target_item *item = &file->items[w->items[i]];
        item->owned = w->file.items[i].owned;
        item->offset = w->file.items[i].offset;
    }
    return FC_OK;
}

static fc_code dist_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err) {
    dist_writer *w = writer->state;
    fc_target_item own = *item;
    own.tensor = w->of[item->tensor];
    return fc_dcp_finish_item(&w->dcp, &own, fd, err);
}

/* ---- the other files ---- */

/* Writes common.pt, by the writer of torch.save files. It has only objects, so no item is to be finished. */
static fc_code write_common(const dist_writer *w, fc_error *err) {
    fc_writer writer = {0};
    fc_target_file file = {.nitems = w->common.ntensors};
    const char *path = fc_arena_printf(w->arena, "%s/%s", w->staging, common_name);
    file.items = fc_arena_calloc(w->arena, file.nitems + 1, sizeof *file.items);
    int64_t *dims = fc_arena_calloc(w->arena, 2 * file.nitems + 1, sizeof *dims);
    FC_NEED(path && file.items && dims, err, w->staging);
    for (size_t i = 0; i < file.nitems; i++) {
        dims[2 * i + 1] = w->common.tensors[i].source->shape[0];
        file.items[i] = (fc_target_item){.tensor = (uint32_t)i, .owned = true, .dims = &dims[2 * i]};
    }
    fc_code rc;
    FC_TRY_GOTO(fc_pt_create(&w->common, path, &writer, err), rc, out);
    FC_TRY_GOTO(fc_pt_reserve(&writer, &file, err), rc, out);
    rc = fc_pt_finish_file(&writer, &file, err);
out:
    fc_pt_destroy(&writer);
    return rc;
}

static fc_code write_description(const dist_writer *w, fc_error *err) {
    const char *path = fc_arena_printf(w->arena, "%s/%s", w->staging, description_name);
    FC_NEED(path, err, w->staging);
    const int fd = fc_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    return fc_close_written(fd, fc_pwrite_full(fd, description, sizeof description - 1, 0, path, err), path, err);
}

static fc_code dist_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    const dist_writer *w = writer->state;
    FC_TRY(fc_dcp_finish(&((dist_writer *)writer->state)->dcp, digests, err)); /* which uses no digests */
    FC_TRY(write_common(w, err));
    return write_description(w, err);
}

static void dist_destroy(fc_writer *writer) {
    dist_writer *w = writer->state;
    if (w) {
        if (w->dcp.state) {
            fc_dcp_destroy(&w->dcp);
        }
        free(w->file.items);
        free(w->items);
        fc_arena_free(w->arena);
        free(w);
        writer->state = NULL;
    }
}

static fc_code dist_take_notes(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err) {
    return fc_dcp_take_notes(&((dist_writer *)writer->state)->dcp, bytes, size, err);
}

static fc_code dist_add_notes(fc_writer *writer, const void *bytes, size_t size, fc_error *err) {
    return fc_dcp_add_notes(&((dist_writer *)writer->state)->dcp, bytes, size, err);
}

/* ---- the table ---- */

static fc_code dist_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    return fc_dcp_open_with_file(checkpoint, common_name, false, options, err);
}

static fc_code is_description(const char *path, bool *is, fc_error *err) {
    unsigned char head[512];
    size_t n = sizeof head;
    const fc_code rc = fc_read_head(path, head, &n, err);
    *is = rc == FC_OK && n > 2 && n < sizeof head && memmem(head, n, "\"sharded_backend\"", 17) != NULL;
    return rc;
}

static const fc_own_file own_files[] = {{".metadata", fc_dcp_is_metadata},
                                        {"__*_*.distcp", fc_dcp_is_data},
                                        {common_name, fc_torch_is_file},
                                        {description_name, is_description},
                                        {NULL}};

static const fc_format_notes notes = {dist_take_notes, dist_add_notes};

/* The format megatron reads these checkpoints, too, and finds them in directories. */
const fc_format fc_format_torch_dist = {
    .name = "torch_dist",
    .description = "Megatron-Core torch_dist checkpoint",
    .header_name = ".metadata",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .open = dist_open,
            .close = fc_dcp_close_with_file,
            .rest = fc_dcp_rest,
            .extent = fc_dcp_extent_with_file,
            .read = fc_torch_read,
            .object_json = fc_dcp_object_json_with_file,
            .digest = fc_dcp_digest_with_file,
            .check_object = fc_dcp_check_object_with_file,
        },
    .target =
        {
            .own_files = own_files,
            .also_needed = "Megatron-LM's --load takes its parent, with a file latest_checkpointed_iteration.txt "
                           "that says 'release' or the number of iter_NNNNNNN",
            .wants_crc32 = true,
            .holds_pickles = true,
            .is_directory = is_directory,
            .adapt = fc_dist_adapt,
            .files = fc_dcp_files,
            .index = fc_dcp_index,
        },
    .writer =
        {
            .create = dist_create,
            .reserve = dist_reserve,
            .finish_item = dist_finish_item,
            .finish = dist_finish,
            .destroy = dist_destroy,
            .notes = &notes,
        },
};
