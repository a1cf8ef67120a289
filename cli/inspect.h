/*
 * The ways `inspect` shows an open checkpoint. Each takes the manifest and writes to `out`; cmd_inspect.c chooses.
 */
#ifndef FSDPCKPT_CLI_INSPECT_H
#define FSDPCKPT_CLI_INSPECT_H

#include "cut.h"
#include "text.h"

#include "fsdpckpt/checkpoint.h"

/** What all views share. */
typedef struct inspection {
    const fc_checkpoint *checkpoint;
    text_out *out;
    bool headers_only; /**< do not touch the data files */
    fc_cut_scratch scratch;
    fc_code worst; /**< of the objects that could not be decoded; the view goes on */
    fc_error first;
} inspection;

/** Totals of a checkpoint. */
typedef struct totals {
    size_t tensors, objects, chunks;
    uint64_t elements, bytes; /**< of the tensors, each stored once; saturate */
    uint64_t file_bytes;      /**< of the files on disk; 0 with headers_only */
    size_t by_dtype[FC_DTYPE_COUNT];
    uint64_t elements_by_dtype[FC_DTYPE_COUNT];
} totals;

void inspect_totals(const inspection *in, totals *out);
/** Elements and bytes of a tensor. */
uint64_t inspect_elements(const fc_tensor *tensor);
uint64_t inspect_bytes(const fc_tensor *tensor);
/** Placements of a tensor, recorded or recognised: "Shard(0)", "[_StridedShard(0, 2), Shard(0)]" or "". @return buf. */
const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_cut *c, char *buf, size_t size);
/**
 * The decoding of an object from `arena`, or NULL: remembered in in->worst (its message in `err`), or not asked for.
 */
const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err);

fc_code inspect_text(inspection *in, fc_error *err);
fc_code inspect_tree(inspection *in, fc_error *err);
fc_code inspect_json(inspection *in, fc_error *err);
/** One tensor or object, for people. */
fc_code inspect_tensor(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_tensor_json(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_html(inspection *in, fc_error *err);

/** FC_ENOMEM with the checkpoint's path. */
fc_code inspect_no_memory(const inspection *in, fc_error *err);

#endif
