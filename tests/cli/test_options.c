/*
 * The option table and its parser.
 */
#include "options/command.h"
#include "options/options.h"
#include "options/suggest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const option_set all = TAKES(OPT_COUNT) - 1;

/* Parses words separated by single blanks; "''" stands for an empty one. */
static fc_code parse(const char *line, option_set takes, options *o, fc_error *err) {
    static char text[512];
    char *argv[32];
    int argc = 0;
    strcpy(text, line);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        argv[argc++] = strcmp(word, "''") == 0 ? word + 2 : word;
    }
    return options_parse(argc, argv, "reshard", takes, o, err);
}

static void table_is_complete(void **state) {
    (void)state;
    for (int id = 0; id < OPT_COUNT; id++) {
        const option_row *row = &option_table[id];
        assert_non_null(row->name);
        assert_non_null(row->help);
        assert_int_equal(option_find(row->name, strlen(row->name)), id);
        assert_int_equal(row->arg != NULL, row->kind != KIND_FLAG && row->kind != KIND_COUNT);
        for (int other = 0; row->letter && other < id; other++) {
            assert_int_not_equal(option_table[other].letter, row->letter);
        }
    }
    for (const command *const *c = command_table; *c; c++) {
        assert_int_equal((*c)->needs & ~(*c)->takes, 0);
        assert_int_equal(TAKES_COMMON & ~(*c)->takes, 0);
        assert_ptr_equal(command_find((*c)->name), *c);
    }
}

static void options_may_be_written_in_several_ways(void **state) {
    (void)state;
    options o;
    fc_error err;
    assert_int_equal(
        parse("a --dp=3 --tp 4 -j5 -o out -qvv --include x --include=y --memory 3M b -- --c -", all, &o, &err), FC_OK);
    assert_int_equal(o.dp, 3);
    assert_int_equal(o.tp, 4);
    assert_int_equal(o.jobs, 5);
    assert_string_equal(o.output, "out");
    assert_true(o.quiet);
    assert_int_equal(o.verbose, 2);
    assert_int_equal(o.include.count, 2);
    assert_string_equal(o.include.items[1], "y");
    assert_null(o.include.items[2]);
    assert_null(o.exclude.items);
    assert_true(o.memory == 3 << 20);
    assert_int_equal(o.noperands, 4);
    assert_string_equal(o.operands[2], "--c");
    assert_string_equal(o.operands[3], "-");
    assert_true(option_given(&o, OPT_DP));
    assert_false(option_given(&o, OPT_REPLICAS));
    options_free(&o);
}

static void values_are_checked(void **state) {
    (void)state;
    static const char *const bad[] = {"--dp 0",
                                      "--dp -1",
                                      "--dp +1",
                                      "--dp 1x",
                                      "--dp ''",
                                      "--dp 1048577",
                                      "--dp 1e3",
                                      "--dp 18446744073709551617",
                                      "--max-shard-size 0",
                                      "--max-shard-size 5GiBs",
                                      "--max-shard-size 17179869184GiB",
                                      "--memory 2",
                                      "--memory 999999",
                                      "--memory 0",
                                      "--memory M",
                                      "--memory 64Q",
                                      "--memory 17179869184G",
                                      "--memory 1.5G",
                                      "--memory -1",
                                      "--progress maybe",
                                      "--dtype int",
                                      "--dtype i64",
                                      "--dtype bool",
                                      "-o ''",
                                      "--dp",
                                      "-j",
                                      "--json=yes",
                                      "--force=",
                                      "--",
                                      "--dtype"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        options o;
        fc_error err = {FC_OK, ""};
        fc_code rc = parse(bad[i], all, &o, &err);
        if (strcmp(bad[i], "--") == 0) {
            assert_int_equal(rc, FC_OK);
        } else {
            assert_int_equal(rc, FC_EUSAGE);
            assert_true(err.message[0]);
        }
        options_free(&o);
    }
}

static void sizes_have_units(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"--memory 17B", 17},      {"--memory 2k", 2048},    {"--memory 1000000", 1000000},     {"--memory 2KiB", 2048},
        {"--memory 5MB", 5 << 20}, {"--memory=1g", 1 << 30}, {"--memory 2T", UINT64_C(2) << 40}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        options o;
        fc_error err;
        assert_int_equal(parse(good[i].text, all, &o, &err), FC_OK);
        assert_true(o.memory == good[i].bytes);
        options_free(&o);
    }
}

/* As in Hugging Face's libraries, a GB is 10^9 bytes. */
static void shard_sizes_are_decimal(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"--max-shard-size 17B", 17},
                {"--max-shard-size 999999", 0},
                {"--max-shard-size 1000000", 1000000},
                {"--max-shard-size 5b", 0},
                {"--max-shard-size 5BB", 0},
                {"--max-shard-size 5BiB", 0},
                {"--max-shard-size B", 0},
                {"--max-shard-size 5GB", UINT64_C(5000000000)},
                {"--max-shard-size 5G", UINT64_C(5000000000)},
                {"--max-shard-size=2kb", 0},
                {"--max-shard-size 2kB", 2000},
                {"--max-shard-size 3MiB", 3 << 20},
                {"--max-shard-size 1T", UINT64_C(1000000000000)}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        options o;
        fc_error err;
        fc_code rc = parse(good[i].text, all, &o, &err);
        assert_int_equal(rc, good[i].bytes ? FC_OK : FC_EUSAGE);
        assert_true(rc != FC_OK || o.max_shard_size == good[i].bytes);
        options_free(&o);
    }
}

static void dtypes_have_two_names(void **state) {
    (void)state;
    options o;
    fc_error err;
    assert_int_equal(parse("--dtype bf16", all, &o, &err), FC_OK);
    assert_int_equal(o.dtype, FC_BF16);
    options_free(&o);
    assert_int_equal(parse("--dtype=float8_e5m2", all, &o, &err), FC_OK);
    assert_int_equal(o.dtype, FC_F8_E5M2);
    options_free(&o);
    assert_int_equal(parse("--dtype torch.float16", all, &o, &err), FC_OK);
    assert_int_equal(o.dtype, FC_F16);
    options_free(&o);
}

static void mistakes_are_explained(void **state) {
    (void)state;
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"--forse", "unknown option '--forse'; did you mean '--force'?"},
        {"--ouptut=x", "unknown option '--ouptut'; did you mean '--output'?"},
        {"--replica 3", "unknown option '--replica'; did you mean '--replicas'?"},
        {"--zzzzzz", "unknown option '--zzzzzz'; see 'fsdpckpt reshard --help'"},
        {"-x", "unknown option '-x'; see 'fsdpckpt reshard --help'"},
        {"-qx", "unknown option '-x'; see 'fsdpckpt reshard --help'"},
        {"--tree", "reshard does not take --tree, which is for inspect; see 'fsdpckpt reshard --help'"},
        {"--output", "--output needs an argument: --output DST"},
        {"--json=1", "--json takes no argument"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        options o;
        fc_error err;
        assert_int_equal(parse(cases[i].line, all & ~TAKES(OPT_TREE), &o, &err), FC_EUSAGE);
        assert_string_equal(err.message, cases[i].message);
        options_free(&o);
    }
}

static void help_wins_over_mistakes_after_it(void **state) {
    (void)state;
    options o;
    fc_error err;
    assert_int_equal(parse("--help --zzz", all, &o, &err), FC_OK);
    assert_true(o.help);
    options_free(&o);
}

static size_t distance(const char *a, const char *b, size_t limit) {
    return suggest_distance(a, strlen(a), b, strlen(b), limit);
}

static void edit_distances(void **state) {
    (void)state;
    assert_int_equal(distance("force", "force", 3), 0);
    assert_int_equal(distance("forse", "force", 3), 1);
    assert_int_equal(distance("froce", "force", 3), 1); /* a swap counts as one edit */
    assert_int_equal(distance("orce", "force", 3), 1);
    assert_int_equal(distance("", "abc", 3), 3);
    assert_int_equal(distance("abcdef", "uvwxyz", 3), 4);
    assert_int_equal(distance("a", "abcdef", 3), 4);
    char far[1000];
    memset(far, 'x', sizeof far);
    assert_int_equal(suggest_distance(far, sizeof far, far, sizeof far, 3), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table_is_complete),       cmocka_unit_test(options_may_be_written_in_several_ways),
        cmocka_unit_test(values_are_checked),      cmocka_unit_test(sizes_have_units),
        cmocka_unit_test(shard_sizes_are_decimal), cmocka_unit_test(dtypes_have_two_names),
        cmocka_unit_test(mistakes_are_explained),  cmocka_unit_test(help_wins_over_mistakes_after_it),
        cmocka_unit_test(edit_distances),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
