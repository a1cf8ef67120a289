/*
 * The table of the safetensors format. Opens a checkpoint: finds its files, reads their headers and builds tensors from
 * them.
 */
#include "safetensors/safetensors.h"
#include "safetensors/groups.h"

#include "checkpoint/extent.h"
#include "checkpoint/identity.h"
#include "checkpoint/other_files.h"
#include "checkpoint/own_files.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/path.h"
#include "read/open_files.h"
#include "registry.h"
#include "safetensors/kept.h"
#include "sharding/recorded.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static fc_code fail_missing(const fc_st_reader *o, size_t file, fc_error *err) {
    size_t count = 0;
    const char *example = "";
    for (size_t i = 0; i < o->files.nmap; i++) {
        if (o->files.map[i].file == file) {
            example = count++ ? example : o->files.map[i].name;
        }
    }
    return fc_fail(err, FC_ECORRUPT, "%s: the file is missing; %s maps %zu tensor%s to it, for example %.256s",
                   o->files.files[file].path, o->files.index->name, count, count == 1 ? "" : "s", example);
}

static fc_code check_map(const fc_st_reader *o, fc_error *err) {
    const fc_st_files *files = &o->files;
    for (size_t f = 0; f < files->nfiles; f++) {
        for (size_t i = 0; i < o->headers[f].nentries; i++) {
            const char *name = o->headers[f].entries[i].name;
            const fc_st_mapped *mapped = fc_find_struct(files->map, files->nmap, sizeof *files->map, name);
            if (!mapped) {
                return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s is in %s, but not in the weight_map",
                               files->index->path, name, files->files[f].name);
            }
            if (mapped->file != f) {
                return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s is in %s, but the weight_map says %s",
                               files->index->path, name, files->files[f].name, files->files[mapped->file].name);
            }
        }
    }
    for (size_t i = 0; i < files->nmap; i++) {
        const fc_st_mapped *m = &files->map[i];
        if (!fc_st_header_find(&o->headers[m->file], m->name)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the weight_map says that tensor %.256s is in %s, but it is not",
                           files->index->path, m->name, files->files[m->file].name);
        }
    }
    return FC_OK;
}

/* Cannot overflow: the headers have been checked against the sizes of the files. */
static int64_t total_bytes(const fc_st_reader *o) {
    uint64_t total = 0;
    for (size_t f = 0; f < o->files.nfiles; f++) {
        const fc_st_header *h = &o->headers[f];
        for (size_t i = 0; i < h->nentries; i++) {
            total += h->entries[i].end - h->entries[i].begin;
        }
    }
    return (int64_t)total;
}

static bool all_headers_good(const fc_st_reader *o) {
    for (size_t f = 0; f < o->files.nfiles; f++) {
        if (o->headers[f].state != ST_HEADER_GOOD) {
            return false;
        }
    }
    return true;
}

/*
 * An index that fsdpckpt wrote has no digest. It repeats what the headers say, and those have digests, so a flipped bit
 * is found here, in check_map, or by the parser. Other programs compute total_size differently (mlx counts whole files,
 * transformers counts a bool as an eighth of a byte), so a difference there is only worth a note.
 */
static fc_code check_metadata(const fc_st_reader *o, fc_error *err) {
    const fc_st_files *files = &o->files;
    const char *kept = fc_st_header_value(&o->headers[0], ST_INDEX_METADATA);
    const int64_t total = total_bytes(o);
    if (!all_headers_good(o)) {
        return FC_OK;
    }
    if (!files->has_total) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: metadata: total_size is missing, so the file is damaged; the tensors take %" PRId64
                       " bytes",
                       files->index->path, total);
    }
    if (files->total != total) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: metadata: total_size is %" PRId64 ", but the tensors take %" PRId64
                       " bytes: the file is damaged or belongs to other files",
                       files->index->path, files->total, total);
    }
    if (kept && (!files->index_metadata || strcmp(kept, files->index_metadata) != 0)) {
        return fc_fail(err, FC_ECORRUPT, "%s: metadata differs from the copy in %s in the header of %s: %.512s",
                       files->index->path, ST_INDEX_METADATA, files->files[0].name, kept);
    }
    return FC_OK;
}

/* Shard files that fsdpckpt wrote record the mesh, so a missing one is found. */
static fc_code set_mesh(fc_st_reader *o, fc_error *err) {
    const fc_st_files *files = &o->files;
    const fc_mesh *mesh = &o->headers[0].mesh;
    if (files->kind != ST_SHARDS) {
        return FC_OK;
    }
    for (size_t f = 0; f < files->nfiles; f++) {
        if (!fc_mesh_equal(mesh, &o->headers[f].mesh)) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: its mesh differs from that of %s: files of two checkpoints are mixed here",
                           files->files[f].path, files->files[0].name);
        }
        if (mesh->ndim > 0 && o->headers[f].rank != (int64_t)files->ranks[f]) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: the file holds the shard of rank %" PRId64 ": it was renamed or replaced",
                           files->files[f].path, o->headers[f].rank);
        }
    }
    if (mesh->ndim > 0 && (uint64_t)fc_mesh_ranks(mesh) != files->nfiles) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: a file is missing: the checkpoint has %" PRId64
                       " ranks, but there are only the shards of the first %zu",
                       o->checkpoint->path, fc_mesh_ranks(mesh), files->nfiles);
    }
    o->checkpoint->mesh = *mesh;
    return FC_OK;
}

/* Tells the tensors of ranks apart by their names, which are the same in each file. */
static fc_code name_ranks(const fc_st_reader *o, fc_error *err) {
    for (size_t f = 0; o->files.kind == ST_RANKS && f < o->files.nfiles; f++) {
        uint32_t rank, part;
        fc_st_parse_rank_name(o->files.files[f].name, &rank, &part);
        for (size_t i = 0; i < o->headers[f].nentries; i++) {
            fc_st_entry *e = &o->headers[f].entries[i];
            e->name = fc_arena_printf(o->checkpoint->arena, "rank%u.%s", rank, e->name);
            e->path = NULL;
            FC_NEED(e->name, err, o->checkpoint->path);
        }
    }
    return FC_OK;
}

static uint32_t last_rank(const fc_st_files *files) {
    uint32_t last = 0;
    for (size_t i = 0; i < files->nfiles; i++) {
        last = files->ranks[i] > last ? files->ranks[i] : last;
    }
    return last;
}

/* Returns a note for the user, or NULL if there is nothing to note. `*good` is false when out of memory. */
static const char *make_note(const fc_st_reader *o, bool *good) {
    fc_arena *arena = o->checkpoint->arena;
    const char *note = NULL;
    *good = true;
    for (size_t f = 0; f < o->files.nfiles; f++) {
        if (o->headers[f].state == ST_HEADER_REWRITTEN) {
            note = fc_arena_printf(arena,
                                   "the header of %s has changed since fsdpckpt wrote it, so its digests are not used: "
                                   "another program rewrote it, or it is damaged",
                                   o->files.files[f].name);
            *good = note != NULL;
            return note;
        }
    }
    if (o->files.has_total && o->files.total != total_bytes(o)) {
        note = fc_arena_printf(arena,
                               "total_size in %s is %" PRId64 ", but the tensors take %" PRId64
                               " bytes: another program may count differently, or the index is out of date",
                               o->files.index->name, o->files.total, total_bytes(o));
        *good = note != NULL;
    }
    if (o->files.kind == ST_SHARDS && o->headers[0].mesh.ndim == 0) {
        note = fc_arena_printf(arena,
                               "torch's safetensors shards do not record their number: make sure that number %zu is "
                               "the last one",
                               (size_t)last_rank(&o->files) + 1);
        *good = note != NULL;
    }
    if (o->files.kind == ST_RANKS) {
        note = fc_arena_printf(arena, "files of ranks: names begin with 'rank0.' and so on, and a recipe (vllm-llama, "
                                      "tensorrt-llm-llama) joins them");
        *good = note != NULL;
    } else if (o->files.assumed) {
        note = fc_arena_printf(arena, "%zu files, no index: assumed complete", o->files.nfiles);
        *good = note != NULL;
    }
    return note;
}

static fc_code set_producer(fc_st_reader *o, fc_error *err) {
    const fc_st_header *first = &o->headers[0];
    const char *version = fc_st_header_value(first, ST_VERSION);
    bool good;
    o->checkpoint->note = make_note(o, &good);
    FC_NEED(good, err, o->checkpoint->path);
    if (version && strspn(version, "0123456789.abcdevrpost+-") == strlen(version)) { /* safe to print */
        o->checkpoint->producer = fc_arena_printf(o->checkpoint->arena, "fsdpckpt %.64s", version);
        return o->checkpoint->producer ? FC_OK : fc_no_memory(err, o->checkpoint->path);
    }
    if (first->is_shard) {
        o->checkpoint->producer = "torch.distributed.checkpoint (HuggingFaceStorageWriter)";
    }
    return FC_OK;
}

static fc_code st_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    fc_st_header header;
    fc_code rc = fc_st_header_read(checkpoint->arena, checkpoint->files[index].path, false, &header, err);
    fc_st_header_free(&header);
    return rc;
}

/* The header of one file before it is copied to the memory of the checkpoint. */
typedef struct new_header {
    fc_arena *arena;
    fc_st_header header;
} new_header;

static fc_code open_header(void *context, size_t index, void *slot, fc_error *err) {
    const fc_st_reader *o = context;
    new_header *new = slot;
    const char *path = o->files.files[index].path;
    struct stat st;
    if (o->files.index && fc_stat(path, &st) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        return fail_missing(o, index, err);
    }
    new->arena = fc_arena_new();
    return new->arena ? fc_st_header_read(new->arena, path, o->options->headers_only, &new->header, err)
                      : fc_no_memory(err, path);
}

static fc_code take_header(void *context, size_t index, void *slot, fc_error *err) {
    fc_st_reader *o = context;
    new_header *new = slot;
    FC_NEED(fc_st_header_keep(o->checkpoint->arena, &new->header, index > 0 ? &o->headers[index - 1] : NULL), err,
            o->checkpoint->path);
    o->headers[index] = new->header;
    new->header = (fc_st_header){0};
    return fc_progress_count(o->options->progress, 1, err);
}

static void close_header(void *slot) {
    new_header *new = slot;
    fc_st_header_free(&new->header);
    fc_arena_free(new->arena);
}

static fc_code read_headers(fc_st_reader *o, fc_error *err) {
    o->checkpoint->files = o->files.files;
    o->checkpoint->nfiles = o->files.nfiles; /* without the index, which has been read */
    FC_TRY(fc_identities_take(o->checkpoint, o->options, err));
    o->headers = calloc(o->files.nfiles, sizeof *o->headers);
    FC_NEED(o->headers, err, o->checkpoint->path);
    const fc_file_opener how = {.count = o->files.nfiles,
                                .slot_size = sizeof(new_header),
                                .context = o,
                                .open = open_header,
                                .take = take_header,
                                .close = close_header};
    fc_progress_begin(o->options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, o->files.nfiles);
    FC_TRY(fc_open_files(&how, err));
    if (!o->files.index) {
        return FC_OK;
    }
    FC_TRY(check_map(o, err));
    return check_metadata(o, err);
}

/* fc_st_verify needs the states after the headers have been freed. */
static fc_code keep_states(const fc_st_reader *o, fc_error *err) {
    fc_st_state *state = fc_arena_alloc(o->checkpoint->arena, sizeof *state);
    unsigned char *states = fc_arena_alloc(o->checkpoint->arena, o->files.nfiles + 1);
    FC_NEED(state && states, err, o->checkpoint->path);
    for (size_t f = 0; f < o->files.nfiles; f++) {
        states[f] = (unsigned char)o->headers[f].state;
    }
    *state = (fc_st_state){states, o->files.nfiles};
    o->checkpoint->state = state;
    return FC_OK;
}

static fc_code read_checkpoint(fc_st_reader *o, fc_error *err) {
    fc_checkpoint *checkpoint = o->checkpoint;
    FC_TRY(fc_st_files_find(checkpoint, o->options, &o->files, err));
    FC_TRY(read_headers(o, err));
    FC_TRY(set_mesh(o, err));
    FC_TRY(set_producer(o, err));
    checkpoint->whole = !o->files.assumed && (o->files.kind != ST_SHARDS || checkpoint->mesh.ndim > 0);
    FC_TRY(name_ranks(o, err));
    FC_TRY(fc_st_build_tensors(o, fc_st_count_objects(o), err));
    FC_TRY(fc_st_build_objects(o, err));
    return keep_states(o, err);
}

static fc_code st_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_st_reader o = {.checkpoint = checkpoint, .options = options};
    const fc_code rc = read_checkpoint(&o, err);
    for (size_t f = 0; o.headers && f < o.files.nfiles; f++) {
        fc_st_header_free(&o.headers[f]);
    }
    free(o.headers);
    fc_st_files_free(&o.files);
    FC_TRY(rc);
    checkpoint->nfiles += o.files.index != NULL;
    checkpoint->tensors = o.tensors;
    checkpoint->ntensors = o.ntensors;
    bool is_directory;
    FC_TRY(fc_is_directory(checkpoint->path, &is_directory, err));
    return is_directory ? fc_note_other_files(checkpoint, checkpoint->path, err) : FC_OK;
}

static bool is_whole(const fc_tensor *tensor, const fc_chunk *chunk) {
    fc_box box = fc_chunk_box(tensor, chunk);
    for (int d = 0; d < tensor->ndim; d++) {
        if (box.offsets[d] != 0 || box.sizes[d] != tensor->shape[d]) {
            return false;
        }
    }
    return true;
}

static fc_code st_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                         fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    if (tensor->object) {
        const fc_st_object *object = tensor->detail;
        *out = fc_inline_extent(object->bytes, object->size);
        return FC_OK;
    }
    *out = fc_raw_extent(&chunk->place);
    if (!fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, out->strides)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: its size overflows", checkpoint->path, tensor->name);
    }
    out->has_crc64 = tensor->detail && !is_whole(tensor, chunk); /* else st_digest returns it */
    out->crc64 = chunk->detail;
    return FC_OK;
}

static fc_code st_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                              const char **json, fc_error *err) {
    const fc_st_object *kept = object->detail;
    *json = fc_arena_strndup(arena, kept->json, strlen(kept->json));
    return *json ? FC_OK : fc_no_memory(err, checkpoint->path);
}

static fc_code st_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                         fc_error *err) {
    (void)checkpoint;
    (void)err;
    if (tensor->object || !tensor->detail || tensor->nchunks == 0) {
        return FC_OK;
    }
    const fc_chunk *chunk = &tensor->chunks[index == FC_WHOLE_TENSOR ? 0 : index];
    if (index != FC_WHOLE_TENSOR || is_whole(tensor, chunk)) {
        *out = (fc_digest){.kind = FC_DIGEST_CRC64, .value = chunk->detail};
    }
    return FC_OK;
}

/* ---- what a target may replace ---- */

static fc_code is_index(const char *path, bool *is, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_st_files files = {.directory = "."};
    const fc_code read = arena ? fc_st_index_read(arena, path, &files, err) : fc_no_memory(err, path);
    fc_st_files_free(&files);
    fc_arena_free(arena);
    return fc_own_if_read(read, is);
}

static fc_code is_safetensors(const char *path, bool *is, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_st_header header = {0};
    const fc_code read = arena ? fc_st_header_read(arena, path, true, &header, err) : fc_no_memory(err, path);
    fc_st_header_free(&header);
    fc_arena_free(arena);
    return fc_own_if_read(read, is);
}

static const fc_own_file own_files[] = {{"model.safetensors.index.json", is_index},
                                        {"model.safetensors", is_safetensors},
                                        {"model-*-of-*.safetensors", is_safetensors},
                                        {"shard-*-model-*-of-*.safetensors", is_safetensors},
                                        {NULL}};

static bool st_reshapes(fc_dtype dtype, int ndim) {
    return fc_st_stored_as(dtype, ndim).append > 0;
}

static const fc_format_notes notes = {NULL, NULL}; /* no file of a target lists the others */

const fc_format fc_format_safetensors = {
    .name = "safetensors",
    .description = "safetensors",
    .file_sign = "safetensors",
    .directory_sign = "*.safetensors",
    .extensions = (const char *const[]){ST_EXTENSION, NULL},
    .reader =
        {
            .probe = fc_st_files_probe,
            .list = fc_st_list,
            .open = st_open,
            .check_header = st_check_header,
            .extent = st_extent,
            .object_json = st_object_json,
            .records_json = true,
            .digest = st_digest,
            .check_file = fc_st_check_file,
        },
    .verifier =
        {
            .verify = fc_st_verify,
            .unverified = "the headers and the index of files that fsdpckpt did not write",
        },
    .target =
        {
            .own_files = own_files,
            .is_checkpoint = is_safetensors,
            .self_contained = true,
            .objects_note = "in __metadata__, where only fsdpckpt finds them: safetensors has no objects",
            .reshapes = st_reshapes,
            .reshaped_note = "with a last dimension of 2 added, which only fsdpckpt removes again: safetensors has no "
                             "complex128, complex32 or 0-dim float4",
            .is_directory = fc_st_is_directory,
            .files = fc_st_count_files,
            .index = fc_st_index,
        },
    .writer =
        {
            .create = fc_st_create,
            .split = fc_st_split,
            .reserve = fc_st_reserve,
            .finish_file = fc_st_finish_file,
            .finish = fc_st_finish,
            .destroy = fc_st_destroy,
            .notes = &notes,
        },
};
