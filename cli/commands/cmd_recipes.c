/*
 * recipes: lists the shipped recipes, or prints one.
 */
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
    NULL,
};

const command command_recipes = {
    .name = "recipes",
    .operands = "[NAME]",
    .summary = "list the shipped recipes, or print one",
    .description = "A recipe describes the names and tensor layouts of one program as those of another one, such as "
                   "torchtitan and transformers. Most commands apply it with --recipe, in either direction. "
                   "docs/RECIPES.md describes the language.",
    .examples = examples,
    .takes = TAKES_COMMON,
    .usual = TAKES(OPT_QUIET),
    .run = run_recipes,
};
