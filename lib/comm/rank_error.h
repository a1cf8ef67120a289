/*
 * Messages that say which rank they are about.
 */
#ifndef FSDPCKPT_COMM_RANK_ERROR_H
#define FSDPCKPT_COMM_RANK_ERROR_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stdbool.h>
#include <string.h>

/** Whether `message` names its rank already ("rank 3: ..."), as an error does that ranks have agreed on before. */
static inline bool fc_names_a_rank(const char *message) {
    return strncmp(message, "rank ", 5) == 0 && message[5] >= '0' && message[5] <= '9';
}

#endif
