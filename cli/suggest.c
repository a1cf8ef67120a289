/*
 * "Did you mean …?": see suggest.h.
 */
#include "suggest.h"

#include <string.h>

enum { LONGEST = 256 };

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

size_t suggest_distance(const char *a, size_t alen, const char *b, size_t blen, size_t limit) {
    size_t gap = alen > blen ? alen - blen : blen - alen;
    if (gap > limit || alen > LONGEST || blen > LONGEST) {
        return limit + 1;
    }
    size_t rows[3][LONGEST + 1];
    size_t *before = rows[0], *last = rows[1], *row = rows[2];
    for (size_t j = 0; j <= blen; j++) {
        last[j] = j;
    }
    memcpy(before, last, sizeof rows[0]);
    for (size_t i = 1; i <= alen; i++) {
        size_t least = row[0] = i;
        for (size_t j = 1; j <= blen; j++) {
            row[j] = smaller(smaller(last[j], row[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                row[j] = smaller(row[j], before[j - 2] + 1);
            }
            least = smaller(least, row[j]);
        }
        if (least > limit) { /* distances only grow from row to row */
            return limit + 1;
        }
        size_t *oldest = before;
        before = last;
        last = row;
        row = oldest;
    }
    return smaller(last[blen], limit + 1);
}

void suggest_consider(const char *word, size_t len, const char *candidate, const char **best, size_t *score) {
    size_t limit = len / 3 + (len < 6);
    size_t clen = strlen(candidate);
    size_t distance = suggest_distance(word, len, candidate, clen, limit);
    if (distance > limit) {
        if (len < 2 || clen < len || memcmp(word, candidate, len) != 0) {
            return;
        }
        distance = limit + 1; /* a beginning is a weaker hint than a typing error */
    }
    if (distance < *score) {
        *score = distance;
        *best = candidate;
    }
}

/* Names that contain the word come first: people remember the end of a name, not its prefix. */
fc_code suggest_name(const char *path, const char *const *names, size_t stride, size_t count, const char *name,
                     fc_error *err) {
    const char *near[3] = {NULL, NULL, NULL};
    size_t n = 0, score = SUGGEST_NONE, len = strlen(name);
    const char *best = NULL;
    for (size_t i = 0; i < count; i++) {
        const char *candidate = *(const char *const *)(const void *)((const char *)names + i * stride);
        if (n < 2 && strstr(candidate, name)) {
            near[n++] = candidate;
        }
        suggest_consider(name, len, candidate, &best, &score);
    }
    if (best && best != near[0] && best != near[1]) {
        near[n++] = best;
    }
    if (n == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: no tensor or object '%s' among %zu; see 'fsdpckpt inspect'", path, name,
                       count);
    }
    return fc_fail(err, FC_EUSAGE, "%s: no tensor or object '%s'; did you mean '%s'%s%s%s%s%s%s?", path, name, near[0],
                   n > 1 ? " or '" : "", n > 1 ? near[1] : "", n > 1 ? "'" : "", n > 2 ? " or '" : "",
                   n > 2 ? near[2] : "", n > 2 ? "'" : "");
}
