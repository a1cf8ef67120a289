/* The declarations of all public headers stand between these two, so that C++ links them as C. */
#ifndef FSDPCKPT_DECLS_H
#define FSDPCKPT_DECLS_H

#ifdef __cplusplus
#define FC_BEGIN_DECLS extern "C" {
#define FC_END_DECLS }
#else
#define FC_BEGIN_DECLS
#define FC_END_DECLS
#endif

#endif
