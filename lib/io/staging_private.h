/*
 * What making and clearing staging directories share.
 */
#pragma once

#include <sys/stat.h>

/* FC_STAGED_MOST_NAME: bytes of the target's name that are kept, so that the suffix still fits into NAME_MAX. */
enum { FC_STAGED_MOST_NAME = 200, FC_STAGING_RANDOM = 6, FC_STAGING_TRIES = 16, FC_INODE_NAME = 40 };

#define FC_STAGING_SUFFIX ".fsdpckpt-"

/** The result of locking a staging directory. */
typedef enum fc_lock_state {
    FC_LOCK_HELD,
    FC_LOCK_BUSY,
    FC_LOCK_GONE,    /**< another run is removing or has removed the directory */
    FC_LOCK_UNKNOWN, /**< the file system has no locks */
    FC_LOCK_FAILED   /**< errno has the reason */
} fc_lock_state;

/** Locks an open staging directory. @param flags O_CREAT or 0. @param fd the descriptor that holds the lock, or -1. */
fc_lock_state fc_staging_lock(int directory, int flags, int *fd);

/** Removes the content, the lock last, so that a directory without one is empty, also after a power failure. */
void fc_staging_empty(int directory);

/** Writes the name in `complete` of a target with this inode. */
void fc_staging_name_inode(const struct stat *st, char name[FC_INODE_NAME]);
