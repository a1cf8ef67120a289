/*
 * Shell completions, generated from the tables of commands and options at build time.
 */
#ifndef FSDPCKPT_CLI_OPTIONS_COMPLETIONS_H
#define FSDPCKPT_CLI_OPTIONS_COMPLETIONS_H

#include "output/text.h"

void completions_bash(text_out *out);
void completions_zsh(text_out *out);
void completions_fish(text_out *out);

#endif
