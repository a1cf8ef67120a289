/*
 * Makes the groups of an image from the datasets upwards: the members of a group are made first.
 */
#include "hdf5/writer/groups.h"

#include "hdf5/writer/set.h"

#include <stdlib.h>

fc_code fc_h5_groups_new(const fc_h5_tree *tree, const char *path, fc_h5_groups *out, fc_error *err) {
    *out = (fc_h5_groups){.tree = tree,
                          .made = calloc(tree->count, sizeof *out->made),
                          .kind_at = calloc(tree->count, sizeof *out->kind_at),
                          .first = calloc(tree->count, sizeof *out->first),
                          .next = calloc(tree->count, sizeof *out->next)};
    return out->made && out->kind_at && out->first && out->next ? FC_OK : fc_no_memory(err, path);
}

void fc_h5_groups_free(fc_h5_groups *groups) {
    free(groups->made);
    free(groups->kind_at);
    free(groups->first);
    free(groups->next);
    free(groups->kinds.data);
    *groups = (fc_h5_groups){NULL};
}

fc_code fc_h5_groups_find(fc_h5_groups *groups, fc_h5_image *image, fc_error *err) {
    const fc_h5_node *nodes = groups->tree->nodes;
    fc_h5_holder holder = {.image = image, .messages = &groups->kinds};
    groups->made[0] = 1; /* the root exists even without members */
    for (uint32_t n = (uint32_t)groups->tree->count; n-- > 0;) {
        if (!groups->made[n]) {
            continue;
        }
        if (n > 0) {
            groups->made[nodes[n].parent] = 1; /* a placeholder until it is made */
            groups->next[n] = groups->first[nodes[n].parent];
            groups->first[nodes[n].parent] = n;
        }
        if (!nodes[n].is_value && nodes[n].kind) {
            groups->kind_at[n] = groups->kinds.size;
            fc_h5_set_text(&holder, FC_H5_A_KIND, fc_h5_group_kind_text(nodes[n].kind));
            groups->kind_size = groups->kinds.size - groups->kind_at[n];
        }
    }
    return groups->kinds.failed ? fc_no_memory(err, image->path) : FC_OK;
}

/* Lists the members of group `n` in `members`, which has enough room. */
static size_t list_members(const fc_h5_groups *groups, const fc_h5_image *image, uint32_t n, fc_h5_member *members) {
    size_t count = 0;
    for (uint32_t m = groups->first[n]; m != 0; m = groups->next[m]) {
        members[count++] = (fc_h5_member){groups->tree->nodes[m].link, image->objects_at + groups->made[m] - 1};
    }
    return count;
}

fc_code fc_h5_groups_make(fc_h5_groups *groups, fc_h5_image *image, const fc_h5_buffer *root, size_t crc64_at,
                          fc_error *err) {
    const fc_h5_node *nodes = groups->tree->nodes;
    fc_h5_member *members = calloc(groups->tree->count, sizeof *members);
    fc_h5_buffer messages = {NULL, 0, 0, root->failed};
    fc_code rc = members ? FC_OK : fc_no_memory(err, image->path);
    for (uint32_t n = (uint32_t)groups->tree->count; n-- > 0 && rc == FC_OK;) {
        if (!groups->made[n] || nodes[n].is_value) {
            continue;
        }
        messages.size = 0;
        if (n == 0) {
            fc_h5_add_bytes(&messages, root->data, root->size);
        }
        if (nodes[n].kind) {
            fc_h5_add_bytes(&messages, groups->kinds.data + groups->kind_at[n], groups->kind_size);
        }
        fc_h5_group group = {.members = members,
                             .count = list_members(groups, image, n, members),
                             .messages = messages.data,
                             .size = messages.size};
        rc = messages.failed ? fc_no_memory(err, image->path) : fc_h5_image_group(image, &group, err);
        groups->made[n] = (size_t)(group.address - image->objects_at) + 1;
        image->root = group.address;
        image->header_crc64 = group.messages_at + crc64_at;
    }
    free(messages.data);
    free(members);
    return rc;
}
