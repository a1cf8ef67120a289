/*
 * Reads a DCP checkpoint and a torch.save file as one checkpoint.
 */
#include "dcp/with_torch_file.h"

#include "checkpoint/other_files.h"
#include "checkpoint/same_name.h"
#include "dcp/dcp.h"
#include "dcp/extent.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "registry.h"
#include "torch/file/file.h"

#include <string.h>

bool fc_dcp_has_file(const char *directory, const char *name, fc_error *err) {
    char path[PATH_MAX];
    return fc_find_in(directory, ".metadata", path, err) && fc_find_in(directory, name, path, err);
}

static fc_code check_unique(const fc_checkpoint *checkpoint, const char *file, fc_error *err) {
    const char *name;
    FC_TRY(fc_find_same_name(checkpoint->tensors, checkpoint->ntensors, &name, err));
    if (name) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %.256s is both in %s and in .metadata", checkpoint->path, name, file);
    }
    return FC_OK;
}

/* Appends the file to the files of DCP. */
static fc_code add_torch_file(fc_checkpoint *checkpoint, const char *name, const char **path, fc_error *err) {
    size_t nfiles = checkpoint->nfiles;
    fc_file *files = fc_arena_calloc(checkpoint->arena, nfiles + 1, sizeof *files);
    *path = fc_arena_printf(checkpoint->arena, "%s/%s", checkpoint->path, name);
    FC_NEED(files && *path, err, checkpoint->path);
    if (nfiles > 0) {
        memcpy(files, checkpoint->files, nfiles * sizeof *files);
    }
    files[nfiles] = (fc_file){*path, name};
    checkpoint->files = files;
    checkpoint->nfiles = nfiles + 1;
    return FC_OK;
}

/* Appends the values of the last file to those of DCP. After a failure only DCP's values remain. */
static fc_code add_values(fc_checkpoint *checkpoint, const char *name, const char *path, fc_error *err) {
    const fc_tensor *const old = checkpoint->tensors;
    const size_t ntensors = checkpoint->ntensors;
    size_t more = 0;
    fc_tensor *added = NULL;
    FC_TRY(fc_torch_read_file(checkpoint, path, (uint32_t)(checkpoint->nfiles - 1), &added, &more, NULL, err));
    fc_tensor *all = fc_arena_calloc(checkpoint->arena, ntensors + more, sizeof *all);
    FC_NEED(all, err, checkpoint->path);
    if (ntensors > 0) {
        memcpy(all, old, ntensors * sizeof *all);
    }
    if (more > 0) {
        memcpy(all + ntensors, added, more * sizeof *all);
    }
    checkpoint->tensors = all;
    checkpoint->ntensors = ntensors + more;
    fc_code rc = check_unique(checkpoint, name, err);
    if (rc != FC_OK) {
        checkpoint->tensors = old;
        checkpoint->ntensors = ntensors;
    }
    return rc;
}

/* Adds the file's values. `*why`: the reason why an optional file, of another program, is not read. */
static fc_code add_optional(fc_checkpoint *checkpoint, const char *name, bool optional, const char **why,
                            fc_error *err) {
    const char *path = NULL;
    FC_TRY(add_torch_file(checkpoint, name, &path, err));
    fc_code rc = add_values(checkpoint, name, path, err);
    if (rc != FC_EUNSUPPORTED || !optional) {
        return rc;
    }
    *why = fc_arena_printf(checkpoint->arena, "the file %s is not read: %s", name, err->message);
    return *why ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_dcp_open_with_file(fc_checkpoint *checkpoint, const char *name, bool optional,
                              const fc_open_options *options, fc_error *err) {
    const char *why = NULL, *directory = NULL;
    FC_TRY(fc_dcp_open(checkpoint, options, &directory, err));
    FC_TRY(add_optional(checkpoint, name, optional, &why, err));
    FC_TRY(fc_note_other_files(checkpoint, directory, err));
    checkpoint->note = why ? why : checkpoint->note;
    return FC_OK;
}

void fc_dcp_close_with_file(fc_checkpoint *checkpoint) {
    fc_format_dcp.reader.close(checkpoint);
}

/* Whether a value belongs to DCP: only DCP sets a state, and the torch.save file is the last. */
static bool is_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    return checkpoint->state && (tensor->nchunks == 0 || tensor->chunks[0].place.file + (size_t)1 < checkpoint->nfiles);
}

fc_code fc_dcp_extent_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                                fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.reader.extent(checkpoint, tensor, index, out, err)
                                      : fc_torch_extent(checkpoint, tensor, index, out, err);
}

fc_code fc_dcp_read_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                              fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.reader.read(checkpoint, tensor, index, buf, err)
                                      : fc_torch_read(checkpoint, tensor, index, buf, err);
}

/* A deflated record of a torch.save file is only decoded as a whole. */
fc_code fc_dcp_read_part_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at,
                                   void *buf, size_t size, fc_error *err) {
    return is_dcp(checkpoint, tensor)
               ? fc_format_dcp.reader.read_part(checkpoint, tensor, index, at, buf, size, err)
               : fc_advise(err,
                           fc_fail(err, FC_EUNSUPPORTED,
                                   "%s: a compressed record is larger than the memory for decoding", checkpoint->path),
                           FC_HINT_MEMORY, NULL);
}

fc_code fc_dcp_object_json_with_file(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                     const char **json, fc_error *err) {
    return is_dcp(checkpoint, object) ? fc_format_dcp.reader.object_json(checkpoint, object, arena, json, err)
                                      : fc_torch_object_json(checkpoint, object, arena, json, err);
}

fc_code fc_dcp_digest_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                                fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.reader.digest(checkpoint, tensor, index, out, err)
                                      : fc_torch_digest(checkpoint, tensor, index, out, err);
}

fc_code fc_dcp_verify_with_file(const fc_checkpoint *checkpoint, struct fc_findings *findings,
                                struct fc_verify_report *report, fc_error *err) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && is_dcp(checkpoint, t)) {
            FC_TRY(fc_dcp_verify_object(checkpoint, t, findings, report, err));
        }
    }
    return FC_OK;
}

fc_code fc_dcp_verify_chunk_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index,
                                      fc_extent *extent, fc_digest *digest, struct fc_findings *findings,
                                      fc_error *err) {
    if (is_dcp(checkpoint, tensor)) {
        return fc_format_dcp.verifier.verify_chunk(checkpoint, tensor, index, extent, digest, findings, err);
    }
    FC_TRY(fc_checkpoint_extent(checkpoint, tensor, index, extent, err));
    return fc_checkpoint_digest(checkpoint, tensor, index, digest, err);
}

fc_code fc_dcp_check_object_with_file(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    return is_dcp(checkpoint, object) ? fc_format_dcp.reader.check_object(checkpoint, object, err) : FC_OK;
}
