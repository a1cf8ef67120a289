/*
 * Shell completions, generated from the tables of commands and options at build time.
 */
#pragma once

#include "output/text.h"

void completions_bash(text_out *out);
void completions_zsh(text_out *out);
void completions_fish(text_out *out);
