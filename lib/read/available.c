/*
 * How much memory the processes of this machine can still use, and whether a load may fill the page cache. See
 * available.h.
 */
#include "read/available.h"

#include "fsdpckpt/read.h"

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The files of a control group. Version 1 reports a number near 2^63 where there is no limit, version 2 "max". */
typedef struct group_files {
    const char *mount, *limit, *used, *cached;
} group_files;

static const group_files GROUP_V1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                     "total_cache "};
static const group_files GROUP_V2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "file "};

/* Finds the number after `key` at the beginning of a line of the file. @return whether it has one. */
static bool read_number(const char *path, const char *key, uint64_t *out) {
    FILE *file = fopen(path, "re");
    char line[256];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        const size_t length = strlen(key);
        found = strncmp(line, key, length) == 0 && sscanf(line + length, " %" SCNu64, out) == 1;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static bool read_group_number(const char *root, const group_files *files, const char *group, const char *name,
                              const char *key, uint64_t *out) {
    char path[PATH_MAX];
    const int length = snprintf(path, sizeof path, "%s%s%s/%s", root, files->mount, group, name);
    return length > 0 && (size_t)length < sizeof path && read_number(path, key, out);
}

/* Lowers `*least` to what the group still has. Its cached files can be given up. */
static void look_at_group(const char *root, const group_files *files, const char *group, uint64_t *least) {
    uint64_t limit, used = 0, cached = 0;
    if (!read_group_number(root, files, group, files->limit, "", &limit)) {
        return;
    }
    read_group_number(root, files, group, files->used, "", &used);
    read_group_number(root, files, group, "memory.stat", files->cached, &cached);
    used = used > cached ? used - cached : 0;
    const uint64_t left = limit > used ? limit - used : 0;
    *least = left < *least ? left : *least;
}

/* Looks at a group and all above it. In a container, its own group may be visible only as the mount. */
static void look_at_groups(const char *root, const group_files *files, char *group, uint64_t *least) {
    look_at_group(root, files, group, least);
    for (char *end; (end = strrchr(group, '/'));) {
        *end = '\0';
        look_at_group(root, files, group, least);
    }
}

uint64_t fc_available_memory(const char *root) {
    char path[PATH_MAX], *line = NULL;
    uint64_t kilobytes = 0;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!read_number(path, "MemAvailable:", &kilobytes) || kilobytes > UINT64_MAX / 1024) {
        return 0;
    }
    uint64_t least = kilobytes * 1024;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    size_t room = 0;
    while (file && getline(&line, &room, file) > 0) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        line[strcspn(line, "\n")] = '\0';
        if (group && strncmp(line, "0::", 3) == 0) {
            look_at_groups(root, &GROUP_V2, group + 1, &least);
        } else if (group && strncmp(controllers, ":memory:", 8) == 0) {
            look_at_groups(root, &GROUP_V1, group + 1, &least);
        }
    }
    free(line);
    if (file) {
        fclose(file);
    }
    return least;
}

bool fc_fits_cache(uint64_t bytes) {
    return bytes <= fc_available_memory("") / 2;
}
