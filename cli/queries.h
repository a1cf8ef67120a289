/*
 * Hides the queries of URLs on the command line.
 */
#pragma once

#include "fsdpckpt/error.h"

/** Replaces each argument that is a URL with a query, or an option with one, by a name that does not show the query. So
 * no message, report or file can show it, and neither can a list of processes. The new arguments are never freed. */
fc_code queries_hide(int argc, char **argv, fc_error *err);
