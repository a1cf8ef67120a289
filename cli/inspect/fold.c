/*
 * Folds names that differ only in numbers: see fold.h.
 *
 * Names are split into text and numbers. Then, from the last number of a name to the first, entries that differ only in
 * that number are joined; a sort makes them neighbours. So the experts of each layer are joined first, then the layers
 * with equal experts.
 */
#include "inspect/fold.h"

#include "fsdpckpt/order.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_NUMBERS = 6, /* that may vary in one name; further numbers are text */
    MAX_COMPONENTS = 64,
    MAX_DIGITS = 9
};

typedef struct entry {
    const char *name;
    const char *frame; /* the name with '*' in place of each number */
    uint64_t places;   /* bit i: component i is a number */
    uint32_t kind;
    int numbers;
    const char *sets[MAX_NUMBERS]; /* a number, or a set such as "{0..31}" after joining */
    size_t first, count;
    size_t head, tail; /* the first and the last member; `next` links them */
} entry;

/* Memory for joining: the numbers of one set, and the member that follows each member of an entry. */
typedef struct joining {
    long *numbers;
    size_t *next;
    fc_arena *arena;
} joining;

/* A sort order: everything except number `free`, then that number. */
typedef struct order {
    int free;
} order;

static bool is_number(const char *s, size_t len) {
    return len > 0 && len <= MAX_DIGITS && strspn(s, "0123456789") >= len && (s[0] != '0' || len == 1);
}

size_t fold_component(const char *pattern) {
    size_t len = 0;
    while (pattern[len] && pattern[len] != '.') {
        size_t set = pattern[len] == '{' ? strspn(pattern + len + 1, "0123456789.,") : 0;
        len += set > 0 && pattern[len + 1 + set] == '}' ? set + 2 : 1;
    }
    return len;
}

static bool split_name(entry *e, fc_arena *arena) {
    size_t length = strlen(e->name), used = 0, at = 0;
    char *frame = fc_arena_alloc(arena, length + 1);
    if (!frame) {
        return false;
    }
    for (int component = 0;; component++) {
        const char *s = e->name + at;
        size_t len = strcspn(s, ".");
        if (e->numbers < MAX_NUMBERS && component < MAX_COMPONENTS && is_number(s, len)) {
            e->places |= UINT64_C(1) << component;
            e->sets[e->numbers] = fc_arena_strndup(arena, s, len);
            if (!e->sets[e->numbers++]) {
                return false;
            }
            frame[used++] = '*';
        } else {
            memcpy(frame + used, s, len);
            used += len;
        }
        at += len;
        if (e->name[at] == '\0') {
            break;
        }
        frame[used++] = e->name[at++];
    }
    frame[used] = '\0';
    e->frame = frame;
    return true;
}

/* Compares all but number `free`. @return 0 if the entries may be joined. */
static int compare_rest(const entry *a, const entry *b, int free) {
    int by = strcmp(a->frame, b->frame);
    by = by ? by : FC_ORDER(a->places, b->places);
    by = by ? by : FC_ORDER(a->kind, b->kind);
    for (int i = 0; i < a->numbers && by == 0; i++) {
        by = i == free ? 0 : strcmp(a->sets[i], b->sets[i]);
    }
    return by;
}

static int compare_entries(const void *x, const void *y, void *context) {
    const entry *a = x, *b = y;
    int free = ((const order *)context)->free, by = compare_rest(a, b, free);
    if (by == 0 && free < a->numbers) {
        long m = strtol(a->sets[free], NULL, 10), n = strtol(b->sets[free], NULL, 10);
        by = (m > n) - (m < n);
    }
    return by;
}

static int compare_first(const void *x, const void *y) {
    const entry *a = x, *b = y;
    return (a->first > b->first) - (a->first < b->first);
}

/* @return the count of numbers from `at` on that increase by the same step. */
static size_t progression_length(const long *numbers, size_t at, size_t count) {
    size_t end = at + 1;
    while (end < count && numbers[end] - numbers[end - 1] == numbers[at + 1] - numbers[at]) {
        end++;
    }
    return end - at;
}

/* Formats ascending numbers as "{0..2,4..31}". */
static const char *write_set(const long *numbers, size_t count, fc_arena *arena) {
    size_t used = 0, size = count * (MAX_DIGITS + 1) + 3;
    char *text = malloc(size), *kept = NULL;
    if (!text) {
        return NULL;
    }
    for (size_t i = 0; i < count;) {
        size_t run = progression_length(numbers, i, count);
        long step = run > 1 ? numbers[i + 1] - numbers[i] : 1;
        bool range = step == 1 ? run > 2 : run > 3;
        text[used++] = i == 0 ? '{' : ',';
        used += (size_t)snprintf(text + used, size - used, "%ld", numbers[i]);
        if (range) {
            used += (size_t)snprintf(text + used, size - used, "..%ld", numbers[i + run - 1]);
        }
        if (range && step != 1) {
            used += (size_t)snprintf(text + used, size - used, "..%ld", step);
        }
        i += range ? run : 1;
    }
    text[used++] = '}';
    kept = fc_arena_strndup(arena, text, used);
    free(text);
    return kept;
}

/* Joins the entries that differ only in number `number`. @return false when out of memory. */
static bool join_entries(entry *entries, size_t *count, int number, const joining *memory) {
    order by = {number};
    size_t kept = 0;
    fc_sort_items_by(entries, *count, sizeof *entries, compare_entries, &by);
    for (size_t i = 0, end; i < *count; i = end) {
        entry joined = entries[i];
        for (end = i + 1; number < joined.numbers && end < *count && compare_rest(&joined, &entries[end], number) == 0;
             end++) {
            joined.count += entries[end].count;
            joined.first = entries[end].first < joined.first ? entries[end].first : joined.first;
            memory->next[joined.tail] = entries[end].head;
            joined.tail = entries[end].tail;
        }
        if (end > i + 1) {
            for (size_t k = i; k < end; k++) {
                memory->numbers[k - i] = strtol(entries[k].sets[number], NULL, 10);
            }
            joined.sets[number] = write_set(memory->numbers, end - i, memory->arena);
            if (!joined.sets[number]) {
                return false;
            }
        }
        entries[kept++] = joined;
    }
    *count = kept;
    return true;
}

/* The frame with the sets in place of its numbers. */
static const char *write_pattern(const entry *e, fc_arena *arena) {
    size_t length = strlen(e->frame) + 1;
    for (int i = 0; i < e->numbers; i++) {
        length += strlen(e->sets[i]);
    }
    char *pattern = fc_arena_alloc(arena, length);
    if (!pattern) {
        return NULL;
    }
    char *to = pattern;
    const char *from = e->frame;
    for (int component = 0, number = 0;; component++) {
        size_t len = strcspn(from, ".");
        if (component < MAX_COMPONENTS && e->places >> component & 1) {
            to = stpcpy(to, e->sets[number++]);
        } else {
            memcpy(to, from, len);
            to += len;
        }
        from += len;
        if (*from == '\0') {
            break;
        }
        *to++ = *from++;
    }
    *to = '\0';
    return pattern;
}

/* Lists the members of an entry at `to`. @return the place after them. */
static size_t *list_members(const entry *e, const size_t *next, size_t *to) {
    size_t at = e->head;
    for (size_t i = 0; i < e->count; i++) {
        *to++ = at;
        at = next[at];
    }
    return to;
}

/* @param names the number of all names. */
static bool make_fold_lines(const entry *entries, size_t count, size_t names, const joining *memory, fold_line **out) {
    fc_arena *arena = memory->arena;
    fold_line *lines = fc_arena_calloc(arena, count, sizeof *lines);
    size_t *members = fc_arena_calloc(arena, names, sizeof *members);
    if (!lines || !members) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        lines[i] = (fold_line){.first = entries[i].first, .count = entries[i].count, .members = members};
        members = list_members(&entries[i], memory->next, members);
        lines[i].pattern = entries[i].count > 1 ? write_pattern(&entries[i], arena) : entries[i].name;
        if (!lines[i].pattern) {
            return false;
        }
    }
    *out = lines;
    return true;
}

bool fold_names(const fold_name *names, size_t count, fc_arena *arena, fold_line **out, size_t *nlines) {
    entry *entries = calloc(count + 1, sizeof *entries);
    const joining memory = {.numbers = calloc(count + 1, sizeof *memory.numbers),
                            .next = calloc(count + 1, sizeof *memory.next),
                            .arena = arena};
    bool good = entries && memory.numbers && memory.next;
    size_t left = count;
    for (size_t i = 0; i < count && good; i++) {
        entries[i] =
            (entry){.name = names[i].name, .kind = names[i].kind, .first = i, .count = 1, .head = i, .tail = i};
        good = split_name(&entries[i], arena);
    }
    for (int number = MAX_NUMBERS - 1; number >= 0 && good; number--) {
        good = join_entries(entries, &left, number, &memory);
    }
    if (good) {
        fc_sort_items(entries, left, sizeof *entries, compare_first);
        good = make_fold_lines(entries, left, count, &memory, out);
        *nlines = left;
    }
    free(memory.next);
    free(memory.numbers);
    free(entries);
    return good;
}
