/*
 * The functions of the Python package that run commands, generated from the same tables as the help and the man pages.
 */
#pragma once

#include "output/text.h"

/** Writes fsdpckpt/_commands.py: one function per command, with its options as keyword arguments. */
void python_api(text_out *out);
