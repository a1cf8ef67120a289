/*
 * What an object is: its value, and what loading it would do. Both are found from the bytes, because conversions copy
 * these. Headers may record a readable form next to the bytes, which is only compared.
 */
#include "checkpoint/identity.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/try.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The bytes of an object: a range of the open file `fd`, or `memory`, which the user frees. */
typedef struct object_bytes {
    const char *path;
    int fd; /* -1: in memory */
    uint64_t offset, length;
    unsigned char *memory;
} object_bytes;

/* Whether the object's bytes are one range of a file. */
static bool is_range(const fc_tensor *object, const fc_extent *extent) {
    return extent->codec == FC_CODEC_RAW && extent->first == 0 && extent->strides[0] == 1 &&
           extent->length == (uint64_t)object->shape[0];
}

/*
 * Finds the bytes. Of a range of a file, only the headers and the pickle are read later. Compressed bytes, and those in
 * several chunks or made when they are read, are all read now.
 */
static fc_code find_bytes(const fc_checkpoint *checkpoint, const fc_tensor *object, object_bytes *out, fc_error *err) {
    fc_extent extent = {0};
    *out = (object_bytes){.path = checkpoint->path, .fd = -1, .length = (uint64_t)object->shape[0]};
    if (object->nchunks == 1) {
        FC_TRY(fc_checkpoint_extent(checkpoint, object, 0, &extent, err));
        if (is_range(object, &extent)) {
            out->path = checkpoint->files[extent.file].path;
            out->offset = extent.offset;
            return fc_identity_open(checkpoint, extent.file, &out->fd, err);
        }
    }
    return fc_read_object(checkpoint, object, &out->memory, err);
}

static fc_code examine_object(const fc_object_encoding *encoding, const fc_checkpoint *checkpoint,
                              const fc_tensor *object, fc_object_verdict *out, fc_error *err) {
    object_bytes b;
    FC_TRY(find_bytes(checkpoint, object, &b, err));
    if (b.fd < 0) {
        return encoding->examine_memory(b.memory, b.length, b.path, out, err);
    }
    fc_code rc = encoding->examine(b.fd, b.path, b.offset, b.length, out, err);
    close(b.fd);
    return rc;
}

fc_code fc_checkpoint_object_verdict(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_object_verdict *out,
                                     fc_error *err) {
    *out = (fc_object_verdict){.risk = FC_OBJECT_HARMLESS};
    if (!object->object || object->object->refusal || object->nchunks == 0) {
        return FC_OK;
    }
    const fc_object_encoding *encoding = fc_object_encoding_find(object->object->encoding);
    if (!encoding || !encoding->examine) {
        return FC_OK;
    }
    FC_TRY_CONTEXT(examine_object(encoding, checkpoint, object, out, err), err, "object %.256s", object->name);
    return FC_OK;
}

/* ---- the value ---- */

static fc_code decode_object(const fc_object_encoding *encoding, const fc_checkpoint *checkpoint,
                             const fc_tensor *object, fc_arena *arena, const char **json, fc_error *err) {
    object_bytes b;
    FC_TRY(find_bytes(checkpoint, object, &b, err));
    if (b.fd < 0) {
        return encoding->json_memory(b.memory, b.length, b.path, arena, json, err);
    }
    fc_code rc = encoding->json(b.fd, b.path, b.offset, b.length, arena, json, err);
    close(b.fd);
    return rc;
}

/* Whether `text` only describes the type of raw elements of HDF5. */
static bool describes_type(const char *encoding, const char *text) {
    json_t *root =
        strcmp(encoding, "hdf5.bytes") == 0 ? json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL) : NULL;
    bool good = json_object_size(root) == 1 && json_object_get(root, "$hdf5");
    json_decref(root);
    return good;
}

/* The value of an object whose encoding nothing here can decode: the recorded text might say anything. */
static fc_code describe_encoding(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                 const char **json, fc_error *err) {
    const char *recorded = NULL;
    FC_TRY(checkpoint->format->reader.object_json(checkpoint, object, arena, &recorded, err));
    if (describes_type(object->object->encoding, recorded)) {
        *json = recorded;
        return FC_OK;
    }
    json_t *root = json_pack("{s:s}", "$encoding", object->object->encoding);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    *json = text ? fc_arena_strndup(arena, text, strlen(text)) : NULL;
    free(text);
    json_decref(root);
    return *json ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_checkpoint_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err) {
    const fc_format_reader *reader = &checkpoint->format->reader;
    FC_TRY(fc_check_readable(checkpoint, object, err));
    if (!reader->records_json) {
        return reader->object_json(checkpoint, object, arena, json, err);
    }
    const fc_object_encoding *encoding = fc_object_encoding_find(object->object->encoding);
    if (!encoding || !encoding->json) {
        return describe_encoding(checkpoint, object, arena, json, err);
    }
    FC_TRY_CONTEXT(decode_object(encoding, checkpoint, object, arena, json, err), err, "object %.256s", object->name);
    return FC_OK;
}

/* ---- the recorded form ---- */

/* Whether a recorded value stands for one that an older version could not show in full. */
static bool is_stub(const json_t *recorded) {
    return json_object_size(recorded) == 1 &&
           (json_object_get(recorded, "$opaque") || json_object_get(recorded, "$omitted"));
}

static bool same_value(const json_t *recorded, const json_t *value) {
    const char *key;
    const json_t *member;
    if (is_stub(recorded)) {
        return json_is_object(value) || json_is_null(value);
    }
    if (json_is_array(recorded) && json_is_array(value) && json_array_size(recorded) == json_array_size(value)) {
        bool same = true;
        for (size_t i = 0; same && i < json_array_size(value); i++) {
            same = same_value(json_array_get(recorded, i), json_array_get(value, i));
        }
        return same;
    }
    if (!json_is_object(recorded) || !json_is_object(value) || json_object_size(recorded) != json_object_size(value)) {
        return json_equal(recorded, value);
    }
    json_object_foreach((json_t *)(uintptr_t)recorded, key, member) {
        const json_t *other = json_object_get(value, key);
        if (!other || !same_value(member, other)) {
            return false;
        }
    }
    return true;
}

static bool same_text(const char *recorded, const char *value) {
    if (strcmp(recorded, value) == 0) {
        return true;
    }
    json_t *x = json_loads(recorded, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    json_t *y = json_loads(value, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    bool same = x && y && same_value(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

/* The first bytes of a text, for a message. */
#define SHOWN "%.64s%s"
static const char *dots(const char *text) {
    return strlen(text) > 64 ? "…" : "";
}

fc_code fc_checkpoint_check_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                        fc_error *err) {
    const fc_format_reader *reader = &checkpoint->format->reader;
    const char *recorded = NULL, *value = NULL;
    const fc_object_encoding *encoding =
        object->object && !object->object->refusal ? fc_object_encoding_find(object->object->encoding) : NULL;
    if (!reader->records_json || !encoding || !encoding->json) {
        return FC_OK;
    }
    FC_TRY(fc_checkpoint_object_json(checkpoint, object, arena, &value, err));
    FC_TRY(reader->object_json(checkpoint, object, arena, &recorded, err));
    if (same_text(recorded, value)) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: object %.256s: its json says " SHOWN ", but its bytes are " SHOWN
                   ": the bytes are what is used; convert it again to record what they are",
                   checkpoint->path, object->name, recorded, dots(recorded), value, dots(value));
}
