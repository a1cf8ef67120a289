/*
 * Makes the frames of changed tensors. Each worker has an encoder, which compares the bytes of one tensor after the
 * other and leaves the frame of each that changed in a file of its own: where a frame goes in the delta depends on the
 * sizes of those before it. On the way to a bucket, frames go through a sender instead (sender.h).
 */
#pragma once

#include "delta/checksum.h"
#include "delta/sender.h"

enum { FC_DELTA_ENCODINGS = 2 }; /**< FC_DELTA_XOR and FC_DELTA_OVERWRITE */

typedef struct fc_delta_encoder fc_delta_encoder;

/** A frame in the file of an encoder. */
typedef struct fc_delta_frame {
    const fc_delta_encoder *in; /**< NULL: there is none */
    uint64_t offset, size;
} fc_delta_frame;

/** What an encoder found out about a tensor. */
typedef struct fc_delta_found {
    uint64_t changed_bytes;                    /**< 0: the tensor did not change, and there are no frames */
    fc_delta_frame frames[FC_DELTA_ENCODINGS]; /**< of the encodings that were wanted */
    char checksum[FC_DELTA_DIGITS];
} fc_delta_found;

/** How frames are made. */
typedef struct fc_delta_how {
    const char *directory;   /**< where the files of the encoders are made */
    fc_delta_sender *sender; /**< takes the frames of the one encoding instead; NULL: there is a directory */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    int level;
    bool no_checksum; /**< the checksum is known already: fc_delta_found.checksum is not set */
} fc_delta_how;

/** @param number differs between the encoders of one directory. @param out receives the encoder, also on failure. */
fc_code fc_delta_encoder_new(const fc_delta_how *how, int number, fc_delta_encoder **out, fc_error *err);
void fc_delta_encoder_free(fc_delta_encoder *encoder);

/** Returns the most bytes that an encoder holds. */
size_t fc_delta_encoder_memory(const fc_delta_how *how);

/** Begins a tensor of `bytes` bytes. @param index for the sender @param name for messages */
fc_code fc_delta_encoder_begin(fc_delta_encoder *encoder, size_t index, const char *name, uint64_t bytes,
                               fc_error *err);

/** Adds the next `size` bytes of both versions. */
fc_code fc_delta_encoder_add(fc_delta_encoder *encoder, const unsigned char *old, const unsigned char *changed,
                             size_t size, fc_error *err);

/**
 * Adds what is known to change in the next `size` bytes.
 * @param changes xor: new ^ old; overwrite: the new bytes.
 * @param changed overwrite: 1 for each byte that changes, else 0; xor: NULL.
 */
fc_code fc_delta_encoder_add_known(fc_delta_encoder *encoder, const unsigned char *changes,
                                   const unsigned char *changed, size_t size, fc_error *err);

/** Ends the tensor. */
fc_code fc_delta_encoder_end(fc_delta_encoder *encoder, fc_delta_found *found, fc_error *err);

/** Reads a part of a frame. @param at from the start of the frame. */
fc_code fc_delta_frame_read(const fc_delta_frame *frame, fc_delta_encoding encoding, uint64_t at, unsigned char *out,
                            size_t size, fc_error *err);
