/*
 * The filter of system calls of a confined process: see child_filter.h.
 */
#include "base/child_filter.h"

#ifdef FSDPCKPT_HAVE_SECCOMP

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

int fc_child_filter_allow(scmp_filter_ctx filter, int call, struct scmp_arg_cmp condition) {
    return seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, call, 1, &condition);
}

scmp_filter_ctx fc_child_filter_new(const int *calls, size_t count) {
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    if (!filter) {
        return NULL;
    }
    /* Calls by the numbers of another machine end all threads, if the kernel can; else the one that made the call. */
    seccomp_attr_set(filter, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);
    int rc = 0;
    for (size_t i = 0; i < count; i++) {
        rc |= seccomp_rule_add(filter, SCMP_ACT_ALLOW, calls[i], 0);
    }
    rc |= fc_child_filter_allow(filter, SCMP_SYS(mmap), (struct scmp_arg_cmp){2, SCMP_CMP_MASKED_EQ, PROT_EXEC, 0});
    rc |= fc_child_filter_allow(filter, SCMP_SYS(mprotect), (struct scmp_arg_cmp){2, SCMP_CMP_MASKED_EQ, PROT_EXEC, 0});
    /* abort() raises its signal with tgkill, which is allowed only for this process. */
    rc |= fc_child_filter_allow(filter, SCMP_SYS(tgkill),
                                (struct scmp_arg_cmp){0, SCMP_CMP_EQ, (scmp_datum_t)getpid(), 0});
    if (rc != 0) {
        seccomp_release(filter);
        return NULL;
    }
    return filter;
}

#endif
