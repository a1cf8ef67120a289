/*
 * inspect --tree: the names as the tree they spell, natural order, with what lies below each branch.
 */
#include "inspect.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 }; /* a hostile name has a million dots; below this a name is printed as it is */

typedef struct tree {
    inspection *in;
    const fc_tensor **sorted;
    bool utf8;
    bool more[MAX_DEPTH]; /* whether a level has more entries below the current one */
} tree;

/* The length of the component that starts at `s`. */
static size_t component(const char *s) {
    return strcspn(s, ".");
}

/* Compares two components: digits by value, then byte by byte, so that equal means identical. */
static int compare_components(const char *a, size_t alen, const char *b, size_t blen) {
    size_t i = 0, k = 0;
    while (i < alen && k < blen) {
        size_t na = strspn(a + i, "0123456789"), nb = strspn(b + k, "0123456789");
        if (na > 0 && nb > 0) {
            size_t za = strspn(a + i, "0"), zb = strspn(b + k, "0");
            size_t la = na - (za < na ? za : na), lb = nb - (zb < nb ? zb : nb);
            int order = la != lb ? (la > lb) - (la < lb) : memcmp(a + i + na - la, b + k + nb - lb, la);
            if (order != 0) {
                return order;
            }
            i += na;
            k += nb;
        } else if (a[i] != b[k]) {
            return (unsigned char)a[i] < (unsigned char)b[k] ? -1 : 1;
        } else {
            i++;
            k++;
        }
    }
    if (i < alen || k < blen) {
        return i < alen ? 1 : -1;
    }
    int order = memcmp(a, b, alen < blen ? alen : blen); /* "01" and "1" are different names */
    return order != 0 ? order : (alen > blen) - (alen < blen);
}

static int compare_names(const void *x, const void *y) {
    const char *a = (*(const fc_tensor *const *)x)->name, *b = (*(const fc_tensor *const *)y)->name;
    for (;;) {
        size_t alen = component(a), blen = component(b);
        int order = compare_components(a, alen, b, blen);
        if (order != 0) {
            return order;
        }
        if (!a[alen] || !b[blen]) {
            return (a[alen] != 0) - (b[blen] != 0);
        }
        a += alen + 1;
        b += blen + 1;
    }
}

static void print_indent(const tree *t, int depth, bool last) {
    for (int i = 0; i < depth; i++) {
        text_puts(t->in->out, t->more[i] ? (t->utf8 ? "│  " : "|  ") : "   ");
    }
    text_puts(t->in->out, t->utf8 ? (last ? "└─ " : "├─ ") : (last ? "`- " : "|- "));
}

static fc_code print_leaf(tree *t, const fc_tensor *tensor, const char *label, fc_error *err) {
    text_out *out = t->in->out;
    char text[128];
    fc_cut c;
    text_name(out, label);
    if (tensor->object) {
        fc_error why = {FC_OK, ""};
        fc_arena *arena = fc_arena_new();
        if (!arena) {
            return inspect_no_memory(t->in, err);
        }
        const char *json = inspect_object(t->in, tensor, arena, &why);
        text_puts(out, json ? " = " : "  object");
        if (json && strlen(json) > 60) {
            text_printf(out, "(%zu characters of JSON)", strlen(json));
        } else if (json) {
            text_name(out, json);
        }
        fc_arena_free(arena);
        text_puts(out, "\n");
        return FC_OK;
    }
    if (!fc_cut_recognise(tensor, &t->in->scratch, &c)) {
        return inspect_no_memory(t->in, err);
    }
    text_printf(out, "  %s", fc_dtype_get(tensor->dtype)->torch_name);
    text_printf(out, "  %s", text_shape(text, sizeof text, tensor->ndim, tensor->shape));
    text_printf(out, "  %s\n", cut_describe(tensor, &c, text, sizeof text));
    return FC_OK;
}

/* The end of the run of entries from `from` whose component at `at` is the same. */
static size_t run_end(const tree *t, size_t from, size_t end, size_t at) {
    const char *s = t->sorted[from]->name + at;
    size_t len = component(s), low = from + 1, high = end;
    while (low < high) { /* sorted, so the run is found without looking at all of it */
        size_t middle = low + (high - low) / 2;
        const char *other = t->sorted[middle]->name + at;
        if (component(other) == len && memcmp(s, other, len) == 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void print_branch(const tree *t, const char *label, size_t len, size_t from, size_t end) {
    char size[TEXT_SIZE_MAX];
    uint64_t bytes = 0;
    size_t tensors = 0, objects = 0;
    for (size_t i = from; i < end; i++) {
        bool object = t->sorted[i]->object != NULL;
        uint64_t more = object ? 0 : inspect_bytes(t->sorted[i]);
        objects += object;
        tensors += !object;
        bytes = more > UINT64_MAX - bytes ? UINT64_MAX : bytes + more;
    }
    char *name = strndup(label, len);
    text_name(t->in->out, name ? name : "?");
    free(name);
    text_puts(t->in->out, "  (");
    if (tensors > 0) {
        text_printf(t->in->out, "%zu %s, %s%s", tensors, tensors == 1 ? "tensor" : "tensors", text_bytes(size, bytes),
                    objects > 0 ? ", " : "");
    }
    if (objects > 0) {
        text_printf(t->in->out, "%zu %s", objects, objects == 1 ? "object" : "objects");
    }
    text_puts(t->in->out, ")\n");
}

/* Prints the entries [from, end), which are the same up to `at`. */
static fc_code print_level(tree *t, size_t from, size_t end, size_t at, int depth, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = from; i < end && rc == FC_OK && t->in->out->error == 0;) {
        const char *label = t->sorted[i]->name + at;
        size_t next = depth < MAX_DEPTH - 1 ? run_end(t, i, end, at) : i + 1, len = component(label);
        t->more[depth] = next < end;
        print_indent(t, depth, next == end);
        if (next == i + 1) {
            rc = print_leaf(t, t->sorted[i], label, err);
            i = next;
            continue;
        }
        /* A chain of single branches goes on one line. A name that ends here is a leaf beside its namesake branch. */
        while (t->sorted[i]->name[at + len] == '.' && run_end(t, i, next, at + len + 1) == next) {
            len += 1 + component(t->sorted[i]->name + at + len + 1);
        }
        print_branch(t, label, len, i, next);
        if (t->sorted[i]->name[at + len] == '\0') {
            t->more[depth + 1] = true;
            print_indent(t, depth + 1, false);
            rc = print_leaf(t, t->sorted[i], "(itself)", err);
            i++;
        }
        if (rc == FC_OK) {
            rc = print_level(t, i, next, at + len + 1, depth + 1, err);
        }
        i = next;
    }
    return rc;
}

fc_code inspect_tree(inspection *in, fc_error *err) {
    size_t n = in->checkpoint->ntensors;
    tree t = {.in = in, .utf8 = text_is_utf8()};
    t.sorted = calloc(n ? n : 1, sizeof *t.sorted);
    if (!t.sorted) {
        return inspect_no_memory(in, err);
    }
    for (size_t i = 0; i < n; i++) {
        t.sorted[i] = &in->checkpoint->tensors[i];
    }
    qsort(t.sorted, n, sizeof *t.sorted, compare_names);
    text_name(in->out, in->checkpoint->path);
    text_puts(in->out, "\n");
    fc_code rc = print_level(&t, 0, n, 0, 0, err);
    free(t.sorted);
    return rc;
}
