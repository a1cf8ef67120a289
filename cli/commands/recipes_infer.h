/*
 * recipes --infer: finds the recipe that turns one checkpoint into another one, or proposes one from names.
 */
#pragma once

#include "options/command.h"

/** Refuses the options of --infer without it. */
fc_code recipes_check_options(const options *o, fc_error *err);

/** Runs recipes --infer A B, or --infer A, which proposes a recipe from the names alone. */
fc_code recipes_infer(cli_call *call, fc_error *err);
