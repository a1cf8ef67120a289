/*
 * A view: an HDF5 file whose datasets are the bytes of another checkpoint, of any format, with nothing copied.
 */
#ifndef FSDPCKPT_VIEW_H
#define FSDPCKPT_VIEW_H

#include "fsdpckpt/select.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_view_options {
    fc_selection selection; /**< include, exclude and strip_prefix; nothing else */
    bool force;             /**< replace an existing target */
    fc_teller teller;       /**< is told what is done about runs that died */
} fc_view_options;

/** What a view consists of. */
typedef struct fc_view_report {
    fc_selected selected;
    uint64_t viewed_bytes; /**< of the source's files */
    uint64_t copied_bytes; /**< of objects, and of small tensors that cannot be viewed */
    size_t external;       /**< tensors that are one external dataset */
    size_t assembled;      /**< tensors that are virtual, over `pieces` external datasets */
    size_t pieces;
    size_t copied; /**< tensors */
} fc_view_report;

/**
 * Writes the view `target` of `source`. Names in it are relative to its directory, so that both can be moved together;
 * a reader sets HDF5_EXTFILE_PREFIX='${ORIGIN}'. Tensors whose bytes are not the elements (compressed, of the other
 * byte order, …) are copied when they are small (64 KiB).
 * @return FC_EUNSUPPORTED naming the tensors that cannot be viewed, with the reason.
 */
fc_code fc_view(const fc_checkpoint *source, const char *target, const fc_view_options *options, fc_view_report *report,
                fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
