/*
 * Visits the lines of `inspect` as a tree: see tree.h.
 */
#include "inspect/tree.h"

#include "fsdpckpt/order.h"
#include "inspect/fold.h"

#include <stdlib.h>
#include <string.h>

#include "fsdpckpt/try.h"

enum { MAX_DEPTH = 64 }; /* protects against hostile names with a million dots; deeper names are not split */

typedef struct walk {
    const inspect_line **sorted;
    const tree_visitor *visitor;
    const text_out *out;
} walk;

static int compare_lines(const void *x, const void *y) {
    return inspect_compare_names((*(const inspect_line *const *)x)->name, (*(const inspect_line *const *)y)->name);
}

/* @return the end of the entries from `from` on that have the same component at `at`. */
static size_t run_end(const walk *w, size_t from, size_t end, size_t at) {
    const char *s = w->sorted[from]->name + at;
    size_t len = fold_component(s), low = from + 1;
    FC_BISECT(low, end, i,
              fold_component(w->sorted[i]->name + at) == len && memcmp(s, w->sorted[i]->name + at, len) == 0);
    return low;
}

static void add_up_lines(const walk *w, size_t from, size_t end, tree_node *node) {
    node->lines = end - from;
    for (size_t i = from; i < end; i++) {
        const inspect_line *line = w->sorted[i];
        node->objects += line->objects;
        node->tensors += line->tensors;
        node->bytes = inspect_add(node->bytes, line->tensors > 0 ? line->bytes : 0);
    }
}

static fc_code visit_leaf(const walk *w, size_t i, const char *label, int depth, bool last, fc_error *err) {
    tree_node node = {.label = label, .length = strlen(label), .line = w->sorted[i], .depth = depth, .last = last};
    add_up_lines(w, i, i + 1, &node);
    return w->visitor->leaf(w->visitor->context, &node, err);
}

static fc_code visit_level(const walk *w, size_t from, size_t end, size_t at, int depth, fc_error *err);

/* Visits a branch: the entries [from, end), which are the same up to `at`, where the branch's label begins. */
static fc_code visit_branch(const walk *w, size_t from, size_t end, size_t at, int depth, bool last, fc_error *err) {
    size_t i = from, len = fold_component(w->sorted[i]->name + at);
    /* A chain of single branches is shown as one. If a name ends here, it becomes a leaf of the branch of that name. */
    while (w->sorted[i]->name[at + len] == '.' && run_end(w, i, end, at + len + 1) == end) {
        len += 1 + fold_component(w->sorted[i]->name + at + len + 1);
    }
    const char *label = w->sorted[i]->name + at;
    tree_node module = {.label = label, .length = len, .depth = depth, .last = last};
    add_up_lines(w, i, end, &module);
    FC_TRY(w->visitor->enter(w->visitor->context, &module, err));
    if (w->sorted[i]->name[at + len] == '\0') {
        tree_node node = {.label = label, .length = len, .line = w->sorted[i], .itself = true, .depth = depth + 1};
        add_up_lines(w, i, i + 1, &node);
        FC_TRY(w->visitor->leaf(w->visitor->context, &node, err));
        i++;
    }
    FC_TRY(visit_level(w, i, end, at + len + 1, depth + 1, err));
    if (w->visitor->leave) {
        w->visitor->leave(w->visitor->context, &module);
    }
    return FC_OK;
}

/* Visits the entries [from, end), which are the same up to `at`. */
static fc_code visit_level(const walk *w, size_t from, size_t end, size_t at, int depth, fc_error *err) {
    for (size_t i = from, next; i < end && w->out->error == 0; i = next) {
        next = depth < MAX_DEPTH - 1 ? run_end(w, i, end, at) : i + 1;
        if (next == i + 1) {
            FC_TRY(visit_leaf(w, i, w->sorted[i]->name + at, depth, next == end, err));
        } else {
            FC_TRY(visit_branch(w, i, next, at, depth, next == end, err));
        }
    }
    return FC_OK;
}

fc_code inspect_walk(inspection *in, bool tensors, bool objects, const tree_visitor *visitor, fc_error *err) {
    size_t n = 0;
    walk w = {.visitor = visitor, .out = in->out, .sorted = calloc(in->nlines + 1, sizeof *w.sorted)};
    FC_NEED(w.sorted, err, in->checkpoint->path);
    for (size_t i = 0; i < in->nlines; i++) {
        const inspect_line *line = &in->lines[i];
        if ((tensors && line->tensors > 0) || (objects && line->objects > 0)) {
            w.sorted[n++] = line;
        }
    }
    fc_sort_items(w.sorted, n, sizeof *w.sorted, compare_lines);
    fc_code rc = visit_level(&w, 0, n, 0, 0, err);
    free(w.sorted);
    return rc;
}
