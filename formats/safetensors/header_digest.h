/*
 * The digest of a header, which stands in the header itself: CRC-64 of the file up to its data, with the 16 digits of
 * the digest as zeros (characters '0').
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_HEADER_DIGEST_H
#define FSDPCKPT_FORMATS_SAFETENSORS_HEADER_DIGEST_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"

enum { ST_DIGITS = 16 };

/** What became of a header since it was written. */
typedef enum st_header_state {
    ST_HEADER_UNKNOWN, /**< no digest, or another program wrote the JSON anew */
    ST_HEADER_GOOD,
    ST_HEADER_DAMAGED,   /**< by one flipped bit */
    ST_HEADER_REWRITTEN, /**< more is different: another program wrote it anew and kept our members of __metadata__ */
    ST_HEADER_BARE       /**< it says that it is ours, and has no digest */
} st_header_state;

/** fc_checkpoint.state: of each data file the state of its header. In the arena. */
typedef struct st_state {
    const unsigned char *headers; /**< st_header_state */
    size_t count;
} st_state;

/** Where in a header (`size` bytes from the start of the file) the digits of its digest are; 0: nowhere. */
size_t fc_st_digest_place(const char *text, size_t size);

/** The digest of a header whose digits are at `place`. */
uint64_t fc_st_digest_of(const char *text, size_t size, size_t place);

/** What became of a header whose digits are at `place`. */
st_header_state fc_st_digest_compare(const char *text, size_t size, size_t place);

/** Writes 16 hexadecimal digits to `out`, without a NUL. */
void fc_st_digits(uint64_t value, char *out);

/** Reads them. @return how many of the 16 are none, e.g. by a flipped bit. */
int fc_st_read_digits(const char *text, uint64_t *out);

/** fc_format.check_file: FC_ECORRUPT when the header of the file is damaged. */
fc_code fc_st_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err);

/** fc_format.verify: a defect for each header that is not as it was written. */
fc_code fc_st_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err);

#endif
