/*
 * PyTorch distributed checkpoints (DCP): the format's table.
 */
#include "registry.h"

static bool dcp_probe(const fc_probe *probe) {
    (void)probe;
    return false;
}

const fc_format fc_format_dcp = {
    .name = "dcp",
    .description = "PyTorch distributed checkpoint (DCP)",
    .probe = dcp_probe,
};
