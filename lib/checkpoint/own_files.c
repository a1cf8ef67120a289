/*
 * Decides which files in a directory are ours, by the names and contents that the formats list.
 */
#include "fsdpckpt/format.h"

#include <fnmatch.h>

bool fc_is_own_file(const char *name, const unsigned char *head, size_t size) {
    bool own = false;
    for (const fc_format *const *format = fc_formats(); *format && !own; format++) {
        for (const fc_own_file *file = (*format)->writer.own_files; file && file->glob && !own; file++) {
            own =
                fnmatch(file->glob, name, FNM_PATHNAME) == 0 && (size == 0 || fc_is_content(file->content, head, size));
        }
    }
    return own;
}
