/*
 * Names and numbers of versions. See version.h.
 */
#include "delta/version.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_DIGITS = 6, MOST_DIGITS = 9 };

static const char *const names[] = {
    [FC_DELTA_XOR] = "xor", [FC_DELTA_OVERWRITE] = "overwrite", [FC_DELTA_AUTO] = "auto"};

const char *fc_delta_encoding_name(fc_delta_encoding encoding) {
    return names[encoding];
}

bool fc_delta_encoding_find(const char *name, fc_delta_encoding *out) {
    *out = strcmp(name, names[FC_DELTA_OVERWRITE]) == 0 ? FC_DELTA_OVERWRITE : FC_DELTA_XOR;
    return strcmp(name, names[*out]) == 0;
}

int64_t fc_delta_number_of(const char *path) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') {
        end--;
    }
    size_t digits = 0;
    while (digits < end && path[end - 1 - digits] >= '0' && path[end - 1 - digits] <= '9') {
        digits++;
    }
    const size_t prefix = sizeof DELTA_FOLDER - 1, start = end - digits;
    if (digits < LEAST_DIGITS || digits > MOST_DIGITS || start < prefix ||
        memcmp(path + start - prefix, DELTA_FOLDER, prefix) != 0 ||
        (start > prefix && path[start - prefix - 1] != '/')) {
        return FC_DELTA_NO_NUMBER;
    }
    return strtoll(path + start, NULL, 10);
}

fc_code fc_delta_choose_numbers(const char *path, int64_t *number, int64_t *base, fc_error *err) {
    const int64_t named = fc_delta_number_of(path);
    if (*number == FC_DELTA_NO_NUMBER) {
        *number = named;
    }
    if (*number == FC_DELTA_NO_NUMBER) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: the name does not tell the number of the version; name it " DELTA_FOLDER
                       "000007 for version 7, or give the number",
                       path);
    }
    if (named != FC_DELTA_NO_NUMBER && named != *number) {
        return fc_fail(err, FC_EUSAGE, "%s: this is the name of version %" PRId64 ", not of version %" PRId64, path,
                       named, *number);
    }
    if (*base == FC_DELTA_NO_NUMBER) {
        *base = *number - 1;
    }
    if (*base < 0 || *base >= *number) {
        return fc_fail(err, FC_EUSAGE, "%s: version %" PRId64 " cannot change version %" PRId64 ": a base is earlier",
                       path, *number, *base);
    }
    return FC_OK;
}
