/*
 * inspect --tree: prints the names as a tree, with the contents of each branch.
 */
#include "inspect/tree.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_LEVELS = 65 };

typedef struct tree {
    inspection *in;
    bool utf8;
    bool more[MAX_LEVELS]; /* whether more entries of a level follow the current one */
} tree;

/* The lines that lead to a node, and its label. */
static void print_label(tree *t, const tree_node *node) {
    text_out *out = t->in->out;
    const bool corner = node->last;
    t->more[node->depth] = !corner;
    for (int i = 0; i < node->depth; i++) {
        text_puts(out, t->more[i] ? (t->utf8 ? "│  " : "|  ") : "   ");
    }
    text_puts(out, t->utf8 ? (corner ? "└─ " : "├─ ") : (corner ? "`- " : "|- "));
    char *label = strndup(node->label, node->length);
    text_name(out, node->itself ? "(itself)" : label ? label : "?");
    free(label);
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
    FC_NEED(arena, err, t->in->checkpoint->path);
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

static fc_code print_line(tree *t, const inspect_line *line, fc_error *err) {
    text_out *out = t->in->out;
    char text[128], size[TEXT_SIZE_MAX];
    const fc_tensor *tensor = line->first;
    if (!line->kind) {
        print_counts(out, line->tensors, line->objects, line->bytes);
        return FC_OK;
    }
    if (tensor->object) {
        return print_object(t, line, err);
    }
    text_printf(out, "  %s  %s  %s", fc_dtype_get(tensor->dtype)->torch_name,
                text_shape(text, sizeof text, tensor->ndim, tensor->shape), line->kind->sharding);
    if (line->folded > 1) {
        text_printf(out, "  (%zu tensors, %s)", line->folded, text_bytes(size, line->bytes));
    }
    text_puts(out, "\n");
    return FC_OK;
}

static fc_code print_module(void *context, const tree_node *node, fc_error *err) {
    (void)err;
    tree *t = context;
    print_label(t, node);
    print_counts(t->in->out, node->tensors, node->objects, node->bytes);
    return FC_OK;
}

static fc_code print_leaf(void *context, const tree_node *node, fc_error *err) {
    tree *t = context;
    print_label(t, node);
    return print_line(t, node->line, err);
}

fc_code inspect_tree(inspection *in, fc_error *err) {
    tree t = {.in = in, .utf8 = text_is_utf8()};
    const tree_visitor visitor = {.enter = print_module, .leaf = print_leaf, .context = &t};
    text_name(in->out, in->checkpoint->path);
    text_puts(in->out, "\n");
    return inspect_walk(in, true, true, &visitor, err);
}
