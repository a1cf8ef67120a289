/*
 * Finds and verifies the bytes of an open checkpoint. extent.c opens the archive of one chunk, safetensors.c finds a
 * chunk in safetensors, flattened.c what `.metadata` lists for a chunk, and verify.c checks whole archives.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Whether the chunk's item is a tensor in the safetensors part of the data file, not an archive. */
bool fc_dcp_in_safetensors(const fc_tensor *tensor, const fc_chunk *chunk);

/** A chunk as `.metadata` lists it. Unless the tensor was flattened, this is the chunk itself. */
typedef struct fc_dcp_listed {
    const fc_tensor *tensor; /* of a flattened tensor: as it is listed; its last dimension has the elements */
    fc_chunk chunk;          /* the run of elements that contains the box */
    int64_t at;              /* the box's first element in the run; the box is row-major there */
    bool is_first;           /* whether no earlier chunk of the tensor is in this run */
} fc_dcp_listed;

/** Finds what `.metadata` lists for chunk number `index`. */
fc_dcp_listed fc_dcp_find_listed(const fc_tensor *tensor, size_t index);

/** Finds the extent of a chunk in safetensors. Thread-safe. */
fc_code fc_dcp_safetensors_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                                  fc_extent *out, fc_error *err);

fc_code fc_dcp_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err);
fc_code fc_dcp_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err);
/** fc_format_verifier.verify_chunk: opens the archive only once. */
fc_code fc_dcp_verify_chunk(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err);
/** Verifies the records of an object's archive, and those of all objects (fc_format_verifier.verify). */
fc_code fc_dcp_verify_object(const fc_checkpoint *checkpoint, const fc_tensor *object, struct fc_findings *findings,
                             struct fc_verify_report *report, fc_error *err);
fc_code fc_dcp_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err);
fc_code fc_dcp_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);
fc_code fc_dcp_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err);
