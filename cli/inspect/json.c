/*
 * inspect --json: streams one line per tensor. docs/schemas/inspect.json describes the document.
 */
#include "inspect/stats.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <sys/stat.h>

/* Writes the offset and strides of the elements of a chunk, unless they must be decoded. */
static fc_code write_extent(json_out *j, inspection *in, const fc_tensor *t, size_t index, fc_error *err) {
    fc_extent extent;
    FC_TRY(fc_checkpoint_extent(in->checkpoint, t, index, &extent, err));
    if (extent.codec == FC_CODEC_RAW) {
        JSON_MEMBER(j, uint, "data_offset", extent.offset + extent.first);
        jw_member_ints(j, "strides", t->ndim, extent.strides);
    }
    return FC_OK;
}

static void write_holders(json_out *j, const rank_span *span) {
    jw_member_open(j, "held_by", '[');
    for (size_t i = 0; i < span->count; i++) {
        jw_uint(j, span->ranks[i]);
    }
    jw_close(j, ']');
}

static void write_place(json_out *j, const fc_place *place) {
    switch ((fc_place_kind)place->kind) {
    case FC_PLACE_NONE:
        return;
    case FC_PLACE_FILE:
        JSON_MEMBER(j, uint, "file", place->file);
        return;
    case FC_PLACE_BYTES:
        JSON_UINTS(j, {"file", place->file}, {"offset", place->offset}, {"length", place->length});
        return;
    }
}

/* @param extents whether to write extents and holders. */
static fc_code write_chunks(json_out *j, inspection *in, const fc_tensor *t, bool extents, fc_error *err) {
    inspect_holders holders = {0};
    fc_code rc = extents ? inspect_find_holders(in, t, in->arena, &holders, err) : FC_OK;
    jw_member_open(j, "chunks", '[');
    for (size_t i = 0; i < t->nchunks && rc == FC_OK && j->out->error == 0; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        jw_open(j, '{');
        jw_member_ints(j, "offsets", t->ndim, chunk->dims);
        jw_member_ints(j, "sizes", t->ndim, chunk->dims + t->ndim);
        write_place(j, &chunk->place);
        if (chunk->rank != FC_NO_RANK) {
            JSON_MEMBER(j, uint, "rank", chunk->rank);
        }
        if (extents && !in->headers_only) {
            rc = write_extent(j, in, t, i, err);
        }
        if (extents && holders.spans[i].count > 0) {
            write_holders(j, &holders.spans[i]);
        }
        jw_close(j, '}');
    }
    jw_close(j, ']');
    return rc;
}

/* Writes the members of a tensor; the caller opens and closes the object. */
static fc_code write_tensor(json_out *j, inspection *in, const fc_tensor *t, bool extents, fc_error *err) {
    char text[160];
    fc_sharding c;
    FC_NEED(fc_recognise_sharding(t, &in->scratch, &c), err, in->checkpoint->path);
    JSON_MEMBER(j, string, "name", t->name);
    JSON_MEMBER(j, path, "path", &t->path);
    JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
    jw_member_ints(j, "shape", t->ndim, t->shape);
    JSON_MEMBER(j, uint, "bytes", inspect_bytes(t));
    inspect_placements(in, t, &c, text, sizeof text);
    JSON_MEMBER(j, string, "placements", text[0] ? text : NULL);
    jw_key(j, "grid");
    if (c.grid) {
        jw_ints(j, t->ndim, c.counts);
    } else {
        jw_string(j, NULL);
    }
    const fc_stats *stats = inspect_stats_of(in, t);
    if (stats) {
        stats_write_json(j, stats, t->dtype);
    }
    return write_chunks(j, in, t, extents, err);
}

/* Writes the members of an object in the same way. */
static fc_code write_object(json_out *j, inspection *in, const fc_tensor *t, fc_error *err) {
    fc_error why = {FC_OK, ""};
    fc_arena *arena = fc_arena_new();
    FC_NEED(arena, err, in->checkpoint->path);
    const char *json = inspect_object(in, t, arena, &why);
    JSON_MEMBER(j, string, "name", t->name);
    JSON_MEMBER(j, path, "path", &t->path);
    JSON_MEMBER(j, string, "encoding", t->object->encoding);
    JSON_MEMBER(j, uint, "bytes", inspect_bytes(t));
    if (json) {
        JSON_MEMBER(j, raw, "value", json);
    } else if (why.message[0]) {
        JSON_MEMBER(j, string, "error", why.message);
    }
    fc_object_verdict verdict;
    if (inspect_risk(in, t, &verdict) != FC_OBJECT_HARMLESS) {
        JSON_MEMBER(j, string, "risk", verdict.risk == FC_OBJECT_RUNS ? "runs" : "unknown");
        JSON_MEMBER(j, string, "global", verdict.global[0] ? verdict.global : NULL);
        JSON_MEMBER(j, string, "reason", verdict.reason);
    }
    fc_arena_free(arena);
    return FC_OK;
}

static void write_mesh(json_out *j, const char *key, const fc_mesh *mesh) {
    jw_key(j, key);
    if (mesh->ndim == 0) {
        jw_string(j, NULL);
        return;
    }
    jw_open(j, '{');
    jw_member_open(j, "names", '[');
    for (int i = 0; i < mesh->ndim; i++) {
        jw_string(j, mesh->names[i]);
    }
    jw_close(j, ']');
    jw_member_ints(j, "sizes", mesh->ndim, mesh->sizes);
    jw_close(j, '}');
}

/* Writes what each rank stores, and what it holds if the placements are known. */
static fc_code write_ranks(json_out *j, inspection *in, fc_error *err) {
    inspect_loads loads;
    FC_TRY(inspect_ranks(in, &loads, err));
    jw_member_open(j, "ranks", '[');
    for (size_t i = 0; i < loads.ranks && j->out->error == 0; i++) {
        jw_open(j, '{');
        JSON_UINTS(j, {"rank", i}, {"stored_tensors", loads.stored[i].tensors},
                   {"stored_bytes", loads.stored[i].bytes});
        if (loads.held) {
            JSON_UINTS(j, {"held_tensors", loads.held[i].tensors}, {"held_bytes", loads.held[i].bytes});
        }
        jw_close(j, '}');
    }
    jw_close(j, ']');
    return FC_OK;
}

static void write_files(json_out *j, const inspection *in) {
    const fc_checkpoint *c = in->checkpoint;
    jw_member_open(j, "files", '[');
    for (size_t i = 0; i < c->nfiles; i++) {
        struct stat st;
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", c->files[i].name);
        if (!in->headers_only && fc_stat(c->files[i].path, &st) == 0) {
            JSON_MEMBER(j, uint, "bytes", (uint64_t)st.st_size);
        } else if (!in->headers_only) {
            fc_error why;
            (void)fc_fail_errno(&why, errno, "%s: cannot be examined", c->files[i].path);
            JSON_MEMBER(j, string, "error", why.message);
        }
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

static void write_totals(json_out *j, const inspection *in) {
    const totals *of = &in->sum;
    jw_member_open(j, "totals", '{');
    JSON_UINTS(j, {"tensors", of->tensors}, {"objects", of->objects}, {"chunks", of->chunks},
               {"elements", of->elements}, {"bytes", of->bytes});
    jw_close(j, '}');
}

/* Writes the tensors or the objects, in the order of the source. */
static fc_code write_values(json_out *j, inspection *in, const char *key, bool objects, fc_error *err) {
    fc_code rc = FC_OK;
    jw_member_open(j, key, '[');
    for (size_t i = 0; i < in->nitems && rc == FC_OK && in->out->error == 0; i++) {
        const fc_tensor *t = in->items[i];
        if ((t->object != NULL) == objects) {
            jw_open(j, '{');
            rc = objects ? write_object(j, in, t, err) : write_tensor(j, in, t, false, err);
            jw_close(j, '}');
        }
    }
    jw_close(j, ']');
    return rc;
}

static fc_code write_contents(json_out *j, inspection *in, fc_error *err) {
    FC_TRY(write_values(j, in, "tensors", false, err));
    FC_TRY(write_values(j, in, "objects", true, err));
    return write_ranks(j, in, err);
}

fc_code inspect_json(inspection *in, fc_error *err) {
    const fc_checkpoint *c = in->checkpoint;
    json_out j;
    jw_document(&j, in->out, 2, "inspect");
    JSON_MEMBER(&j, string, "checkpoint", c->path);
    JSON_MEMBER(&j, string, "format", c->format->name);
    JSON_MEMBER(&j, string, "producer", c->producer);
    JSON_MEMBER(&j, string, "note", c->note);
    JSON_MEMBER(&j, string, "risk", c->risk);
    write_mesh(&j, "mesh", &c->mesh);
    write_mesh(&j, "layout", &in->mesh);
    write_totals(&j, in);
    write_files(&j, in);
    fc_code rc = write_contents(&j, in, err);
    jw_end_document(&j);
    return rc;
}

fc_code inspect_tensor_json(inspection *in, const fc_tensor *tensor, fc_error *err) {
    json_out j;
    jw_document(&j, in->out, 1, tensor->object ? "object" : "tensor");
    fc_code rc = tensor->object ? write_object(&j, in, tensor, err) : write_tensor(&j, in, tensor, true, err);
    jw_end_document(&j);
    return rc;
}
