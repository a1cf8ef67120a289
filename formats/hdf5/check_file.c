/*
 * Checks the start of a data file without libhdf5: whether it is an HDF5 file, and as long as its superblock says. Used
 * for checkpoints that were opened from index.h5 alone.
 */
#include "base/little.h"
#include "hdf5/h5.h"
#include "hdf5/reader.h"

#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/stand_in.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* HDF5 file format specification, III.A: superblocks of versions 2 and 3, as fsdpckpt writes them. */
enum { SUPERBLOCK = 48, VERSION = 8, OFFSET_SIZE = 9, BASE = 12, END = 28 };

static fc_code too_short(const char *path, uint64_t size, fc_error *err) {
    FC_TRY(fc_check_stand_in(path, err));
    return fc_fail(err, FC_ECORRUPT, "%s: not an HDF5 file: it has %" PRIu64 " bytes; copy it again", path, size);
}

/* The superblock of the file. */
static fc_code read_superblock(const char *path, unsigned char head[SUPERBLOCK], uint64_t *size, fc_error *err) {
    int fd;
    FC_TRY(fc_open_input(path, &fd, size, err));
    fc_code rc = *size < SUPERBLOCK ? too_short(path, *size, err) : fc_pread_full(fd, head, SUPERBLOCK, 0, path, err);
    close(fd);
    return rc;
}

fc_code fc_h5_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    static const unsigned char signature[] = "\x89HDF\r\n\x1a\n";
    const char *path = checkpoint->files[index].path;
    unsigned char head[SUPERBLOCK] = {0};
    uint64_t size;
    const fc_h5_state *state = checkpoint->state;
    if (state->files) {
        return fc_h5_check_identity(checkpoint, index, err);
    }
    if (strncmp(checkpoint->files[index].name, "shard-", 6) != 0) {
        return FC_OK; /* libhdf5 has just read it, or it is external storage and not an HDF5 file */
    }
    FC_TRY(read_superblock(path, head, &size, err));
    if (memcmp(head, signature, sizeof signature - 1) != 0) {
        FC_TRY(fc_check_stand_in(path, err));
        return fc_fail(err, FC_ECORRUPT, "%s: not an HDF5 file: the signature is missing; copy it again", path);
    }
    bool known = head[VERSION] >= 2 && head[OFFSET_SIZE] == 8 && fc_load_little(head + BASE, 8) == 0;
    if (known && fc_load_little(head + END, 8) > size) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: truncated: it has %" PRIu64 " bytes, but its header says %" PRIu64 "; copy it again", path,
                       size, fc_load_little(head + END, 8));
    }
    return FC_OK;
}
