/*
 * Members of `__metadata__` for everything that safetensors cannot express. Other programs ignore them. Each value is
 * a string; most hold JSON. header_out.c writes them; kept.c and objects.c read them.
 */
#pragma once

/** The prefix of fsdpckpt's own members. */
#define ST_OURS "fsdpckpt."
/** The version of fsdpckpt that wrote the file. */
#define ST_VERSION "fsdpckpt.version"
/** {name: [element, …]}: the paths of nested values. A key is a string, a list index is a number, a tuple index is
 *  {"tuple": number}, and a key that is a number is {"number": number}. */
#define ST_PATHS "fsdpckpt.paths"
/** {name: torch dtype} for dtypes that safetensors does not have (see fc_st_stored). */
#define ST_DTYPES "fsdpckpt.dtypes"
/** {"rank": R, "shape": [size, …], "names": [name, …]}: the mesh, and the rank whose shard the file holds. */
#define ST_MESH "fsdpckpt.mesh"
/** {name: {"shape": [size, …], "placements": text}}: the global shape and the placements of a sharded tensor. */
#define ST_LAYOUT "fsdpckpt.layout"
/** 16 hexadecimal digits per tensor, in the order of their data: the CRC-64 of its row-major bytes. */
#define ST_DIGESTS "fsdpckpt.crc64"
/** 16 hexadecimal digits: the CRC-64 of the file up to its data, see header_digest.h. */
#define ST_HEADER_DIGEST "fsdpckpt.header_crc64"
/** Followed by a name: one object, {"encoding": text, "json": text, "path": [element, …], "data": base64}. */
#define ST_OBJECT "fsdpckpt.object."

/** Written by torch: {name: {"saved_offsets": [offset, …]}}. */
#define ST_SHARDING "DCP_SHARDING_INFO"
#define ST_DCP_VERSION "DCP_VERSION"
/** The framework that the tensors are for. transformers requires it. */
#define ST_FRAMEWORK "format"

/** The name and encoding of the object that carries all other members of `__metadata__`, as JSON text. */
#define ST_METADATA_NAME "__metadata__"
#define ST_METADATA_ENCODING "safetensors.metadata"
/** A member of that object: the "metadata" of an index file, without the values that follow from the tensors. */
#define ST_INDEX_METADATA "safetensors.index"
