/*
 * What a conversion that can be resumed converts, and how: a list of texts. A later run may go on with it only if all
 * of them are the same.
 */
#pragma once

#include "base/grow.h"
#include "fsdpckpt/move.h"

/** Lists them, each with its final NUL. @param path of the target. @param out free out->data also after a failure. */
fc_code fc_resume_identify(const fc_target *target, const char *path, const fc_convert_options *options, fc_notes *out,
                           fc_error *err);

/**
 * Compares the texts of the run that began the conversion with those of this one.
 * @param folder the staging directory, for the message.
 * @return FC_ECORRUPT if a file of the source was changed, FC_EUSAGE if something else differs.
 */
fc_code fc_resume_compare(const char *begun, size_t size, const fc_notes *now, const char *folder, fc_error *err);
