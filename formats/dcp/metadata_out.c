/*
 * Writes `.metadata`: the pickle of a torch.distributed.checkpoint.metadata.Metadata that every torch since 2.0 reads.
 * It goes to the file while it is made; only the memo numbers of strings are kept in memory.
 *
 * States have the fields of torch 2.0. Newer versions have defaults for the fields that they added (strides,
 * transforms), and set storage_meta when they read. The path of the checkpoint is not recorded, because it would be
 * wrong after the checkpoint is moved.
 */
#include "dcp/writer.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "torch/object/write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 1000 }; /* items that a reader has on its stack at once, as in Python's pickler */

typedef struct metadata_out {
    const fc_target *target;
    const fc_dcp_item *items;
    size_t nitems;
    fc_torch_pickler w;
    uint32_t *names; /* per tensor: the memo number of its name */
    uint32_t *paths; /* per rank: the memo number of its file name, plus 1; 0: not written yet */
    size_t batched;  /* pairs or items since the mark */
} metadata_out;

void fc_dcp_file_name(uint32_t rank, char name[FC_DCP_FILE_NAME]) {
    snprintf(name, FC_DCP_FILE_NAME, "__%" PRIu32 "_0.distcp", rank);
}

fc_code fc_dcp_item_box(const fc_target *target, const fc_dcp_item *item, int64_t *dims, fc_error *err) {
    const fc_tensor *t = target->tensors[item->tensor].source;
    fc_target_item box;
    if (!fc_is_empty(t->ndim, t->shape)) {
        return fc_target_item_of(target, item->tensor, item->rank, dims, &box, err);
    }
    for (int d = 0; d < t->ndim; d++) {
        dims[d] = 0;
        dims[t->ndim + d] = t->shape[d];
    }
    return FC_OK;
}

static void metadata_class(metadata_out *m, const char *name) {
    fc_torch_pickle_global(&m->w, "torch.distributed.checkpoint.metadata", name);
}

/*
 * An instance is its class, an empty tuple, NEWOBJ, its state as a dict, and BUILD. The dict goes between these two
 * calls.
 */
static void begin_instance(metadata_out *m) {
    fc_torch_pickle_tuple(&m->w, 0);
    fc_torch_pickle_op(&m->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(&m->w, FC_PICKLE_EMPTY_DICT);
    fc_torch_pickle_op(&m->w, FC_PICKLE_MARK);
}

static void end_instance(metadata_out *m) {
    fc_torch_pickle_op(&m->w, FC_PICKLE_SETITEMS);
    fc_torch_pickle_op(&m->w, FC_PICKLE_BUILD);
}

static void begin_batches(metadata_out *m, fc_pickle_opcode empty) {
    fc_torch_pickle_op(&m->w, empty);
    fc_torch_pickle_op(&m->w, FC_PICKLE_MARK);
    m->batched = 0;
}

static void next_in_batch(metadata_out *m, fc_pickle_opcode add) {
    if (++m->batched == BATCH) {
        fc_torch_pickle_op(&m->w, add);
        fc_torch_pickle_op(&m->w, FC_PICKLE_MARK);
        m->batched = 0;
    }
}

static void write_size(metadata_out *m, int ndim, const int64_t *sizes) {
    fc_torch_pickle_global(&m->w, "torch", "Size");
    fc_torch_pickle_ints(&m->w, sizes, (size_t)ndim);
    fc_torch_pickle_tuple(&m->w, 1);
    fc_torch_pickle_op(&m->w, FC_PICKLE_REDUCE);
}

/* The state of TensorProperties is a tuple: dtype, layout, requires_grad, memory format, pin_memory. */
static void write_properties(metadata_out *m, fc_dtype dtype) {
    metadata_class(m, "TensorProperties");
    fc_torch_pickle_tuple(&m->w, 0);
    fc_torch_pickle_op(&m->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(&m->w, FC_PICKLE_MARK);
    fc_torch_pickle_global(&m->w, "torch", fc_dtype_get(dtype)->torch_name);
    fc_torch_pickle_global(&m->w, "torch.serialization", "_get_layout");
    fc_torch_pickle_often(&m->w, "torch.strided");
    fc_torch_pickle_tuple(&m->w, 1);
    fc_torch_pickle_op(&m->w, FC_PICKLE_REDUCE);
    fc_torch_pickle_bool(&m->w, false);
    metadata_class(m, "_MEM_FORMAT_ENCODING");
    fc_torch_pickle_int(&m->w, 0);
    fc_torch_pickle_tuple(&m->w, 1);
    fc_torch_pickle_op(&m->w, FC_PICKLE_REDUCE);
    fc_torch_pickle_bool(&m->w, false);
    fc_torch_pickle_op(&m->w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(&m->w, FC_PICKLE_BUILD);
}

static fc_code write_chunk(metadata_out *m, const fc_dcp_item *item, fc_error *err) {
    int64_t dims[2 * FC_MAX_DIMS];
    int ndim = m->target->tensors[item->tensor].source->ndim;
    FC_TRY(fc_dcp_item_box(m->target, item, dims, err));
    metadata_class(m, "ChunkStorageMetadata");
    begin_instance(m);
    fc_torch_pickle_often(&m->w, "offsets");
    write_size(m, ndim, dims);
    fc_torch_pickle_often(&m->w, "sizes");
    write_size(m, ndim, dims + ndim);
    end_instance(m);
    return FC_OK;
}

/* Writes the entry of an object. torch ignores an attribute, which says that the object is one of another format. */
static void write_object(metadata_out *m, const char *encoding) {
    metadata_class(m, "BytesStorageMetadata");
    if (strcmp(encoding, FC_TORCH_OBJECT) == 0 || strcmp(encoding, FC_OBJECT_VALUE) == 0) {
        fc_torch_pickle_tuple(&m->w, 0);
        fc_torch_pickle_op(&m->w, FC_PICKLE_NEWOBJ);
        return;
    }
    begin_instance(m);
    fc_torch_pickle_often(&m->w, "fsdpckpt_encoding");
    fc_torch_pickle_str(&m->w, encoding);
    end_instance(m);
}

/*
 * Writes the entry of a tensor in state_dict_metadata. `*next` is the index of its first item, and is set to that of
 * the next tensor.
 */
static fc_code write_tensor(metadata_out *m, uint32_t tensor, size_t *next, fc_error *err) {
    const fc_target_tensor *t = &m->target->tensors[tensor];
    size_t outer = m->batched;
    if (t->source->object) {
        write_object(m, t->source->object->encoding);
        (*next)++;
        return FC_OK;
    }
    metadata_class(m, "TensorStorageMetadata");
    begin_instance(m);
    fc_torch_pickle_often(&m->w, "properties");
    write_properties(m, t->dtype);
    fc_torch_pickle_often(&m->w, "size");
    write_size(m, t->source->ndim, t->source->shape);
    fc_torch_pickle_often(&m->w, "chunks");
    begin_batches(m, FC_PICKLE_EMPTY_LIST);
    for (; *next < m->nitems && m->items[*next].tensor == tensor; (*next)++) {
        FC_TRY(write_chunk(m, &m->items[*next], err));
        next_in_batch(m, FC_PICKLE_APPENDS);
    }
    fc_torch_pickle_op(&m->w, FC_PICKLE_APPENDS);
    end_instance(m);
    m->batched = outer;
    return FC_OK;
}

static fc_code write_tensors(metadata_out *m, fc_error *err) {
    size_t next = 0;
    begin_batches(m, FC_PICKLE_EMPTY_DICT);
    for (size_t i = 0; i < m->target->ntensors; i++) {
        fc_torch_pickle_str(&m->w, m->target->tensors[i].name);
        m->names[i] = fc_torch_pickle_put(&m->w);
        FC_TRY(write_tensor(m, (uint32_t)i, &next, err));
        next_in_batch(m, FC_PICKLE_SETITEMS);
    }
    fc_torch_pickle_op(&m->w, FC_PICKLE_SETITEMS);
    return FC_OK;
}

static void write_path(metadata_out *m, const fc_path *path, uint32_t name) {
    fc_torch_pickle_op(&m->w, FC_PICKLE_MARK);
    if (path->count == 0) {
        fc_torch_pickle_get(&m->w, name);
    }
    for (size_t i = 0; i < path->count; i++) {
        const fc_path_element *e = &path->elements[i];
        char *end = NULL;
        errno = 0;
        /* torch's loader makes the outermost container a dict even if the first key is an index. */
        long long index = e->is_index && i > 0 ? strtoll(e->key, &end, 10) : 0;
        if (end && end != e->key && *end == '\0' && errno == 0) {
            fc_torch_pickle_int(&m->w, index);
        } else {
            fc_torch_pickle_str(&m->w, e->key);
        }
    }
    fc_torch_pickle_op(&m->w, FC_PICKLE_TUPLE);
}

/* Writes planner_data: the path of each value in the nested state dict. */
static void write_paths(metadata_out *m) {
    begin_batches(m, FC_PICKLE_EMPTY_DICT);
    for (size_t i = 0; i < m->target->ntensors; i++) {
        fc_torch_pickle_get(&m->w, m->names[i]);
        write_path(m, &m->target->tensors[i].path, m->names[i]);
        next_in_batch(m, FC_PICKLE_SETITEMS);
    }
    fc_torch_pickle_op(&m->w, FC_PICKLE_SETITEMS);
}

static fc_code write_index(metadata_out *m, const fc_dcp_item *item, size_t number, fc_error *err) {
    const fc_tensor *t = m->target->tensors[item->tensor].source;
    int64_t dims[2 * FC_MAX_DIMS];
    FC_TRY(t->object ? FC_OK : fc_dcp_item_box(m->target, item, dims, err));
    metadata_class(m, "MetadataIndex");
    begin_instance(m);
    fc_torch_pickle_often(&m->w, "fqn");
    fc_torch_pickle_get(&m->w, m->names[item->tensor]);
    fc_torch_pickle_often(&m->w, "index");
    if (t->object) {
        fc_torch_pickle_op(&m->w, FC_PICKLE_NONE);
    } else {
        fc_torch_pickle_int(&m->w, (int64_t)number);
        fc_torch_pickle_often(&m->w, "offset");
        write_size(m, t->ndim, dims);
    }
    end_instance(m);
    return FC_OK;
}

static void write_place(metadata_out *m, const fc_dcp_item *item) {
    fc_torch_pickle_global(&m->w, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    begin_instance(m);
    fc_torch_pickle_often(&m->w, "relative_path");
    if (m->paths[item->rank]) {
        fc_torch_pickle_get(&m->w, m->paths[item->rank] - 1);
    } else {
        char name[FC_DCP_FILE_NAME];
        fc_dcp_file_name(item->rank, name);
        fc_torch_pickle_str(&m->w, name);
        m->paths[item->rank] = fc_torch_pickle_put(&m->w) + 1;
    }
    fc_torch_pickle_often(&m->w, "offset");
    fc_torch_pickle_int(&m->w, (int64_t)item->offset);
    fc_torch_pickle_often(&m->w, "length");
    fc_torch_pickle_int(&m->w, (int64_t)item->length);
    end_instance(m);
}

static fc_code write_places(metadata_out *m, fc_error *err) {
    size_t number = 0;
    begin_batches(m, FC_PICKLE_EMPTY_DICT);
    for (size_t i = 0; i < m->nitems; i++) {
        number = i > 0 && m->items[i - 1].tensor == m->items[i].tensor ? number + 1 : 0;
        FC_TRY(write_index(m, &m->items[i], number, err));
        write_place(m, &m->items[i]);
        next_in_batch(m, FC_PICKLE_SETITEMS);
    }
    fc_torch_pickle_op(&m->w, FC_PICKLE_SETITEMS);
    return FC_OK;
}

static fc_code write_root(metadata_out *m, fc_error *err) {
    metadata_class(m, "Metadata");
    begin_instance(m);
    fc_torch_pickle_str(&m->w, "state_dict_metadata");
    FC_TRY(write_tensors(m, err));
    fc_torch_pickle_str(&m->w, "planner_data");
    write_paths(m);
    fc_torch_pickle_str(&m->w, "storage_data");
    FC_TRY(write_places(m, err));
    fc_torch_pickle_str(&m->w, "storage_meta");
    fc_torch_pickle_op(&m->w, FC_PICKLE_NONE);
    fc_torch_pickle_str(&m->w, "version");
    fc_torch_pickle_str(&m->w, "1.0.0"); /* torch's version of this format */
    end_instance(m);
    return FC_OK;
}

static fc_code write_file(metadata_out *m, const char *path, fc_error *err) {
    int fd = fc_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    fc_torch_pickle_begin_file(&m->w, 4, fd, path);
    fc_code rc;
    FC_TRY_GOTO(write_root(m, err), rc, out);
    rc = fc_torch_pickle_end(&m->w, err);
out:
    fc_torch_pickle_free(&m->w);
    return fc_close_written(fd, rc, path, err);
}

fc_code fc_dcp_write_metadata(const fc_target *target, const char *directory, const fc_dcp_item *items, size_t nitems,
                              fc_error *err) {
    metadata_out m = {.target = target, .items = items, .nitems = nitems};
    m.names = calloc(target->ntensors + 1, sizeof *m.names);
    m.paths = calloc((size_t)fc_mesh_ranks(target->mesh) + 1, sizeof *m.paths);
    fc_arena *arena = fc_arena_new();
    const char *path = arena ? fc_arena_printf(arena, "%s/.metadata", directory) : NULL;
    fc_code rc = m.names && m.paths && path ? write_file(&m, path, err) : fc_no_memory(err, directory);
    fc_arena_free(arena);
    free(m.names);
    free(m.paths);
    return rc;
}
