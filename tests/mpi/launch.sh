#!/bin/sh
# Runs a program as an MPI job: launch.sh RANKS PROGRAM [ARGUMENT]... Exits with 77 (skipped) if there is no mpirun.
# The job may run as root and with more ranks than processors. Ranks of one machine copy through shared memory in two
# steps, because the single copy (process_vm_readv) is forbidden in most containers and prints a long warning.
set -eu
ranks=$1
shift
command -v mpirun >/dev/null || exit 77
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Ignore leaks inside the MPI library.
export LSAN_OPTIONS="${LSAN_OPTIONS:-}:detect_leaks=0"
exec mpirun --bind-to none -n "$ranks" "$@"
