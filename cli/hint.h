/*
 * The library's hints as options of the command.
 */
#ifndef HINT_H
#define HINT_H

#include "fsdpckpt/error.h"

#include <stddef.h>

/** Writes what the user can do about `err` into `buf`: "; --exclude 'step' leaves it out", or "". @return `buf`. */
const char *hint_text(const fc_error *err, char *buf, size_t size);

#endif
