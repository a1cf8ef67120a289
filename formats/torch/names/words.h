/*
 * Lists of names as one text, with a space between two of them.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

/** @return whether the `len` bytes at `name` are `word`. */
static inline bool fc_word_is(const char *name, size_t len, const char *word) {
    return strlen(word) == len && memcmp(name, word, len) == 0;
}

/** @return the length of the word at `at`. */
static inline size_t fc_words_length(const char *at) {
    return strcspn(at, " ");
}

/** @return the word after the one at `at`, or the end of the list. */
static inline const char *fc_words_next(const char *at) {
    at += fc_words_length(at);
    return at + (*at == ' ');
}

/** @return whether `name` is one of the words. */
static inline bool fc_words_have(const char *words, const char *name, size_t len) {
    for (const char *at = words; *at; at = fc_words_next(at)) {
        if (fc_words_length(at) == len && memcmp(at, name, len) == 0) {
            return true;
        }
    }
    return false;
}
