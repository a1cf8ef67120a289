/*
 * What the files that find a recipe share: the tensors of both sides with their sums, the things that are matched, the
 * classes of matches that become rules, and the search for the operations of a rule.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/infer.h"
#include "recipe/recipe.h"

enum {
    FC_SEARCH_TYPES = 4, /**< dtypes of B in which sums are computed */
    FC_SEARCH_SLOTS = 6, /**< numbers in a name */
    FC_SEARCH_PARTS = 4, /**< tensors that are joined, but for those that a variable numbers */
    FC_SEARCH_INNER = 2  /**< variables that number tensors that are joined */
};

/** A tensor, or all tensors whose names differ in one or two numbers. */
typedef struct fc_thing {
    const fc_tensor *tensor; /**< the tensor; of several, the first */
    const char *skeleton;    /**< the name with '\1' for each number, '\2' for one that counts its tensors */
    uint64_t numbers[FC_SEARCH_SLOTS];
    int nslots;
    int inner[FC_SEARCH_INNER]; /**< the slots that count its tensors */
    int ninner;
    int64_t counts[FC_SEARCH_INNER];
    uint64_t elements;
    uint64_t sums[FC_SEARCH_TYPES]; /**< of its elements in each of fc_search.types */
    unsigned known;                 /**< bits: which of them */
    bool done;                      /**< belongs to a match */
    size_t first, number;           /**< of the tensors that it has: fc_side.order */
    size_t next;                    /**< used by match.c */
} fc_thing;

typedef struct fc_side {
    const fc_checkpoint *checkpoint;
    const fc_tensor **tensors; /**< without objects and empty tensors */
    size_t count;
    uint64_t (*sums)[FC_SEARCH_TYPES];
    unsigned *known;
    uint64_t *digests;       /**< CRC-64 of values of `checkpoint`, by their index; see `digested` */
    unsigned char *digested; /**< by the same index; 0: the digest is unknown */
    bool *taken;             /**< per tensor: it is matched or dropped */
    fc_thing *things;        /**< first those of single tensors, in the order of `tensors` */
    size_t nthings, capacity;
    size_t *order; /**< the tensors of things */
    size_t norder, order_capacity;
} fc_side;

/** One tensor of one side and what it is equal to on the other one. */
typedef struct fc_match {
    bool reverse; /**< `one` is of B */
    const fc_thing *one;
    const fc_thing *many[FC_SEARCH_PARTS];
    int nmany;
    bool guess;
} fc_match;

typedef struct fc_search {
    fc_side a, b;
    fc_dtype types[FC_SEARCH_TYPES];
    int ntypes;
    fc_match *matches; /**< in the arena */
    size_t nmatches, match_capacity;
    fc_recipe recipe; /**< with sizes and configuration; its rules are the result */
    fc_recipe_size *sizes;
    size_t size_capacity, rule_capacity;
    const char **notes; /**< one per rule; NULL: none */
    size_t note_capacity;
    fc_checkpoint *source; /**< a.checkpoint */
    fc_name_table *b_names;
    fc_work_options work;
    const char **dropped, **guesses;
    size_t ndropped, nguesses, dropped_capacity, guess_capacity;
    uint64_t same; /**< elements of B's tensors that have the same values as some of A's */
    fc_arena *arena;
} fc_search;

/** Hashes of all elements, added up: equal for the same elements in any order. Zeros count nothing. A tensor that is
 * the only one with its digest on each side has the digest instead. */
fc_code fc_search_sums(fc_search *s, fc_error *err);

/** @return whether the digests say that a tensor of A and one of B are equal. */
bool fc_search_same_digest(const fc_search *s, const fc_tensor *a, const fc_tensor *b);

/** Makes the things of one side. */
fc_code fc_search_things(fc_search *s, fc_side *side, fc_error *err);

/** Makes the matches. */
fc_code fc_search_match(fc_search *s, fc_error *err);

/** Adds a match, whose things are done. */
fc_code fc_search_add_match(fc_search *s, const fc_match *match, fc_error *err);

/** Matches tensors that are equal to others of their side by their names. */
fc_code fc_search_match_equal(fc_search *s, fc_error *err);

/** Makes rules for tensors of a side that repeat another one. */
fc_code fc_search_ties(fc_search *s, fc_side *side, fc_error *err);

/** Compares two tensors of one checkpoint bit for bit. */
fc_code fc_search_same(const fc_checkpoint *checkpoint, const fc_tensor *a, const fc_tensor *b, bool *same,
                       fc_error *err);

/** @return how alike two names are; larger is more. */
long fc_search_likeness(const char *a, const char *b);

/** Makes rules of the matches, and finds their operations. */
fc_code fc_search_rules(fc_search *s, fc_error *err);

/** Adds a rule. @param guess why it is a guess, then it has `from` and `to`; NULL: it is none. */
fc_code fc_search_add_rule(fc_search *s, const fc_recipe_rule *rule, const char *guess, fc_error *err);

/** Sets report->unexplained to the tensors of B for which `explained` is false, and to those of A that no rule takes.
 */
fc_code fc_search_unexplained(const fc_search *s, const bool *explained, fc_infer_report *report, fc_error *err);

/** The shapes for which operations are sought: `one` tensor becomes `parts`, each once per inner number. */
typedef struct fc_puzzle {
    const fc_match *match; /**< the example */
    fc_recipe_rule rule;   /**< from A to B, with the patterns; the search sets operations and the order of parts */
    bool found;
    bool symmetric; /**< two axes have the same size, so the order before and after can be exchanged */
} fc_puzzle;

/** Finds the operations that make B's tensors of A's, bit for bit in all samples. */
fc_code fc_search_operations(fc_search *s, fc_puzzle *puzzle, fc_error *err);

/** Applies the rule to the tensors of the match, and compares samples of the result with B. Failures of the rule are
 * `*same` = false. */
fc_code fc_search_try(fc_search *s, const fc_puzzle *puzzle, bool *same, fc_error *err);

/* ---- sizes ---- */

/** Lists the sizes that a configuration may have. */
fc_code fc_search_sizes(fc_search *s, const char *config, fc_error *err);

/** @return the value of a size with a name, or 0. */
int64_t fc_search_size(const fc_search *s, const char *name);

/** @return the axis of `value` elements for a rearrangement: the first of `names` with that value (NULL-terminated), or
 * a size of its own; NULL: out of memory. */
const char *fc_search_axis(fc_search *s, int64_t value, const char *const *names);

/** @return an expression for a number; NULL: out of memory. */
const char *fc_search_expression(fc_search *s, int64_t value);

/** @return whether the condition or an operation of a rule has a size as a word. */
bool fc_search_mentions(const fc_recipe_rule *rule, const char *size);

/** Writes the recipe. @return NULL: out of memory. */
const char *fc_search_text(const fc_search *s);
