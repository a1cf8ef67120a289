/*
 * The library's hints and settings as options of the command.
 */
#pragma once

#include "fsdpckpt/check.h"
#include "fsdpckpt/error.h"

#include <stddef.h>

/** Writes what the user can do about `err` into `buf`: "; --exclude 'step' leaves it out", or "". @return `buf`. */
const char *hint_text(const fc_error *err, char *buf, size_t size);

/** The option of each setting: fc_check_options.setting_names. */
extern const char *const hint_settings[FC_SETTING_COUNT];
