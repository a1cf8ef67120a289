/*
 * Recognises the first bytes of files that are in place of a checkpoint's file, or that another program would read: see
 * stand_in.h.
 */
#include "io/stand_in.h"

#include "fsdpckpt/io.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { HEAD = 512 };

static bool begins_with(const char *text, const char *sign) {
    return strncasecmp(text, sign, strlen(sign)) == 0;
}

static bool is_zeros(const char *head, size_t size) {
    return head[0] == '\0' && memcmp(head, head + 1, size - 1) == 0;
}

/* Archives and weights of other programs. */
static const struct {
    size_t offset;
    const char *magic, *what;
} others[] = {
    {0, "GGUF", "it is a GGUF file of llama.cpp: use the model that it was made from"},
    {0, "\x93NUMPY", "it is a NumPy array: load it, and save a dict of tensors"},
    {0, "\x1f\x8b", "it is a gzip file: decompress it first"},
    {0, "\x28\xb5\x2f\xfd", "it is a zstd file: decompress it first"},
    {0,
     "\xfd"
     "7zXZ",
     "it is an xz file: decompress it first"},
    {0, "BZh", "it is a bzip2 file: decompress it first"},
    {257, "ustar", "it is a tar archive: extract it first"},
};

static const char *name_other(const char *head, size_t size) {
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const size_t n = strlen(others[i].magic);
        if (size >= others[i].offset + n && memcmp(head + others[i].offset, others[i].magic, n) == 0) {
            return others[i].what;
        }
    }
    /* The opcode PROTO, but not the magic number of torch before 1.6, which follows it. */
    if (size >= 3 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5 && head[2] != '\x8a') {
        return "it is a pickle of Python's own: load it, and save a dict of its tensors with torch.save";
    }
    return NULL;
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
    return is_zeros(head, size) ? "it begins with zeros: its data never reached the disk: copy it again"
                                : name_other(head, size);
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
    const char *content = name_content(head, some);
    return content ? fc_fail(err, FC_ECORRUPT, "%s: not a file of a checkpoint: it has %" PRIu64 " bytes; %s", path,
                             size, content)
                   : FC_OK;
}
