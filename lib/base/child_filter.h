/*
 * The filter of system calls of a confined process, as far as all have it. Builds without libseccomp have none.
 */
#pragma once

#ifdef FSDPCKPT_HAVE_SECCOMP

#include <seccomp.h>
#include <stddef.h>

/**
 * Makes a filter that allows `calls`, memory that is not executable, and abort(). All other calls fail with EPERM, so
 * that a newer library that tries another call first still works.
 * @return for seccomp_load and seccomp_release; NULL: it cannot be made.
 */
scmp_filter_ctx fc_child_filter_new(const int *calls, size_t count);

/** Allows a call under a condition. @return 0, or a negative error of libseccomp. */
int fc_child_filter_allow(scmp_filter_ctx filter, int call, struct scmp_arg_cmp condition);

#endif
