/*
 * The atomic types of <stdatomic.h>, in C and in C++, which has that header only from C++23 on.
 */
#pragma once

#ifdef __cplusplus
#include <atomic>
using std::atomic_bool;
using std::atomic_uint;
using std::atomic_uint_fast64_t;
#else
#include <stdatomic.h>
#endif
