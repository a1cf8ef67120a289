/*
 * Files of ranks that are not torch.save files: an item of torch_checkpointing may be in safetensors or JSON. What
 * their headers say is written as the pickle that torch.save would have made, so that the join of ranks has only one
 * kind of value. The key of a storage is then the place of its bytes in the file.
 */
#include "pt/as_torch.h"

#include "base/file_name.h"
#include "base/little.h"
#include "checkpoint/folder.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "safetensors/header.h"
#include "torch/pickle/write.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_JSON = 4 << 20 /* bytes; a tree of it takes several times as many */ };

typedef enum file_kind { KIND_TORCH, KIND_SAFETENSORS, KIND_JSON } file_kind;

static fc_code kind_of(const char *path, file_kind *kind, fc_error *err) {
    unsigned char head[16];
    size_t size = sizeof head;
    FC_TRY(fc_read_head(path, head, &size, err));
    const bool torch = fc_torch_is_zip(head, size) || fc_torch_is_legacy(head, size);
    const bool safe =
        size > ST_LENGTH_BYTES && head[ST_LENGTH_BYTES] == '{' && fc_load_little(head, 8) <= ST_MAX_HEADER;
    *kind = torch ? KIND_TORCH : safe ? KIND_SAFETENSORS : fc_ends_with(path, ".json") ? KIND_JSON : KIND_TORCH;
    return FC_OK;
}

/* ---- safetensors ---- */

static void write_entry(const fc_st_header *header, const fc_st_entry *e, fc_torch_pickler *w) {
    const fc_torch_tensor_out tensor = {.dtype = e->dtype,
                                        .key = header->data + e->begin,
                                        .numel = (e->end - e->begin) / fc_dtype_size(e->dtype),
                                        .ndim = e->ndim,
                                        .sizes = e->shape};
    fc_torch_pickle_str(w, e->name);
    fc_torch_pickle_tensor(w, &tensor);
    fc_torch_pickle_op(w, FC_PICKLE_SETITEM);
}

static fc_code write_safetensors(const char *path, fc_torch_pickler *w, fc_error *err) {
    fc_st_header header = {0};
    fc_arena *arena = fc_arena_new();
    fc_code rc;
    FC_TRY_GOTO(arena ? fc_st_header_read(arena, path, false, &header, err) : fc_no_memory(err, path), rc, out);
    fc_torch_pickle_op(w, FC_PICKLE_EMPTY_DICT);
    for (size_t i = 0; i < header.nentries; i++) {
        write_entry(&header, &header.entries[i], w);
    }
out:
    fc_st_header_free(&header);
    fc_arena_free(arena);
    return rc;
}

/* ---- JSON ---- */

static void write_value(const json_t *value, fc_torch_pickler *w);

static void write_object(json_t *object, fc_torch_pickler *w) {
    const char *key;
    json_t *value;
    fc_torch_pickle_op(w, FC_PICKLE_EMPTY_DICT);
    json_object_foreach(object, key, value) {
        fc_torch_pickle_str(w, key);
        write_value(value, w);
        fc_torch_pickle_op(w, FC_PICKLE_SETITEM);
    }
}

static void write_array(const json_t *array, fc_torch_pickler *w) {
    fc_torch_pickle_op(w, FC_PICKLE_EMPTY_LIST);
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    for (size_t i = 0; i < json_array_size(array); i++) {
        write_value(json_array_get(array, i), w);
    }
    fc_torch_pickle_op(w, FC_PICKLE_APPENDS);
}

/* The recursion is as deep as jansson allows. */
static void write_value(const json_t *value, fc_torch_pickler *w) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        write_object((json_t *)(uintptr_t)value, w);
        break;
    case JSON_ARRAY:
        write_array(value, w);
        break;
    case JSON_STRING:
        fc_torch_pickle_strn(w, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        fc_torch_pickle_int(w, json_integer_value(value));
        break;
    case JSON_REAL:
        fc_torch_pickle_float(w, json_real_value(value));
        break;
    case JSON_NULL:
        fc_torch_pickle_op(w, FC_PICKLE_NONE);
        break;
    default:
        fc_torch_pickle_bool(w, json_is_true(value));
    }
}

static fc_code read_text(const char *path, unsigned char **out, size_t *size, fc_error *err) {
    int fd;
    uint64_t bytes;
    FC_TRY(fc_open_input(path, &fd, &bytes, err));
    *out = NULL;
    fc_code rc = bytes <= MAX_JSON
                     ? FC_OK
                     : fc_fail(err, FC_EUNSUPPORTED, "%s: a JSON file of more than %d MiB is not read as an item", path,
                               MAX_JSON >> 20);
    *size = (size_t)bytes;
    *out = rc == FC_OK ? malloc(*size + 1) : NULL;
    rc = rc == FC_OK && !*out ? fc_no_memory(err, path) : rc;
    rc = rc == FC_OK ? fc_pread_full(fd, *out, *size, 0, path, err) : rc;
    close(fd);
    return rc;
}

static fc_code write_json(const char *path, fc_torch_pickler *w, fc_error *err) {
    unsigned char *text = NULL;
    size_t size = 0;
    json_error_t why;
    json_t *value = NULL;
    fc_code rc;
    FC_TRY_GOTO(read_text(path, &text, &size, err), rc, out);
    value = json_loadb((const char *)text, size, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (value) {
        write_value(value, w);
    } else if (json_error_code(&why) <= json_error_out_of_memory) { /* or unknown: jansson does not always say it */
        rc = fc_no_memory(err, path);
    } else {
        rc = fc_fail(err, FC_ECORRUPT, "%s: line %d: not JSON: %s; NaN and Infinity, which Python writes, are not JSON",
                     path, why.line, why.text);
    }
out:
    json_decref(value);
    free(text);
    return rc;
}

/* ---- the file ---- */

fc_code fc_pt_open_as_torch(const char *path, uint32_t index, torch_file *f, fc_error *err) {
    file_kind kind;
    fc_torch_pickler w;
    *f = (torch_file){.fd = -1};
    FC_TRY(kind_of(path, &kind, err));
    if (kind == KIND_TORCH) {
        return fc_torch_file_open(path, index, f, err);
    }
    fc_torch_pickle_begin(&w, 4);
    fc_code rc;
    FC_TRY_GOTO(kind == KIND_JSON ? write_json(path, &w, err) : write_safetensors(path, &w, err), rc, out);
    FC_TRY_GOTO(fc_torch_pickle_end(&w, err), rc, out);
    rc = fc_torch_file_describe(path, index, w.bytes, w.size, f, err);
out:
    fc_torch_pickle_free(&w);
    return rc;
}

fc_code fc_pt_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    torch_file f;
    const fc_code rc = fc_pt_open_as_torch(checkpoint->files[index].path, (uint32_t)index, &f, err);
    fc_torch_file_close(&f);
    return rc;
}
