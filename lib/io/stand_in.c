/*
 * Recognises the first bytes of files that are in place of a checkpoint's file, or that another program would read: see
 * stand_in.h.
 */
#include "io/stand_in.h"

#include "io/file.h"
#include "io/foreign.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { HEAD = FC_FOREIGN_HEAD };

static bool begins_with(const char *text, const char *sign) {
    return strncasecmp(text, sign, strlen(sign)) == 0;
}

static bool is_zeros(const char *head, size_t size) {
    return head[0] == '\0' && memcmp(head, head + 1, size - 1) == 0;
}

/* @return what the file is and what to do about it; NULL if it is unknown. */
static const char *name_content(const char *head, size_t size) {
    const char *text = head;
    if (size == 0) {
        return "it is empty: copy it again";
    }
    while (isspace((unsigned char)*text)) { /* up to the NUL after the head */
        text++;
    }
    if (begins_with(text, "<!doctype html") || begins_with(text, "<html")) {
        return "it is a web page, which a server sent in place of the file: download it again";
    }
    if (begins_with(text, "<?xml") || begins_with(text, "<error>")) {
        return "it is an XML document, which a server sent in place of the file: download it again";
    }
    if (begins_with(text, "version https://git-lfs.github.com/spec/")) {
        return "it is a Git LFS pointer: fetch the file with git lfs pull";
    }
    return is_zeros(head, size) ? "it begins with zeros: its data never reached the disk: copy it again" : NULL;
}

fc_code fc_check_stand_in(const char *path, fc_error *err) {
    char head[HEAD + 1];
    uint64_t size;
    int fd;
    if (fc_open_input(path, &fd, &size, NULL) != FC_OK) {
        return FC_OK;
    }
    const size_t some = size < HEAD ? (size_t)size : HEAD;
    const fc_code rc = fc_pread_full(fd, head, some, 0, path, NULL);
    close(fd);
    if (rc != FC_OK) {
        return FC_OK;
    }
    head[some] = '\0';
    const char *foreign = fc_name_foreign_content(head, some);
    if (foreign) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: not a file of a checkpoint: %s", path, foreign);
    }
    const char *content = name_content(head, some);
    return content ? fc_fail(err, FC_ECORRUPT, "%s: not a file of a checkpoint: it has %" PRIu64 " bytes; %s", path,
                             size, content)
                   : FC_OK;
}
