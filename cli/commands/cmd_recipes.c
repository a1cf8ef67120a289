/*
 * recipes: lists the shipped recipes, prints one, or finds one.
 */
#include "commands/recipes_infer.h"
#include "options/command.h"
#include "output/text.h"

#include "fsdpckpt/recipe.h"
#include "fsdpckpt/try.h"

#include <string.h>

static fc_code list_recipes(cli_call *call, fc_error *err) {
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        const fc_recipe *recipe = NULL;
        FC_TRY(fc_recipe_load(s->name, NULL, call->arena, &recipe, err));
        text_printf(call->out, "%-24s %s\n", s->name, fc_recipe_description(recipe));
    }
    return FC_OK;
}

static fc_code run_recipes(cli_call *call, fc_error *err) {
    const options *o = call->options;
    if (o->infer) {
        return recipes_infer(call, err);
    }
    FC_TRY(recipes_check_options(o, err));
    if (o->noperands == 0) {
        return list_recipes(call, err);
    }
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        if (strcmp(s->name, o->operands[0]) == 0) {
            text_puts(call->out, s->text);
            return FC_OK;
        }
    }
    return fc_fail(err, FC_EUSAGE, "recipes: there is no shipped recipe '%s'; 'fsdpckpt recipes' lists them",
                   o->operands[0]);
}

static const char *const examples[] = {
    "fsdpckpt recipes",
    "the names of the shipped recipes, and what each is for",
    "fsdpckpt recipes torchtitan-llama3 > mine.json",
    "a copy to change, for --recipe mine.json",
    "fsdpckpt recipes --infer step-1000/ Llama-3.1-8B/ -o mine.json",
    "the recipe that turns one checkpoint into another one of the same weights",
    "fsdpckpt recipes --infer step-1000/ --config config.json -o mine.json",
    "a proposal from the names alone",
    NULL,
};

static const option_help helps[] = {
    {OPT_OUTPUT,
     "write the recipe to the file DST, which must not exist unless --force is given; - is standard output, "
     "the default"},
    {OPT_CONFIG,
     "config.json of the model, or its folder, whose names --infer gives to sizes (default: the one next to "
     "B or A)"},
    {OPT_MODEL_ONLY, "with --infer, take only the parameters and buffers of the model from A and B"},
    {.help = NULL},
};

const command command_recipes = {
    .name = "recipes",
    .operands = "[NAME|A [B]]",
    .summary = "list the shipped recipes, print one, or find one",
    .description =
        "A recipe describes the names and tensor layouts of one program as those of another one, such as "
        "torchtitan and transformers. Most commands apply it with --recipe, in either direction. "
        "docs/RECIPES.md describes the language.\n\nWith --infer, two checkpoints of the same weights are read, "
        "and the recipe that turns A into B is written to standard output or to -o. It has one rule for all "
        "layers and experts, and names of config.json as sizes if that file is next to B or A. It is applied "
        "to A, and the result is compared with B. The exit status is 1 if something is left that the recipe "
        "does not explain, which is listed with the nearest tensor of the other side.\n\nWithout B, a recipe is "
        "proposed from the names and shapes of A, with the rules of the shipped recipes. It is not proven. The exit "
        "status is 1 if no rule takes some of the tensors, which are listed.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES(OPT_INFER) | TAKES(OPT_OUTPUT) | TAKES(OPT_FORCE) | TAKES(OPT_CONFIG) |
             TAKES(OPT_MODEL_ONLY) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES_EXTERNAL,
    .usual = TAKES(OPT_INFER) | TAKES(OPT_OUTPUT) | TAKES(OPT_CONFIG) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_QUIET),
    .run = run_recipes,
};
