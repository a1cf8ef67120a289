/*
 * "Did you mean …?": see suggest.h.
 */
#include "options/suggest.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
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
        distance = limit + 1; /* a common prefix is a weaker hint than a typing error */
    }
    if (distance < *score) {
        *score = distance;
        *best = candidate;
    }
}

/* How near a name is that contains the word: whole components are nearer than parts, short names than long ones. */
static size_t part_score(const char *candidate, const char *word) {
    const size_t length = strlen(word), all = strlen(candidate);
    size_t score = SUGGEST_NONE;
    for (const char *at = strstr(candidate, word); at && length > 0; at = strstr(at + 1, word)) {
        const bool whole = (at == candidate || at[-1] == '.') && (at[length] == '.' || at[length] == '\0');
        score = smaller(score, whole ? all : all + (1 << 20));
    }
    return score;
}

/* Keeps the two nearest names, the first of equals. */
static void keep_nearest(const char *candidate, size_t score, const char *near[2], size_t scores[2]) {
    const size_t place = score < scores[0] ? 0 : 1;
    if (score >= scores[place]) {
        return;
    }
    if (place == 0) {
        near[1] = near[0];
        scores[1] = scores[0];
    }
    near[place] = candidate;
    scores[place] = score;
}

/* Names that contain the word come first, because users often omit the prefix of a name. */
fc_code suggest_name(const char *path, const char *const *names, size_t stride, size_t count, const char *name,
                     fc_error *err) {
    const char *near[3] = {NULL, NULL, NULL};
    size_t scores[2] = {SUGGEST_NONE, SUGGEST_NONE}, score = SUGGEST_NONE, len = strlen(name);
    const char *best = NULL;
    for (size_t i = 0; i < count; i++) {
        const char *candidate = *(const char *const *)(const void *)((const char *)names + i * stride);
        keep_nearest(candidate, part_score(candidate, name), near, scores);
        suggest_consider(name, len, candidate, &best, &score);
    }
    size_t n = (near[0] != NULL) + (near[1] != NULL);
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

/* Finds the entry of a directory with the most similar name. @return false if the directory cannot be read. */
static bool nearest_entry(const char *directory, const char *name, size_t len, char best[NAME_MAX + 1]) {
    enum { MOST = 4096 }; /* do not read a directory of millions of files to the end */
    size_t score = SUGGEST_NONE;
    DIR *dir = opendir(directory);
    struct dirent *e = NULL;
    for (int i = 0; dir && i < MOST && (errno = 0, e = readdir(dir)); i++) {
        const char *near = NULL;
        if (e->d_name[0] != '.') {
            suggest_consider(name, len, e->d_name, &near, &score);
        }
        if (near) {
            snprintf(best, NAME_MAX + 1, "%s", near);
        }
    }
    bool complete = dir && (e || errno == 0);
    if (dir) {
        closedir(dir);
    }
    return complete;
}

void suggest_path(const char *path, fc_error *err) {
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/') {
        len--;
    }
    size_t start = len;
    while (start > 0 && path[start - 1] != '/') {
        start--;
    }
    char directory[PATH_MAX], best[NAME_MAX + 1] = "";
    if (start >= sizeof directory || !err) {
        return;
    }
    snprintf(directory, sizeof directory, "%.*s", (int)start, start ? path : ".");
    if (!nearest_entry(start ? directory : ".", path + start, len - start, best)) {
        return;
    }
    if (best[0]) {
        size_t used = strlen(err->message);
        snprintf(err->message + used, sizeof err->message - used, "; did you mean '%s%s'?", start ? directory : "",
                 best);
    }
}
