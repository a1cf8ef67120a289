/*
 * The records of a journal, as they are stored.
 */
#pragma once

#include "codec/changes.h"
#include "delta/journal.h"

#define JOURNAL_MAGIC "fcjrnl01"

enum {
    JOURNAL_MAGIC_BYTES = 8,
    /* kind, file, offset, size, length of what follows: 4, 4, 8, 4 and 4 bytes, little endian */
    JOURNAL_HEADER = 24,
    JOURNAL_LAST = 24, /* digest of everything before the last record, 16 bytes, and the version */
    /* A change is a gap, a length, each of at most 3 bytes, and its bytes; two changes are at least FC_CHANGE_GAP bytes
       apart. */
    JOURNAL_MOST = FC_JOURNAL_BLOCK + FC_JOURNAL_BLOCK / FC_CHANGE_GAP * 6,
    JOURNAL_SHORT = 8 /* bytes of a change that are copied at once */
};

typedef enum journal_kind {
    JOURNAL_FILE = 1, /* the name of the next file; these come first */
    JOURNAL_CHANGES,
    JOURNAL_REPLACES,
    JOURNAL_REMOVES,
    JOURNAL_END
} journal_kind;
