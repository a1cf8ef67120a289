/*
 * Reads the frame of one changed tensor as a stream: the bytes of the tensor pass by in order, and each is replaced by
 * its new value. A frame is someone else's: one that is damaged, longer or shorter than the tensor, or that changes
 * bytes outside of it is refused, and memory does not depend on what it claims.
 */
#pragma once

#include "delta/checksum.h"
#include "delta/versions.h"

enum { FC_DELTA_MOST_WINDOW = 8 << 20 }; /**< bytes; that of zstd's level 19 */

typedef struct fc_delta_decoder fc_delta_decoder;

/** One thread uses a decoder at a time. @param out receives it, which the caller frees. */
fc_code fc_delta_decoder_new(fc_delta_decoder **out, fc_error *err);
void fc_delta_decoder_free(fc_delta_decoder *decoder);

/** Returns the most bytes that a decoder holds for frames with a window of `window` bytes. */
size_t fc_delta_decoder_memory(fc_delta_encoding encoding, size_t window);

/**
 * Reads how large a window the frame of a tensor needs.
 * @param content receives the size of what it decodes to; UINT64_MAX if the frame does not say it.
 * @return FC_ECORRUPT if it is no zstd frame, or needs a window of more than FC_DELTA_MOST_WINDOW.
 */
fc_code fc_delta_window(const fc_delta_tensor *tensor, size_t *window, uint64_t *content, fc_error *err);

/**
 * Begins a tensor, whatever the state of the last one.
 * @param tensor is borrowed until the end.
 * @param bytes  the size of the tensor; of a tensor of an unknown size, at least that which the frame says.
 */
fc_code fc_delta_decoder_begin(fc_delta_decoder *decoder, const fc_delta_version *version,
                               const fc_delta_tensor *tensor, uint64_t bytes, fc_error *err);

/** Lets the decoder compute no checksum of the tensor that it has begun. */
void fc_delta_decoder_skip_checksum(fc_delta_decoder *decoder);

/**
 * Gives the next `size` bytes of the tensor their new values.
 * @param old     the old bytes, which may be where the new ones go; NULL: all are 0.
 * @param bytes   receives the new bytes.
 * @param changed if it is not NULL, receives 1 for each byte that the frame changes, and keeps the others: with the
 *                encoding xor those whose difference is not 0, with overwrite those that are stored.
 */
fc_code fc_delta_decode(fc_delta_decoder *decoder, const unsigned char *old, unsigned char *bytes,
                        unsigned char *changed, size_t size, fc_error *err);

/**
 * Returns the position of the next byte that a frame of the encoding overwrite changes; UINT64_MAX if there is none.
 */
fc_code fc_delta_next_position(fc_delta_decoder *decoder, uint64_t *position, fc_error *err);

/** Goes on to `at`, which is not behind the next position: the bytes between do not change. Only for overwrite. */
void fc_delta_decoder_skip_to(fc_delta_decoder *decoder, uint64_t at);

/** Checks that the frame ends with the tensor. @param check compares the checksum of the new bytes. */
fc_code fc_delta_decoder_end(fc_delta_decoder *decoder, bool check, fc_error *err);
