/*
 * Servers that serve few connections at once. What is read ahead must not keep them busy while readers wait, nor must
 * idle connections. All of this is only about reads, not about what is written.
 */
#pragma once

#include "net/fetcher/fetcher.h"

/* The known server of "host:port", or the proxy; NULL: it is not known. */
host_line *crowd_find(const fetcher *f, const char *where);
/* Whether a transfer, which does not run yet, may run now. */
bool crowd_admits(const fetcher *f, const transfer *t);
/* A transfer receives bytes of a body. */
void crowd_heard(transfer *t);
/* Ends what was read ahead, and begins reads again, where a server serves no more connections.
   @return whether others may start now */
bool crowds_relieve(fetcher *f);
/* @return milliseconds until it may have to, at most `most` */
int64_t crowds_pause(const fetcher *f, int64_t most);
