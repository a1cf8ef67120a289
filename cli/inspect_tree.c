/*
 * inspect --tree: the names as the tree they spell, natural order, with what lies below each branch.
 */
#include "fold.h"
#include "inspect.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 }; /* a hostile name has a million dots; below this a name is printed as it is */

typedef struct tree {
    inspection *in;
    const inspect_line **sorted;
    bool utf8;
    bool more[MAX_DEPTH]; /* whether a level has more entries below the current one */
} tree;

static int compare_lines(const void *x, const void *y) {
    return inspect_compare_names((*(const inspect_line *const *)x)->name, (*(const inspect_line *const *)y)->name);
}

static void print_indent(const tree *t, int depth, bool last) {
    for (int i = 0; i < depth; i++) {
        text_puts(t->in->out, t->more[i] ? (t->utf8 ? "│  " : "|  ") : "   ");
    }
    text_puts(t->in->out, t->utf8 ? (last ? "└─ " : "├─ ") : (last ? "`- " : "|- "));
}

static void print_counts(text_out *out, size_t tensors, size_t objects, uint64_t bytes) {
    char size[TEXT_SIZE_MAX], count[TEXT_SIZE_MAX];
    text_puts(out, "  (");
    if (tensors > 0) {
        text_printf(out, "%s %s, %s%s", text_count(count, tensors), tensors == 1 ? "tensor" : "tensors",
                    text_bytes(size, bytes), objects > 0 ? ", " : "");
    }
    if (objects > 0) {
        text_printf(out, "%s %s", text_count(count, objects), objects == 1 ? "object" : "objects");
    }
    text_puts(out, ")\n");
}

static fc_code print_object(tree *t, const inspect_line *line, fc_error *err) {
    text_out *out = t->in->out;
    fc_error why = {FC_OK, ""};
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return inspect_no_memory(t->in, err);
    }
    const char *json = line->kind->value ? line->kind->value : inspect_object(t->in, line->first, arena, &why);
    text_puts(out, json ? " = " : "  object");
    if (json && strlen(json) > 60) {
        text_printf(out, "(%zu characters of JSON)", strlen(json));
    } else if (json) {
        text_name(out, json);
    }
    text_puts(out, "\n");
    fc_arena_free(arena);
    return FC_OK;
}

static fc_code print_leaf(tree *t, const inspect_line *line, const char *label, fc_error *err) {
    text_out *out = t->in->out;
    char text[128], size[TEXT_SIZE_MAX];
    const fc_tensor *tensor = line->first;
    text_name(out, label);
    if (!line->kind) {
        print_counts(out, line->tensors, line->objects, line->bytes);
        return FC_OK;
    }
    if (tensor->object) {
        return print_object(t, line, err);
    }
    text_printf(out, "  %s  %s  %s", fc_dtype_get(tensor->dtype)->torch_name,
                text_shape(text, sizeof text, tensor->ndim, tensor->shape), line->kind->cut);
    if (line->folded > 1) {
        text_printf(out, "  (%zu tensors, %s)", line->folded, text_bytes(size, line->bytes));
    }
    text_puts(out, "\n");
    return FC_OK;
}

/* The end of the run of entries from `from` whose component at `at` is the same. */
static size_t run_end(const tree *t, size_t from, size_t end, size_t at) {
    const char *s = t->sorted[from]->name + at;
    size_t len = fold_component(s), low = from + 1, high = end;
    while (low < high) { /* sorted, so the run is found without looking at all of it */
        size_t middle = low + (high - low) / 2;
        const char *other = t->sorted[middle]->name + at;
        if (fold_component(other) == len && memcmp(s, other, len) == 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void print_branch(const tree *t, const char *label, size_t len, size_t from, size_t end) {
    uint64_t bytes = 0;
    size_t tensors = 0, objects = 0;
    for (size_t i = from; i < end; i++) {
        const inspect_line *line = t->sorted[i];
        objects += line->objects;
        tensors += line->tensors;
        bytes = inspect_add(bytes, line->tensors > 0 ? line->bytes : 0);
    }
    char *name = strndup(label, len);
    text_name(t->in->out, name ? name : "?");
    free(name);
    print_counts(t->in->out, tensors, objects, bytes);
}

/* Prints the entries [from, end), which are the same up to `at`. */
static fc_code print_level(tree *t, size_t from, size_t end, size_t at, int depth, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = from; i < end && rc == FC_OK && t->in->out->error == 0;) {
        const char *label = t->sorted[i]->name + at;
        size_t next = depth < MAX_DEPTH - 1 ? run_end(t, i, end, at) : i + 1, len = fold_component(label);
        t->more[depth] = next < end;
        print_indent(t, depth, next == end);
        if (next == i + 1) {
            rc = print_leaf(t, t->sorted[i], label, err);
            i = next;
            continue;
        }
        /* A chain of single branches goes on one line. A name that ends here is a leaf beside its namesake branch. */
        while (t->sorted[i]->name[at + len] == '.' && run_end(t, i, next, at + len + 1) == next) {
            len += 1 + fold_component(t->sorted[i]->name + at + len + 1);
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
    size_t n = in->nlines;
    tree t = {.in = in, .utf8 = text_is_utf8()};
    t.sorted = calloc(n ? n : 1, sizeof *t.sorted);
    if (!t.sorted) {
        return inspect_no_memory(in, err);
    }
    for (size_t i = 0; i < n; i++) {
        t.sorted[i] = &in->lines[i];
    }
    qsort(t.sorted, n, sizeof *t.sorted, compare_lines);
    text_name(in->out, in->checkpoint->path);
    text_puts(in->out, "\n");
    fc_code rc = print_level(&t, 0, n, 0, 0, err);
    free(t.sorted);
    return rc;
}
