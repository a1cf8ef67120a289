/*
 * The table of formats. A new format is a folder and a line in format_list.h.
 */
#include "registry.h"

#include "base/text.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "safetensors/kept.h"
#include "torch/object/item.h"
#include "torch/object/sparse.h"
#include "torch/object/verdict.h"

#include <stdlib.h>
#include <string.h>

/* clang-format off */
static const fc_format *const formats[] = {
#define X(folder) &fc_format_##folder,
#include "format_list.h"
#undef X
    NULL,
};
/* clang-format on */

const fc_format *const *fc_formats(void) {
    return formats;
}

/* ---- objects ---- */

static fc_code text_json_memory(unsigned char *bytes, uint64_t length, const char *path, fc_arena *arena,
                                const char **json, fc_error *err) {
    const char *text = (const char *)bytes;
    const bool good = fc_is_json(text, (size_t)length);
    *json = good ? fc_arena_strndup(arena, text, (size_t)length) : NULL;
    free(bytes);
    if (!good) {
        return fc_fail(err, FC_ECORRUPT, "%s: its bytes are not JSON", path);
    }
    return *json ? FC_OK : fc_no_memory(err, path);
}

static fc_code text_json(int fd, const char *path, uint64_t offset, uint64_t length, fc_arena *arena, const char **json,
                         fc_error *err) {
    unsigned char *bytes = length < SIZE_MAX ? malloc((size_t)length + 1) : NULL;
    FC_NEED(bytes, err, path);
    fc_code rc = fc_pread_full(fd, bytes, (size_t)length, offset, path, err);
    if (rc != FC_OK) {
        free(bytes);
        return rc;
    }
    return text_json_memory(bytes, length, path, arena, json, err);
}

const fc_object_encoding *fc_object_encoding_find(const char *name) {
    static const fc_object_encoding encodings[] = {
        {"torch.save", fc_torch_verdict, fc_torch_verdict_memory, fc_torch_json_range, fc_torch_json_memory},
        {FC_OBJECT_VALUE, NULL, NULL, text_json, text_json_memory},
        {"hdf5.string", NULL, NULL, text_json, text_json_memory},
        {ST_METADATA_ENCODING, NULL, NULL, text_json, text_json_memory},
        {"hdf5.attributes", NULL, NULL, text_json, text_json_memory},
        {FC_TORCH_SPARSE, NULL, NULL, text_json, text_json_memory},
        {"hdf5.bytes", NULL, NULL, NULL, NULL}, /* their type is recorded next to them */
    };
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++) {
        if (strcmp(name, encodings[i].name) == 0) {
            return &encodings[i];
        }
    }
    return NULL;
}

const fc_format *fc_format_find(const char *name) {
    for (const fc_format *const *f = formats; *f; f++) {
        if (strcmp((*f)->name, name) == 0) {
            return *f;
        }
    }
    return NULL;
}
