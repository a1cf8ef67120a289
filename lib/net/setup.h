/*
 * What the environment and the user's files say about servers: certificates, and credentials for buckets and the hub.
 */
#pragma once

#include "net/module.h"

/** Reads the variables and files that the AWS command and huggingface_hub read, before the fetcher is confined. */
void fc_net_setup_read(fc_net_setup *out);
