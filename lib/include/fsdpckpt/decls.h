/* The declarations of all public headers stand between these two, so that C++ links them as C. */
#pragma once

#ifdef __cplusplus
#define FC_BEGIN_DECLS extern "C" {
#define FC_END_DECLS }
#else
#define FC_BEGIN_DECLS
#define FC_END_DECLS
#endif
