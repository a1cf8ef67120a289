/*
 * Writes target files from a source in the memory of several ranks. Each rank writes what it holds, in whichever file
 * that belongs, so the ranks exchange no data.
 */
#pragma once

#include "move/write_files.h"

/**
 * Chooses one of the ranks that hold each chunk of the source (fc_conversion.movers). Collective.
 * @return FC_EUSAGE with the name of a tensor with a chunk that no rank holds.
 */
fc_code fc_held_choose(fc_conversion *m, fc_error *err);

/** Moves what this rank was chosen for into the file: fc_conversion.move_file. The CRCs of the items are then those
 * with zeros in place of what other ranks move. */
fc_code fc_held_move_file(const fc_conversion *m, const fc_target_file *file, fc_error *err);
