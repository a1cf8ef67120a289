/*
 * Files that stand where a checkpoint's should be: what a download or a copy leaves that did not work.
 */
#ifndef FSDPCKPT_IO_STAND_IN_H
#define FSDPCKPT_IO_STAND_IN_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

/**
 * Call it for a file that has not the size or the content that it should have.
 * @return FC_ECORRUPT, if it is empty, or begins as a web page, an XML error, a Git LFS pointer or with zeros: the
 * message says which. Else FC_OK, also if it cannot be read.
 */
fc_code fc_check_stand_in(const char *path, fc_error *err);

#endif
