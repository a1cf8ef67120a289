#!/bin/sh
# Runs a program as an MPI job: launch.sh RANKS PROGRAM [ARGUMENT]... Ends with 77 (skipped) where there is no mpirun.
# As root and with more ranks than processors: this is a test machine. Ranks of one machine copy through shared memory
# in two steps, because the one-step way (process_vm_readv) is forbidden in most containers and says so at length.
set -eu
ranks=$1
shift
command -v mpirun >/dev/null || exit 77
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Leaks inside of the MPI library are not ours.
export LSAN_OPTIONS="${LSAN_OPTIONS:-}:detect_leaks=0"
exec mpirun --bind-to none -n "$ranks" "$@"
