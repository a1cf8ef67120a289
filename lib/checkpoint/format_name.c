/*
 * Which format the name of a file stands for.
 */
#include "fsdpckpt/format.h"

#include <strings.h>

const fc_format *fc_format_of_extension(const char *extension) {
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        for (const char *const *known = (*f)->extensions; fc_format_writes(*f) && *known; known++) {
            if (strcasecmp(*known, extension) == 0) {
                return *f;
            }
        }
    }
    return NULL;
}
