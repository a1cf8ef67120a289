/*
 * Page-aligned buffers. See pages.h.
 */
#include "base/pages.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined __SANITIZE_ADDRESS__
#define BOUNDS_ARE_CHECKED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define BOUNDS_ARE_CHECKED 1
#endif
#endif

#ifdef BOUNDS_ARE_CHECKED

enum { PAGE = 4096 };

void *fc_pages_new(size_t size) {
    void *pages;
    return posix_memalign(&pages, PAGE, size ? size : 1) == 0 ? memset(pages, 0, size) : NULL;
}

void fc_pages_free(void *pages, size_t size) {
    (void)size;
    free(pages);
}

#else

void *fc_pages_new(size_t size) {
    void *pages = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

void fc_pages_free(void *pages, size_t size) {
    if (pages) {
        munmap(pages, size ? size : 1);
    }
}

#endif
