/*
 * What formats keep in a session, see fc_session.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** The part of a session that belongs to one format, which sets `state` and `release` when it first needs them. */
typedef struct fc_session_part {
    const struct fc_format *format;
    void *state;
    void (*release)(void *state); /**< called with a `state` that is not NULL when the session ends */
    struct fc_session_part *next;
} fc_session_part;

/** @return the folder of plugins; NULL: none. `session` may be NULL. */
const char *fc_session_plugins(const fc_session *session);

/** @return the part of `format`; NULL: out of memory. */
fc_session_part *fc_session_part_of(fc_session *session, const struct fc_format *format);
