/*
 * Recognises error messages that name a rank.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

/** Returns whether `message` names its rank ("rank 3: …"), as it does after fc_comm_agree. */
static inline bool fc_names_a_rank(const char *message) {
    return strncmp(message, "rank ", 5) == 0 && message[5] >= '0' && message[5] <= '9';
}
