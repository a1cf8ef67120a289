/*
 * Views: HDF5 files whose datasets are the bytes in the files of another checkpoint of any format.
 */
#pragma once

#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

typedef struct fc_view_options {
    fc_selection selection; /**< include, exclude and strip_prefix; nothing else */
    bool force;             /**< replace an existing target */
    fc_reporter reporter;   /**< receives a line for each killed run that was cleaned up */
} fc_view_options;

/** What a view contains. */
typedef struct fc_view_report {
    fc_selected selected;
    uint64_t viewed_bytes; /**< bytes of tensors that stay in the files of the source */
    uint64_t copied_bytes; /**< bytes of objects, and of small tensors that cannot be viewed */
    size_t external;       /**< number of tensors that are one external dataset */
    size_t assembled;      /**< number of tensors that are virtual datasets over several external ones */
    size_t pieces;         /**< number of external datasets that these are made of, in the group %pieces */
    size_t copied;         /**< number of tensors that were copied */
} fc_view_report;

/**
 * Writes the view `target` of `source`. File names in it are relative to its directory, so both can be moved together;
 * a program that reads it must set HDF5_EXTFILE_PREFIX='${ORIGIN}'. Tensors that are not stored as plain elements (e.g.
 * compressed, or in the other byte order) are copied if they have at most 64 KiB.
 * @return FC_EUNSUPPORTED with the larger tensors that cannot be viewed, and the reason.
 */
fc_code fc_view(const fc_checkpoint *source, const char *target, const fc_view_options *options, fc_view_report *report,
                fc_error *err);

FC_END_DECLS
