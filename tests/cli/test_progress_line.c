/*
 * The text of progress lines, with a simulated clock. No line may be wider than the terminal.
 */
#include "output/progress_line.h"
#include "output/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static char line[PROGRESS_LINE_MAX];

static progress_meter meter_at(fc_phase phase, fc_counted unit, uint64_t done, uint64_t total, double rate) {
    return (progress_meter){.state = {.phase = phase, .unit = unit, .done = done, .total = total, .number = 2},
                            .began = 0,
                            .now = 10,
                            .rate = rate};
}

static const char *on_terminal(const progress_meter *meter, unsigned width, bool utf8, bool color) {
    const progress_style style = {.width = width, .utf8 = utf8, .color = color};
    size_t n = progress_line_terminal(meter, &style, line);
    assert_int_equal(n, strlen(line));
    return line;
}

/* The width on the screen: UTF-8 characters, not counting the sequences that set colours. */
static size_t columns_of(const char *s) {
    char plain[PROGRESS_LINE_MAX];
    size_t n = 0;
    while (*s) {
        if (*s == '\x1b') {
            s += strcspn(s, "m") + 1;
        } else {
            plain[n++] = *s == '#' ? '-' : *s; /* the bar is not a name, in which "##" is escaped */
            s++;
        }
    }
    plain[n] = '\0';
    return text_name_width(plain);
}

static void line_has_rate_and_remaining_time(void **state) {
    (void)state;
    progress_meter m = meter_at(FC_PHASE_COPYING, FC_COUNTED_BYTES, 500000000, 2000000000, 100000000);
    assert_string_equal(on_terminal(&m, 79, false, false),
                        "copying #######----------------------  25% 500 MB of 2.00 GB 100 MB/s 0:15 left");
    assert_string_equal(on_terminal(&m, 19, false, false), "copying 25%");
    assert_string_equal(on_terminal(&m, 24, false, false), "copying 25% 0:15 left");
    m = meter_at(FC_PHASE_OPENING, FC_COUNTED_FILES, 1234, 0, 100);
    assert_string_equal(on_terminal(&m, 79, false, false), "opening 1,234 files 100/s 0:10 so far");
    m = meter_at(FC_PHASE_OPENING, FC_COUNTED_FILES, 0, 0, 0);
    assert_string_equal(on_terminal(&m, 79, false, false), "opening 0:10 so far");
}

static void the_bar_takes_one_column_a_character(void **state) {
    (void)state;
    const progress_meter m = meter_at(FC_PHASE_SYNCING, FC_COUNTED_FILES, 5, 10, 0);
    assert_string_equal(on_terminal(&m, 55, true, false), "syncing ━━━━━━━━────────  50% 5 of 10 files 0:10 so far");
    assert_string_equal(on_terminal(&m, 40, true, true), "\x1b[1msyncing\x1b[0m 50% 5 of 10 files 0:10 so far");
}

static void no_line_is_wider_than_the_terminal(void **state) {
    (void)state;
    static const uint64_t numbers[] = {0, 1, 999, 123456, 999499999999, UINT64_MAX};
    static const double rates[] = {0, 0.5, 1e3, 1e12, 1e19};
    enum { NUMBERS = sizeof numbers / sizeof *numbers, RATES = sizeof rates / sizeof *rates };
    for (int phase = 0; phase < FC_PHASE_COUNT; phase++) {
        for (int i = 0; i < NUMBERS * NUMBERS * RATES * FC_COUNTED_COUNT; i++) {
            const progress_meter m = meter_at(
                (fc_phase)phase, (fc_counted)(i % FC_COUNTED_COUNT), numbers[i / FC_COUNTED_COUNT % NUMBERS],
                numbers[i / FC_COUNTED_COUNT / NUMBERS % NUMBERS], rates[i / FC_COUNTED_COUNT / NUMBERS / NUMBERS]);
            for (unsigned width = 0; width < 130; width += width < 50 ? 1 : 13) {
                assert_true(columns_of(on_terminal(&m, width, i % 2, true)) <= width);
                assert_true(width == 0 || columns_of(line) > 0);
            }
            assert_true(progress_line_log(&m, line) < PROGRESS_LINE_MAX);
            assert_true(progress_line_json(&m, line) < PROGRESS_LINE_MAX);
        }
    }
}

static void only_a_finished_job_shows_100_percent(void **state) {
    (void)state;
    progress_meter m = meter_at(FC_PHASE_COPYING, FC_COUNTED_BYTES, 9999, 10000, 0);
    assert_non_null(strstr(on_terminal(&m, 79, false, false), " 99% "));
    m.state.done = 10001; /* the total is an estimate and may be too small */
    assert_non_null(strstr(on_terminal(&m, 79, false, false), " 100% 10.0 kB of 10.0 kB "));
}

static void log_lines(void **state) {
    (void)state;
    progress_meter m = meter_at(FC_PHASE_COPYING, FC_COUNTED_BYTES, 0, 2000000000, 0);
    progress_line_log(&m, line);
    assert_string_equal(line, "fsdpckpt: copying 2.00 GB\n");
    m = meter_at(FC_PHASE_COPYING, FC_COUNTED_BYTES, 500000000, 2000000000, 100000000);
    progress_line_log(&m, line);
    assert_string_equal(line, "fsdpckpt: copying 25%, 500 MB of 2.00 GB, 100 MB/s, 0:15 left\n");
    m = meter_at(FC_PHASE_SYNCING, FC_COUNTED_FILES, 0, 1, 0);
    progress_line_log(&m, line);
    assert_string_equal(line, "fsdpckpt: syncing 1 file\n");
    m = meter_at(FC_PHASE_CHECKING, FC_COUNTED_BYTES, 0, 0, 0);
    progress_line_log(&m, line);
    assert_string_equal(line, "fsdpckpt: checking\n");
}

static void the_rate_is_smoothed(void **state) {
    (void)state;
    progress_meter m = {.rate = 0};
    fc_progress_state s = {.phase = FC_PHASE_COPYING, .total = 1000, .number = 2};
    progress_meter_see(&m, &s, 5);
    assert_true(m.rate == 0 && m.began == 5 && progress_meter_left(&m) < 0);
    s.done = 100;
    progress_meter_see(&m, &s, 6);
    assert_true(m.rate == 100 && progress_meter_left(&m) == 9);
    progress_meter_see(&m, &s, 7); /* a stall */
    assert_true(m.rate < 100 && m.rate > 50);
    progress_meter_see(&m, &s, 7); /* no time has passed */
    assert_true(m.rate < 100 && m.rate > 50);
    s = (fc_progress_state){.phase = FC_PHASE_SYNCING, .unit = FC_COUNTED_FILES, .total = 3, .number = 4};
    progress_meter_see(&m, &s, 8); /* a new phase counts files, so the rate in bytes is dropped */
    assert_true(m.rate == 0 && m.began == 8);
}

static size_t lines_within(progress_kind kind, double seconds) {
    size_t count = 0;
    double last = -1;
    for (int i = 0; i < (int)(seconds * 10); i++) {
        double now = i / 10.0;
        if (progress_line_is_due(kind, now, last)) {
            last = now;
            count++;
        }
    }
    return count;
}

static void lines_come_at_the_chosen_interval(void **state) {
    (void)state;
    assert_int_equal(lines_within(PROGRESS_KIND_TERMINAL, 1), 0);
    assert_int_equal(lines_within(PROGRESS_KIND_TERMINAL, 2), 10);
    assert_int_equal(lines_within(PROGRESS_KIND_JSON, 10), 10);
    assert_int_equal(lines_within(PROGRESS_KIND_LOG, 2), 0);
    assert_int_equal(lines_within(PROGRESS_KIND_LOG, 10), 4);
    assert_in_range(lines_within(PROGRESS_KIND_LOG, 10 * 3600), 30, 45);
    assert_int_equal(lines_within(PROGRESS_KIND_LONG_LOG, 60), 0);
    assert_int_equal(lines_within(PROGRESS_KIND_LONG_LOG, 241), 4);
    assert_in_range(lines_within(PROGRESS_KIND_LONG_LOG, 10 * 3600), 20, 30);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(line_has_rate_and_remaining_time),
        cmocka_unit_test(the_bar_takes_one_column_a_character),
        cmocka_unit_test(no_line_is_wider_than_the_terminal),
        cmocka_unit_test(only_a_finished_job_shows_100_percent),
        cmocka_unit_test(log_lines),
        cmocka_unit_test(the_rate_is_smoothed),
        cmocka_unit_test(lines_come_at_the_chosen_interval),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
