/*
 * What safetensors has no place for and this program keeps in `__metadata__`, where other programs pass over it. Each
 * is a text; most are JSON. The writer makes them, kept.c reads them.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_KEPT_H
#define FSDPCKPT_FORMATS_SAFETENSORS_KEPT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

/** All of ours start so. */
#define ST_OURS "fsdpckpt."
/** The version of this program that wrote the file. */
#define ST_VERSION "fsdpckpt.version"
/** {name: [element, …]}: the nesting of values that are not flat. A key is a text, a list index a number; an index of a
 *  tuple is {"tuple": number}, a key that is a number {"number": number}. */
#define ST_PATHS "fsdpckpt.paths"
/** {name: torch's dtype}: where the format has none of that kind (see st_stored). */
#define ST_DTYPES "fsdpckpt.dtypes"
/** {"rank": R, "shape": [size, …], "names": [name, …]}: the mesh that the file is one rank's part of. */
#define ST_MESH "fsdpckpt.mesh"
/** {name: {"shape": [size, …], "placements": text}}: of the whole tensor. */
#define ST_LAYOUT "fsdpckpt.layout"
/** 16 hexadecimal digits a tensor, in the order of their data: CRC-64 of the row-major bytes. */
#define ST_DIGESTS "fsdpckpt.crc64"
/** 16 hexadecimal digits: CRC-64 of the file up to its data, see header_digest.h. */
#define ST_HEADER_DIGEST "fsdpckpt.header_crc64"
/** Followed by its name: an object, {"encoding": text, "json": text, "path": [element, …], "data": base64}. */
#define ST_OBJECT "fsdpckpt.object."

/** torch's: {name: {"saved_offsets": [offset, …]}}. */
#define ST_SHARDING "DCP_SHARDING_INFO"
#define ST_DCP_VERSION "DCP_VERSION"
/** transformers wants it: which framework the tensors are for. */
#define ST_FRAMEWORK "format"

/** The object that stands for the other members of `__metadata__`, and its encoding: JSON text. */
#define ST_METADATA_NAME "__metadata__"
#define ST_METADATA_ENCODING "safetensors.metadata"
/** A member of that object: the "metadata" of an index file, beyond what follows from the tensors. */
#define ST_INDEX_METADATA "safetensors.index"

#endif
