/*
 * Says which files of a directory are those of a DCP checkpoint, so that a target may replace them.
 */
#include "base/little.h"
#include "checkpoint/folder.h"
#include "dcp/builder.h"
#include "dcp/dcp.h"

#include "checkpoint/own_files.h"
#include "fsdpckpt/try.h"

#include <string.h>

fc_code fc_dcp_is_metadata(const char *path, bool *is, fc_error *err) {
    fc_pickle *pickle = NULL;
    FC_TRY(fc_own_if_read(fc_dcp_load_metadata(path, &pickle, err), is));
    *is = *is && fc_pickle_is_object(pickle, pickle->root, FC_CLASS_METADATA);
    fc_pickle_free(pickle);
    return FC_OK;
}

/* Whether the bytes are the start of an archive of torch.save in memory: its first record is a pickle of this name. */
static bool is_archive(const unsigned char *head, size_t size) {
    enum { HEADER = 30, METHOD_AT = 8, NAME_AT = 26, EXTRA_AT = 28, PROTO = 0x80 };
    static const char first[] = "archive/data.pkl";
    const size_t name = sizeof first - 1;
    if (size < HEADER + name || memcmp(head, "PK\3\4", 4) != 0 || memcmp(head + HEADER, first, name) != 0) {
        return false;
    }
    const size_t length = (size_t)fc_load_little(head + NAME_AT, 2);
    const size_t data = HEADER + name + (size_t)fc_load_little(head + EXTRA_AT, 2);
    return length == name && head[METHOD_AT] == 0 && head[METHOD_AT + 1] == 0 && data < size && head[data] == PROTO;
}

/* The first archive is at the start, or after the zeros that align its data to a page. */
fc_code fc_dcp_is_data(const char *path, bool *is, fc_error *err) {
    enum { PAGE = 4096 };
    unsigned char head[2 * PAGE];
    size_t n = sizeof head, at = 0;
    *is = false;
    const fc_code rc = fc_read_head(path, head, &n, err);
    while (rc == FC_OK && at < n && at < PAGE && head[at] == 0) {
        at++;
    }
    *is = rc == FC_OK && is_archive(head + at, n - at);
    return rc;
}
