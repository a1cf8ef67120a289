/*
 * Writes the seal of a checkpoint, with one line per file and one per tensor (docs/schemas/seal.json).
 */
#include "commands/seal_file.h"

#include "out_file.h"
#include "output/json_out.h"

#include <inttypes.h>
#include <stdio.h>

static void put_crc(json_out *j, uint64_t crc) {
    char digits[17];
    snprintf(digits, sizeof digits, "%016" PRIx64, crc);
    JSON_MEMBER(j, string, "crc64", digits);
}

static void put_files(json_out *j, const fc_seal *seal) {
    jw_member_open(j, "files", '[');
    for (size_t i = 0; i < seal->nfiles; i++) {
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", seal->files[i].name);
        JSON_MEMBER(j, uint, "bytes", seal->files[i].bytes);
        put_crc(j, seal->files[i].crc64);
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

static void put_tensors(json_out *j, const fc_checkpoint *checkpoint, const fc_seal *seal) {
    jw_member_open(j, "tensors", '[');
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (!seal->has[i]) {
            continue;
        }
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", t->name);
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
        jw_member_ints(j, "shape", t->ndim, t->shape);
        put_crc(j, seal->crc64[i]);
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

typedef struct seal_document {
    const fc_checkpoint *checkpoint;
    const fc_seal *seal;
} seal_document;

static fc_code write_seal(void *context, text_out *out, fc_error *err) {
    const seal_document *s = context;
    json_out j;
    (void)err;
    jw_document(&j, out, 2, "seal");
    put_files(&j, s->seal);
    put_tensors(&j, s->checkpoint, s->seal);
    jw_end_document(&j);
    return FC_OK;
}

fc_code seal_write(const options *o, const fc_checkpoint *checkpoint, const fc_seal *seal, fc_error *err) {
    seal_document s = {checkpoint, seal};
    return out_file(o, checkpoint, seal->path, o->force, 0, write_seal, &s, err);
}
