/*
 * The smallest program that uses the installed library: opens a checkpoint and counts what is in it.
 */
#include <fsdpckpt/box.h>
#include <fsdpckpt/checkpoint.h>
#include <fsdpckpt/format.h>
#include <fsdpckpt/io.h>
#include <fsdpckpt/layout.h>
#include <fsdpckpt/move.h>
#include <fsdpckpt/plan.h>

#include <stdio.h>

int main(int argc, char **argv) {
    fc_checkpoint *checkpoint;
    fc_error err;
    if (argc != 2) {
        return 2;
    }
    fc_code rc = fc_checkpoint_open(argv[1], NULL, &checkpoint, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
        return fc_exit_status(rc);
    }
    printf("%zu\n", checkpoint->ntensors);
    fc_checkpoint_close(checkpoint);
    return 0;
}
