/*
 * Rates, bars and lines: see progress_line.h.
 */
#include "output/progress_line.h"

#include "output/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PROGRESS_JSON_SCHEMA = 1, BAR_LEAST = 8, BAR_MOST = 40, PARTS = 5, PART_MAX = 96 };

/* ---- the meter ---- */

void progress_meter_see(progress_meter *meter, const fc_progress_state *state, double now) {
    static const double smoothing = 2; /* seconds: steady enough to read, quick enough to show a stall */
    double elapsed = now - meter->now;
    if (state->number != meter->state.number) {
        *meter = (progress_meter){.state = *state, .began = now, .now = now};
        return;
    }
    if (elapsed <= 0) {
        meter->state = *state;
        return;
    }
    double recent = state->done > meter->state.done ? (double)(state->done - meter->state.done) / elapsed : 0;
    meter->rate = meter->rate > 0 ? meter->rate + (recent - meter->rate) * elapsed / (elapsed + smoothing) : recent;
    meter->state = *state;
    meter->now = now;
}

static uint64_t done_of(const fc_progress_state *s) {
    return s->total > 0 && s->done > s->total ? s->total : s->done;
}

static double fraction_done(const fc_progress_state *s) {
    return s->total > 0 ? (double)done_of(s) / (double)s->total : 0;
}

double progress_meter_left(const progress_meter *meter) {
    const fc_progress_state *s = &meter->state;
    return s->total > 0 && meter->rate > 0 ? (double)(s->total - done_of(s)) / meter->rate : -1;
}

/* ---- parts of a line ---- */

/* "1:02:03" or "4:05", of at most 99 days. */
static void format_time(char *to, double seconds, const char *what) {
    unsigned long s = seconds < 0 ? 0 : seconds > 99 * 86400.0 ? 99UL * 86400 : (unsigned long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(to, PART_MAX, "%lu:%02lu:%02lu %s", s / 3600, s / 60 % 60, s % 60, what);
    } else {
        snprintf(to, PART_MAX, "%lu:%02lu %s", s / 60, s % 60, what);
    }
}

static const char *amount_text(char *buf, fc_counted unit, uint64_t n) {
    return unit == FC_COUNTED_BYTES ? text_bytes(buf, n) : text_count(buf, n);
}

static const char *noun_of(fc_counted unit, uint64_t n) {
    return unit == FC_COUNTED_BYTES   ? ""
           : unit == FC_COUNTED_FILES ? (n == 1 ? " file" : " files")
                                      : (n == 1 ? " tensor" : " tensors");
}

static void format_amounts(char *to, const fc_progress_state *s) {
    char done[TEXT_SIZE_MAX], total[TEXT_SIZE_MAX];
    const char *noun = noun_of(s->unit, s->total > 0 ? s->total : s->done);
    if (s->total > 0) {
        snprintf(to, PART_MAX, "%s of %s%s", amount_text(done, s->unit, done_of(s)),
                 amount_text(total, s->unit, s->total), noun);
    } else if (s->done > 0) {
        snprintf(to, PART_MAX, "%s%s", amount_text(done, s->unit, s->done), noun);
    }
}

static void format_rate(char *to, const progress_meter *meter) {
    char rate[TEXT_SIZE_MAX];
    if (meter->rate >= 1) {
        snprintf(to, PART_MAX, "%s/s", amount_text(rate, meter->state.unit, (uint64_t)meter->rate));
    }
}

static void format_left(char *to, const progress_meter *meter) {
    double left = progress_meter_left(meter), elapsed = meter->now - meter->began;
    format_time(to, left >= 0 ? left : elapsed, left >= 0 ? "left" : "so far");
}

/* Rounds down, so that 100% means that everything is done. */
static unsigned percent_done(const fc_progress_state *s) {
    return (unsigned)(fraction_done(s) * 100);
}

/* ---- for a terminal ---- */

/* A line to which parts are added while they fit. All parts except the bar are ASCII, one byte per column. */
typedef struct line {
    char *to;
    size_t bytes, columns, width;
} line;

static void put_text(line *l, const char *s, size_t columns) {
    size_t n = strlen(s);
    if (l->bytes + n < PROGRESS_LINE_MAX) {
        memcpy(l->to + l->bytes, s, n + 1);
        l->bytes += n;
        l->columns += columns;
    }
}

static void put_bar(line *l, const fc_progress_state *s, const progress_style *style, size_t columns) {
    size_t full = (size_t)(fraction_done(s) * (double)columns);
    put_text(l, style->color ? "\x1b[32m" : "", 0);
    for (size_t i = 0; i < columns; i++) {
        if (i == full) {
            put_text(l, style->color ? "\x1b[0;2m" : "", 0);
        }
        put_text(l, i < full ? (style->utf8 ? "━" : "#") : style->utf8 ? "─" : "-", 1);
    }
    put_text(l, style->color ? "\x1b[0m" : "", 0);
}

size_t progress_line_terminal(const progress_meter *meter, const progress_style *style, char *text) {
    const fc_progress_state *s = &meter->state;
    /* The parts in the order of the line. `matters` ranks them: in a narrow window the last ones are dropped. */
    enum { PERCENT, AMOUNTS, RATE, LEFT, SHOWN };
    static const int matters[SHOWN] = {PERCENT, LEFT, AMOUNTS, RATE};
    char parts[SHOWN][PART_MAX] = {"", "", "", ""};
    bool fits[SHOWN] = {false};
    char phase[PART_MAX];
    snprintf(phase, sizeof phase, "%.*s", (int)style->width, fc_phase_name(s->phase));
    line l = {.to = text, .width = style->width};
    *text = '\0';
    size_t used = strlen(phase);
    if (s->total > 0) {
        snprintf(parts[PERCENT], PART_MAX, "%3u%%", percent_done(s));
    }
    format_amounts(parts[AMOUNTS], s);
    format_rate(parts[RATE], meter);
    format_left(parts[LEFT], meter);
    for (int i = 0; i < SHOWN; i++) {
        int part = matters[i];
        size_t n = strlen(parts[part]);
        fits[part] = n > 0 && used + 1 + n <= l.width;
        used += fits[part] ? 1 + n : 0;
    }
    put_text(&l, style->color ? "\x1b[1m" : "", 0);
    put_text(&l, phase, strlen(phase));
    put_text(&l, style->color ? "\x1b[0m" : "", 0);
    size_t room = l.width - used;
    bool bar = s->total > 0 && room > BAR_LEAST;
    if (bar) {
        put_text(&l, " ", 1);
        put_bar(&l, s, style, room - 1 < BAR_MOST ? room - 1 : BAR_MOST);
    }
    for (int i = 0; i < SHOWN; i++) {
        if (fits[i]) {
            const char *part =
                bar ? parts[i] : parts[i] + strspn(parts[i], " "); /* padded, so that all bars end in the same column */
            put_text(&l, " ", 1);
            put_text(&l, part, strlen(part));
        }
    }
    return l.bytes;
}

/* ---- for a log and for programs ---- */

size_t progress_line_log(const progress_meter *meter, char *text) {
    const fc_progress_state *s = &meter->state;
    char amounts[PART_MAX] = "", rate[PART_MAX] = "", left[PART_MAX] = "", share[PART_MAX] = "";
    if (s->done == 0) { /* at the start of a phase: its total */
        char total[TEXT_SIZE_MAX];
        if (s->total > 0) {
            snprintf(share, sizeof share, " %s%s", amount_text(total, s->unit, s->total), noun_of(s->unit, s->total));
        }
    } else {
        format_amounts(amounts, s);
    }
    format_rate(rate, meter);
    if (s->done > 0 && s->total > 0) {
        snprintf(share, sizeof share, " %u%%", percent_done(s));
    }
    if (progress_meter_left(meter) >= 0) {
        format_left(left, meter);
    }
    int n = snprintf(text, PROGRESS_LINE_MAX, "fsdpckpt: %s%s%s%s%s%s%s%s\n", fc_phase_name(s->phase), share,
                     *amounts ? ", " : "", amounts, *rate ? ", " : "", rate, *left ? ", " : "", left);
    return n > 0 ? (size_t)n : 0;
}

/* A number, or null where there is none. */
static const char *number_or_null(char buf[32], bool known, double value) {
    snprintf(buf, 32, "%.3f", value);
    return known ? buf : "null";
}

size_t progress_line_json(const progress_meter *meter, char *text) {
    const fc_progress_state *s = &meter->state;
    char total[32] = "null", rate[32], seconds[32], left[32];
    double remaining = progress_meter_left(meter);
    if (s->total > 0) {
        snprintf(total, sizeof total, "%" PRIu64, s->total);
    }
    int n =
        snprintf(text, PROGRESS_LINE_MAX,
                 "{\"fsdpckpt\": \"progress\", \"schema\": %d, \"phase\": \"%s\", \"unit\": \"%s\", \"done\": %" PRIu64
                 ", \"total\": %s, \"rate\": %s, \"seconds\": %s, \"seconds_left\": %s}\n",
                 PROGRESS_JSON_SCHEMA, fc_phase_name(s->phase), fc_counted_name(s->unit), s->done, total,
                 number_or_null(rate, meter->rate > 0, meter->rate), number_or_null(seconds, true, meter->now),
                 number_or_null(left, remaining >= 0, remaining));
    return n > 0 ? (size_t)n : 0;
}

/* ---- when ---- */

bool progress_line_is_due(progress_kind kind, double now, double last) {
    static const double first[] = {1, 2, 60, 0}, least[] = {0.09, 2, 60, 1};
    bool rarer = kind == PROGRESS_KIND_LOG || kind == PROGRESS_KIND_LONG_LOG;
    double pause = rarer && last / 4 > least[kind] ? last / 4 : least[kind];
    return now >= first[kind] && (last < 0 || now - last >= pause);
}
