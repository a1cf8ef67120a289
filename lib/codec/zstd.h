/*
 * Zstandard frames in memory and as a stream. Without libzstd every function returns FC_EUNSUPPORTED and names the
 * Debian package. The input of decoding may be hostile: nothing is written past the room that the caller gives, and a
 * frame that asks for a window of more than FC_ZSTD_MOST_WINDOW is refused before memory is allocated for it.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FC_ZSTD_MOST_WINDOW = 1 << 27 /**< bytes; that of `zstd -d` without --long, and all that levels up to 22 need */
};

/** Whether this build has libzstd. */
bool fc_zstd_is_built_in(void);

/**
 * Decodes one or more frames that must decode to exactly `out_size` bytes.
 * @return FC_ECORRUPT if they are damaged or have another size, FC_EUNSUPPORTED, FC_ENOMEM.
 */
fc_code fc_zstd_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err);

/**
 * Reads the header of a frame.
 * @param window  receives how many bytes of window its decoder needs.
 * @param content receives the size of what it decodes to; UINT64_MAX if the header does not say it.
 * @return false if `in` does not begin with the whole header of a frame, which has at most 18 bytes.
 */
bool fc_zstd_frame(const unsigned char *in, size_t in_size, uint64_t *window, uint64_t *content);

/** A part of a stream: what was taken of the input and what was put into the output. */
typedef struct fc_zstd_step {
    size_t taken;  /**< bytes of the input */
    size_t made;   /**< bytes of the output */
    bool finished; /**< decoding: a frame ended here and all of it was put out; encoding: the frame is complete */
} fc_zstd_step;

/** Decodes a stream of frames step by step. One thread uses it at a time. */
typedef struct fc_zstd_decoder fc_zstd_decoder;

/** @param out receives the decoder, which the caller frees. @return FC_EUNSUPPORTED, FC_ENOMEM. */
fc_code fc_zstd_decoder_new(fc_zstd_decoder **out, fc_error *err);
void fc_zstd_decoder_free(fc_zstd_decoder *decoder);

/** Begins a new stream, whatever the state of the last one. */
void fc_zstd_decoder_reset(fc_zstd_decoder *decoder);

/**
 * Takes what it can of `in` and fills what it can of `out`. The stream is complete only if `finished` was set by the
 * last step, so a caller that runs out of input before that has a truncated stream.
 * @return FC_ECORRUPT if the stream is damaged, FC_ENOMEM.
 */
fc_code fc_zstd_decode_step(fc_zstd_decoder *decoder, const unsigned char *in, size_t in_size, unsigned char *out,
                            size_t out_size, fc_zstd_step *step, fc_error *err);

/** Makes frames step by step. One thread uses it at a time. */
typedef struct fc_zstd_encoder fc_zstd_encoder;

/**
 * @param level 1 … 22, as of the command zstd.
 * @param out   receives the encoder, which the caller frees.
 * @return FC_EUNSUPPORTED, FC_ENOMEM.
 */
fc_code fc_zstd_encoder_new(int level, fc_zstd_encoder **out, fc_error *err);
void fc_zstd_encoder_free(fc_zstd_encoder *encoder);

/** Returns the most bytes that an encoder of this level, at most 9, holds. */
size_t fc_zstd_encoder_memory(int level);

/** Begins a new frame of `size` bytes, which its header records. What was begun before is dropped. */
fc_code fc_zstd_encoder_begin(fc_zstd_encoder *encoder, unsigned long long size, fc_error *err);

/**
 * Takes what it can of `in` and fills what it can of `out`.
 * @param last whether `in` is the end of the frame; call again with what is left of it until `finished` is set.
 */
fc_code fc_zstd_encode_step(fc_zstd_encoder *encoder, const unsigned char *in, size_t in_size, bool last,
                            unsigned char *out, size_t out_size, fc_zstd_step *step, fc_error *err);
