/*
 * Makes the manifest of one `.metadata`, in the stages of stages.h.
 */
#include "checkpoint/identity.h"
#include "dcp/dcp.h"
#include "dcp/packed.h"
#include "dcp/stages.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static fc_code set_producer(fc_dcp_builder *b, fc_pv version) {
    b->checkpoint->keeps_order = true;
    size_t n = 0;
    const char *text = fc_pv_typeof(version) == FC_PV_STR ? fc_pickle_bytes(b->p, version, &n) : "";
    if (n == 0 || strspn(text, "0123456789.abcdevrpost+-") != n) { /* only these characters are printed */
        b->checkpoint->producer = "torch.distributed.checkpoint";
        return FC_OK;
    }
    b->checkpoint->producer = fc_arena_printf(b->checkpoint->arena, "torch.distributed.checkpoint %.64s", text);
    return b->checkpoint->producer ? FC_OK : fc_no_memory(b->err, b->metadata_path);
}

static fc_code build_manifest(fc_dcp_builder *b, bool of_rank) {
    fc_pv root = b->p->root;
    FC_TRY(fc_dcp_check_class(b, NULL, root));
    if (!fc_pickle_is_object(b->p, root, FC_CLASS_METADATA)) {
        return fc_dcp_fail(b, FC_ECORRUPT, NULL,
                           "not the metadata of a checkpoint: the pickle contains something else");
    }
    FC_TRY(set_producer(b, fc_pickle_slot(b->p, root, FC_METADATA_VERSION)));
    FC_TRY(fc_dcp_build_tensors(b, root));
    FC_TRY(fc_dcp_place_chunks(b, fc_pickle_slot(b->p, root, FC_METADATA_STORAGE)));
    b->checkpoint->tensors = b->tensors;
    b->checkpoint->ntensors = b->ntensors;
    FC_TRY(fc_dcp_finish_files(b));
    FC_TRY(fc_dcp_measure_objects(b));
    FC_TRY(fc_dcp_move_misplaced(b));
    FC_TRY(fc_dcp_place_in_safetensors(b));
    if (of_rank) {
        return FC_OK; /* the ranks' metadata is compared first: all ranks must list a value in the same way */
    }
    FC_TRY(fc_dcp_refuse_classes(b));
    FC_TRY(fc_dcp_restore_flattened(b, root));
    return fc_dcp_open_items(b);
}

fc_code fc_dcp_load(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                    const char *metadata_path, bool of_rank, fc_error *err) {
    fc_pickle *pickle = NULL;
    fc_dcp_builder b = {.checkpoint = checkpoint, .options = options, .err = err};
    b.directory = directory;
    b.metadata_path = metadata_path;
    fc_code rc;
    FC_TRY_GOTO(fc_identities_add_header(checkpoint, metadata_path, options, err), rc, out);
    FC_TRY_GOTO(fc_dcp_load_metadata(metadata_path, &pickle, err), rc, out);
    b.p = pickle;
    rc = build_manifest(&b, of_rank);
out:
    fc_pickle_free(pickle);
    free(b.files);
    free(b.to_open);
    return rc;
}
