/*
 * See beside_dcp.h.
 */
#include "dcp/with_torch_file.h"

#include "base/file_name.h"
#include "checkpoint/same_name.h"
#include "dcp/dcp.h"
#include "io/other_files.h"
#include "pt/pt.h"
#include "registry.h"

#include <string.h>

bool fc_pt_is_beside_dcp(const char *directory, const char *name) {
    char path[PATH_MAX];
    return fc_find_in(directory, ".metadata", path) && fc_find_in(directory, name, path);
}

static fc_code no_memory(const fc_checkpoint *checkpoint, fc_error *err) {
    return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
}

static fc_code check_unique(const fc_checkpoint *checkpoint, const char *file, fc_error *err) {
    const char *name;
    fc_code rc = fc_find_same_name(checkpoint->tensors, checkpoint->ntensors, &name, err);
    return rc != FC_OK || !name ? rc
                                : fc_fail(err, FC_EUNSUPPORTED, "%s: %.256s is both in %s and in .metadata",
                                          checkpoint->path, name, file);
}

/* Puts the file behind those of DCP. */
static fc_code add_file(fc_checkpoint *checkpoint, const char *name, const char **path, fc_error *err) {
    size_t nfiles = checkpoint->nfiles;
    fc_file *files = fc_arena_calloc(checkpoint->arena, nfiles + 1, sizeof *files);
    *path = fc_arena_printf(checkpoint->arena, "%s/%s", checkpoint->path, name);
    if (!files || !*path) {
        return no_memory(checkpoint, err);
    }
    if (nfiles > 0) {
        memcpy(files, checkpoint->files, nfiles * sizeof *files);
    }
    files[nfiles] = (fc_file){*path, name};
    checkpoint->files = files;
    checkpoint->nfiles = nfiles + 1;
    return FC_OK;
}

/* Puts the values of the file, the last one, behind those of DCP. After a failure there are those of DCP alone. */
static fc_code add_values(fc_checkpoint *checkpoint, const char *name, const char *path, fc_error *err) {
    const fc_tensor *const old = checkpoint->tensors;
    const size_t ntensors = checkpoint->ntensors;
    size_t more = 0;
    fc_tensor *added = NULL;
    fc_code rc = fc_pt_read_file(checkpoint, path, (uint32_t)(checkpoint->nfiles - 1), &added, &more, err);
    fc_tensor *all = rc == FC_OK ? fc_arena_calloc(checkpoint->arena, ntensors + more, sizeof *all) : NULL;
    if (!all) {
        return rc == FC_OK ? no_memory(checkpoint, err) : rc;
    }
    if (ntensors > 0) {
        memcpy(all, old, ntensors * sizeof *all);
    }
    if (more > 0) {
        memcpy(all + ntensors, added, more * sizeof *all);
    }
    checkpoint->tensors = all;
    checkpoint->ntensors = ntensors + more;
    rc = check_unique(checkpoint, name, err);
    if (rc != FC_OK) {
        checkpoint->tensors = old;
        checkpoint->ntensors = ntensors;
    }
    return rc;
}

fc_code fc_pt_open_beside_dcp(fc_checkpoint *checkpoint, const char *name, bool optional,
                              const fc_open_options *options, fc_error *err) {
    const char *path = NULL, *why = NULL, *directory = NULL;
    fc_code rc = fc_dcp_open(checkpoint, options, &directory, err);
    rc = rc == FC_OK ? add_file(checkpoint, name, &path, err) : rc;
    rc = rc == FC_OK ? add_values(checkpoint, name, path, err) : rc;
    if (rc == FC_EUNSUPPORTED && path && optional) { /* another program's file, of the same name */
        why = fc_arena_printf(checkpoint->arena, "%s beside it is not read: %s", name, err->message);
        rc = why ? FC_OK : no_memory(checkpoint, err);
    }
    rc = rc == FC_OK ? fc_note_beside(checkpoint, directory, err) : rc;
    checkpoint->note = why ? why : checkpoint->note;
    return rc;
}

void fc_pt_close_beside_dcp(fc_checkpoint *checkpoint) {
    fc_format_dcp.close(checkpoint);
}

/* Whether a value is one of DCP's: only that has a state, and the torch.save file is the last. */
static bool is_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    return checkpoint->state && (tensor->nchunks == 0 || tensor->chunks[0].file + 1 < checkpoint->nfiles);
}

fc_code fc_pt_extent_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                                fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.extent(checkpoint, tensor, index, out, err)
                                      : fc_pt_extent(checkpoint, tensor, index, out, err);
}

fc_code fc_pt_object_json_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                     const char **json, fc_error *err) {
    return is_dcp(checkpoint, object) ? fc_format_dcp.object_json(checkpoint, object, arena, json, err)
                                      : fc_pt_object_json(checkpoint, object, arena, json, err);
}

fc_code fc_pt_digest_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                                fc_error *err) {
    return is_dcp(checkpoint, tensor) ? fc_format_dcp.digest(checkpoint, tensor, index, out, err)
                                      : fc_pt_digest(checkpoint, tensor, index, out, err);
}

fc_code fc_pt_verify_beside_dcp(const fc_checkpoint *checkpoint, struct fc_findings *findings,
                                struct fc_verify_report *report, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; i < checkpoint->ntensors && rc == FC_OK; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        rc = t->object && is_dcp(checkpoint, t) ? fc_dcp_verify_object(checkpoint, t, findings, report, err) : FC_OK;
    }
    return rc;
}

fc_code fc_pt_verify_chunk_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index,
                                      fc_extent *extent, fc_digest *digest, struct fc_findings *findings,
                                      fc_error *err) {
    if (is_dcp(checkpoint, tensor)) {
        return fc_format_dcp.verify_chunk(checkpoint, tensor, index, extent, digest, findings, err);
    }
    fc_code rc = fc_checkpoint_extent(checkpoint, tensor, index, extent, err);
    return rc == FC_OK ? fc_checkpoint_digest(checkpoint, tensor, index, digest, err) : rc;
}

fc_code fc_pt_check_object_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    return is_dcp(checkpoint, object) ? fc_format_dcp.check_object(checkpoint, object, err) : FC_OK;
}
